// MegaQueueThreads: workers that are threads of the host. The publisher's thread works on their tables
// itself; see mega_queue_memory.h for what they see.
#pragma once

#include <thread>

#include "mega_queue_memory.h"

namespace brickline {

class MegaQueueThreads final : public MegaQueueWorkers {
  public:
    // Bytes of the tables; asked before they are allocated.
    static uint64_t bytes_of(const MegaQueueOptions& options, uint32_t most_arguments);

    // Throws std::bad_alloc, and std::system_error where the machine gives no thread.
    MegaQueueThreads(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops);
    ~MegaQueueThreads() override;

    uint32_t count() const override { return m_queue.workers; }
    uint64_t bytes() const override { return bytes_of(m_memory->options, m_memory->stride); }
    uint64_t edges() const override { return m_queue.edges_count; }
    void grow_edges(uint64_t count) override;
    bool write(const MegaQueueEntry& entry) override;
    bool commit(uint32_t submissions, bool is_first) override;
    bool collect(std::vector<MegaFinished>& finished, std::vector<MegaItemFault>& faults) override;
    uint32_t open() const override { return platform::Atomics::load(&m_memory->control.open); }

    MegaQueueMode mode() const override { return MegaQueueMode(platform::Atomics::load(&m_memory->control.mode)); }
    void stop() override;
    void expire() override;
    void go_on() override;
    bool have_left() override { return m_memory->left.load(std::memory_order_seq_cst) == m_queue.workers; }
    void set_deadline(uint64_t deadline_ns) override;
    void sleep_until_open(uint32_t few, uint64_t until_ns) override;
    void sleep_until_left(uint64_t until_ns) override;
    void end(bool is_hung) override;
    void forget() override;
    void reset() override;

    const MegaQueue& look() override { return m_queue; }
    std::vector<MegaWorkerTotals> hands() override;
    std::vector<MegaOpTotals> op_totals() override;
    std::vector<MegaQueueRecord> records() override;
    void forget_records() override;
    uint64_t now_tick() override { return m_memory->clock.now(); }
    uint64_t begin_tick() const override { return m_begin_tick; }
    double ns_per_tick() const override { return m_memory->ns_per_tick; }

  private:
    void start();
    void free_all();
    bool collect_one(uint32_t place, std::vector<MegaFinished>& finished, std::vector<MegaItemFault>& faults);

    std::shared_ptr<MegaThreadMemory> m_memory;
    const MegaQueue& m_queue;
    std::vector<std::thread> m_threads;
    std::vector<uint32_t> m_free_slots, m_free_edges;
    std::vector<uint32_t> m_first_edge;  // by place
    std::vector<uint32_t> m_done;        // places
    uint32_t m_first = MEGA_NOTHING, m_last = MEGA_NOTHING;  // places of the batch that is being written
    uint64_t m_begin_tick = 0;
};

}  // namespace brickline
