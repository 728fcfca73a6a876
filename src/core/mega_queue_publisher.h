// MegaPublisher: what a queue's owner decides and remembers: who waits for whom, what is the same as an
// earlier one, places and order of submissions, and what became of each. Tells the workers, and hears of
// them; never waits. Submissions have an order: their number, less that of the first.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "mega_queue_proof.h"
#include "mega_queue_workers.h"
#include "mega_touched.h"

namespace brickline {

class MegaPublisher {
  public:
    MegaPublisher(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops, MegaQueueWorkers& workers);

    // A batch: checked, planned, written; each after the other.
    MegaPublished check(const MegaBatch& batch) const;
    bool has_room(const MegaBatch& batch) const {
        return m_free_slots >= batch.items && m_free_places.size() >= batch.jobs.size();
    }
    bool has_rows(const MegaBatch& batch) const { return rows.size() + batch.jobs.size() <= MAX_ROWS; }
    // What each job waits for, in the order of submission. From here on the tracker knows the batch.
    void plan(const MegaBatch& batch);
    // Whether what was planned is proved to be right; else the queue is broken.
    bool prove(const MegaBatch& batch);
    bool has_edges() const { return m_producers.size() <= m_free_edges; }
    // Nothing is open.
    void grow_edges();
    bool write(const MegaBatch& batch);

    // What has finished.
    void collect();
    // Nothing will be done of what is open; workers have left.
    void cancel(const MegaQueue& tables);
    // Rows go, sums stay. Nothing is open.
    void forget();
    void forget_totals();

    const std::vector<MegaQueueOp>& ops() const { return m_ops; }
    uint64_t next() const { return first + rows.size(); }
    uint32_t free_slots() const { return uint32_t(m_free_slots); }
    bool is_empty() const { return m_free_slots == m_options.slots; }
    // The whole number of a submission, of which tables hold the low half.
    uint64_t number_of(uint32_t order) const { return first + (order - uint32_t(first)); }
    // Of each row, with what is done of those that are open.
    std::vector<MegaSubmissionRow> rows_now(const MegaQueue& tables) const;
    uint64_t bytes() const;
    // Before the first submission.
    static uint64_t bytes_of(const MegaQueueOptions& options) {
        return uint64_t{options.slots} * (sizeof(Place) + sizeof(uint32_t));
    }

    static constexpr uint32_t MAX_ROWS = 1u << 24;  // submissions between two moments at which nothing is open

    uint64_t first = 0;                   // number of the submission whose order is 0
    std::vector<MegaSubmissionRow> rows;  // by order
    MegaQueueReasons all_waits;           // where items are recorded
    MegaQueueAccesses all_accesses;       // where lineage is kept
    std::map<uint64_t, MegaSubmissionState> lost;  // of submissions whose rows are gone, those that are not done
    std::vector<MegaItemFault> faults;
    std::vector<uint64_t> finished_batches;
    MegaQueueTotals totals;
    bool is_broken = false;
    std::string problem;                  // with a batch

  private:
    struct Batch {
        uint64_t first;
        uint32_t open;
        bool is_missing;  // values of a submission are not there
    };
    struct Place {  // of an open submission
        uint32_t order, edges, batch;
    };

    void reset();
    void begin_tracking();
    void plan_job(const MegaBatch& batch, uint32_t job, std::span<const MegaAccess> accesses);
    MegaCode join(const MegaBatch& batch, uint32_t job, std::span<const uint32_t> producers,
                   std::span<const MegaAccess> accesses);
    uint32_t twin_of(const MegaBatch& batch, uint32_t job, const uint64_t* values, uint32_t first_access);
    void note(std::span<const uint32_t> producers);
    void expand(std::span<const uint32_t> found, std::vector<uint32_t>& numbers, uint64_t begin) const;
    void write_alias(const MegaJob& job, uint32_t twin);
    bool write_job(const MegaBatch& batch, uint32_t number, const uint64_t* values, uint32_t batch_place,
                   std::span<uint32_t> producers);
    void finish(const MegaFinished& each, std::span<const MegaItemFault> own_faults);
    uint32_t head_of(uint32_t job) const { return m_regions[job].follows == MEGA_NOTHING ? job : m_regions[job].head; }

    const MegaQueueOptions m_options;
    const std::vector<MegaQueueOp> m_ops;
    MegaQueueWorkers& m_workers;

    HazardTracker m_hazards;
    MegaQueueProof m_proof;
    uint64_t m_free_slots = 0, m_free_edges = 0;
    std::vector<uint32_t> m_free_places, m_free_batches;
    std::vector<Place> m_places;
    std::vector<Batch> m_batches;
    std::vector<uint64_t> m_missing_batches;  // whose memory is not to be another's while it counts as missing
    std::vector<uint32_t> m_place_of;     // by order; MEGA_NOTHING of one that is finished
    uint32_t m_first_missing = MEGA_NOTHING;  // the first order whose values are not there
    uint32_t m_finished = 0;              // orders below are, and their values are there
    uint32_t m_forgotten = 0;             // the tracker does not know those below

    // Of the batch that is being published.
    std::vector<uint32_t> m_producers;    // of all jobs: orders, and MEGA_VALUE
    std::vector<uint32_t> m_wait_end;     // by job
    std::vector<uint32_t> m_twins;        // by job: an earlier one that computes the same, or MEGA_NOTHING
    std::vector<std::pair<uint32_t, const uint64_t*>> m_known_jobs;  // by a hash: job and arguments
    std::vector<bool> m_is_missing;       // by job: reads something that was never written
    struct Region {
        uint32_t follows = MEGA_NOTHING;  // the job that it is joined to
        uint32_t head = MEGA_NOTHING;     // then the first job of its region
        bool has_follower = false;
        MegaCode apart = MegaCode::None;
    };
    std::vector<Region> m_regions;        // by job
    std::map<uint32_t, MegaTouched> m_touched;  // by head, of those with several blocks
    std::vector<uint32_t> m_read_from;    // orders whose values a job reads, ascending
    // Of what has finished.
    std::vector<MegaFinished> m_done;
    std::vector<MegaItemFault> m_done_faults;
};

}  // namespace brickline
