// megakernel_entries.h: what the warps of a CUDA worker hand to each other in shared memory, and the
// instructions by which they do.

#pragma once

#include "brickline/megakernel.h"
#include "brickline/megakernel_device.h"

namespace brickline {

inline constexpr uint32_t MEGA_DEPTH = 4;         // entries that the clerk is ahead
inline constexpr uint32_t MEGA_NEAR_WAITS = 8;    // of an entry that are read ahead
inline constexpr uint32_t MEGA_MAX_SLOTS = 32;

namespace mega {

// What consumers do with an entry.
enum Order : uint32_t { ORDER_RUN = 0, ORDER_SKIP = 1, ORDER_LEAVE = 2 };

// One entry of the list. Consumers are given it twice: when it is there, so that they know what comes,
// and when nothing is missing any more.
struct Entry {
    MegaTask task;
    uint32_t number;   // of the task; MEGA_NONE ends the list
    uint32_t first, last;
    uint32_t order;    // Order; what is said last
    uint64_t begin, ready, end;  // ticks: its turn came; nothing was missing any more; its items were done
    uint32_t blocks, executed;  // items that were come to, and those that were executed without a fault
    uint64_t arguments[MEGA_MAX_ARGUMENTS];
    MegaWait waits[MEGA_NEAR_WAITS];  // where it has no more
    RowSource rows;
};

struct Shared {
    uint4 scratch[Place::SCRATCH_BYTES / sizeof(uint4)];
    Entry entries[MEGA_DEPTH];
    uint64_t loaded[MEGA_DEPTH], ready[MEGA_DEPTH], taken[MEGA_DEPTH];
    uint64_t full[MEGA_MAX_SLOTS], empty[MEGA_MAX_SLOTS];
    uint64_t stopped, left;     // the clerk says that all end; consumers have
    uint32_t fault[3];          // of an item; take turns
    uint32_t leaves[2];         // what consumers agree on; take turns
    uint32_t task, block;       // where consumers are: items that are done of which task
    uint32_t missing, arrived;  // what the watcher waited for when it left
    uint64_t ring_wait;
    uint64_t counters;          // as in MegaLaunch
    MegaFault* faults;
    uint32_t delay_seed;
    MegaProgress progress;
};
static_assert(sizeof(Shared) <= MEGA_WORKER_BYTES);

// Whether a barrier of one phase was arrived at.
__device__ __forceinline__ bool is_over(uint64_t& barrier) { return platform::is_phase_over_now(&barrier, 0); }
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t size_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(platform::shared_address(barrier)),
                 "r"(size_bytes)
                 : "memory");
}
// Reads by the threads of the block end before a copy overwrites what they read.
__device__ __forceinline__ void end_reads_before_copy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void copy_rows(void* to, const void* from, uint32_t size_bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            platform::shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(size_bytes), "r"(platform::shared_address(barrier))
        : "memory");
}
__device__ __forceinline__ void ask_for(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_of_host(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
// One part of a task is done. The fence takes longest: what is added may be decided meanwhile.
__device__ __forceinline__ void signal(uint32_t* counter, uint32_t fault) {
    asm volatile("fence.release.gpu;" ::: "memory");
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter),
                 "r"(fault ? 1 + MEGA_FAULT_SIGNAL : 1)
                 : "memory");
}
__device__ __forceinline__ MegaWait load_wait(const MegaLaunch& launch, uint32_t at) {
    const uint2 both = __ldcg(reinterpret_cast<const uint2*>(launch.waits + at));
    return {both.x, both.y};
}
__device__ __forceinline__ uint32_t peek(const uint32_t& word) {
    return *reinterpret_cast<const volatile uint32_t*>(&word);
}
__device__ __forceinline__ uint32_t* peek_pointer(const uint64_t& word) {
    return reinterpret_cast<uint32_t*>(*reinterpret_cast<const volatile uint64_t*>(&word));
}
// What seldom happens is not inlined: what others wait for stays short.

// For tests: now and then a worker takes its time.
__device__ __noinline__ void dawdle(uint32_t seed, uint32_t at, uint32_t block) {
    uint32_t bits = (seed ^ (at * 31 + block) * 0x9e3779b9u ^ (blockIdx.x + 1) * 0x85ebca6bu) * 0xc2b2ae35u;
    bits ^= bits >> 15;
    if (bits % 4 == 0) __nanosleep(bits % 4000);
}

// Of several blocks that fault, the first is reported.
__device__ __noinline__ void report_fault(uint32_t number, uint32_t block, uint32_t code) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    atomicMax(reinterpret_cast<unsigned long long*>(reinterpret_cast<Shared*>(dynamic)->faults + number),
              static_cast<unsigned long long>(~block) << 32 | code);
}

// Rows that an item of an entry did not ask for, but that are there. By the first group.
__device__ __noinline__ uint64_t drop_rows(uint32_t entry, uint32_t block) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const RowSource& rows = reinterpret_cast<Shared*>(dynamic)->entries[entry].rows;
    return rows.each_row(block, 0, 1, threadIdx.x, [](uint32_t, unsigned char*) {});
}

}  // namespace mega
}  // namespace brickline
