#include "mega_hazards.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace brickline {

// ------------------------------------------------------------------------------------------- sets

namespace {

void sort_each_once(std::vector<uint32_t>& numbers) {
    if (numbers.size() > 16) {
        std::sort(numbers.begin(), numbers.end());
        numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
        return;
    }
    size_t kept = 1;
    for (size_t k = 1; k < numbers.size(); ++k) {
        const uint32_t number = numbers[k];
        size_t at = kept;
        while (at > 0 && numbers[at - 1] > number) --at;
        if (at > 0 && numbers[at - 1] == number) continue;
        for (size_t j = kept++; j > at; --j) numbers[j] = numbers[j - 1];
        numbers[at] = number;
    }
    numbers.resize(kept);
}

inline void keep_each_once(std::vector<uint32_t>& numbers) {
    if (numbers.size() > 1) sort_each_once(numbers);
}

uint32_t hash_of(std::span<const uint32_t> members) {
    uint64_t hash = members.size() * 0x9e3779b97f4a7c15ull;
    for (const uint32_t member : members) hash = (hash ^ member) * 0xff51afd7ed558ccdull, hash ^= hash >> 32;
    return uint32_t(hash ^ (hash >> 29));
}

}  // namespace

MegaSets::MegaSets() { clear(); }

void MegaSets::clear() {
    m_begin.assign(1, 0);
    m_members.clear();
    m_hashes.clear();
    m_table.assign(64, 0);
}

std::pair<MegaVector<uint64_t>, MegaVector<uint32_t>> MegaSets::take() {
    auto taken = std::make_pair(std::move(m_begin), std::move(m_members));
    clear();
    return taken;
}

void MegaSets::grow() {
    const size_t mask = m_table.size() * 2 - 1;
    m_table.assign(mask + 1, 0);
    for (uint32_t set = 0; set < size(); ++set) {
        size_t at = m_hashes[set] & mask;
        while (m_table[at]) at = (at + 1) & mask;
        m_table[at] = set + 1;
    }
}

uint32_t MegaSets::of(std::span<const uint32_t> members) {
    if (size_t(size()) * 2 >= m_table.size()) grow();
    const uint32_t hash = hash_of(members);
    const size_t mask = m_table.size() - 1;
    size_t at = hash & mask;
    for (; m_table[at]; at = (at + 1) & mask) {
        const uint32_t set = m_table[at] - 1;
        if (m_hashes[set] != hash) continue;
        const std::span<const uint32_t> found = (*this)[set];
        if (found.size() == members.size() &&
            std::equal(members.begin(), members.end(), found.begin())) {
            return set;
        }
    }
    const uint32_t made = size();
    m_table[at] = made + 1;
    m_hashes.push_back(hash);
    m_members.insert(m_members.end(), members.begin(), members.end());
    m_begin.push_back(m_members.size());
    return made;
}

// --------------------------------------------------------------------------------------- segments

namespace {

constexpr uint32_t NONE = ~0u;
constexpr uint32_t COMPOSITE = 1u << 31;  // in Segment::what
constexpr uint32_t UNKNOWN = ~0u;         // an entry that nobody has asked for
constexpr uint32_t NOBODY = ~0u - 1;      // an entry without tasks
constexpr size_t MERGE_FROM = 8;          // segments that one read joins
constexpr uint32_t MAX_DEPTH = 6;         // of composites within each other

// Bytes with one history.
struct Segment {
    uint64_t begin, end;
    uint32_t space;
    uint32_t what;     // who wrote: 0 nobody, 1 before all tasks, task + 2; or COMPOSITE | number
    uint32_t readers;  // since: the newest, 0: none
    uint32_t reads;    // of a part of a composite as it is
};

// A reader, and those before it: lists share their tails, so segments are cut without copies.
struct Reader {
    uint32_t task;
    uint32_t previous;  // 0: none
    uint32_t entry;     // of the whole list
};

// Segments that one read joined. Never changes; a Segment that names it may cover only a part of it.
struct Composite {
    uint64_t begin, end;
    size_t first;  // in `children`, which tile [begin, end)
    uint32_t count;
    uint32_t newest, oldest;  // of what the leaves below hold
    uint32_t entry;           // of its writers
    uint32_t depth;
    bool has_readers;  // below
};

using Key = unsigned __int128;

Key key_of(uint32_t space, uint64_t at) { return Key(space) << 64 | at; }

// Disjoint segments in the order of (space, begin), in leaves; a leaf holds those that begin in its part
// of the keys. An index finds leaves; the last ones found are tried first.
class SegmentTree {
public:
    struct Place {
        uint32_t leaf, slot;
    };

