// MegaQueueWorkers: those who execute a queue, as its publisher sees them: threads of the host, or blocks
// of a device. How what the publisher decides is applied, and how it hears of what became of it.
//
// The publisher gives submissions their places and their order. Slots and edges are numbered by whoever
// applies a batch; the publisher only counts them. All but `stop` belong to the publisher's thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "mega_queue_types.h"

namespace brickline {

// One submission, as the publisher has decided it.
struct MegaQueueEntry {
    const MegaJob& job;
    std::span<const uint64_t> values;      // arguments
    std::span<const uint32_t> producers;   // places of those that it waits for, and MEGA_VALUE
    uint32_t place, order, blocks, flags;
    bool is_missing;                       // it reads something that was never written
    uint32_t follows;                      // place of the one that it is joined to, MEGA_NOTHING: none
    uint32_t soon;                         // a place that is written to shortly
};

// What became of a submission.
struct MegaFinished {
    uint32_t place, done, faulted, skipped;
};

class MegaQueueWorkers {
  public:
    virtual ~MegaQueueWorkers() = default;

    virtual uint32_t count() const = 0;
    virtual uint64_t bytes() const = 0;   // of tables
    virtual uint64_t edges() const = 0;   // ties that there can be at once
    virtual void grow_edges(uint64_t count) = 0;  // nothing is open

    // Writes one submission of a batch, of which nothing runs before it is committed. False: the tables
    // contradict themselves.
    virtual bool write(const MegaQueueEntry& entry) = 0;
    // Makes all of a batch run; `is_first` since the clock of reports began.
    virtual bool commit(uint32_t submissions, bool is_first) = 0;
    // Appends what has finished, and of each its faults one after the other, named by its place. False
    // as above. Places are the publisher's again.
    virtual bool collect(std::vector<MegaFinished>& finished, std::vector<MegaItemFault>& faults) = 0;
    // Submissions that are committed and not finished, as of now or of the last collect().
    virtual uint32_t open() const = 0;

    virtual MegaQueueMode mode() const = 0;
    // Makes workers leave for good, from any thread.
    virtual void stop() = 0;
    // Makes workers leave that have not been told otherwise.
    virtual void expire() = 0;
    // Lets workers that have left begin again, without a deadline, unless they were stopped.
    virtual void go_on() = 0;
    virtual bool have_left() = 0;
    virtual void set_deadline(uint64_t deadline_ns) = 0;
    // Sleeps until so few are open, workers are told to leave, or that moment comes; or less.
    virtual void sleep_until_open(uint32_t few, uint64_t until_ns) = 0;
    virtual void sleep_until_left(uint64_t until_ns) = 0;
    // The end, when all have left; or one never comes back, and keeps what it works on.
    virtual void end(bool is_hung) = 0;
    // In a forked child, where there are no workers: nothing is waited for and nothing given back.
    virtual void forget() = 0;
    // "" or what the device failed with.
    virtual std::string failure() const { return {}; }

    // Everything is as before the first submission. Workers have left.
    virtual void reset() = 0;

    // The tables as they are now: of a device, a copy that stays until the next call.
    virtual const MegaQueue& look() = 0;
    // Since the workers were made.
    virtual std::vector<MegaWorkerTotals> hands() = 0;
    virtual std::vector<MegaOpTotals> op_totals() = 0;
    virtual std::vector<MegaQueueRecord> records() = 0;
    virtual void forget_records() = 0;    // nothing is open
    virtual MegaQueueTraffic traffic() const { return {}; }
    virtual uint64_t now_tick() = 0;
    virtual uint64_t begin_tick() const = 0;  // of the last commit that was the first
    virtual double ns_per_tick() const = 0;
};

}  // namespace brickline
