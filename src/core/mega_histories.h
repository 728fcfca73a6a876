// mega_histories.h: who wrote and read the bytes of segments, and whom that makes wait. Owns the lists of
// readers, the composites and the sets of tasks that segments name; where segments lie is mega_segments.h's,
// and what an access does to them mega_hazards.cpp's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mega_hazards.h"
#include "mega_segments.h"

namespace brickline {

// What a Segment has of it:
//     what     who wrote: 0 nobody, 1 before all tasks, task + 2; or COMPOSITE | number
//     readers  since: the newest, 0: none
//     reads    of a part of a composite as it is
struct MegaHistories {
    static constexpr uint32_t COMPOSITE = 1u << 31;  // in Segment::what
    static constexpr uint32_t UNKNOWN = ~0u;         // an entry that nobody has asked for
    static constexpr uint32_t NOBODY = ~0u - 1;      // an entry without tasks

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
        double density;    // children of two bytes: half a distance is a number that converts fast
    };

    MegaVector<Reader> readers{Reader{}};
    MegaVector<Composite> composites;
    MegaVector<Segment> children;
    MegaSets sets;
    uint32_t first = 0;             // tasks below are forgotten
    std::vector<uint32_t> entries;  // what the task that is noted waits for
    std::vector<uint32_t> scratch;

    // Throws away what is known of tasks below a number. Segments are made to name what is left.
    void forget(uint32_t below, std::vector<Segment>& segments);

    // ----------------------------------------------------------------------------------- what is held

    uint32_t reader_after(uint32_t list, uint32_t task) {
        if (list && readers[list].task == task) return list;
        readers.push_back({task, list, list ? UNKNOWN : task});
        return uint32_t(readers.size() - 1);
    }

    uint32_t entry_of(std::vector<uint32_t>& tasks) {
        if (tasks.empty()) return NOBODY;
        if (tasks.size() == 1) return tasks[0];
        return MEGA_SET | sets.of(tasks);
    }

    uint32_t readers_entry(uint32_t list);

    // The child of a composite that holds a byte. Pieces are often alike, so a guess comes first.
    static size_t guess_of(const Composite& composite, uint64_t at) {
        const size_t guess = size_t(double(int64_t((at - composite.begin) >> 1)) * composite.density);
        return std::min(guess, size_t(composite.count - 1));
    }
    size_t child_at(const Composite& composite, uint64_t at) const {
        const size_t guess = guess_of(composite, at);
        const Segment& guessed = children[composite.first + guess];
        if (guessed.begin <= at && at < guessed.end) return composite.first + guess;
        size_t low = composite.first, high = low + composite.count;
        while (low < high) {
            const size_t middle = (low + high) / 2;
            if (children[middle].end > at) high = middle;
            else low = middle + 1;
        }
        return low;
    }

    // Calls with each child of a composite that a segment covers, cut to it.
    template <class Call>
    void each_child(const Segment& segment, const Call& call) const {
        const Composite& composite = composites[segment.what & ~COMPOSITE];
        const size_t last = composite.first + composite.count;
        for (size_t low = child_at(composite, segment.begin); low < last && children[low].begin < segment.end; ++low) {
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

    uint32_t composite_entry(const Segment& segment);
    void collect_tasks(const Segment& segment, std::vector<uint32_t>& tasks) const;

    static MegaVersion both(MegaVersion a, MegaVersion b) {
        return {std::max(a.newest, b.newest), a.has_unwritten || b.has_unwritten};
    }

    // What the bytes of a segment between two of them hold.
    MegaVersion held(const Segment& segment, uint64_t begin, uint64_t end) const {
        if (!(segment.what & COMPOSITE)) return {segment.what, segment.what == 0};
        const Composite& composite = composites[segment.what & ~COMPOSITE];
        if (composite.begin == begin && composite.end == end) return {composite.newest, composite.oldest == 0};
        const Segment& child = children[composite.first + guess_of(composite, begin)];
        if (child.begin <= begin && end <= child.end && !(child.what & COMPOSITE)) return {child.what, child.what == 0};
        return held_by_children(composite, begin, end);
    }
    MegaVersion held_by_children(const Composite& composite, uint64_t begin, uint64_t end) const;
    MegaVersion held(const Segment& segment) const { return held(segment, segment.begin, segment.end); }

    void push(std::vector<uint32_t>& to, uint32_t entry) const {
        if (entry != NOBODY && (to.empty() || to.back() != entry)) to.push_back(entry);
    }

    void push_writer(uint32_t what, uint32_t self, std::vector<uint32_t>& to) const {
        if (what >= 2 && what - 2 >= first && what - 2 != self) push(to, what - 2);
    }

    void push_writers(const Segment& segment, uint32_t self, std::vector<uint32_t>& to);

    // What a write to a part of a segment waits for.
    void push_blockers(const Segment& segment, uint64_t begin, uint64_t end, uint32_t self) {
        const bool is_composite = segment.what & COMPOSITE;
        if (!segment.readers && !is_composite) {
            push_writer(segment.what, self, entries);
            return;
        }
        if (const Reader& newest = readers[segment.readers];
            newest.entry != UNKNOWN && newest.task != self && segment.readers &&
            !(is_composite && composites[segment.what & ~COMPOSITE].has_readers)) {
            push(entries, newest.entry);
            return;
        }
        push_all_blockers({begin, end, segment.space, segment.what, segment.readers, 0}, self, false);
    }

    // The same of one as it is; is_covered: a reader of all of it has waited for the writers.
    void push_all_blockers(const Segment& segment, uint32_t self, bool is_covered);

    // -------------------------------------------------------------------------------------- composites

    uint32_t depth_of(const Segment& segment) const {
        return segment.what & COMPOSITE ? composites[segment.what & ~COMPOSITE].depth : 0;
    }

    // Makes one segment of several that tile a range.
    Segment composite_of(std::span<const Segment> parts);

    // A part of a composite that is read again and again becomes one of its own.
    void narrow(Segment& segment);
};

}  // namespace brickline