    SegmentTree() {
        m_leaves[m_leaves.make()].high = ~Key(0);
        m_branches.push_back(std::make_unique<Branch>());
        m_branch_keys.push_back(0);
        m_branches[0]->count = 1;
        m_branches[0]->keys[0] = 0;
        m_branches[0]->leaves[0] = 0;
    }

    // A segment that was found last in its space, where it is this range; else null.
    Segment* exact(const MegaAccess& access) {
        const Place place = m_exact[access.space % m_exact.size()];
        Leaf& leaf = m_leaves[place.leaf];
        if (place.slot >= leaf.count) return nullptr;
        Segment& segment = leaf.segments[place.slot];
        const bool is_it = segment.begin == access.begin && segment.end == access.end && segment.space == access.space;
        return is_it ? &segment : nullptr;
    }
    void set_exact(uint32_t space, Place place) { m_exact[space % m_exact.size()] = place; }

    // The first segment of those that end behind a byte, as a place in a leaf that it would be put into
    // if it began there; the place may be behind the last one of its leaf.
    Place seek(uint32_t space, uint64_t at) const {
        const Key key = key_of(space, at);
        const uint32_t number = leaf_of(key);
        const Leaf& leaf = m_leaves[number];
        uint32_t slot = leaf.hint;
        if (!(slot < leaf.count && end_of(leaf.segments[slot]) > key &&
              (slot == 0 || end_of(leaf.segments[slot - 1]) <= key))) {
            if (slot < leaf.count && end_of(leaf.segments[slot]) <= key &&
                (slot + 1 == leaf.count || end_of(leaf.segments[slot + 1]) > key)) {
                ++slot;
            } else {
                uint32_t low = 0, high = leaf.count;
                while (low < high) {
                    const uint32_t middle = (low + high) / 2;
                    if (end_of(leaf.segments[middle]) > key) high = middle;
                    else low = middle + 1;
                }
                slot = low;
            }
            leaf.hint = slot;
        }
        if (slot == 0 && leaf.previous != NONE) {  // it may begin in an earlier leaf
            const Leaf& before = m_leaves[leaf.previous];
            if (before.count && end_of(before.segments[before.count - 1]) > key) {
                return {leaf.previous, before.count - 1};
            }
        }
        return {number, slot};
    }

    // The segment at a place or the next one; null behind the last.
    Segment* at(Place& place) {
        while (place.slot >= m_leaves[place.leaf].count) {
            place = {m_leaves[place.leaf].next, 0};
            if (place.leaf == NONE) return nullptr;
        }
        return &m_leaves[place.leaf].segments[place.slot];
    }
    const Segment* at(Place& place) const { return const_cast<SegmentTree*>(this)->at(place); }

    // Puts segments in the place of `count` of them, from `place` on; the new ones begin no earlier than
    // whatever comes before that place ends.
    void replace(Place place, uint32_t count, std::span<const Segment> made) {
        Leaf& leaf = m_leaves[place.leaf];
        const uint32_t grown = leaf.count - count + uint32_t(made.size());
        if (place.slot + count <= leaf.count && grown <= LEAF && !made.empty() &&
            begin_of(made.front()) >= leaf.low && begin_of(made.back()) < leaf.high) {
            Segment* const to = leaf.segments + place.slot;
            std::memmove(to + made.size(), to + count,
                         (leaf.count - place.slot - count) * sizeof(Segment));
            std::memcpy(to, made.data(), made.size() * sizeof(Segment));
            leaf.count = grown;
            leaf.hint = place.slot + uint32_t(made.size()) - 1;
            return;
        }
        erase(place, count);
        for (const Segment& each : made) insert(each);
    }

    // Puts one segment into a gap, where `seek` found it.
    void insert_at(Place place, const Segment& made) {
        Leaf& leaf = m_leaves[place.leaf];
        if (leaf.count == LEAF || begin_of(made) < leaf.low || begin_of(made) >= leaf.high) {
            insert(made);
            return;
        }
        Segment* const to = leaf.segments + place.slot;
        if (place.slot < leaf.count) std::memmove(to + 1, to, (leaf.count - place.slot) * sizeof(Segment));
        *to = made;
        leaf.hint = place.slot;
        ++leaf.count;
    }

    // All of them, in order.
    template <class Call>
    void each(const Call& call) const {
        for (uint32_t leaf = 0; leaf != NONE; leaf = m_leaves[leaf].next) {
            for (uint32_t slot = 0; slot < m_leaves[leaf].count; ++slot) call(m_leaves[leaf].segments[slot]);
        }
    }

    size_t bytes() const {
        return m_leaves.bytes() + m_branches.size() * sizeof(Branch);
    }

private:
    static constexpr uint32_t LEAF = 30, BRANCH = 64;  // a block of leaves is 64 KiB, nearly

