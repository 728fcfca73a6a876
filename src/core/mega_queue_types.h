// What a queue of a megakernel is told and what it tells: plain data, for whoever executes it.
#pragma once

#include <cstdint>
#include <vector>

#include "brickline/launch.h"
#include "brickline/megakernel_queue.h"
#include "mega_planning.h"

namespace brickline {

inline constexpr uint64_t MEGA_FOREVER = ~0ull;  // no moment of monotonic_ns

struct MegaQueueOp {
    void (*function)(const brickline_launch*) = nullptr;  // null: no such op
    uint32_t arguments = 0;                               // of 8 bytes each
    uint32_t flags = 0;                                   // MegaSubmissionFlag
};

struct MegaQueueOptions {
    static constexpr uint32_t MAX_WORKERS = 4095, MAX_THREADS = 255;

    uint32_t workers = 1;
    uint32_t slots = 1;
    uint32_t retry_limit = 0;            // how often an item is tried again
    std::vector<uint32_t> retry_codes;   // faults after which it is
    bool is_recorded = false;            // item by item, and who waits for whom
    bool is_deduping = true;             // within a batch: later, the host may have written to memory
    bool is_fusing = true;               // within a batch: what runs cannot be joined to
    bool is_proved = false;              // each batch, before it is published; takes time with what is open
    bool has_lineage = false;            // what each submission reads and writes is kept
    uint64_t delay_seed = 0;             // other than 0: workers dawdle between steps, at random
    uint64_t grace_ns = 1'500'000'000;   // after a deadline or a stop, for items to end
};

// One submission of a batch.
struct MegaJob {
    uint32_t op = 0;
    uint32_t priority = 2;
    uint32_t grid[3] = {1, 1, 1};
    uint32_t lanes = 1;
    uint32_t shared_bytes = 0;
};

// Submissions that are published together, in order.
struct MegaBatch {
    std::vector<MegaJob> jobs;
    std::vector<uint64_t> arguments;       // of all jobs, one after the other
    std::vector<MegaAccess> accesses;
    std::vector<uint32_t> access_end;      // of each job
    uint64_t items = 0;

    void clear();
    // Takes away what was added after so many jobs.
    void shorten(size_t jobs, size_t arguments, size_t accesses, uint64_t items);
};

enum class MegaQueueState : uint32_t {
    Running = 0,
    Expired = 1,  // a deadline came; goes on with the next submission or wait
    Stopped = 2,  // for good
    Dead = 3,     // an item never returned
};

enum class MegaQueueWait : uint32_t {
    Done = 0,
    Expired = 1,      // the deadline came, and all workers have left
    Stopped = 2,      // somebody said stop, and all workers have left
    Interrupted = 3,  // PlanStop: workers go on
    Hung = 4,         // the engine is dead
};

enum class MegaRefused : uint32_t {
    None = 0,
    NoJobs,
    Op,           // there is no such op
    Priority,
    Grid,         // no block, or more than slots
    Items,        // more items than slots
    Accesses,     // a range that ends before it begins
    Waiting,      // room was not there in time: see MegaPublished::wait
    State,        // stopped or dead
    Broken,       // the queue contradicts itself
};

struct MegaPublished {
    MegaRefused refused = MegaRefused::None;
    MegaQueueWait wait = MegaQueueWait::Done;
    uint32_t job = 0;        // that was refused
    uint64_t first = 0;      // number of the first submission
    uint64_t plan_ns = 0, publish_ns = 0;
};

// An item that faulted. Those that were skipped are counted, and seen by the state of their submission.
struct MegaItemFault {
    uint64_t submission;
    uint32_t block, code, attempts;
};

// What a worker stands at that does not come back.
struct MegaHung {
    uint32_t worker;
    uint64_t submission;
    uint32_t block, op;
    uint64_t since_ns;           // how long
    uint64_t waiter;             // a submission that waits for it, NO_SUBMISSION: none
    uint64_t waiters;            // how many do, one after the other
    static constexpr uint64_t NO_SUBMISSION = ~0ull;
};

enum class MegaSubmissionState : uint8_t {
    Open = 0,
    Done = 1,
    Faulted = 2,
    Skipped = 3,
    Cancelled = 4,
    Alias = 5,  // another one of its batch computes the same into the same memory: see its state
};

struct MegaSubmissionRow {
    uint32_t op, items, done;
    uint32_t alias;    // of an Alias, the one that computes it, counted as rows are
    uint32_t follows;  // the one that it is joined to, counted as rows are; MEGA_NOTHING: none
    MegaSubmissionState state;
    uint8_t priority;
    uint16_t apart = 0;  // MegaCode: why it is not joined to one that it waits for
};
static_assert(sizeof(MegaSubmissionRow) == 24);

struct MegaQueueRecord {
    uint64_t begin, ready, end;  // ticks: nothing to do before, began, ended
    uint64_t submission;
    uint32_t block, worker;
};

// Submissions that others have to do with.
struct MegaQueueReasons {
    std::vector<uint64_t> ends;     // of each submission
    std::vector<uint32_t> numbers;
};

// What submissions read and write, as they were submitted.
struct MegaQueueAccesses {
    std::vector<uint64_t> ends;     // of each submission
    std::vector<MegaAccess> rows;   // one for each buffer of its signature
};

struct MegaQueueTotals {
    uint64_t submissions = 0;
    uint64_t published = 0;   // items
    uint64_t deduped = 0;     // items that were not, because another computes the same
    uint64_t deduped_done = 0;  // of those whose rows are gone, the ones whose values are there
    uint64_t joined = 0;      // submissions that follow another one, item by item
    uint64_t done = 0, faulted = 0, skipped = 0, cancelled = 0;
    uint64_t requeued = 0;    // how often
    uint64_t plan_ns = 0, publish_ns = 0;
    uint64_t edges = 0;
    uint64_t waits = 0;       // how often the host slept
    uint64_t dropped_records = 0;
};

// Of a worker; ticks are those of the workers' clock.
struct MegaWorkerTotals {
    uint64_t items = 0, skipped = 0, requeued = 0;
    uint64_t work_ticks = 0;      // inside items
    uint64_t wait_ticks = 0;      // while submissions were open and none was ready
    uint64_t idle_ticks = 0;      // while nothing was open
    uint64_t dropped_records = 0;
    bool is_inside = false;       // of an item:
    uint32_t slot = 0, block = 0;
    uint32_t order = 0;           // of its submission, the low half of the number
    uint64_t submission = 0;      // the whole of it, which the publisher knows
    uint64_t since = 0;           // tick at which it began
};

struct MegaOpTotals {
    uint64_t items = 0, work_ticks = 0;
};

// What went between host and device.
struct MegaQueueTraffic {
    uint64_t uploaded_bytes = 0, read_back_bytes = 0;
    uint64_t reads = 0;                // copies that were made to look at something
    uint64_t allocations = 0;          // pieces of memory for tables and for what is shared with the host
    uint64_t launches = 0;
    uint64_t syncs = 0;                // waits for a stream or for room, beside those for submissions and workers
};

}  // namespace brickline
