#include "worker_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <system_error>
#include <thread>

#include "clock.h"

namespace brickline {
namespace {

constexpr uint64_t WATCH_NS = 10000;   // without giving way
constexpr uint64_t YIELD_NS = 100000;  // until then others go first; later it sleeps

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `is_over` came true before it was time to sleep.
template <class Condition>
bool watch(Condition is_over) {
    for (int i = 0; i < 64; ++i) {
        if (is_over()) return true;
        relax();
    }
    const uint64_t begin_ns = monotonic_ns();
    for (uint64_t waited_ns = 0; waited_ns < YIELD_NS; waited_ns = monotonic_ns() - begin_ns) {
        for (int i = 0; i < 8; ++i) {
            if (is_over()) return true;
            relax();
        }
        if (waited_ns > WATCH_NS) ::sched_yield();
    }
    return is_over();
}

}  // namespace

// Ringing changes the count and then looks for sleepers; who sleeps is counted before the kernel looks
// at the count. So either the ringer sees the sleeper, or the kernel sees the new count.
void Doorbell::wait(uint32_t seen, uint64_t until_ns) {
    if (watch([&] { return m_count.load(std::memory_order_acquire) != seen; })) return;
    const bool is_forever = until_ns == FOREVER;
    timespec until;
    until.tv_sec = time_t(until_ns / 1000000000);
    until.tv_nsec = long(until_ns % 1000000000);
    m_sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (m_count.load(std::memory_order_seq_cst) == seen && (is_forever || monotonic_ns() < until_ns)) {
        // The one way to wait that takes a moment and not a duration.
        ::syscall(SYS_futex, &m_count, FUTEX_WAIT_BITSET_PRIVATE, seen, is_forever ? nullptr : &until, nullptr,
                  FUTEX_BITSET_MATCH_ANY);
    }
    m_sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void Doorbell::ring(uint32_t wake) {
    m_count.fetch_add(1, std::memory_order_seq_cst);
    if (wake && m_sleepers.load(std::memory_order_seq_cst)) {
        ::syscall(SYS_futex, &m_count, FUTEX_WAKE_PRIVATE, wake, nullptr, nullptr, 0);
    }
}

// One piece of work and who is at it. `state` holds, from the lowest bit: 16 bits of threads inside,
// 16 bits of places left, whether it is taken.
struct alignas(64) Seats {
    static constexpr uint64_t INSIDE = 1, PLACE = 1ull << 16, TAKEN = 1ull << 32;
    static constexpr uint64_t INSIDE_MASK = PLACE - 1, PLACES_MASK = TAKEN - PLACE;

    std::atomic<uint64_t> state{0};
    SharedWork* work = nullptr;

    bool take(SharedWork& given, uint32_t places) {
        uint64_t free = 0;
        if (!state.compare_exchange_strong(free, TAKEN, std::memory_order_acquire)) return false;
        work = &given;
        state.store(TAKEN | places * PLACE, std::memory_order_release);
        return true;
    }
    bool enter() {
        uint64_t found = state.load(std::memory_order_relaxed);
        while (found & PLACES_MASK) {
            if (state.compare_exchange_weak(found, found - PLACE + INSIDE, std::memory_order_acq_rel,
                                            std::memory_order_relaxed)) return true;
        }
        return false;
    }
    void leave() { state.fetch_sub(INSIDE, std::memory_order_release); }
    // Nobody enters any more; waits for those inside, who are about to leave.
    void close() {
        state.fetch_and(~PLACES_MASK, std::memory_order_relaxed);
        const auto is_empty = [&] { return !(state.load(std::memory_order_acquire) & INSIDE_MASK); };
        while (!watch(is_empty)) {}
        state.store(0, std::memory_order_release);
    }
};

namespace {

std::atomic<WorkerPool*> g_pool{nullptr};
std::atomic<WorkerPool*> g_parent{nullptr};  // of a forked child: whose threads do not exist here

void forget_pool() { g_parent.store(g_pool.exchange(nullptr)); }

}  // namespace

WorkerPool& WorkerPool::instance() {
    WorkerPool* pool = g_pool.load(std::memory_order_acquire);
    if (pool) [[likely]] return *pool;
    static const int registered = ::pthread_atfork(nullptr, nullptr, &forget_pool);
    (void)registered;
    WorkerPool* const made = new WorkerPool;
    made->m_seats = new Seats[MAX_WORKS];
    made->m_parent = g_parent.load();
    if (g_pool.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) return *made;
    delete[] made->m_seats;
    delete made;
    return *pool;
}

void WorkerPool::start_workers(uint32_t count) {
    const std::lock_guard guard(m_mutex);
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the other threads' business
    try {
        for (uint32_t number = m_workers + 1; number <= count; ++number) {
            std::thread([this, number] { work(number); }).detach();
            m_workers.store(number, std::memory_order_relaxed);
        }
    } catch (const std::system_error&) {
        // The machine gives no more threads: those that there are do the work.
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WorkerPool::work(uint32_t number) {
    char name[16];
    std::snprintf(name, sizeof name, "brickline-%u", number);
    ::pthread_setname_np(::pthread_self(), name);
    for (;;) {
        const uint32_t seen = m_bell.seen();
        bool has_helped = false;
        for (uint32_t k = 0; k < MAX_WORKS; ++k) {
            if (!m_seats[k].enter()) continue;
            m_seats[k].work->help(number);
            m_seats[k].leave();
            has_helped = true;
        }
        if (!has_helped) m_bell.wait(seen);
    }
}

WorkerPool::Help::Help(WorkerPool& pool, SharedWork& work, uint32_t workers) {
    workers = std::min(workers, MAX_WORKERS);
    if (workers > pool.m_workers.load(std::memory_order_relaxed)) pool.start_workers(workers);
    for (uint32_t k = 0; k < MAX_WORKS && !m_seats; ++k) {
        if (pool.m_seats[k].take(work, workers)) m_seats = &pool.m_seats[k];
    }
    if (m_seats) pool.m_bell.ring(workers);
}

WorkerPool::Help::~Help() {
    if (m_seats) m_seats->close();
}

}  // namespace brickline
