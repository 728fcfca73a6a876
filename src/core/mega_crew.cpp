#include "mega_crew.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <system_error>
#include <thread>

#include "clock.h"

namespace brickline {

struct MegaCrew::State {
    Doorbell bell, done;
    SharedWork* work = nullptr;
    std::atomic<uint32_t> places{0};  // of those that may still begin
    std::atomic<uint32_t> inside{0};  // have begun or may, and have not returned
    std::atomic<bool> is_over{false};

    bool enter() {
        uint32_t left = places.load(std::memory_order_relaxed);
        while (left) {
            if (places.compare_exchange_weak(left, left - 1, std::memory_order_acquire,
                                             std::memory_order_relaxed)) return true;
        }
        return false;
    }
    void leave() {
        const uint32_t left = 1 + places.exchange(0, std::memory_order_relaxed);
        if (inside.fetch_sub(left, std::memory_order_acq_rel) == left) done.ring(1);
    }
};

MegaCrew::~MegaCrew() {
    if (!m_state) return;
    m_state->is_over.store(true, std::memory_order_release);
    m_state->bell.ring(~0u >> 1);
}

void MegaCrew::work(std::shared_ptr<State> state, uint32_t number) {
    char name[16];
    std::snprintf(name, sizeof name, "brickline-m%u", number);
    ::pthread_setname_np(::pthread_self(), name);
    for (;;) {
        const uint32_t seen = state->bell.seen();
        if (state->is_over.load(std::memory_order_acquire)) return;
        if (!state->enter()) {
            state->bell.wait(seen);
            continue;
        }
        state->work->help(0);
        state->leave();
    }
}

uint32_t MegaCrew::begin(SharedWork& work, uint32_t threads) {
    if (!m_state || m_process != ::getpid()) {
        m_state = std::make_shared<State>();
        m_threads = 0;
        m_process = ::getpid();
    }
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the other threads' business
    try {
        for (; m_threads < threads; ++m_threads) std::thread(&MegaCrew::work, m_state, m_threads + 1).detach();
    } catch (const std::system_error&) {
        // The machine gives no more: those that there are do the work.
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    const uint32_t places = m_threads < threads ? m_threads : threads;
    if (!places) return 0;
    m_state->work = &work;
    m_state->inside.store(places, std::memory_order_relaxed);
    m_state->places.store(places, std::memory_order_release);
    m_state->bell.ring(places);
    return places;
}

bool MegaCrew::wait(uint64_t until_ns) {
    for (;;) {
        const uint32_t seen = m_state->done.seen();
        if (!m_state->inside.load(std::memory_order_acquire)) return true;
        if (monotonic_ns() >= until_ns) return false;
        m_state->done.wait(seen, until_ns);
    }
}

}  // namespace brickline
