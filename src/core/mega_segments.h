// mega_segments.h: disjoint segments of memory in the order of (space, begin), each with what a tracker
// notes of its bytes. Knows how to find, cut and replace them; what the notes mean is mega_hazards.cpp's.
//
// Segments lie in leaves, and a leaf holds those that begin in its part of the keys:
//
//     branches   [ keys of leaves ... ] [ ... ]
//     leaves     { low, high, 29 slots: segment segment segment dead dead ... dead }
//
// A place is the address of a slot. A leaf begins at a multiple of its size, so a place tells its leaf;
// slots that hold nothing are dead, so a place that was remembered is good as long as what lies there is
// what one looks for. Most accesses begin where an earlier one did: `known` finds those without a search.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mega_memory.h"

namespace brickline {

// Bytes with one history.
struct Segment {
    uint64_t begin, end;
    uint32_t space;
    uint32_t what, readers, reads;  // the tracker's

    // Field by field: a copy of one that was just made waits for its parts.
    void put(const Segment& made) {
        begin = made.begin;
        end = made.end;
        space = made.space;
        what = made.what;
        readers = made.readers;
        reads = made.reads;
    }
};
static_assert(sizeof(Segment) == 32);

class SegmentTree {
public:
    SegmentTree();

    // The segment that begins at a byte, where it was remembered; else null.
    Segment* known(uint32_t space, uint64_t begin) const {
        Segment*& found = m_known[hash_of(space, begin)];
        if (found->begin == begin && found->space == space) return found;
        // Something was put in before it, often.
        if (found[1].begin == begin && found[1].space == space) return ++found;
        return nullptr;
    }
    void remember(Segment* segment) { m_known[hash_of(segment->space, segment->begin)] = segment; }

    // The place of the first segment of those that end behind a byte; a dead one, where whatever begins
    // there would be put, if that is in a later leaf or nowhere.
    Segment* seek(uint32_t space, uint64_t at) const;

    // A gap behind the segment that was put into a space last, where it holds all of a range; null: it does
    // not. So what comes in the order of its bytes needs no search.
    Segment* gap_behind_last(uint32_t space, uint64_t begin, uint64_t end) const {
        Segment* const last = m_last[space % m_last.size()];
        if (last->space != space || last->end > begin || is_dead(*last)) return nullptr;
        const Segment& next = last[1];
        const bool is_gap = is_dead(next) ? leaf_at(last).high >= key_of(space, end)
                                          : next.space != space || next.begin >= end;
        return is_gap ? last + 1 : nullptr;
    }

    // The segment at a place or the next one; null behind the last.
    Segment* at(Segment* place) const { return const_cast<Segment*>(at(static_cast<const Segment*>(place))); }
    const Segment* at(const Segment* place) const {
        return is_dead(*place) ? first_behind(place) : place;
    }

    // The last of the segments from a known one on that tile a range without a gap, of one leaf and at
    // most `most`; null: they do not.
    static Segment* last_of_tiles(Segment* first, uint64_t end, size_t most) {
        Segment* last = first;
        for (size_t count = 1; last->end < end && count < most; ++count, ++last) {
            if (last[1].begin != last->end || last[1].space != first->space) return nullptr;
        }
        return last->end == end ? last : nullptr;
    }

    // Puts segments in the place of `count` of them, from `place` on; the new ones begin no earlier than
    // whatever comes before that place ends. Returns whether they lie at the place, one after the other.
    bool replace(Segment* place, uint32_t count, std::span<const Segment> made);

    // Puts a segment in the place of the first bytes of another one. Returns where the rest of that is.
    Segment* put_before(Segment* place, const Segment& made) {
        Leaf& leaf = leaf_at(place);
        if (leaf.count == LEAF || key_of(made.space, made.end) >= leaf.high) return put_apart(place, made);
        Segment* const end = leaf.segments + leaf.count++;
        for (Segment* to = end; to > place; --to) *to = to[-1];
        place[1].begin = made.end;
        place->put(made);
        return place + 1;
    }

