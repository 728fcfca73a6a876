// mega_hazards.h: which task must wait for which, from the byte ranges that tasks read and write.
// The rules are those of src/brickline/hazards.py, for tasks by the hundred thousand. Knows tasks by
// their numbers and memory by a space and bytes; nothing of ops, workers or devices.
//
// Of every byte it is known who wrote it last and who has read it since. A read waits for the last
// writer; a write waits for the readers since, and where there is none, for the last writer (a reader
// has waited for it). Segments of bytes with one history lie in a tree.
//
// Many tasks may read what many tasks wrote: 128 that read 128 pieces are 16,384 pairs. So a read that
// covers several segments makes one segment of them, which remembers its pieces, and producers come
// as sets that tasks share: whoever reads the same range again pays for one segment, and waits for
// one set. Later writes take a piece out of it again. Nothing is rounded: the producers are exactly
// those that hazards.py finds, less those that others among them have waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mega_sets.h"

namespace brickline {

// A task that cannot be planned; it becomes ValueError in Python, which planning.py explains.
class MegaFaulty : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

enum MegaMode : uint32_t { MEGA_READ = 1, MEGA_WRITE = 2 };  // both: 3

// Bytes that a task touches. Block b touches [begin + b * per_block, begin + (b + 1) * per_block), cut
// at end; all of [begin, end) where per_block is 0. A range without bytes is no access.
struct MegaAccess {
    uint64_t begin, end;
    int64_t per_block;
    uint32_t space;
    uint32_t mode;
};
static_assert(sizeof(MegaAccess) == 32);

inline constexpr uint32_t MEGA_SET = 1u << 31;         // an entry that is a set, not a task
inline constexpr uint32_t MEGA_MAX_TASKS = MEGA_SET - 4;

// What a range held when it was asked for.
struct MegaVersion {
    // Who wrote last to any byte of it, + 2; 1: it is older than all tasks; 0: nobody. No two states of
    // one range have the same: a newer write to any of its bytes has a greater number.
    uint32_t newest;
    bool has_unwritten;  // a byte that nobody wrote, nor `add_initial`
};

// Reads and writes of tasks, in the order in which they are submitted.
//
// Contract: `add` is called with ascending numbers, below MEGA_MAX_TASKS, and gives the producers of
// the task: every earlier task that must have finished before it begins, or that such a one has waited
// for. A task never waits for itself; its reads come before its writes. Not thread-safe. Spans that it
// returns hold until the next call. Sets hold until `forget`.
class HazardTracker {
public:
    HazardTracker();
    ~HazardTracker();
    HazardTracker(HazardTracker&&) noexcept;
    HazardTracker& operator=(HazardTracker&&) noexcept;

    // Says how many accesses are to come, about, so that memory is asked for once.
    void reserve(size_t accesses);

    // Notes a task; returns its producers as ascending numbers, each once.
    std::span<const uint32_t> add(uint32_t task, std::span<const MegaAccess> accesses);

    // The same, where sets are shared: an entry is a task, or MEGA_SET | the number of a set in
    // `sets()`. Entries may overlap. Costs as many steps as there are entries, about.
    std::span<const uint32_t> add_shared(uint32_t task, std::span<const MegaAccess> accesses);

    // The same, and notes what each access found in `versions`, of which there are as many. Of one that
    // writes alone, `newest` is for `newest_of`, and `has_unwritten` is false.
    std::span<const uint32_t> add_shared(uint32_t task, std::span<const MegaAccess> accesses,
                                         std::span<MegaVersion> versions);

    // After `add`, or `add_shared` without them: what each access found, before the task's own writes.
    std::span<const MegaVersion> versions() const;

    // Who wrote last to a range before an access that writes alone did, as MegaVersion says it; from what was
    // noted then. So whoever never asks does not pay for a look into composites. Not after `forget`.
    uint32_t newest_of(const MegaVersion& noted, uint64_t begin, uint64_t end) const;

    // After `add` or `add_shared`: those among its producers who wrote what it reads, as entries. Kept
    // from `keep_sources` on.
    std::span<const uint32_t> sources() const;
    void keep_sources();

    const MegaSets& sets() const;
    uint32_t make_set(std::span<const uint32_t> members);  // ascending, each once
    MegaSets take_sets();                                  // the tracker is not used afterwards

    // Says that a range was written before any task, where reads of unwritten bytes matter.
    void add_initial(uint32_t space, uint64_t begin, uint64_t end);

    // What a range holds now. Changes nothing.
    MegaVersion version(uint32_t space, uint64_t begin, uint64_t end) const;

    // Throws away what is known of tasks below `first`, all of which have finished: nobody is told
    // to wait for them any more. Sets get new numbers. Takes time in proportion to what is kept
    // track of, so call it now and then; memory grows with the reads between two calls.
    void forget(uint32_t first);

    // Bytes that it holds, about.
    size_t bytes() const;

private:
    struct Memory;
    std::unique_ptr<Memory> m;
};

}  // namespace brickline
