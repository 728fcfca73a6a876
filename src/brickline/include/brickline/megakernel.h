// megakernel.h: a program of launches that workers execute without a host in between. What it is made
// of, and the rules by which workers wait for each other; one text for CPU threads and CUDA blocks.
//
// A task is one launch. Its blocks are its items. They are shared out over `parts` workers, each of
// which takes a contiguous range: part k of p gets the blocks [n k / p, n (k + 1) / p). A worker walks
// its own list of tasks from begin to end, and for each of them
//
//     waits until every task that it waits for has been signalled by all of its parts,
//     executes its items, one after the other,
//     signals, once.
//
// A list is in an order in which a task comes after all that it waits for, the same for every worker,
// so a worker waits only for what others can reach without it: no cycle, no deadlock.
//
// A signal adds 1 to the task's counter, with release order; who waits reads it with acquire order,
// so what was written before a signal is read after the wait. Two sets of counters take turns: a run
// uses one, and zeroes the other for the next. A part whose item faulted, or that was not run because
// of one, adds FAULT_SIGNAL, too: a waiter sees in one load that the data will never come, and skips.
//
// Joined tasks are one region: a worker executes its part of one right after its part of the other,
// with no wait in between, because its part of the second reads nothing that another worker's part of
// the first writes.

#pragma once

#include "brickline/platform.h"  // integers of fixed width, for NVRTC too