    // Puts one segment into a gap, where it was found.
    void insert_at(Segment* place, const Segment& made) {
        Leaf& leaf = leaf_at(place);
        if (leaf.count == LEAF || begin_of(made) < leaf.low || begin_of(made) >= leaf.high) {
            insert(made);
            return;
        }
        Segment* const end = leaf.segments + leaf.count++;
        for (Segment* to = end; to > place; --to) *to = to[-1];
        place->put(made);
        m_last[made.space % m_last.size()] = place;
    }

    // All of them, in order.
    template <class Call>
    void each(const Call& call) const {
        for (uint32_t leaf = 0; leaf != NONE; leaf = m_leaves[leaf].next) {
            for (uint32_t slot = 0; slot < m_leaves[leaf].count; ++slot) call(m_leaves[leaf].segments[slot]);
        }
    }

    size_t bytes() const { return m_leaves.bytes() + m_branches.size() * sizeof(Branch); }

private:
    using Key = unsigned __int128;
    static constexpr uint32_t NONE = ~0u;
    static constexpr uint32_t LEAF = 29, BRANCH = 64;
    static constexpr uint64_t DEAD = ~0ull;  // no segment begins there: it would be empty

    struct alignas(1024) Leaf {
        Key low, high;
        uint32_t next, previous;
        uint32_t count, number;
        mutable uint32_t hint;
        Segment segments[LEAF + 1];  // the last one is dead
    };
    static_assert(sizeof(Leaf) == 1024);
    struct Branch {
        uint32_t count = 0;
        Key keys[BRANCH];
        uint32_t leaves[BRANCH];
    };

    // Leaves in blocks of nearly 64 KiB: growing copies none.
    class Leaves {
    public:
        Leaf& operator[](uint32_t leaf) const { return m_blocks[leaf / BLOCK].first[leaf % BLOCK]; }
        uint32_t make();
        size_t bytes() const { return m_blocks.size() * BYTES; }

    private:
        static constexpr uint32_t BLOCK = 63;
        static constexpr size_t BYTES = (BLOCK + 1) * sizeof(Leaf);
        struct Free {
            void operator()(std::byte* memory) const { mega_free(memory, BYTES); }
        };
        struct Block {
            std::unique_ptr<std::byte[], Free> memory;
            Leaf* first;
        };
        std::vector<Block> m_blocks;
        uint32_t m_size = 0;
    };

    static Key key_of(uint32_t space, uint64_t at) { return Key(space) << 64 | at; }
    static Key begin_of(const Segment& segment) { return key_of(segment.space, segment.begin); }
    static Key end_of(const Segment& segment) { return key_of(segment.space, segment.end); }
    static bool is_dead(const Segment& segment) { return segment.begin == DEAD; }
    static Leaf& leaf_at(const Segment* place) {
        return *reinterpret_cast<Leaf*>(reinterpret_cast<uintptr_t>(place) & ~uintptr_t(sizeof(Leaf) - 1));
    }
    static size_t hash_of(uint32_t space, uint64_t begin) {
        return (begin + space * 0x9e3779b97f4a7c15ull) * 0xd6e8feb86659fd93ull >> 54;
    }
    static void bury(Leaf& leaf, uint32_t first, uint32_t last) {
        for (; first < last; ++first) leaf.segments[first].begin = DEAD;
    }

    const Segment* first_behind(const Segment* place) const;
    uint32_t branch_of(Key key) const;
    uint32_t leaf_of(Key key) const;
    Segment* insert(const Segment& segment);
    Segment* put_apart(Segment* place, const Segment& made);
    uint32_t split(uint32_t number, uint32_t kept, Key low);
    void enter(Key key, uint32_t leaf);
    void remove(Leaf& leaf);
    void erase(Segment* place, uint32_t count);

    static Segment s_dead[2];  // what nobody has remembered, and its neighbour
    Leaves m_leaves;
    std::vector<std::unique_ptr<Branch>> m_branches;  // in order
    std::vector<Key> m_branch_keys;                   // their first ones
    std::vector<uint32_t> m_free;
    mutable std::array<uint32_t, 16> m_fingers{};  // the leaves found last
    mutable std::array<Segment*, 1024> m_known;
    std::array<Segment*, 64> m_last;  // by space
};

}  // namespace brickline
