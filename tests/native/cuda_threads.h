// CUDA's threads on a host thread, as far as fingerprint_cuda.h needs them: every thread of a CUDA
// block is a fiber, and a barrier lets the others run. What it shows is whether a kernel computes the
// right thing and waits where it must; it knows nothing of speed, memory order or alignment.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define BRICKLINE_FETCH_AHEAD(address) ((void)(address))

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_threads {

constexpr size_t STACK_BYTES = 256 << 10;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool is_done = false;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline uint64_t exchange[1024];

struct Barrier {
    unsigned waiting = 0, generation = 0;
};
inline Barrier team, warps[32];

inline void enter() {
    body();
    fibers[threadIdx.x].is_done = true;
}
inline void pause() {
    const unsigned me = threadIdx.x;
    swapcontext(&fibers[me].context, &scheduler);
    threadIdx.x = me;
}
inline void wait(Barrier& barrier, unsigned count) {
    const unsigned generation = barrier.generation;
    if (++barrier.waiting == count) {
        barrier.waiting = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) pause();
}

// Executes one CUDA block of `threads` threads to its end.
inline void run_block(unsigned block, unsigned threads, std::function<void()> kernel) {
    body = std::move(kernel);
    blockIdx.x = block, blockDim.x = threads, blockDim.y = blockDim.z = 1;
    if (fibers.size() < threads) fibers.resize(threads);
    team = {};
    for (Barrier& warp : warps) warp = {};
    for (unsigned k = 0; k < threads; ++k) {
        Fiber& fiber = fibers[k];
        if (!fiber.stack) fiber.stack = std::make_unique<char[]>(STACK_BYTES);
        fiber.is_done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool is_running = true; is_running;) {
        is_running = false;
        for (unsigned k = 0; k < threads; ++k) {
            if (fibers[k].is_done) continue;
            is_running = true;
            threadIdx.x = k;
            swapcontext(&scheduler, &fibers[k].context);
        }
    }
}

template <class T>
T exchanged(T value, unsigned from) {
    Barrier& warp = warps[threadIdx.x / 32];
    std::memcpy(&exchange[threadIdx.x], &value, sizeof value);
    wait(warp, 32);
    T found;
    std::memcpy(&found, &exchange[threadIdx.x / 32 * 32 + from % 32], sizeof found);
    wait(warp, 32);
    return found;
}

template <class To, class From>
To as(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace cuda_threads

inline void __syncthreads() { cuda_threads::wait(cuda_threads::team, blockDim.x); }
inline void __syncwarp(unsigned lanes = 0xffffffff) {
    cuda_threads::wait(cuda_threads::warps[threadIdx.x / 32], unsigned(std::popcount(lanes)));
}
inline bool __syncthreads_or(bool value) {
    static bool found;
    if (cuda_threads::team.waiting == 0) found = false;
    found |= value;
    __syncthreads();
    const bool result = found;
    __syncthreads();
    return result;
}
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) { return cuda_threads::exchanged(value, lane); }
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return cuda_threads::exchanged(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
    return cuda_threads::exchanged(value, threadIdx.x % 32 + distance);
}
inline bool __any_sync(unsigned, bool value) {
    bool found = false;
    for (unsigned lane = 0; lane < 32; ++lane) found |= cuda_threads::exchanged(value, lane);
    return found;
}

inline size_t __cvta_generic_to_global(const void* from) { return reinterpret_cast<size_t>(from); }
inline size_t __cvta_generic_to_shared(const void* from) { return reinterpret_cast<size_t>(from); }
inline long long clock64() { return 0; }
template <class T>
T __ldcs(const T* from) { return *from; }
template <class T>
T __ldcg(const T* from) { return *from; }
template <class T>
void __stcg(T* to, T value) { *to = value; }

// Fibers take turns only at barriers, so plain arithmetic is atomic.
template <class T, class V>
T atomicAdd(T* to, V value) {
    const T before = *to;
    *to = static_cast<T>(before + value);
    return before;
}
template <class T, class V>
T atomicMin(T* to, V value) {
    const T before = *to;
    if (static_cast<T>(value) < before) *to = static_cast<T>(value);
    return before;
}
template <class T, class V>
T atomicMax(T* to, V value) {
    const T before = *to;
    if (static_cast<T>(value) > before) *to = static_cast<T>(value);
    return before;
}
inline unsigned atomicCAS(unsigned* to, unsigned expected, unsigned value) {
    const unsigned before = *to;
    if (before == expected) *to = value;
    return before;
}

inline int __vimax3_s32(int a, int b, int c) { return std::max(std::max(a, b), c); }
inline int __vimin3_s32(int a, int b, int c) { return std::min(std::min(a, b), c); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return std::max(std::max(a, b), c); }
inline unsigned __vimin3_u32(unsigned a, unsigned b, unsigned c) { return std::min(std::min(a, b), c); }

namespace cuda_threads {
template <class Half, class Choice>
unsigned of_halves(unsigned a, unsigned b, unsigned c, Choice choice) {
    const auto of = [&](int shift) {
        return unsigned(uint16_t(choice(choice(Half(a >> shift), Half(b >> shift)), Half(c >> shift)))) << shift;
    };
    return of(16) | of(0);
}
template <class Half>
unsigned largest_halves(unsigned a, unsigned b, unsigned c) {
    return of_halves<Half>(a, b, c, [](Half x, Half y) { return std::max(x, y); });
}
template <class Half>
unsigned smallest_halves(unsigned a, unsigned b, unsigned c) {
    return of_halves<Half>(a, b, c, [](Half x, Half y) { return std::min(x, y); });
}
}  // namespace cuda_threads
inline unsigned __vimax3_s16x2(unsigned a, unsigned b, unsigned c) {
    return cuda_threads::largest_halves<int16_t>(a, b, c);
}
inline unsigned __vimin3_s16x2(unsigned a, unsigned b, unsigned c) {
    return cuda_threads::smallest_halves<int16_t>(a, b, c);
}
inline unsigned __vimax3_u16x2(unsigned a, unsigned b, unsigned c) {
    return cuda_threads::largest_halves<uint16_t>(a, b, c);
}
inline unsigned __vimin3_u16x2(unsigned a, unsigned b, unsigned c) {
    return cuda_threads::smallest_halves<uint16_t>(a, b, c);
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __float_as_uint(float x) { return cuda_threads::as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cuda_threads::as<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_threads::as<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_threads::as<double>(x); }
inline int __double2hiint(double x) { return int(cuda_threads::as<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return int(cuda_threads::as<uint64_t>(x)); }
inline double __hiloint2double(int high, int low) {
    return cuda_threads::as<double>(uint64_t(unsigned(high)) << 32 | unsigned(low));
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
