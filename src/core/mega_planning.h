// mega_planning.h: what to run, what need not be run, what runs together, and where.
//
// From what tasks read and write, `mega_plan` finds whom each waits for (mega_hazards.h), which tasks
// compute what another has computed already, and which form a region: a chain whose parts one worker
// runs one after the other, without a wait in between. Knows ops by their numbers alone, and executes
// nothing. Whether its answer is right is for mega_validation.h to say, which shares no code with it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mega_hazards.h"

namespace brickline {

enum MegaTaskFlag : uint32_t {
    MEGA_TASK_PURE = 1,    // the same inputs give the same outputs, and nothing else is changed
    MEGA_TASK_ATOMIC = 2,  // its blocks add to one another's results
};

// Tasks in the order of submission, as columns. Nothing is copied.
struct MegaTaskTable {
    std::span<const uint32_t> op, blocks, flags;
    std::span<const uint32_t> param_begin;   // one more than tasks; into params
    std::span<const uint64_t> params;
    std::span<const uint32_t> access_begin;  // one more than tasks; into accesses
    std::span<const MegaAccess> accesses;

    uint32_t size() const { return uint32_t(op.size()); }
    std::span<const MegaAccess> accesses_of(uint32_t task) const {
        return accesses.subspan(access_begin[task], access_begin[task + 1] - access_begin[task]);
    }
    std::span<const uint64_t> params_of(uint32_t task) const {
        return params.subspan(param_begin[task], param_begin[task + 1] - param_begin[task]);
    }
    // Throws MegaFaulty where columns do not fit each other: lengths, ranges, modes.
    void check() const;
    // The same in two steps, for whoever goes through the accesses anyway: all but the accesses; and whether
    // those of tasks [first, last) are right. Where they are not, `check` says what is wrong.
    void check_columns() const;
    bool has_right_accesses(uint32_t first, uint32_t last) const;
};

// Numbers are stable: planning.py tells them to users as MK and the number.
enum class MegaCode : uint32_t {
    None = 0,
    // Two tasks have the same op, parameters and ranges, and yet both are run. Reported where the earlier
    // one is among the last few that wrote the later one's output:
    NotPure = 201,         // the op is not declared pure
    Accumulates = 202,     // it adds to what is there
    InputChanged = 203,    // `other` wrote an input in between
    OutputChanged = 204,   // `other` wrote an output in between
    // A task is not joined to the region of what it waits for:
    DifferentBlocks = 302,
    NotBlockwise = 303,    // a block of one touches what another block of the other writes
    HasFollower = 304,     // `other` follows already
    JoinAccumulates = 305,
    Cycle = 306,           // it waits for `other`, too, which waits for the region
    WaitsForOther = 307,   // it waits for `other`, too, which may end after the region begins
    // Of a queue alone, a submission is not joined to the last one that it waits for:
    OtherPriority = 311,
    OtherBatch = 312,      // that one was submitted in an earlier batch
    NoValue = 313,         // it reads nothing that that one writes
    FuseOff = 314,         // nothing is joined: the queue was made so
    // A read of bytes that nobody wrote; `other` is the access, from 0 on:
    NeverWritten = 401,
};

// Why two tasks were not made one, or not joined. NeverWritten: `earlier` is the task itself.
struct MegaRefusal {
    uint32_t earlier, later;
    MegaCode code;
    uint32_t other;
};
static_assert(sizeof(MegaRefusal) == 16);

struct MegaInitial {
    uint64_t begin, end;
    uint32_t space;
};

struct MegaPlanOptions {
    bool dedupes = true;
    bool joins = true;
    bool finds_unwritten = false;              // then `initial` is what is written before the tasks
    std::span<const MegaInitial> initial;
    std::span<const uint64_t> costs;           // of tasks, for the critical path; none: 1 each
};

struct MegaPlanned {
    // Of each task, an earlier one that computed the same, or -1. Such a task is not run, waits for
    // nobody, and is in no region.
    MegaVector<int32_t> alias;
    // What each task waits for, entries as HazardTracker has them; without members of its own region.
    MegaVector<uint32_t> entry_begin, entries;
    MegaSets sets;
    // Regions are numbered in an order in which they may run: what a region waits for has a lower
    // number. A task that is not run has the number NO_REGION.
    static constexpr uint32_t NO_REGION = ~0u;
    MegaVector<uint32_t> region;
    uint32_t regions = 0;
    MegaVector<uint32_t> order;  // tasks that run: region by region, each in the order of its chain
    MegaVector<uint32_t> level;  // 0: waits for nobody; else one more than the highest it waits for
    MegaVector<MegaRefusal> refusals;
    uint64_t critical_cost = 0;
    MegaVector<uint32_t> critical;  // the tasks of the costliest chain, first to last
};

// Throws MegaFaulty for tables that do not fit.
MegaPlanned mega_plan(const MegaTaskTable& tasks, const MegaPlanOptions& options);

// Waits as plain lists of tasks, ascending, each once: `begin` has one more than tasks.
struct MegaFlat {
    MegaVector<uint64_t> begin;
    MegaVector<uint32_t> tasks;
};
MegaFlat mega_flat(std::span<const uint32_t> entry_begin, std::span<const uint32_t> entries,
                   std::span<const uint64_t> set_begin, std::span<const uint32_t> set_members);

// The worker of each task's first part; part k is worker (first + k) % workers. Tasks with fewer blocks
// than workers take turns, or where costs are given (of a part of each task) begin at the worker with
// the least of it; those of a region begin at one worker. order and region: as in MegaPlanned.
MegaVector<uint32_t> mega_assign(std::span<const uint32_t> order, std::span<const uint32_t> region,
                                  std::span<const uint32_t> blocks, std::span<const uint64_t> costs,
                                  uint32_t workers);

// The list of each worker, in an order of tasks.
struct MegaLists {
    MegaVector<uint64_t> begin;  // one more than workers
    MegaVector<uint32_t> tasks;
};
MegaLists mega_lists(std::span<const uint32_t> order, std::span<const uint32_t> blocks,
                     std::span<const uint32_t> first_worker, uint32_t workers);

}  // namespace brickline