    struct Leaf {
        Key low, high;
        uint32_t next, previous;
        uint32_t count;
        mutable uint32_t hint;
        Segment segments[LEAF];
    };
    struct Branch {
        uint32_t count = 0;
        Key keys[BRANCH];
        uint32_t leaves[BRANCH];
    };

    // Leaves in blocks: growing copies none.
    class Leaves {
    public:
        Leaf& operator[](uint32_t leaf) { return m_blocks[leaf / BLOCK][leaf % BLOCK]; }
        const Leaf& operator[](uint32_t leaf) const { return m_blocks[leaf / BLOCK][leaf % BLOCK]; }
        uint32_t make() {
            if (m_size == m_blocks.size() * BLOCK) m_blocks.emplace_back(MegaAllocator<Leaf>().allocate(BLOCK));
            Leaf& made = (*this)[m_size];
            made.low = made.high = 0;
            made.next = made.previous = NONE;
            made.count = made.hint = 0;
            return m_size++;
        }
        size_t bytes() const { return m_blocks.size() * BLOCK * sizeof(Leaf); }

    private:
        static constexpr uint32_t BLOCK = 65;
        struct Free {
            void operator()(Leaf* block) const { MegaAllocator<Leaf>().deallocate(block, BLOCK); }
        };
        std::vector<std::unique_ptr<Leaf[], Free>> m_blocks;
        uint32_t m_size = 0;
    };

    static Key begin_of(const Segment& segment) { return key_of(segment.space, segment.begin); }
    static Key end_of(const Segment& segment) { return key_of(segment.space, segment.end); }

    static uint32_t last_not_above(const Key* keys, uint32_t count, Key key) {
        uint32_t low = 0, high = count;  // keys[low] <= key
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (keys[middle] <= key) low = middle;
            else high = middle;
        }
        return low;
    }

    uint32_t branch_of(Key key) const {
        return last_not_above(m_branch_keys.data(), uint32_t(m_branch_keys.size()), key);
    }

    uint32_t leaf_of(Key key) const {
        uint32_t& finger = m_fingers[uint32_t(key >> 64) % m_fingers.size()];
        const Leaf& guess = m_leaves[finger];
        if (guess.low <= key && key < guess.high) return finger;
        const Branch& branch = *m_branches[branch_of(key)];
        finger = branch.leaves[last_not_above(branch.keys, branch.count, key)];
        return finger;
    }

    void insert(const Segment& segment) {
        const Key key = begin_of(segment);
        uint32_t number = leaf_of(key);
        uint32_t slot = 0;
        {
            const Leaf& leaf = m_leaves[number];
            while (slot < leaf.count && begin_of(leaf.segments[slot]) < key) ++slot;
        }
        if (m_leaves[number].count == LEAF) {
            // Behind the last one nothing moves, so that what comes in order fills its leaves.
            const uint32_t kept = slot == LEAF ? LEAF : LEAF / 2;
            const uint32_t made = split(number, kept, slot == LEAF ? key : begin_of(m_leaves[number].segments[kept]));
            if (slot >= kept && key >= m_leaves[made].low) {
                number = made;
                slot -= kept;
            }
        }
        Leaf& leaf = m_leaves[number];
        std::memmove(leaf.segments + slot + 1, leaf.segments + slot, (leaf.count - slot) * sizeof(Segment));
        leaf.segments[slot] = segment;
        leaf.hint = slot;
        ++leaf.count;
    }

    uint32_t split(uint32_t number, uint32_t kept, Key low) {
        uint32_t made = NONE;
        if (m_free.empty()) {
            made = m_leaves.make();
        } else {
            made = m_free.back();
            m_free.pop_back();
        }
        Leaf& from = m_leaves[number];
        Leaf& to = m_leaves[made];
        to.count = from.count - kept;
        to.hint = 0;
        std::memcpy(to.segments, from.segments + kept, to.count * sizeof(Segment));
        from.count = kept;
        to.low = low;
        to.high = from.high;
        from.high = low;
        to.next = from.next;
        to.previous = number;
        from.next = made;
        if (to.next != NONE) m_leaves[to.next].previous = made;
        enter(low, made);
        return made;
    }

