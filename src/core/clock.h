// The host's clock: the cheapest monotonic tick there is, and how to turn ticks into nanoseconds.
// Knows nothing of bricks. Ticks are the time-stamp counter where the kernel itself trusts it.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include "brickline/abi.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace brickline {

inline uint64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000ull + uint64_t(now.tv_nsec);
}

inline uint64_t unix_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return uint64_t(now.tv_sec) * 1000000000ull + uint64_t(now.tv_nsec);
}

inline uint64_t counter_ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t value;
    asm volatile("mrs %0, cntvct_el0" : "=r"(value));
    return value;
#else
    return monotonic_ns();
#endif
}

// The counter kind that this machine can trust: invariant and synchronised between cores.
ClockKind host_clock_kind();

// Reads one of: the hardware counter, CLOCK_MONOTONIC, or a value that only tests move.
class TickSource {
  public:
    explicit TickSource(ClockKind kind = host_clock_kind()) : m_kind(kind) {}
    ClockKind kind() const { return m_kind; }
    uint64_t now() const {
        if (m_kind == ClockKind::Tsc || m_kind == ClockKind::Cntvct) [[likely]] {
            return counter_ticks();
        }
        return m_kind == ClockKind::Manual ? m_manual.load(std::memory_order_relaxed)
                                           : monotonic_ns();
    }
    void advance(uint64_t ns) { m_manual.fetch_add(ns, std::memory_order_relaxed); }

  private:
    ClockKind m_kind;
    std::atomic<uint64_t> m_manual{0};
};

struct Anchor {
    uint64_t tick;
    uint64_t ns;
};

// A (tick, monotonic ns) pair read together; the tightest of a few tries.
Anchor take_anchor(const TickSource& source);

// Nanoseconds per tick measured since the process loaded this code; waits until the baseline is a
// millisecond long, which only a profiler made in the first millisecond notices.
double measure_ns_per_tick(const TickSource& source);

}  // namespace brickline
