// MegaQueueDevice: workers that are blocks of a cooperative launch on CUDA. Writes commands and reads
// completions of megakernel_intake.h, in memory of the host that the device sees; looks at tables and
// counters by copies on a stream of its own, which works while workers run.
//
// Workers leave by themselves when nothing has been open for a while, so that nobody who waits for the
// device waits for them; they are launched again with the next batch. Owns its memory and its streams, and
// gives them back at the end, but not where a worker hangs: nothing that a device still writes to can be.
#pragma once

#include <atomic>

#include "cuda_driver.h"
#include "mega_queue_layout.h"
#include "mega_queue_workers.h"

namespace brickline {

// How workers are made.
struct MegaDevicePlace {
    const Driver* driver = nullptr;   // null: the machine's
    uint64_t context = 0, function = 0;
    uint32_t threads = 0;             // of a block
    uint32_t item_bytes = 0;          // of shared memory for an item
    uint32_t ring_bits = 0;           // of each priority 1 << ring_bits rings
    uint64_t rest_ns = 1'000'000;
};

class MegaQueueDevice final : public MegaQueueWorkers {
  public:
    // Bytes of everything that is allocated on the device and mapped of the host.
    static uint64_t bytes_of(const MegaQueueOptions& options, uint32_t stride, uint32_t ops, uint32_t ring_bits);

    // Throws std::runtime_error with the driver's words where it refuses.
    MegaQueueDevice(const MegaQueueOptions& options, const std::vector<MegaQueueOp>& ops, const MegaDevicePlace& place);
    ~MegaQueueDevice() override;

    // What the stream was given before is done when this returns.
    void wait_for_stream(uint64_t stream);

    uint32_t count() const override { return m_options.workers; }
    uint64_t bytes() const override;
    uint64_t edges() const override { return m_room.edges_count; }
    void grow_edges(uint64_t count) override;
    bool write(const MegaQueueEntry& entry) override;
    bool commit(uint32_t submissions, bool is_first) override;
    bool collect(std::vector<MegaFinished>& finished, std::vector<MegaItemFault>& faults) override;
    uint32_t open() const override { return m_open; }

    MegaQueueMode mode() const override;
    void stop() override;
    void expire() override;
    void go_on() override;
    bool have_left() override;
    void set_deadline(uint64_t deadline_ns) override;
    void sleep_until_open(uint32_t few, uint64_t until_ns) override;
    void sleep_until_left(uint64_t until_ns) override;
    void end(bool is_hung) override;
    void forget() override { m_has_ended = true; }
    std::string failure() const override { return m_failure; }
    void reset() override;

    const MegaQueue& look() override;
    std::vector<MegaWorkerTotals> hands() override;
    std::vector<MegaOpTotals> op_totals() override;
    std::vector<MegaQueueRecord> records() override;
    void forget_records() override;
    MegaQueueTraffic traffic() const override { return m_traffic; }
    uint64_t now_tick() override;
    uint64_t begin_tick() const override;
    double ns_per_tick() const override { return 1.0; }

  private:
    bool check(CUresult code, const char* call);
    void must(CUresult code, const char* call);
    void allocate(uint64_t& address, uint64_t bytes);
    void* allocate_host(uint64_t bytes, unsigned flags);
    void allocate_edges(uint64_t count);
    void make_empty();
    void make_launch();
    bool launch();
    bool go_on_where_needed();
    bool rest_now();
    void give_back();
    bool emit(uint32_t flags);
    bool wait_for_lines(uint32_t lines);
    void read(void* to, uint64_t from, uint64_t bytes);
    const unsigned char* read_counters();
    template <class Condition>
    void watch(Condition is_over, uint64_t until_ns);

    const MegaQueueOptions m_options;
    const MegaDevicePlace m_place;
    const Driver& m_driver;
    const uint32_t m_ops;
    const MegaQueueLayout m_layout;
    CUstream m_stream = nullptr, m_copy_stream = nullptr;
    MegaQueueRoom m_room;
    unsigned char* m_mapped = nullptr;        // what is shared, as the host sees it
    unsigned char* m_pinned = nullptr;        // for copies
    MegaHostWords* m_host = nullptr;
    MegaIntakeWords* m_words = nullptr;
    unsigned char* m_commands = nullptr;
    MegaCompletion* m_completions = nullptr;

    MegaQueueLaunch m_launch = {};
    uint32_t m_open = 0;
    uint32_t m_tail = 0;                      // lines of commands
    uint32_t m_read = 0;                      // completions
    uint64_t m_deadline_ns = MEGA_FOREVER;
    uint32_t m_ignored_run = 0;               // what this launch said was heard
    bool m_is_launched = false, m_is_expired = false, m_has_ended = false;
    std::atomic<bool> m_is_stopped{false};
    std::string m_failure;
    MegaQueueTraffic m_traffic;

    // Of the chunk that is being written.
    std::vector<MegaCommand> m_chunk_jobs;
    std::vector<uint64_t> m_chunk_arguments;
    std::vector<uint32_t> m_chunk_ties;

    // Copies of what workers have counted, and of the tables.
    std::vector<unsigned char> m_counters;
    bool m_are_counters_fresh = false;  // nothing was open when they were read, nor has been since
    MegaQueue m_seen = {};
    MegaControl m_seen_control = {};
    std::vector<MegaSlot> m_seen_slots;
    std::vector<MegaSubmission> m_seen_submissions;
    std::vector<MegaEdge> m_seen_edges;
};

}  // namespace brickline
