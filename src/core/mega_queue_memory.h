// What workers that are threads see: the tables of the queue, how they sleep and are woken, and what each
// of them has done. Outlives the queue where one hangs.
#pragma once

#include <atomic>
#include <memory>
#include <random>
#include <vector>

#include "clock.h"
#include "mega_queue_workers.h"

namespace brickline {

// Where threads sleep until they are rung for. Who rings looks for sleepers after it has changed what
// they look at; who sleeps is counted before it looks again: one of the two sees the other.
class MegaBell {
  public:
    // Sleeps unless `is_over` holds; until it is rung, or until that moment of monotonic_ns.
    template <class Condition>
    void sleep(Condition is_over, uint64_t until_ns) {
        m_sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = m_count.load(std::memory_order_seq_cst);
        if (!is_over()) {
            platform::hold_up();
            wait(seen, until_ns);
        }
        platform::hold_up();
        m_sleepers.fetch_sub(1, std::memory_order_seq_cst);
        m_is_ringing.store(false, std::memory_order_seq_cst);
    }
    bool has_sleepers() const { return m_sleepers.load(std::memory_order_seq_cst) != 0; }
    // Wakes one, unless one is waking up already, who then looks for more that is to be done.
    void ring_one();
    void ring_all();

  private:
    void wait(uint32_t seen, uint64_t until_ns);

    std::atomic<uint32_t> m_count{0};
    std::atomic<uint32_t> m_sleepers{0};
    std::atomic<bool> m_is_ringing{false};
};

// Written by its worker alone.
struct alignas(64) MegaHand {
    std::atomic<uint64_t> items{0}, work{0}, wait{0}, idle{0};
    std::atomic<uint64_t> since{0};   // tick at which the item began
    std::atomic<uint32_t> inside{0};  // 1 while it executes one
    std::atomic<uint32_t> slot{0};
    std::unique_ptr<std::atomic<uint64_t>[]> op_items, op_work;
    std::vector<MegaQueueRecord> records;
    uint64_t dropped_records = 0;
};

struct MegaThreadMemory {
    static constexpr uint64_t MAX_RECORDS = 4u << 20;  // of each worker

    MegaThreadMemory(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops);

    // As they are before the first submission.
    void reset_tables();
    void grow_edges(uint32_t count);
    uint32_t count(uint32_t worker, uint32_t word) const {
        return platform::Atomics::peek(queue.finished + worker * MEGA_FINISHED_STEP + word);
    }

    // Whether a worker has anything to look at; in one order with the steps that push.
    bool has_work() const;
    // The whole life of a worker's thread.
    static void work(std::shared_ptr<MegaThreadMemory> memory, uint32_t number);

    const MegaQueueOptions options;
    const std::vector<MegaQueueOp> ops;
    const TickSource clock;
    double ns_per_tick;
    uint32_t stride = 0;  // arguments of a submission

    MegaControl control = {};
    MegaQueue queue = {};
    std::vector<MegaSlot> slots;
    std::vector<MegaSubmission> submissions;
    std::vector<MegaEdge> edges;
    std::vector<MegaCell> cells;
    std::vector<uint32_t> words;     // heads and tails, and what workers have finished
    std::vector<uint64_t> argument_words;
    std::unique_ptr<MegaHand[]> hands;

    alignas(64) std::atomic<uint64_t> deadline_tick{MEGA_FOREVER};
    std::atomic<uint64_t> deadline_ns{MEGA_FOREVER};
    alignas(64) std::atomic<uint32_t> runs{0};  // changes when workers shall go on
    std::atomic<bool> is_closing{false};
    alignas(64) std::atomic<uint32_t> left{0};  // workers that have left this run
    alignas(64) std::atomic<uint32_t> wake_at{MEGA_NOTHING};  // the host sleeps until so few are open
    alignas(64) MegaBell bell;       // of workers
    alignas(64) MegaBell gate;       // of workers that have left
    alignas(64) MegaBell host_bell;

  private:
    struct Turn;  // a worker between two parks

    void execute_until_told(uint32_t number, Turn& turn);
    uint32_t execute(Turn& turn, MegaHand& hand, uint32_t slot, const MegaSlot& item);
    void rest(Turn& turn, MegaHand& hand);
    void tell_host(MegaOpen open);
    bool is_retried(uint32_t code) const;
};

}  // namespace brickline