    void enter(Key key, uint32_t leaf) {
        uint32_t number = branch_of(key);
        if (m_branches[number]->count == BRANCH) {
            Branch& from = *m_branches[number];
            const uint32_t kept = key > from.keys[BRANCH - 1] ? BRANCH - 1 : BRANCH / 2;
            auto to = std::make_unique<Branch>();
            to->count = BRANCH - kept;
            std::copy(from.keys + kept, from.keys + BRANCH, to->keys);
            std::copy(from.leaves + kept, from.leaves + BRANCH, to->leaves);
            from.count = kept;
            const Key low = to->keys[0];
            m_branches.insert(m_branches.begin() + number + 1, std::move(to));
            m_branch_keys.insert(m_branch_keys.begin() + number + 1, low);
            if (key >= low) ++number;
        }
        Branch& branch = *m_branches[number];
        uint32_t slot = branch.count;
        for (; slot > 0 && branch.keys[slot - 1] > key; --slot) {
            branch.keys[slot] = branch.keys[slot - 1];
            branch.leaves[slot] = branch.leaves[slot - 1];
        }
        branch.keys[slot] = key;
        branch.leaves[slot] = leaf;
        ++branch.count;
    }

    // The first leaf stays, so that there is one for every key.
    void remove(uint32_t number) {
        Leaf& leaf = m_leaves[number];
        const uint32_t at = branch_of(leaf.low);
        Branch& branch = *m_branches[at];
        uint32_t slot = last_not_above(branch.keys, branch.count, leaf.low);
        --branch.count;
        for (; slot < branch.count; ++slot) {
            branch.keys[slot] = branch.keys[slot + 1];
            branch.leaves[slot] = branch.leaves[slot + 1];
        }
        if (branch.count) {
            m_branch_keys[at] = branch.keys[0];
        } else {
            m_branches.erase(m_branches.begin() + at);
            m_branch_keys.erase(m_branch_keys.begin() + at);
        }
        m_leaves[leaf.previous].next = leaf.next;
        m_leaves[leaf.previous].high = leaf.high;
        if (leaf.next != NONE) m_leaves[leaf.next].previous = leaf.previous;
        leaf.low = ~Key(0);
        leaf.high = 0;  // no finger finds it
        m_free.push_back(number);
    }

    void erase(Place place, uint32_t count) {
        while (count) {
            if (place.slot >= m_leaves[place.leaf].count) {
                place = {m_leaves[place.leaf].next, 0};
                continue;
            }
            Leaf& leaf = m_leaves[place.leaf];
            const uint32_t taken = std::min(count, leaf.count - place.slot);
            std::memmove(leaf.segments + place.slot, leaf.segments + place.slot + taken,
                         (leaf.count - place.slot - taken) * sizeof(Segment));
            leaf.count -= taken;
            leaf.hint = 0;
            count -= taken;
            const uint32_t next = leaf.next;
            if (leaf.count == 0 && leaf.previous != NONE) {
                remove(place.leaf);
                place = {next, 0};
            }
        }
    }

    Leaves m_leaves;
    std::vector<std::unique_ptr<Branch>> m_branches;  // in order
    std::vector<Key> m_branch_keys;                   // their first ones
    std::vector<uint32_t> m_free;
    mutable std::array<uint32_t, 16> m_fingers{};
    std::array<Place, 64> m_exact{};
};

}  // namespace

// ---------------------------------------------------------------------------------------- tracker

struct HazardTracker::Memory {
    SegmentTree tree;
    MegaVector<Reader> readers{Reader{}};
    MegaVector<Composite> composites;
    MegaVector<Segment> children;
    MegaSets sets;
    uint32_t next = 0;   // the smallest number that a task may have
    uint32_t first = 0;  // tasks below are forgotten
    bool has_sources = false;
    std::vector<uint32_t> entries, sources, flat;
    std::vector<MegaVersion> versions;
    std::vector<Segment> pieces;
    std::vector<uint32_t> scratch;

    // ------------------------------------------------------------------------------ what is held

    uint32_t reader_after(uint32_t list, uint32_t task) {
        if (list && readers[list].task == task) return list;
        readers.push_back({task, list, UNKNOWN});
        return uint32_t(readers.size() - 1);
    }

    uint32_t entry_of(std::vector<uint32_t>& tasks) {
        if (tasks.empty()) return NOBODY;
        if (tasks.size() == 1) return tasks[0];
        return MEGA_SET | sets.of(tasks);
    }

    uint32_t readers_entry(uint32_t list) {
        if (!list) return NOBODY;
        Reader& reader = readers[list];
        if (reader.entry != UNKNOWN) return reader.entry;
        if (!reader.previous) return reader.entry = reader.task;
        scratch.clear();
        for (uint32_t each = list; each; each = readers[each].previous) scratch.push_back(readers[each].task);
        std::reverse(scratch.begin(), scratch.end());
        return reader.entry = entry_of(scratch);
    }

