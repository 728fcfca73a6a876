// MegaQueueEngine: the queue of megakernel_queue.h with its publisher, on threads or on a device.
//
// The thread that owns the engine is the publisher: it finds out what a submission waits for, publishes
// batches whole or not at all, and notes what has finished. Workers execute: they run from the beginning
// on, leave by themselves between two items when the deadline comes or somebody says stop, and stay until
// the engine is closed. One that never comes back from an item makes the engine dead; what it works on
// then stays for ever, because it may still write to it.
//
// All but `stop` belong to one thread at a time. A forked child has no workers: see is_foreign(). Knows
// no Python, and nothing of who the workers are: see mega_queue_workers.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mega_queue_types.h"
#include "mega_queue_workers.h"
#include "plan_stop.h"

namespace brickline {

class MegaPublisher;

class MegaQueueEngine {
  public:
    // Bytes of the tables of an engine on threads; asked before they are allocated.
    static uint64_t bytes(const MegaQueueOptions& options, uint32_t most_arguments);

    // On threads of the host. Throws std::invalid_argument where an option is out of range,
    // std::bad_alloc, and std::system_error where the machine gives no thread.
    MegaQueueEngine(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops);
    // On workers that are there. Throws as above.
    MegaQueueEngine(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops,
                    std::unique_ptr<MegaQueueWorkers> workers);
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

    static constexpr uint64_t FOREVER = MEGA_FOREVER;

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
    std::vector<MegaSubmissionRow> rows_now();
    // Where is_recorded: of each row the submissions that it waits for, in numbers that count from first() on.
    const MegaQueueReasons& waits() const;
    // Where has_lineage: what each row reads and writes, also of those that another one computes.
    const MegaQueueAccesses& accesses() const;
    MegaSubmissionState state_of(uint64_t submission) const;
    const std::vector<MegaItemFault>& faults() const;
    MegaQueueTotals totals();
    // Of each worker.
    std::vector<MegaWorkerTotals> hands();
    // Of each op, over all workers.
    std::vector<MegaOpTotals> op_totals();
    std::vector<MegaQueueRecord> records();
    // Batches that have finished since the last call, by the number of their first submission.
    std::vector<uint64_t> take_finished_batches();
    std::vector<MegaHung> hung();
    // "" or what the device failed with, in the driver's words; the engine is dead then.
    std::string failure() const;
    // What went between host and device since begin_again().
    MegaQueueTraffic traffic() const;
    double ns_per_tick() const;
    uint64_t begin_tick() const;  // of the first submission since begin_again()
    uint64_t tables_bytes() const;
    uint32_t workers() const;
    // "" for a sound queue, else what was found; for tests and for the report.
    std::string problem();

  private:
    MegaQueueWait run_on();
    template <class Condition, class Enough>
    MegaQueueWait wait_for(Condition is_done, Enough enough, uint64_t until_ns, PlanStop* stop);
    MegaQueueWait wait_for_workers();
    MegaQueueWait give_up();
    MegaQueueWait make_room(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop);
    MegaQueueWait make_room_for_edges();

    std::unique_ptr<MegaQueueWorkers> m_workers;
    std::unique_ptr<MegaPublisher> m;
    const uint32_t m_made_at_fork;
    bool m_is_running = false;
    bool m_is_dead = false;
    uint64_t m_waits = 0;                     // how often the host slept
    std::vector<MegaWorkerTotals> m_before;   // when it began again
    std::vector<MegaOpTotals> m_ops_before;
    MegaQueueTraffic m_traffic_before;
    const uint64_t m_grace_ns;
};

}  // namespace brickline
