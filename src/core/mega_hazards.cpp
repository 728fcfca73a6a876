#include "mega_hazards.h"

#include <algorithm>
#include <string>

#include "mega_histories.h"

namespace brickline {
namespace {

constexpr size_t MERGE_FROM = 8;          // segments that one read joins
constexpr uint32_t MAX_DEPTH = 6;         // of composites within each other

}  // namespace

struct HazardTracker::Memory : MegaHistories {
    SegmentTree tree;
    uint32_t next = 0;  // the smallest number that a task may have
    bool has_sources = false;
    std::vector<uint32_t> sources, flat;
    std::vector<MegaVersion> versions;
    std::vector<Segment> pieces;

    // ------------------------------------------------------------------------------- what changes

    // The place of the first segment of a range, how many there are, and `pieces`: what tiles the range,
    // with what is left of the first and the last segment outside of it.
    struct Cover {
        Segment* place;
        uint32_t count;
        size_t first, last;  // of the pieces, those within
    };

    Cover cover(uint32_t space, uint64_t begin, uint64_t end) {
        Cover found{tree.seek(space, begin), 0, 0, 0};
        pieces.clear();
        uint64_t at = begin;
        for (const Segment* segment = tree.at(found.place); segment; segment = tree.at(segment + 1)) {
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

    // A segment that one task wrote, or a whole composite that was read before: all at once.
    MegaVersion read_piece(Segment& piece, uint32_t task) {
        if (!(piece.what & COMPOSITE)) {
            push_writer(piece.what, task, entries);
            return {piece.what, piece.what == 0};
        }
        const Composite& composite = composites[piece.what & ~COMPOSITE];
        if (composite.entry == UNKNOWN || composite.begin != piece.begin || composite.end != piece.end) {
            return read_part(piece, task);
        }
        push(entries, composite.entry);
        return {composite.newest, composite.oldest == 0};
    }

    [[gnu::noinline]] MegaVersion read_part(Segment& piece, uint32_t task) {
        narrow(piece);
        push_writers(piece, task, entries);
        return held(piece);
    }

    // Puts a segment in the place of a part of another one.
    void put_into(Segment* place, const Segment& made) {
        if (place->begin != made.begin) return put_between(place, made);
        Segment* const rest = tree.put_before(place, made);
        rest->reads = 0;
        tree.remember(rest);  // whoever cuts a piece off often goes on with the next one
    }
    [[gnu::noinline]] void put_between(Segment* place, const Segment& made) {
        const Segment around = *place;
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

    // Where an access meets what is there: a segment that begins where it does, or that it lies within; or
    // the place of a gap that holds all of it; or neither.
    struct Meeting {
        Segment *segment, *gap;
    };
    Meeting meet(const MegaAccess& access) {
        if (Segment* const known = tree.known(access.space, access.begin)) return {known, nullptr};
        if (Segment* const gap = tree.gap_behind_last(access.space, access.begin, access.end)) return {nullptr, gap};
        Segment* const place = tree.seek(access.space, access.begin);
        Segment* const found = tree.at(place);
        if (!found || found->space != access.space || found->begin >= access.end) return {nullptr, place};
        if (found->begin == access.begin) tree.remember(found);
        else if (found->begin > access.begin || found->end < access.end) return {nullptr, nullptr};
        return {found, nullptr};
    }

    [[gnu::always_inline]] MegaVersion read(uint32_t task, const MegaAccess& access) {
        const auto [found, gap] = meet(access);
        if (gap) {
            tree.insert_at(gap, {access.begin, access.end, access.space, 0, reader_after(0, task), 0});
            return {0, true};
        }
        if (!found) return read_several(task, access);
        if (found->begin == access.begin && found->end == access.end) {
            const MegaVersion version = read_piece(*found, task);
            found->readers = reader_after(found->readers, task);
            return version;
        }
        if (found->end > access.end || found->begin < access.begin) {
            Segment part{access.begin, access.end, access.space, found->what, found->readers, 0};
            const MegaVersion version = read_piece(part, task);
            part.readers = reader_after(part.readers, task);
            put_into(found, part);
            return version;
        }
        Segment* const last = SegmentTree::last_of_tiles(found, access.end, MERGE_FROM - 1);
        return last ? read_tiles({found, last + 1}, task) : read_several(task, access);
    }

    MegaVersion read_tiles(std::span<Segment> tiles, uint32_t task) {
        MegaVersion version{};
        uint32_t before = 0, after = 0;
        for (Segment& tile : tiles) {
            version = both(version, read_piece(tile, task));
            if (!after || tile.readers != before) {
                before = tile.readers;
                after = reader_after(before, task);
            }
            tile.readers = after;
        }
        return version;
    }

    // Joins the segments that tile what is read, if there are enough of them, none is a composite and none
    // must be cut. False: it is not so, and nothing is done.
    bool has_joined_tiles(uint32_t task, const MegaAccess& access, MegaVersion& version) {
        const size_t first_child = children.size();
        Composite made{access.begin, access.end, first_child, 0, 0, ~0u, UNKNOWN, 1, false, 0};
        Segment* const place = tree.seek(access.space, access.begin);
        scratch.clear();
        uint64_t at = access.begin;
        uint32_t are_read = 0;
        for (const Segment* tile = tree.at(place); at < access.end; tile = tree.at(tile + 1)) {
            if (!tile || tile->begin != at || tile->space != access.space || (tile->what & COMPOSITE)) break;
            at = tile->end;
            made.newest = std::max(made.newest, tile->what);
            made.oldest = std::min(made.oldest, tile->what);
            are_read |= tile->readers;
            if (tile->what >= 2 && tile->what - 2 >= first) scratch.push_back(tile->what - 2);
            children.push_back(*tile);
        }
        made.count = uint32_t(children.size() - first_child);
        if (at != access.end || made.count < MERGE_FROM) {
            children.resize(first_child);
            return false;
        }
        made.density = 2 * double(made.count) / double(made.end - made.begin);
        made.has_readers = are_read != 0;
        mega_each_once(scratch);
        made.entry = entry_of(scratch);
        push(entries, made.entry);
        version = {made.newest, made.oldest == 0};
        composites.push_back(made);
        const Segment whole{made.begin, made.end, access.space, COMPOSITE | uint32_t(composites.size() - 1),
                            reader_after(0, task), 0};
        tree.replace(place, made.count, {&whole, 1});
        return true;
    }

    [[gnu::noinline]] MegaVersion read_several(uint32_t task, const MegaAccess& access) {
        MegaVersion version{};
        if (has_joined_tiles(task, access, version)) return version;
        const Cover found = cover(access.space, access.begin, access.end);
        const std::span<Segment> within(pieces.data() + found.first, found.last - found.first);
        uint32_t depth = 0;
        for (const Segment& piece : within) depth = std::max(depth, depth_of(piece));
        if (within.size() >= MERGE_FROM && depth < MAX_DEPTH) {
            Segment made = composite_of(within);
            version = held(made);
            push(entries, composite_entry(made));
            made.readers = reader_after(0, task);
            keep_one(found, made);
        } else {
            version = read_tiles(within, task);
        }
        tree.replace(found.place, found.count, pieces);
        return version;
    }

    // Returns what a Segment of these bytes alone would have had as `what`, or as the newest of several.
    uint32_t write(uint32_t task, const MegaAccess& access) {
        const Segment made{access.begin, access.end, access.space, task + 2, 0, 0};
        const auto [found, gap] = meet(access);
        if (gap) {
            tree.insert_at(gap, made);
            return 0;
        }
        if (!found) return write_several(task, access, made);
        if (found->end >= access.end) {
            const uint32_t what = found->what;
            push_blockers(*found, access.begin, access.end, task);
            if (found->begin == access.begin && found->end == access.end) {
                found->what = task + 2;
                found->readers = found->reads = 0;
            } else {
                put_into(found, made);
            }
            return what;
        }
        Segment* const last = SegmentTree::last_of_tiles(found, access.end, MERGE_FROM - 1);
        if (!last) return write_several(task, access, made);
        uint32_t newest = 0;
        for (Segment* each = found; each <= last; ++each) {
            newest = std::max(newest, held(*each).newest);
            push_blockers(*each, each->begin, each->end, task);
        }
        tree.replace(found, uint32_t(last - found) + 1, {&made, 1});
        return newest;
    }

    [[gnu::noinline]] uint32_t write_several(uint32_t task, const MegaAccess& access, const Segment& made) {
        const Cover covered = cover(access.space, access.begin, access.end);
        uint32_t newest = 0;
        for (size_t k = covered.first; k < covered.last; ++k) {
            newest = std::max(newest, held(pieces[k]).newest);
            push_all_blockers(pieces[k], task, false);
        }
        keep_one(covered, made);
        tree.replace(covered.place, covered.count, pieces);
        return newest;
    }

    MegaVersion held_by_several(uint32_t space, uint64_t begin, uint64_t end) const;

    // Calls with each segment of a range, cut to it, and with gaps as segments that nobody wrote.
    template <class Call>
    void scan(uint32_t space, uint64_t begin, uint64_t end, const Call& call) const {
        uint64_t at = begin;
        for (const Segment* segment = tree.at(tree.seek(space, begin)); segment; segment = tree.at(segment + 1)) {
            if (segment->space != space || segment->begin >= end) break;
            if (segment->begin > at) call(Segment{at, segment->begin, space, 0, 0, 0});
            Segment piece = *segment;
            piece.begin = std::max(piece.begin, begin);
            piece.end = std::min(piece.end, end);
            call(piece);
            at = piece.end;
        }
        if (at < end) call(Segment{at, end, space, 0, 0, 0});
    }
};

[[gnu::noinline]] MegaVersion HazardTracker::Memory::held_by_several(uint32_t space, uint64_t begin,
                                                                     uint64_t end) const {
    MegaVersion version{};
    scan(space, begin, end, [&](const Segment& piece) { version = both(version, held(piece)); });
    return version;
}

HazardTracker::HazardTracker() : m(std::make_unique<Memory>()) {}
HazardTracker::~HazardTracker() = default;
HazardTracker::HazardTracker(HazardTracker&&) noexcept = default;
HazardTracker& HazardTracker::operator=(HazardTracker&&) noexcept = default;

void HazardTracker::reserve(size_t accesses) { m->readers.reserve(m->readers.size() + accesses); }
void HazardTracker::keep_sources() { m->has_sources = true; }
std::span<const uint32_t> HazardTracker::sources() const { return m->sources; }
const MegaSets& HazardTracker::sets() const { return m->sets; }
uint32_t HazardTracker::make_set(std::span<const uint32_t> members) { return m->sets.of(members); }
MegaSets HazardTracker::take_sets() { return std::move(m->sets); }
std::span<const MegaVersion> HazardTracker::versions() const { return m->versions; }

std::span<const uint32_t> HazardTracker::add_shared(uint32_t task, std::span<const MegaAccess> accesses,
                                                    std::span<MegaVersion> versions) {
    if (task < m->next || task >= MEGA_MAX_TASKS) {
        throw MegaFaulty("expected a task from " + std::to_string(m->next) + " to " +
                         std::to_string(MEGA_MAX_TASKS - 1) + ", got " + std::to_string(task));
    }
    m->next = task + 1;
    std::vector<uint32_t>& entries = m->entries;
    entries.clear();
    size_t first_write = accesses.size();
    for (size_t k = accesses.size(); k-- > 0;) {
        const MegaAccess& access = accesses[k];
        if (access.mode & MEGA_WRITE) first_write = k;
        versions[k] = (access.mode & MEGA_READ) && access.begin < access.end ? m->read(task, access) : MegaVersion{};
    }
    if (m->has_sources) {
        mega_each_once(entries);
        m->sources.assign(entries.begin(), entries.end());
    }
    for (size_t k = first_write; k < accesses.size(); ++k) {
        const MegaAccess& access = accesses[k];
        if (!(access.mode & MEGA_WRITE) || access.begin == access.end) continue;
        const uint32_t found = m->write(task, access);
        if (!(access.mode & MEGA_READ)) versions[k].newest = found;
    }
    mega_each_once(entries);
    return entries;
}

std::span<const uint32_t> HazardTracker::add_shared(uint32_t task, std::span<const MegaAccess> accesses) {
    m->versions.resize(accesses.size());
    return add_shared(task, accesses, m->versions);
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
    mega_each_once(flat);
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
    if (begin >= end) return {};
    if (const Segment* const found = m->tree.known(space, begin); found && found->end >= end) {
        return m->held(*found, begin, end);
    }
    if (m->tree.gap_behind_last(space, begin, end)) return {0, true};
    return m->held_by_several(space, begin, end);
}

uint32_t HazardTracker::newest_of(const MegaVersion& noted, uint64_t begin, uint64_t end) const {
    return m->held({begin, end, 0, noted.newest, 0, 0}).newest;
}

size_t HazardTracker::bytes() const {
    return m->tree.bytes() + m->readers.capacity() * sizeof(MegaHistories::Reader) +
           m->composites.capacity() * sizeof(MegaHistories::Composite) + m->children.capacity() * sizeof(Segment) +
           m->sets.members().capacity() * 4;
}

void HazardTracker::forget(uint32_t first) {
    first = std::min(first, m->next);
    if (first <= m->first && m->readers.size() < 2) return;
    std::vector<Segment> segments;
    m->tree.each([&](const Segment& segment) { segments.push_back(segment); });
    m->forget(first, segments);
    SegmentTree tree;
    for (size_t k = 0; k < segments.size();) {
        Segment whole = segments[k++];
        // What a cut has left apart is one again where it has one history.
        for (; k < segments.size() && segments[k].space == whole.space && segments[k].begin == whole.end &&
               segments[k].what == whole.what && segments[k].readers == whole.readers; ++k) {
            whole.end = segments[k].end;
        }
        tree.replace(tree.seek(whole.space, whole.begin), 0, {&whole, 1});
    }
    m->tree = std::move(tree);
}

}  // namespace brickline