    // Calls with each child of a composite that a segment covers, cut to it.
    template <class Call>
    void each_child(const Segment& segment, const Call& call) const {
        const Composite& composite = composites[segment.what & ~COMPOSITE];
        size_t low = composite.first, high = low + composite.count;
        const size_t last = high;
        while (low < high) {
            const size_t middle = (low + high) / 2;
            if (children[middle].end > segment.begin) high = middle;
            else low = middle + 1;
        }
        for (; low < last && children[low].begin < segment.end; ++low) {
            Segment child = children[low];
            child.begin = std::max(child.begin, segment.begin);
            child.end = std::min(child.end, segment.end);
            call(child);
        }
    }

    bool is_whole(const Segment& segment) const {
        const Composite& composite = composites[segment.what & ~COMPOSITE];
        return composite.begin == segment.begin && composite.end == segment.end;
    }

    void collect_tasks(const Segment& segment, std::vector<uint32_t>& tasks) const {
        if (segment.what & COMPOSITE) {
            each_child(segment, [&](const Segment& child) { collect_tasks(child, tasks); });
        } else if (segment.what >= 2 && segment.what - 2 >= first) {
            tasks.push_back(segment.what - 2);
        }
    }

    uint32_t composite_entry(const Segment& segment) {
        Composite& composite = composites[segment.what & ~COMPOSITE];
        if (composite.entry != UNKNOWN) return composite.entry;
        scratch.clear();
        collect_tasks(segment, scratch);
        keep_each_once(scratch);
        return composite.entry = entry_of(scratch);
    }

    static void widen(MegaVersion& version, uint32_t newest, uint32_t oldest) {
        version.newest = std::max(version.newest, newest);
        version.has_unwritten |= oldest == 0;
    }

    void look(const Segment& segment, MegaVersion& version) const {
        if (!(segment.what & COMPOSITE)) {
            widen(version, segment.what, segment.what);
        } else if (is_whole(segment)) {
            const Composite& composite = composites[segment.what & ~COMPOSITE];
            widen(version, composite.newest, composite.oldest);
        } else {
            each_child(segment, [&](const Segment& child) { look(child, version); });
        }
    }

    void push(std::vector<uint32_t>& to, uint32_t entry) const {
        if (entry != NOBODY && (to.empty() || to.back() != entry)) to.push_back(entry);
    }

    void push_writers(const Segment& segment, uint32_t self, std::vector<uint32_t>& to) {
        if (!(segment.what & COMPOSITE)) {
            if (segment.what >= 2 && segment.what - 2 >= first && segment.what - 2 != self) push(to, segment.what - 2);
        } else if (is_whole(segment)) {
            push(to, composite_entry(segment));
        } else {
            each_child(segment, [&](const Segment& child) { push_writers(child, self, to); });
        }
    }

    // What a write waits for; is_covered: a reader of all of it has waited for the writers.
    void push_blockers(const Segment& segment, uint32_t self, bool is_covered) {
        if (segment.readers) {
            is_covered = true;
            const Reader& newest = readers[segment.readers];
            push(entries, readers_entry(newest.task == self ? newest.previous : segment.readers));
        }
        if ((segment.what & COMPOSITE) && composites[segment.what & ~COMPOSITE].has_readers) {
            each_child(segment, [&](const Segment& child) { push_blockers(child, self, is_covered); });
        } else if (!is_covered) {
            push_writers(segment, self, entries);
        }
    }

    // ------------------------------------------------------------------------------- what changes

    // The place of the first segment of a range, how many there are, and `pieces`: what tiles the range,
    // with what is left of the first and the last segment outside of it.
    struct Cover {
        SegmentTree::Place place;
        uint32_t count;
        size_t first, last;  // of the pieces, those within
    };

    Cover cover(uint32_t space, uint64_t begin, uint64_t end) {
        Cover found{tree.seek(space, begin), 0, 0, 0};
        pieces.clear();
        SegmentTree::Place place = found.place;
        uint64_t at = begin;
        while (const Segment* segment = tree.at(place)) {
            if (segment->space != space || segment->begin >= end) break;
            Segment piece = *segment;
            if (piece.begin < begin) {
                pieces.push_back(piece);
                pieces.back().end = begin;
                pieces.back().reads = 0;
                piece.begin = begin;
                piece.reads = 0;
                found.first = 1;
            }
            if (piece.begin > at) {
                pieces.push_back({at, piece.begin, space, 0, 0, 0});
            }
            at = piece.end;
            ++found.count;
            if (piece.end > end) {
                const uint64_t rest = piece.end;
                piece.end = end;
                piece.reads = 0;
                pieces.push_back(piece);
                found.last = pieces.size();
                piece.begin = end;
                piece.end = rest;
                pieces.push_back(piece);
                return found;
            }
            pieces.push_back(piece);
            ++place.slot;
        }
        if (at < end) {
            pieces.push_back({at, end, space, 0, 0, 0});
        }
        found.last = pieces.size();
        return found;
    }

