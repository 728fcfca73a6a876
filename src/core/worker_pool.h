// WorkerPool: the threads of this process that help to execute plans, and Doorbell, how they wait.
//
// The pool is made at first use and never taken down; a forked child makes its own. Threads have
// names, take no signals, watch for work a short while and then sleep. Knows nothing of launches.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace brickline {

// A count that changes when there is something to look at. Who waits watches it for about a tenth of a
// millisecond, gives way to other threads meanwhile, and then sleeps until it is woken.
class Doorbell {
  public:
    uint32_t seen() const { return m_count.load(std::memory_order_acquire); }
    static constexpr uint64_t FOREVER = ~0ull;

    // Waits until the count differs from the one seen, or until that moment of monotonic_ns has come.
    void wait(uint32_t seen, uint64_t until_ns = FOREVER);
    // Those that watch notice; `wake` of those that sleep are woken.
    void ring(uint32_t wake);
    bool has_sleepers() const { return m_sleepers.load(std::memory_order_relaxed) != 0; }

  private:
    std::atomic<uint32_t> m_count{0};
    std::atomic<uint32_t> m_sleepers{0};
};

// Something that several threads can work on at once.
class SharedWork {
  public:
    // Called once in each thread that helps, with its number from 1 on; returns when nothing is left.
    virtual void help(uint32_t worker) = 0;

  protected:
    ~SharedWork() = default;
};

class WorkerPool {
  public:
    static constexpr uint32_t MAX_WORKERS = 255;

    static WorkerPool& instance();

    // While it lives, up to so many threads of the pool help. Its end waits until all have left.
    class Help {
      public:
        Help(WorkerPool& pool, SharedWork& work, uint32_t workers);
        ~Help();
        Help(const Help&) = delete;
        Help& operator=(const Help&) = delete;

      private:
        struct Seats* m_seats = nullptr;  // null where too many others are at work: nobody helps
    };

  private:
    WorkerPool() = default;
    void start_workers(uint32_t count);
    void work(uint32_t number);

    static constexpr uint32_t MAX_WORKS = 16;
    struct Seats* m_seats = nullptr;  // MAX_WORKS of them
    std::mutex m_mutex;               // of starting threads
    std::atomic<uint32_t> m_workers{0};
    Doorbell m_bell;
    WorkerPool* m_parent = nullptr;   // a forked child keeps what it cannot end
};

}  // namespace brickline