namespace brickline {

inline constexpr uint32_t MEGA_NONE = 0xffffffff;
inline constexpr uint32_t MEGA_COUNTER_STEP = 32;  // words from one counter to the next: a cache line
inline constexpr uint32_t MEGA_FAULT_SIGNAL = 1u << 20;
inline constexpr uint32_t MEGA_MAX_WORKERS = 4095;  // as many may signal a fault before a counter overflows
inline constexpr uint32_t MEGA_MAX_ARGUMENTS = 24;
inline constexpr uint32_t MEGA_WORKER_BYTES = 4096;  // CUDA: shared memory of a worker for itself

enum MegaFlag : uint32_t {
    MEGA_SIGNALS = 1,  // another task waits for it
    MEGA_JOINED = 2,   // it follows the task before it in the list without a wait
    MEGA_STREAMS = 4,  // CUDA: a producer copies the rows that it reads ahead of it
};

// One launch.
struct alignas(16) MegaTask {
    uint32_t op;              // which function
    uint32_t flags;           // MegaFlag
    uint32_t lanes;           // of a block
    uint32_t shared_bytes;    // of a block
    uint32_t grid[3];
    uint32_t blocks;          // their product
    uint32_t first_worker;    // part k is worker (first_worker + k) % workers
    uint32_t parts;           // a part without blocks waits and signals all the same; 0: not run, another computes it
    uint32_t first_argument;  // in the table of arguments, 8 bytes each
    uint32_t arguments;
    uint32_t first_wait;      // in the table of waits
    uint32_t waits;
    uint32_t stream;          // MEGA_STREAMS: the argument that is streamed, ...
    uint32_t row_bytes;       // a multiple of 16
    uint32_t block_rows;      // block b streams rows [b * block_rows, (b + 1) * block_rows) ...
    uint32_t rows;            // ... that are below this
    uint32_t reserved[2];
};
static_assert(sizeof(MegaTask) == 80);

// That a task is done: its number, and how many signals say so.
struct MegaWait {
    uint32_t task;
    uint32_t parts;
};

// Why a worker left.
enum class MegaState : uint32_t {
    Running = 0,
    Finished = 1,  // its list is done
    Stopped = 2,   // the deadline came, or the host said stop
    Hung = 3,      // it did not leave in time: `task` is what it was at
};

// What a worker has done; written by that worker alone, read by the host when it has left, or when it
// does not leave.
struct alignas(64) MegaProgress {
    uint32_t state;        // MegaState
    uint32_t position;     // entries of its list that are finished, skipped ones included
    uint32_t task;         // where it stands, MEGA_NONE after the last one
    uint32_t blocks;       // items of `task` that are finished
    uint64_t items;        // that were executed
    uint64_t skipped;      // that were not, because of a fault before them
    uint64_t begin_ns, end_ns;  // of a clock that all workers share
    uint64_t begin, end;   // the same moments in ticks of its own clock, as everything below
    uint64_t work;         // in items
    uint64_t dependency_wait;  // its items waited for other tasks
    uint64_t data_wait;        // CUDA: consumers waited for a row under way
    uint64_t ring_wait;        // CUDA: the producer waited for room
    uint32_t missing;      // the task that it waits for, MEGA_NONE: none
    uint32_t arrived;      // parts of `missing` that had signalled
};
static_assert(sizeof(MegaProgress) == 128);

// One entry of a worker's list as it was executed, where that is asked for.
struct alignas(32) MegaRecord {
    uint64_t begin;   // ticks: the worker could begin, but for what it waits for
    uint64_t ready;   // nothing is missing any more
    uint64_t end;
    uint32_t task;
    uint32_t blocks;  // executed
};
static_assert(sizeof(MegaRecord) == 32);

// A fault of a task; of several, that of the first block.
struct MegaFault {
    uint32_t code;   // 0: none
    uint32_t block;  // CUDA: its complement, so that the first one is the largest
};

// CUDA: everything that a run is given.
struct MegaLaunch {
    const MegaTask* tasks;
    const uint32_t* list_begin;
    const uint32_t* lists;
    const MegaWait* waits;
    const uint64_t* arguments;
    uint32_t* counters;         // of this run, zero
    uint32_t* next_counters;    // of the next one
    MegaFault* faults;          // one a task, zero
    MegaProgress* progress;     // one a worker, in memory that the host reads meanwhile
    MegaRecord* records;        // one an entry of the lists, or null
    uint32_t* executed;         // items of an entry of the lists that were executed without a fault, where
                                // that are not all of them; MEGA_NONE before
    uint32_t* stop;             // the host's word: not 0 ends the run; in the host's memory
    uint32_t* stopped;          // the workers' word; zero
    uint64_t tables_bytes;      // of what begins with the tasks, up to the last argument
    uint64_t max_ns;            // 0: no deadline
    uint64_t grace_ns;          // after it, for items to end
    uint32_t tasks_count;
    uint32_t workers;
    uint32_t ring_slots, slot_bytes;  // 0 slots: no rows are copied ahead
    uint32_t shared_bytes;            // of an item
    uint32_t delay_seed;              // 0: none; for tests, random delays
};

// The part of a worker in a task, as blocks [first, last); empty where it has none.
struct MegaShare {
    uint32_t first, last;
};

BRICKLINE_INLINE uint32_t mega_part(uint32_t first_worker, uint32_t worker, uint32_t workers) {
    return worker >= first_worker ? worker - first_worker : worker + workers - first_worker;
}
BRICKLINE_INLINE MegaShare mega_share(uint32_t blocks, uint32_t first_worker, uint32_t parts,
                                      uint32_t worker, uint32_t workers) {
    const uint32_t part = mega_part(first_worker, worker, workers);
    if (part >= parts) return {0, 0};
    if (blocks < 1u << 20)  // times a part it fits 32 bits, which are divided faster
        return {blocks * part / parts, blocks * (part + 1) / parts};
    return {static_cast<uint32_t>(uint64_t{blocks} * part / parts),
            static_cast<uint32_t>(uint64_t{blocks} * (part + 1) / parts)};
}

// A counter's value, taken apart.
BRICKLINE_INLINE uint32_t mega_arrivals(uint32_t value) { return value % MEGA_FAULT_SIGNAL; }
BRICKLINE_INLINE bool mega_is_faulted(uint32_t value) { return value >= MEGA_FAULT_SIGNAL; }

}  // namespace brickline
