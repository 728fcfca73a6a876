// mega_validation.h: proves of a schedule that it can be run: no cycle, no race, no wait without a
// producer, no slot too few. Takes nothing for granted that the planner says, and shares no code with
// it: it knows ranges as a whole, and how they overlap, where the planner cuts memory into segments.
//
// A schedule is right when every two tasks that touch the same byte, one of them writing, happen in
// the order of their numbers. It is enough to look at who wrote each range last and who has read it
// since, because whoever came before has been proved to happen before those.
#pragma once

#include <cstdint>
#include <span>

#include "mega_planning.h"

namespace brickline {

enum class MegaBreach : uint32_t {
    None = 0,
    UnknownProducer = 402,  // `task` waits for `other`, a task or set that is not there
    SkippedProducer = 403,  // `task` waits for `other`, which is not run
    SilentProducer = 404,   // `task` waits for `other`, which does not signal
    Cycle = 405,            // `task` cannot begin before `other`, which cannot begin before it
    Race = 406,             // `other` and `task` touch the same bytes, and nothing keeps them apart
    WrongList = 407,        // `task` is not once in each list that has a part of it, `other`: the worker
    TooFewSlots = 408,      // `task` has no slot, or more parts than its counter can count
    WrongAlias = 409,       // `task` is not what `other` computed
    WrongRegion = 410,      // `task` is in a region with `other`, but has other blocks or workers
};

struct MegaSchedule {
    MegaTaskTable tasks;
    std::span<const int32_t> alias;  // as in MegaPlanned; none: every task is run
    std::span<const uint32_t> entry_begin, entries;
    std::span<const uint64_t> set_begin;  // one more than sets
    std::span<const uint32_t> set_members;
    std::span<const uint32_t> order;      // of the tasks that run: a proof that there is no cycle
    std::span<const uint32_t> region;     // none: every task is one
    std::span<const uint8_t> signals;     // whether a task does; none: all do
    uint32_t workers = 0;                 // 0: any worker takes any task, or any region
    std::span<const uint32_t> first_worker;
    std::span<const uint64_t> list_begin;  // one more than workers
    std::span<const uint32_t> list_tasks;
    uint64_t slots = ~0ull;                // tasks that there is room for
};

struct MegaVerdict {
    MegaBreach breach = MegaBreach::None;  // the first that was found
    uint32_t task = 0, other = 0;
};

// Throws MegaFaulty where columns do not fit each other.
MegaVerdict mega_validate(const MegaSchedule& schedule);

}  // namespace brickline
