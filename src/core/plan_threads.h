// PlanThreads: the launches of a program on several CPU threads. A launch starts when those that it
// waits for are finished; the blocks of one that may be split are cut into chunks that idle threads
// take. What is computed never depends on who computes it, and neither does the failure that is
// reported: after a fault everything earlier in the plan still runs, so the first one is the one that
// a serial run would meet.
#pragma once

#include <memory>

#include "plan_program.h"
#include "worker_pool.h"

namespace brickline {

enum class PlanWay : uint8_t {
    Shared,    // always on several threads
    Sensible,  // by the calling thread alone where the plan takes less than a few hand-offs
};

class PlanThreads final : private SharedWork {
  public:
    explicit PlanThreads(PlanProgram& program);

    // Runs everything on up to so many threads, the calling one included. Allocates nothing after the
    // first run with as many threads. Where nothing can overlap, the calling thread does it alone.
    // `stop` is asked by the calling thread, null: never. After a yes the other threads end what they
    // are at and take nothing more, so part of a launch may be done that is not finished.
    PlanOutcome run(uint32_t threads, PlanWay way = PlanWay::Sensible, PlanStop* stop = nullptr);

    // Whether launch i finished in the last run.
    bool is_finished(uint32_t i) const { return m_is_alone ? i < m_done_alone : m_finished[i] == m_run; }
    // Launches and chunks can overlap at all.
    bool can_overlap() const { return m_can_overlap; }

  private:
    static constexpr uint64_t NO_FAULT = ~0ull;
    static constexpr uint32_t NOTHING = ~0u;

    // State of one launch. A new run finds it as it was made: whoever makes a launch ready resets it.
    struct alignas(64) Node {
        std::atomic<uint32_t> pending{0};    // launches that it still waits for
        std::atomic<uint32_t> remaining{0};  // chunks that are not finished
        std::atomic<uint64_t> next{0};       // the next chunk to take
        std::atomic<uint64_t> fault{NO_FAULT};  // chunk and code of the first chunk that failed
        std::atomic<uint64_t> busy_ns{0};
        std::atomic<bool> is_skipped{false};
        uint32_t chunks = 1;
        uint64_t chunk_blocks = 1;
        uint32_t dependencies = 0;
        uint32_t first_dependent = 0, last_dependent = 0;
        std::atomic<float> block_ns{0};  // time that one block takes, from the runs before; 0: unknown
    };

    // A thread at work.
    struct Hand {
        uint32_t worker = 0;
        void* shared = nullptr;
        uint64_t now_ns = 0;
    };

    void help(uint32_t worker) override;
    PlanOutcome run_alone(PlanStop* stop);
    PlanOutcome run_together(PlanStop* stop);
    PlanOutcome outcome() const;
    void prepare(uint32_t threads);
    void reset();
    void make_ready(uint32_t launch);
    uint32_t copies(const Node& node) const;
    float estimate_ns(uint32_t launch) const;
    void push(uint32_t launch);
    uint32_t pop();
    bool has_queued() const;
    bool is_over() const { return m_done.load(std::memory_order_acquire) == m_program.size(); }
    void ask(Hand& hand);
    uint32_t execute(uint32_t launch, Hand& hand);
    void execute_chunk(uint32_t launch, uint64_t chunk, brickline_launch& local);
    uint32_t complete(uint32_t launch, uint64_t busy_ns);
    void wake_others(uint32_t launch, uint64_t now_ns);

    PlanProgram& m_program;
    std::unique_ptr<Node[]> m_nodes;
    std::vector<uint32_t> m_dependents;  // of all launches, one after the other
    std::vector<uint32_t> m_roots;
    bool m_can_overlap = false;
    bool m_is_running = false;           // still set where a fork cut a run off
    uint32_t m_threads = 0;
    uint32_t m_run = 0;
    std::vector<uint32_t> m_finished;    // by launch: the last run on several threads that finished it
    bool m_is_alone = true;              // the last run had one thread
    uint32_t m_done_alone = 0;           // and finished so many launches
    uint64_t m_total_ns = 0;             // of the work of the last run; 0: unknown
    PlanStop* m_stop = nullptr;
    uint64_t m_ask_ns = Doorbell::FOREVER;  // when the calling thread asks it

    // Ready launches in the order in which they became so. An entry is the run and a launch; a launch
    // that is cut into chunks has several, one for each thread that may join. Places are never reused
    // within a run.
    std::unique_ptr<std::atomic<uint64_t>[]> m_queue;
    uint32_t m_queue_size = 0;
    alignas(64) std::atomic<uint32_t> m_head{0};
    alignas(64) std::atomic<uint32_t> m_tail{0};
    alignas(64) std::atomic<uint32_t> m_done{0};
    std::atomic<uint64_t> m_fault{NO_FAULT};  // launch and code of the first launch that failed
    std::atomic<uint64_t> m_busy_ns{0};
    std::atomic<uint64_t> m_last_wake_ns{0};
    std::atomic<bool> m_is_stopped{false};
    alignas(64) Doorbell m_bell;
};

}  // namespace brickline