    // Puts one segment in the place of the pieces within a range.
    void keep_one(const Cover& found, const Segment& made) {
        pieces[found.first] = made;
        pieces.erase(pieces.begin() + std::ptrdiff_t(found.first + 1),
                     pieces.begin() + std::ptrdiff_t(found.last));
    }

    uint32_t depth_of(const Segment& segment) const {
        return segment.what & COMPOSITE ? composites[segment.what & ~COMPOSITE].depth : 0;
    }

    // Makes one segment of several that tile a range.
    Segment composite_of(std::span<const Segment> parts) {
        Composite made{parts.front().begin, parts.back().end, children.size(), uint32_t(parts.size()),
                       0, NONE, UNKNOWN, 0, false};
        for (const Segment& part : parts) {
            MegaVersion version;
            look(part, version);
            made.newest = std::max(made.newest, version.newest);
            made.oldest = version.has_unwritten ? 0 : std::min(made.oldest, version.newest);
            made.depth = std::max(made.depth, depth_of(part) + 1);
            made.has_readers |= part.readers != 0 || ((part.what & COMPOSITE) &&
                                                      composites[part.what & ~COMPOSITE].has_readers);
        }
        children.insert(children.end(), parts.begin(), parts.end());
        composites.push_back(made);
        return {made.begin, made.end, parts.front().space, COMPOSITE | uint32_t(composites.size() - 1), 0, 0};
    }

    // A part of a composite that is read again and again becomes one of its own.
    void narrow(Segment& segment) {
        if (!(segment.what & COMPOSITE) || is_whole(segment)) return;
        if (uint64_t(++segment.reads) * 8 < composites[segment.what & ~COMPOSITE].count) return;
        std::vector<Segment> parts;
        each_child(segment, [&](const Segment& child) { parts.push_back(child); });
        if (parts.size() == 1 && !parts[0].readers) {
            segment.what = parts[0].what;
        } else {
            segment.what = composite_of(parts).what;
        }
        segment.reads = 0;
    }

    void read_piece(Segment& piece, uint32_t task, MegaVersion& version) {
        narrow(piece);
        look(piece, version);
        push_writers(piece, task, entries);
    }

    static bool is_outside(const Segment* segment, const MegaAccess& access) {
        return !segment || segment->space != access.space || segment->begin >= access.end;
    }
    static bool is_all(const Segment* segment, const MegaAccess& access) {
        return segment->begin == access.begin && segment->end == access.end;
    }

    // Puts a segment in the place of a part of another one.
    void put_into(SegmentTree::Place place, const Segment& around, const Segment& made) {
        Segment parts[3];
        size_t count = 0;
        if (around.begin < made.begin) {
            parts[count] = around;
            parts[count].reads = 0;
            parts[count++].end = made.begin;
        }
        parts[count++] = made;
        if (made.end < around.end) {
            parts[count] = around;
            parts[count].reads = 0;
            parts[count++].begin = made.end;
        }
        tree.replace(place, 1, {parts, count});
    }
    static bool is_within(const Segment* segment, const MegaAccess& access) {
        return segment->begin <= access.begin && access.end <= segment->end;
    }

    void read(uint32_t task, const MegaAccess& access, MegaVersion& version) {
        if (Segment* const found = tree.exact(access)) {
            read_piece(*found, task, version);
            found->readers = reader_after(found->readers, task);
            return;
        }
        SegmentTree::Place place = tree.seek(access.space, access.begin);
        const SegmentTree::Place found_at = place;
        Segment* const segment = tree.at(place);
        if (is_outside(segment, access)) {
            version.has_unwritten = true;
            tree.insert_at(found_at, {access.begin, access.end, access.space, 0, reader_after(0, task), 0});
            return;
        }
        if (is_all(segment, access)) {
            tree.set_exact(access.space, place);
            read_piece(*segment, task, version);
            segment->readers = reader_after(segment->readers, task);
            return;
        }
        if (is_within(segment, access)) {
            const Segment around = *segment;
            Segment part{access.begin, access.end, access.space, around.what, around.readers, 0};
            read_piece(part, task, version);
            part.readers = reader_after(part.readers, task);
            put_into(place, around, part);
            return;
        }
        const Cover found = cover(access.space, access.begin, access.end);
        uint32_t depth = 0;
        for (size_t k = found.first; k < found.last; ++k) depth = std::max(depth, depth_of(pieces[k]));
        if (found.last - found.first >= MERGE_FROM && depth < MAX_DEPTH) {
            Segment made = composite_of({pieces.data() + found.first, found.last - found.first});
            look(made, version);
            push(entries, composite_entry(made));
            made.readers = reader_after(0, task);
            keep_one(found, made);
        } else {
            uint32_t before = 0, after = 0;
            for (size_t k = found.first; k < found.last; ++k) {
                read_piece(pieces[k], task, version);
                uint32_t& list = pieces[k].readers;
                if (!after || list != before) {
                    before = list;
                    after = reader_after(list, task);
                }
                list = after;
            }
        }
        tree.replace(found.place, found.count, pieces);
    }

