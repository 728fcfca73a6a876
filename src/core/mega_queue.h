// MegaQueueEngine: the queue of megakernel_queue.h on threads of the host.
//
// The thread that owns the engine is the publisher: it finds out what a submission waits for, publishes
// batches whole or not at all, and recycles what has finished. Threads of the engine are the workers.
// They run from the beginning on, leave by themselves between two items when the deadline comes or
// somebody says stop, and stay until the engine is closed. One that never comes back from an item makes
// the engine dead; what it works on then stays for ever, because it may still write to it.
//
// All but `stop` belong to one thread at a time. A forked child has no workers: see is_foreign(). Knows
// no Python, and of ops that they are functions.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "brickline/launch.h"
#include "brickline/megakernel_queue.h"
#include "mega_hazards.h"
#include "plan_stop.h"

namespace brickline {

struct MegaQueueOp {
    void (*function)(const brickline_launch*) = nullptr;  // null: no such op
    uint32_t arguments = 0;                               // of 8 bytes each
    uint32_t flags = 0;                                   // MegaSubmissionFlag
};

struct MegaQueueOptions {
    static constexpr uint32_t MAX_WORKERS = 255;

    uint32_t workers = 1;
    uint32_t slots = 1;
    uint32_t retry_limit = 0;            // how often an item is tried again
    std::vector<uint32_t> retry_codes;   // faults after which it is
    bool is_recorded = false;            // item by item
    bool is_deduping = true;             // within a batch: later, the host may have written to memory
    bool has_lineage = false;            // whose values each submission reads is kept, and who waits for whom
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
    uint32_t alias;  // of an Alias, the one that computes it, counted as rows are
    MegaSubmissionState state;
    uint8_t priority;
    uint16_t reserved = 0;
};
static_assert(sizeof(MegaSubmissionRow) == 20);

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

struct MegaQueueTotals {
    uint64_t submissions = 0;
    uint64_t published = 0;   // items
    uint64_t deduped = 0;     // items that were not, because another computes the same
    uint64_t deduped_done = 0;  // of those whose rows are gone, the ones whose values are there
    uint64_t done = 0, faulted = 0, skipped = 0, cancelled = 0;
    uint64_t requeued = 0;    // how often
    uint64_t plan_ns = 0, publish_ns = 0;
    uint64_t edges = 0;
    uint64_t waits = 0;       // how often the host slept
    uint64_t dropped_records = 0;
};

struct MegaWorkerTotals {
    uint64_t items = 0, skipped = 0;
    uint64_t work_ticks = 0;      // inside items
    uint64_t wait_ticks = 0;      // while submissions were open and none was ready
    uint64_t idle_ticks = 0;      // while nothing was open
    bool is_inside = false;       // of an item
    uint64_t submission = 0;
    uint32_t block = 0;
};

class MegaQueueEngine {
  public:
    // Bytes of an engine's tables; asked before they are allocated.
    static uint64_t bytes(const MegaQueueOptions& options, uint32_t most_arguments);

    // Throws std::invalid_argument where an option is out of range, std::bad_alloc, and
    // std::system_error where the machine gives no thread.
    MegaQueueEngine(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops);
    // As close().
    ~MegaQueueEngine();
    MegaQueueEngine(const MegaQueueEngine&) = delete;
    MegaQueueEngine& operator=(const MegaQueueEngine&) = delete;

    // Publishes all jobs of a batch or none. Waits for room until that moment; 0: not at all.
    MegaPublished publish(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop);
    // Waits until all is finished. `deadline_ns` is a moment of monotonic_ns, FOREVER: none.
    MegaQueueWait drain(uint64_t deadline_ns, PlanStop* stop);
    // Waits for one submission; workers go on when the moment comes, and it is Expired.
    MegaQueueWait wait(uint64_t submission, uint64_t until_ns, PlanStop* stop);
    // Makes workers leave for good, between two items. From any thread; does not wait.
    void stop();
    // Waits until all workers have left, after stop.
    MegaQueueWait join();
    // Stops, waits for the workers and ends their threads, but not one that hangs.
    MegaQueueWait close();
    // Cancels what remains of a queue whose workers have left.
    void clear();
    // Forgets what has finished, after a report: nothing is open.
    void begin_again();

    static constexpr uint64_t FOREVER = ~0ull;

    MegaQueueState state() const;
    bool is_foreign() const;  // made before a fork, by the parent
    uint64_t open() const;    // submissions, as of the last look
    uint32_t free_slots() const;
    void collect();           // looks at what has finished

    // Of all submissions since begin_again(), by number from first() on.
    uint64_t first() const;
    uint64_t next() const;
    const std::vector<MegaSubmissionRow>& rows() const;
    // The same, with what is done of those that are open.
    std::vector<MegaSubmissionRow> rows_now() const;
    // Where has_lineage: of each row the submissions that it waits for, and those whose values it reads.
    // Numbers count from first() on.
    const MegaQueueReasons& waits() const;
    const MegaQueueReasons& sources() const;
    // Who wrote last to some byte of a range, in the same numbers. Nothing is open, and begin_again() follows.
    std::vector<uint32_t> last_writers(uint64_t begin, uint64_t end);
    MegaSubmissionState state_of(uint64_t submission) const;
    const std::vector<MegaItemFault>& faults() const;
    MegaQueueTotals totals() const;
    MegaWorkerTotals worker(uint32_t number) const;
    // Items and ticks inside of them, of one op, over all workers.
    std::pair<uint64_t, uint64_t> op_totals(uint32_t op) const;
    std::vector<MegaQueueRecord> records() const;
    // Batches that have finished since the last call, by the number of their first submission.
    std::vector<uint64_t> take_finished_batches();
    std::vector<MegaHung> hung() const;
    double ns_per_tick() const;
    uint64_t begin_tick() const;  // of the first submission since begin_again()
    uint64_t tables_bytes() const;
    uint32_t workers() const;
    // "" for a sound queue, else what was found; for tests and for the report.
    std::string problem() const;
    const MegaQueue& queue() const;

  private:
    struct Memory;     // what workers see; outlives the engine where one hangs
    struct Publisher;  // what they do not
    std::shared_ptr<Memory> m_memory;
    std::unique_ptr<Publisher> m;
};

}  // namespace brickline
