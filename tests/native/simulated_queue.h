// A device for queues of megakernels that is simulated: a launch is threads of the host, a few for the intake
// and one for each worker, which execute what megakernel_intake.h and megakernel_queue.h say. A stream
// begins its next step when the last one is over. What it shows is whether host and intake understand each
// other, and, under TSan, whether they synchronise; it knows nothing of lanes and of how fast things are.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "clock.h"
#include "mega_queue_device.h"

namespace simulated_queue {

using namespace brickline;
using Atomics = platform::Atomics;

struct Kernel {  // what a CUfunction points to
    std::vector<MegaQueueOp> ops;
};

struct Stream {
    std::atomic<uint32_t> running{0};  // threads, which nobody joins: one may hang

    void wait() {
        while (running.load()) ::usleep(20);
    }
};

// Reachable for ever: who hangs may still write to it.
inline std::set<void*>& memory() {
    static auto* const all = new std::set<void*>();
    return *all;
}
inline std::atomic<uint32_t> g_launches{0};
inline std::shared_ptr<MegaQueueLaunch> g_last_launch;  // of the thread that launches
inline uint32_t g_intake_threads = 1;  // or an even number

// What the threads of one intake have in common.
struct Together {
    explicit Together(uint32_t count) : barrier(count) {}
    std::barrier<> barrier;
    MegaIntakeShared shared;
};

struct Team {
    Team(Together& with, uint32_t number, uint32_t count)
        : thread(number), threads(count), lanes(count > 1 ? 2 : 1), together(&with) {}

    uint32_t thread, threads, lanes;
    uint32_t warp = thread / lanes, warps = threads / lanes, lane = thread % lanes;
    Together* together;