    void write(uint32_t task, const MegaAccess& access) {
        const Segment made{access.begin, access.end, access.space, task + 2, 0, 0};
        if (Segment* const found = tree.exact(access)) {
            push_blockers(*found, task, false);
            *found = made;
            return;
        }
        SegmentTree::Place place = tree.seek(access.space, access.begin);
        const SegmentTree::Place found_at = place;
        Segment* const segment = tree.at(place);
        if (is_outside(segment, access)) {
            tree.insert_at(found_at, made);
            return;
        }
        if (is_all(segment, access)) {
            tree.set_exact(access.space, place);
            push_blockers(*segment, task, false);
            *segment = made;
            return;
        }
        if (is_within(segment, access)) {
            const Segment around = *segment;
            push_blockers({access.begin, access.end, access.space, around.what, around.readers, 0}, task, false);
            put_into(place, around, made);
            return;
        }
        const Cover found = cover(access.space, access.begin, access.end);
        for (size_t k = found.first; k < found.last; ++k) push_blockers(pieces[k], task, false);
        keep_one(found, made);
        tree.replace(found.place, found.count, pieces);
    }

    // Calls with each segment of a range, cut to it, and with gaps as segments that nobody wrote.
    template <class Call>
    void scan(uint32_t space, uint64_t begin, uint64_t end, const Call& call) const {
        SegmentTree::Place place = tree.seek(space, begin);
        uint64_t at = begin;
        while (const Segment* segment = tree.at(place)) {
            if (segment->space != space || segment->begin >= end) break;
            if (segment->begin > at) call(Segment{at, segment->begin, space, 0, 0, 0});
            Segment piece = *segment;
            piece.begin = std::max(piece.begin, begin);
            piece.end = std::min(piece.end, end);
            call(piece);
            at = piece.end;
            ++place.slot;
        }
        if (at < end) call(Segment{at, end, space, 0, 0, 0});
    }
};

HazardTracker::HazardTracker() : m(std::make_unique<Memory>()) {}
HazardTracker::~HazardTracker() = default;
HazardTracker::HazardTracker(HazardTracker&&) noexcept = default;
HazardTracker& HazardTracker::operator=(HazardTracker&&) noexcept = default;

void HazardTracker::keep_sources() { m->has_sources = true; }
std::span<const uint32_t> HazardTracker::sources() const { return m->sources; }
const MegaSets& HazardTracker::sets() const { return m->sets; }
uint32_t HazardTracker::make_set(std::span<const uint32_t> members) { return m->sets.of(members); }
MegaSets HazardTracker::take_sets() { return std::move(m->sets); }
std::span<const MegaVersion> HazardTracker::versions() const { return m->versions; }

std::span<const uint32_t> HazardTracker::add_shared(uint32_t task, std::span<const MegaAccess> accesses) {
    if (task < m->next || task >= MEGA_MAX_TASKS) {
        throw MegaFaulty("expected a task from " + std::to_string(m->next) + " to " +
                         std::to_string(MEGA_MAX_TASKS - 1) + ", got " + std::to_string(task));
    }
    m->next = task + 1;
    m->entries.clear();
    m->versions.resize(accesses.size());
    for (size_t k = 0; k < accesses.size(); ++k) {
        const MegaAccess& access = accesses[k];
        m->versions[k] = {};
        if ((access.mode & MEGA_READ) && access.begin < access.end) m->read(task, access, m->versions[k]);
    }
    std::vector<uint32_t>& entries = m->entries;
    if (m->has_sources) {
        keep_each_once(entries);
        m->sources.assign(entries.begin(), entries.end());
    }
    for (const MegaAccess& access : accesses) {
        if ((access.mode & MEGA_WRITE) && access.begin < access.end) m->write(task, access);
    }
    keep_each_once(entries);
    return entries;
}

std::span<const uint32_t> HazardTracker::add(uint32_t task, std::span<const MegaAccess> accesses) {
    std::vector<uint32_t>& flat = m->flat;
    flat.clear();
    for (const uint32_t entry : add_shared(task, accesses)) {
        if (entry & MEGA_SET) {
            const std::span<const uint32_t> members = m->sets[entry & ~MEGA_SET];
            flat.insert(flat.end(), members.begin(), members.end());
        } else {
            flat.push_back(entry);
        }
    }
    keep_each_once(flat);
    return flat;
}

