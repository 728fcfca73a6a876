// PlanStop: how a run is told to end before its last launch. StopClock: when a run asks, so that asking
// costs next to nothing. Knows no Python.
#pragma once

#include <cstdint>
#include <ctime>

namespace brickline {

class PlanStop {
  public:
    explicit PlanStop(uint64_t interval_ns = 50'000'000) : m_interval_ns(interval_ns) {}

    // Whether the run should end. Asked between launches by the thread that called for the run, about
    // once in an interval and never again after a yes. It may run launches of its own in that thread.
    virtual bool is_wanted() = 0;

    uint64_t interval_ns() const { return m_interval_ns; }

  protected:
    ~PlanStop() = default;

  private:
    const uint64_t m_interval_ns;
};

// A clock that moves every few milliseconds and is read in a few nanoseconds. Where launches are so
// short that it stands still between them, only one of four reads it.
class StopClock {
  public:
    explicit StopClock(const PlanStop* stop) : m_stop(stop) {
        if (stop) restart();
    }

    // Whether it is time to ask, before a launch; never before the first one.
    bool is_due() {
        if (m_unread) {
            --m_unread;
            return false;
        }
        if (!m_stop) return false;
        const uint64_t now_ns = coarse_ns();
        m_unread = now_ns == m_seen_ns ? 3 : 0;
        m_seen_ns = now_ns;
        return now_ns >= m_next_ns;
    }

    void restart() { m_next_ns = coarse_ns() + m_stop->interval_ns(); }

  private:
    static uint64_t coarse_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
        return uint64_t(now.tv_sec) * 1000000000ull + uint64_t(now.tv_nsec);
    }

    const PlanStop* m_stop;
    uint64_t m_seen_ns = 0;
    uint64_t m_next_ns = 0;
    uint32_t m_unread = 1;  // launches that do not look
};

}  // namespace brickline