    void sync() const {
        if (threads > 1) together->barrier.arrive_and_wait();
    }
    void fence() const {
        static thread_local std::atomic<uint32_t> word{0};
        word.exchange(1, std::memory_order_seq_cst);
    }
    uint64_t now_ns() const { return monotonic_ns(); }
    uint32_t take(uint32_t* word, uint32_t count) const { return Atomics::add(word, 0u - count); }
    uint32_t add(uint32_t* word, uint32_t count) const { return Atomics::add(word, count); }
    void write(MegaCompletion& to, const MegaCompletion& from) const { to = from; }
    void copy(unsigned char* to, const unsigned char* from, uint32_t bytes) const {
        if (thread == 0) std::memcpy(to, from, bytes);
    }
};

inline uint32_t execute(const MegaQueueLaunch& launch, const Kernel& kernel, MegaDeviceHand& hand, uint32_t slot,
                        const MegaSlot& item) {
    const MegaSubmission& submission = launch.queue.submissions[item.submission];
    if (!kernel.ops[submission.op].function) return MEGA_FAULT_UNKNOWN_OP;
    std::vector<void*> pointers;
    for (uint32_t k = 0; k < launch.stride; ++k)
        pointers.push_back(launch.arguments + uint64_t{item.submission} * launch.stride + k);
    uint32_t code = 0;
    brickline_launch block = {};
    block.arguments = pointers.data();
    std::copy_n(submission.grid, 3, block.grid);
    block.lanes[0] = submission.lanes, block.lanes[1] = block.lanes[2] = 1;
    block.first = item.block, block.last = uint64_t{item.block} + 1;
    block.fault = &code;
    hand.slot = slot, hand.order = submission.order, hand.block = item.block;
    hand.since = monotonic_ns();
    Atomics::store(&hand.inside, 1);
    kernel.ops[submission.op].function(&block);
    Atomics::store(&hand.inside, 0);
    ++hand.items;
    hand.work_ns += monotonic_ns() - hand.since;
    if (launch.records) ++hand.records;
    return code;
}

inline void work(const MegaQueueLaunch& launch, uint32_t number, const Kernel& kernel) {
    MegaWorker<Atomics> worker(launch.queue, number, launch.retry_limit);
    worker.resume();
    for (;;) {
        const MegaRound round = worker.round(
            [&](uint32_t slot, const MegaSlot& item) {
                return execute(launch, kernel, launch.hands[number], slot, item);
            },
            [&](uint32_t code) {
                for (uint32_t k = 0; k < launch.retry_count; ++k)
                    if (launch.retry_codes[k] == code) return true;
                return false;
            },
            [] {});
        if (round == MegaRound::Left) break;
        if (round == MegaRound::Idle) ::sched_yield();
    }
    Atomics::add(&launch.queue.control->left, 1);
}

// Items that the last launch has found ready so far.
inline uint32_t ready_items() {
    const MegaQueue& queue = g_last_launch->queue;
    uint32_t count = 0;
    for (uint32_t ring = 0; ring < mega_rings(queue); ++ring) count += Atomics::load(queue.ready[ring].tail);
    return count;
}

// Copies what others may be writing to, as a copy engine does.
__attribute__((no_sanitize("thread"))) inline void copy_quietly(void* to, const void* from, size_t bytes) {
    const volatile unsigned char* const source = static_cast<const volatile unsigned char*>(from);
    volatile unsigned char* const target = static_cast<volatile unsigned char*>(to);
    for (size_t k = 0; k < bytes; ++k) target[k] = source[k];
}

inline const Driver& driver() {
    static const Driver made = [] {
        Driver driver{Driver::Nothing{}};
        driver.context_current = [](CUcontext* current) -> CUresult { return *current = nullptr, CUDA_SUCCESS; };
        driver.context_push = [](CUcontext) -> CUresult { return CUDA_SUCCESS; };
        driver.context_pop = [](CUcontext*) -> CUresult { return CUDA_SUCCESS; };
        driver.memory_allocate = [](uint64_t* address, size_t bytes) -> CUresult {
            void* const made = ::aligned_alloc(256, (bytes + 255) / 256 * 256);
            memory().insert(made);
            *address = reinterpret_cast<uint64_t>(made);
            return CUDA_SUCCESS;
        };
        driver.memory_free = [](uint64_t address) -> CUresult {
            memory().erase(reinterpret_cast<void*>(address));
            std::free(reinterpret_cast<void*>(address));
            return CUDA_SUCCESS;
        };
        driver.host_allocate = [](void** address, size_t bytes, unsigned) -> CUresult {
            *address = ::aligned_alloc(256, (bytes + 255) / 256 * 256);
            memory().insert(*address);
            return CUDA_SUCCESS;
        };
        driver.host_free = [](void* address) -> CUresult {
            memory().erase(address);
            std::free(address);
            return CUDA_SUCCESS;
        };
        driver.host_address = [](uint64_t* address, void* of, unsigned) -> CUresult {
            *address = reinterpret_cast<uint64_t>(of);
            return CUDA_SUCCESS;
        };
        driver.stream_create = [](CUstream* stream, unsigned) -> CUresult {
            *stream = new Stream();
            memory().insert(*stream);
            return CUDA_SUCCESS;
        };
        driver.stream_destroy = [](CUstream stream) -> CUresult {
            memory().erase(stream);
            static_cast<Stream*>(stream)->wait();
            delete static_cast<Stream*>(stream);
            return CUDA_SUCCESS;
        };
        driver.stream_query = [](CUstream stream) -> CUresult {
            if (static_cast<Stream*>(stream)->running.load()) return CUDA_ERROR_NOT_READY;
            static_cast<Stream*>(stream)->wait();
            return CUDA_SUCCESS;
        };
        driver.stream_synchronize = [](CUstream stream) -> CUresult {
            static_cast<Stream*>(stream)->wait();
            return CUDA_SUCCESS;
        };
        driver.copy_to_device = [](uint64_t to, const void* from, size_t bytes, CUstream stream) -> CUresult {
            static_cast<Stream*>(stream)->wait();
            std::memcpy(reinterpret_cast<void*>(to), from, bytes);
            return CUDA_SUCCESS;
        };
        driver.copy_from_device = [](void* to, uint64_t from, size_t bytes, CUstream) -> CUresult {
            copy_quietly(to, reinterpret_cast<const void*>(from), bytes);
            return CUDA_SUCCESS;
        };
        driver.fill_words = [](uint64_t to, unsigned value, size_t words, CUstream stream) -> CUresult {
            static_cast<Stream*>(stream)->wait();
            std::fill_n(reinterpret_cast<unsigned*>(to), words, value);
            return CUDA_SUCCESS;
        };
        driver.launch_cooperative = [](CUfunction function, unsigned blocks, unsigned, unsigned, unsigned, unsigned,
                                       unsigned, unsigned, CUstream stream, void** arguments) -> CUresult {
            Stream& on = *static_cast<Stream*>(stream);
            on.wait();
            const auto launch = std::make_shared<MegaQueueLaunch>(*static_cast<MegaQueueLaunch*>(arguments[0]));
            const auto kernel = std::make_shared<Kernel>(*static_cast<Kernel*>(function));
            const uint32_t threads = g_intake_threads;
            on.running.store(blocks - 1 + threads);
            g_launches.fetch_add(1);
            g_last_launch = launch;
            const auto together = std::make_shared<Together>(threads);
            for (uint32_t number = 0; number < threads; ++number)
                std::thread([launch, together, number, threads, &on] {
                    MegaIntake<Atomics, Atomics, Team>(*launch, together->shared, Team(*together, number, threads)).run();
                    on.running.fetch_sub(1);
                }).detach();
            for (unsigned number = 0; number + 1 < blocks; ++number)
                std::thread([launch, kernel, number, &on] {
                    work(*launch, number, *kernel);
                    on.running.fetch_sub(1);
                }).detach();
            return CUDA_SUCCESS;
        };
        return driver;
    }();
    return made;
}

inline std::unique_ptr<MegaQueueWorkers> workers(const MegaQueueOptions& options, const std::vector<MegaQueueOp>& ops,
                                                 uint32_t ring_bits, uint64_t rest_ns) {
    static auto* const kernels = new std::vector<std::unique_ptr<Kernel>>();  // outlive who hangs
    kernels->push_back(std::make_unique<Kernel>(Kernel{ops}));
    MegaDevicePlace place;
    place.driver = &driver();
    place.function = reinterpret_cast<uint64_t>(kernels->back().get());
    place.threads = 1;
    place.ring_bits = ring_bits;
    place.rest_ns = rest_ns;
    return std::make_unique<MegaQueueDevice>(options, ops, place);
}

}  // namespace simulated_queue