void HazardTracker::add_initial(uint32_t space, uint64_t begin, uint64_t end) {
    if (begin >= end) return;
    if (m->next) throw MegaFaulty("expected initial ranges before the first task");
    const Memory::Cover found = m->cover(space, begin, end);
    m->keep_one(found, {begin, end, space, 1, 0, 0});
    m->tree.replace(found.place, found.count, m->pieces);
}

MegaVersion HazardTracker::version(uint32_t space, uint64_t begin, uint64_t end) const {
    MegaVersion version;
    if (const Segment* const found = m->tree.exact({begin, end, 0, space, MEGA_READ})) m->look(*found, version);
    else if (begin < end) m->scan(space, begin, end, [&](const Segment& piece) { m->look(piece, version); });
    return version;
}

size_t HazardTracker::bytes() const {
    return m->tree.bytes() + m->readers.capacity() * sizeof(Reader) +
           m->composites.capacity() * sizeof(Composite) + m->children.capacity() * sizeof(Segment) +
           m->sets.members().capacity() * 4;
}

namespace {

// A copy without what is forgotten: readers below `first` go, lists and composites stay shared.
class Kept {
public:
    Kept(const MegaVector<Reader>& readers, const MegaVector<Composite>& composites,
         const MegaVector<Segment>& children, uint32_t first)
        : m_old_readers(readers), m_old_composites(composites), m_old_children(children), m_first(first),
          m_reader_of(readers.size(), NONE), m_composite_of(composites.size(), NONE) {}

    Segment of(Segment segment) {
        segment.readers = list_of(segment.readers);
        if (segment.what & COMPOSITE) segment.what = COMPOSITE | composite_of(segment.what & ~COMPOSITE);
        return segment;
    }

    MegaVector<Reader> readers{Reader{}};
    MegaVector<Composite> composites;
    MegaVector<Segment> children;

private:
    uint32_t list_of(uint32_t list) {
        m_path.clear();
        uint32_t at = list;
        while (at && m_old_readers[at].task >= m_first && m_reader_of[at] == NONE) {
            m_path.push_back(at);
            at = m_old_readers[at].previous;
        }
        uint32_t made = at && m_old_readers[at].task >= m_first ? m_reader_of[at] : 0;
        for (size_t k = m_path.size(); k-- > 0;) {
            readers.push_back({m_old_readers[m_path[k]].task, made, UNKNOWN});
            made = m_reader_of[m_path[k]] = uint32_t(readers.size() - 1);
        }
        return made;
    }

    uint32_t composite_of(uint32_t number) {  // as deep as composites are
        if (m_composite_of[number] != NONE) return m_composite_of[number];
        Composite made = m_old_composites[number];
        std::vector<Segment> parts(m_old_children.begin() + std::ptrdiff_t(made.first),
                                   m_old_children.begin() + std::ptrdiff_t(made.first + made.count));
        made.has_readers = false;
        made.entry = UNKNOWN;
        for (Segment& part : parts) {
            part = of(part);
            made.has_readers |= part.readers != 0 ||
                                ((part.what & COMPOSITE) && composites[part.what & ~COMPOSITE].has_readers);
        }
        made.first = children.size();
        children.insert(children.end(), parts.begin(), parts.end());
        composites.push_back(made);
        return m_composite_of[number] = uint32_t(composites.size() - 1);
    }

    const MegaVector<Reader>& m_old_readers;
    const MegaVector<Composite>& m_old_composites;
    const MegaVector<Segment>& m_old_children;
    const uint32_t m_first;
    std::vector<uint32_t> m_reader_of, m_composite_of, m_path;
};

}  // namespace

void HazardTracker::forget(uint32_t first) {
    first = std::min(first, m->next);
    if (first <= m->first && m->readers.size() < 2) return;
    Kept kept(m->readers, m->composites, m->children, first);
    std::vector<Segment> segments;
    m->tree.each([&](const Segment& segment) {
        const Segment copy = kept.of(segment);
        // What a cut has left apart is one again where it has one history.
        if (!segments.empty() && segments.back().space == copy.space && segments.back().end == copy.begin &&
            segments.back().what == copy.what && segments.back().readers == copy.readers) {
            segments.back().end = copy.end;
            return;
        }
        segments.push_back(copy);
    });
    SegmentTree tree;
    for (const Segment& segment : segments) {
        tree.replace(tree.seek(segment.space, segment.begin), 0, {&segment, 1});
    }
    m->tree = std::move(tree);
    m->readers = std::move(kept.readers);
    m->composites = std::move(kept.composites);
    m->children = std::move(kept.children);
    m->sets.clear();
    m->first = std::max(m->first, first);
}

}  // namespace brickline
