#include "mega_segments.h"

#include <algorithm>
#include <cstring>

namespace brickline {

Segment SegmentTree::s_dead[2] = {{DEAD, 0, 0, 0, 0, 0}, {DEAD, 0, 0, 0, 0, 0}};

SegmentTree::SegmentTree() {
    m_leaves[m_leaves.make()].high = ~Key(0);
    m_branches.push_back(std::make_unique<Branch>());
    m_branch_keys.push_back(0);
    m_branches[0]->count = 1;
    m_branches[0]->keys[0] = 0;
    m_branches[0]->leaves[0] = 0;
    m_known.fill(s_dead);
    m_last.fill(s_dead);
}

uint32_t SegmentTree::Leaves::make() {
    if (m_size == m_blocks.size() * BLOCK) {
        std::byte* const memory = static_cast<std::byte*>(mega_allocate(BYTES));
        const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + sizeof(Leaf) - 1) & ~uintptr_t(sizeof(Leaf) - 1);
        m_blocks.push_back({std::unique_ptr<std::byte[], Free>(memory), reinterpret_cast<Leaf*>(first)});
    }
    Leaf& made = (*this)[m_size];
    made.low = made.high = 0;
    made.next = made.previous = NONE;
    made.count = made.hint = 0;
    made.number = m_size;
    bury(made, 0, LEAF + 1);
    return m_size++;
}

// ------------------------------------------------------------------------------------------ search

namespace {

template <class Key>
uint32_t last_not_above(const Key* keys, uint32_t count, Key key) {
    uint32_t low = 0, high = count;  // keys[low] <= key
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (keys[middle] <= key) low = middle;
        else high = middle;
    }
    return low;
}

}  // namespace

uint32_t SegmentTree::branch_of(Key key) const {
    return last_not_above(m_branch_keys.data(), uint32_t(m_branch_keys.size()), key);
}

uint32_t SegmentTree::leaf_of(Key key) const {
    uint32_t& finger = m_fingers[uint32_t(key >> 64) % m_fingers.size()];
    const Leaf& guess = m_leaves[finger];
    if (guess.low <= key && key < guess.high) return finger;
    const Branch& branch = *m_branches[branch_of(key)];
    finger = branch.leaves[last_not_above(branch.keys, branch.count, key)];
    return finger;
}

const Segment* SegmentTree::first_behind(const Segment* place) const {
    while (is_dead(*place)) {
        const uint32_t next = leaf_at(place).next;
        if (next == NONE) return nullptr;
        place = m_leaves[next].segments;
    }
    return place;
}

Segment* SegmentTree::seek(uint32_t space, uint64_t at) const {
    const Key key = key_of(space, at);
    Leaf& leaf = m_leaves[leaf_of(key)];
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
        Leaf& before = m_leaves[leaf.previous];
        if (before.count && end_of(before.segments[before.count - 1]) > key) {
            return before.segments + before.count - 1;
        }
    }
    return leaf.segments + slot;
}

// ----------------------------------------------------------------------------------------- changes

bool SegmentTree::replace(Segment* place, uint32_t count, std::span<const Segment> made) {
    Leaf& leaf = leaf_at(place);
    const uint32_t slot = uint32_t(place - leaf.segments);
    const uint32_t grown = leaf.count - count + uint32_t(made.size());
    if (slot + count <= leaf.count && grown <= LEAF && !made.empty() &&
        begin_of(made.front()) >= leaf.low && begin_of(made.back()) < leaf.high) {
        if (const uint32_t after = leaf.count - slot - count; after && made.size() != count) {
            std::memmove(place + made.size(), place + count, after * sizeof(Segment));
        }
        std::copy(made.begin(), made.end(), place);
        bury(leaf, grown, leaf.count);
        leaf.count = grown;
        leaf.hint = slot + uint32_t(made.size()) - 1;
        return true;
    }
    erase(place, count);
    for (const Segment& each : made) insert(each);
    return false;
}

// Where the rest finds no room behind it, or belongs to the next leaf.
Segment* SegmentTree::put_apart(Segment* place, const Segment& made) {
    Segment rest = *place;
    rest.begin = made.end;
    place->put(made);
    return insert(rest);
}

Segment* SegmentTree::insert(const Segment& segment) {
    const Key key = begin_of(segment);
    uint32_t number = leaf_of(key);
    uint32_t slot = m_leaves[number].count;  // from behind, where what comes in order belongs
    while (slot > 0 && begin_of(m_leaves[number].segments[slot - 1]) > key) --slot;
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
    leaf.segments[slot].put(segment);
    leaf.hint = slot;
    ++leaf.count;
    return m_last[segment.space % m_last.size()] = leaf.segments + slot;
}

uint32_t SegmentTree::split(uint32_t number, uint32_t kept, Key low) {
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
    bury(from, kept, from.count);
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

void SegmentTree::enter(Key key, uint32_t leaf) {
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
void SegmentTree::remove(Leaf& leaf) {
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
    m_free.push_back(leaf.number);
}

void SegmentTree::erase(Segment* place, uint32_t count) {
    while (count) {
        Leaf& leaf = leaf_at(place);
        const uint32_t slot = uint32_t(place - leaf.segments);
        const uint32_t next = leaf.next;
        const uint32_t taken = std::min(count, leaf.count - slot);
        if (taken) {
            std::memmove(place, place + taken, (leaf.count - slot - taken) * sizeof(Segment));
            bury(leaf, leaf.count - taken, leaf.count);
            leaf.count -= taken;
            leaf.hint = 0;
            count -= taken;
            if (leaf.count == 0 && leaf.previous != NONE) remove(leaf);
        }
        if (count) place = m_leaves[next].segments;
    }
}

}  // namespace brickline
