// platform.h: what differs between a host compiler and NVRTC, and the only place that asks which.
//
// Everything above it (elements.h, arithmetic.h, reductions.h, kernel.h) is one source. Both halves
// define the same names; where a name makes sense on one side only, the other says so. Knows
// nothing of blocks.
//
//   BRICKLINE            in front of a kernel function and of helpers in a kernel's source
//   BRICKLINE_INLINE     in front of members and templates of these headers
//   BRICKLINE_UNROLL     unroll the next loop of fixed length wholly
//   BRICKLINE_IN_FLIGHT  unroll the next loop so that four rounds of loads are under way at once
//   BRICKLINE_INDEPENDENT  no round of the next loop reads what another round writes

#pragma once

#ifdef __CUDACC__

#ifdef __CUDACC_RTC__  // NVRTC has no <stdint.h>
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#else
#include <stdint.h>
#endif

#define BRICKLINE __device__ inline
#define BRICKLINE_INLINE __device__ __forceinline__
#define BRICKLINE_UNROLL _Pragma("unroll")
#define BRICKLINE_IN_FLIGHT _Pragma("unroll 4")
#define BRICKLINE_INDEPENDENT

namespace brickline::platform {

// Whether one thread executes all lanes of a block. If not, each lane is a thread of its own.
inline constexpr bool ONE_THREAD = false;

BRICKLINE_INLINE uint32_t bits_of(float value) { return __float_as_uint(value); }
BRICKLINE_INLINE float float_of(uint32_t bits) { return __uint_as_float(bits); }

// Copies bytes between objects of different type; NVRTC turns it into register moves.
template <class To, class From>
BRICKLINE_INLINE void copy_bits(To& to, const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits have the same size");
    memcpy(&to, &from, sizeof(To));
}

template <int BYTES> struct Word;  // the type of one access
template <> struct Word<1> { using Type = unsigned char; };
template <> struct Word<2> { using Type = unsigned short; };
template <> struct Word<4> { using Type = unsigned int; };
template <> struct Word<8> { using Type = uint2; };
template <> struct Word<16> { using Type = uint4; };

// T as the words in which it is read and written.
template <class T>
struct Words {
    static constexpr int BYTES = sizeof(T) < 16 ? sizeof(T) : 16;
    using Type = typename Word<BYTES>::Type;
    Type word[sizeof(T) / BYTES];
};

// Reads and writes in accesses of 16 bytes, or one of 1, 2, 4 or 8, aligned to their size. What is
// streamed is evicted first.
template <class To>
BRICKLINE_INLINE To load(const void* from) {
    Words<To> words;
    int k = 0;
    BRICKLINE_UNROLL
    for (auto& word : words.word) word = static_cast<const typename Words<To>::Type*>(from)[k++];
    To to;
    copy_bits(to, words);
    return to;
}
template <class To>
BRICKLINE_INLINE To load_streamed(const void* from) {
    Words<To> words;
    int k = 0;
    BRICKLINE_UNROLL
    for (auto& word : words.word)
        word = __ldcs(static_cast<const typename Words<To>::Type*>(from) + k++);
    To to;
    copy_bits(to, words);
    return to;
}
// As instructions name a place in shared memory.
BRICKLINE_INLINE uint32_t shared_address(const void* near) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(near));
}
// From shared memory.
template <class To>
BRICKLINE_INLINE To load_near(const void* from) {
    static_assert(sizeof(To) % 16 == 0, "it is read in accesses of 16 bytes");
    Words<To> words;
    const uint32_t address = shared_address(from);
    int k = 0;
    BRICKLINE_UNROLL
    for (uint4& word : words.word)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                     : "r"(address + 16 * k++));
    To to;
    copy_bits(to, words);
    return to;
}
template <class From>
BRICKLINE_INLINE void store(void* to, const From& from) {
    Words<From> words;
    copy_bits(words, from);
    int k = 0;
    BRICKLINE_UNROLL
    for (auto& word : words.word) static_cast<typename Words<From>::Type*>(to)[k++] = word;
}

// Asks for memory that is read soon: up to PREFETCH_BYTES of it, a multiple of 16 and aligned to
// 16, into the cache that all blocks share. It changes nothing else, and nobody waits.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr uint32_t PREFETCH_BYTES = 2048;
BRICKLINE_INLINE void prefetch(const void* from, uint32_t size_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
                 "r"(size_bytes)
                 : "memory");
}
#else
inline constexpr uint32_t PREFETCH_BYTES = 128;
BRICKLINE_INLINE void prefetch(const void* from, uint32_t) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)) : "memory");
}
#endif

// Lets the launches that depend on this one begin; and waits until those that it depends on have
// ended. Where a launch does not begin early, as in a stream, both do nothing.
BRICKLINE_INLINE void let_others_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
BRICKLINE_INLINE void wait_for_others() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A barrier in shared memory that takes turns between two phases: arrivals fill one, and who waits for
// it goes on when it is full.
BRICKLINE_INLINE void make_barrier(uint64_t* barrier, uint32_t count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                 : "memory");
#endif
}
BRICKLINE_INLINE bool is_phase_over(uint64_t* barrier, uint32_t phase) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t is_over;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_over)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
    return is_over;
#else
    return true;
#endif
}
// The same at once; the one above may sleep for a while.
BRICKLINE_INLINE bool is_phase_over_now(uint64_t* barrier, uint32_t phase) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t is_over;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is_over)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
    return is_over;
#else
    return true;
#endif
}
// Returns the ticks that were waited for.
BRICKLINE_INLINE uint64_t wait_for_phase(uint64_t* barrier, uint32_t phase) {
    if (is_phase_over(barrier, phase)) return 0;
    const uint64_t begin = clock64();
    while (!is_phase_over(barrier, phase)) {}
    return clock64() - begin;
}
BRICKLINE_INLINE void arrive(uint64_t* barrier, uint32_t count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                 : "memory");
#endif
}

// For lanes that have met before: the first one arrives for all. With BRICKLINE_EACH_ARRIVES each does,
// because compute-sanitizer takes what a lane read before for unordered if it does not arrive itself.
#ifdef BRICKLINE_EACH_ARRIVES
inline constexpr bool EACH_ARRIVES = true;
#else
inline constexpr bool EACH_ARRIVES = false;
#endif
BRICKLINE_INLINE uint32_t arrivals_of(uint32_t lanes) { return EACH_ARRIVES ? lanes : 1; }
BRICKLINE_INLINE void arrive_together(uint64_t* barrier, bool is_first, uint32_t count = 1) {
    if (EACH_ARRIVES || is_first) arrive(barrier, count);
}

// Waits until `lanes` threads have reached the barrier; memory written before is visible after.
// BLOCK_BARRIER is the one of a whole CUDA block; of a worker of a megakernel, ITEM_BARRIER that of the lanes
// of an item, CONSUMER_BARRIER that of all that execute; PART_OF_WARP that of fewer lanes than a warp has.
// Hardware counts whole warps.
inline constexpr uint32_t BLOCK_BARRIER = 0, ITEM_BARRIER = 1, CONSUMER_BARRIER = 2, PART_OF_WARP = 3;
#ifdef BRICKLINE_EACH_ARRIVES
// compute-sanitizer follows no hardware barrier of a part of a block: it reports what one orders, and
// overlooks what it does not. It follows these.
BRICKLINE_INLINE uint64_t* barrier_of_part(uint32_t barrier) {
    __shared__ uint64_t barriers[2];
    return &barriers[barrier - ITEM_BARRIER];
}
inline constexpr uint32_t MOST_LANES = 1024;
BRICKLINE_INLINE void make_barriers_of_parts() {
    if (threadIdx.x < 2) make_barrier(barrier_of_part(ITEM_BARRIER + threadIdx.x), MOST_LANES);
}
// The first lane arrives for those that the block has not.
BRICKLINE_INLINE void wait_in_part(uint32_t barrier, uint32_t lanes) {
    const uint32_t address = shared_address(barrier_of_part(barrier));
    uint64_t state;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;"
                 : "=l"(state)
                 : "r"(address), "r"(threadIdx.x == 0 ? MOST_LANES - lanes + 1 : 1)
                 : "memory");
    for (uint32_t is_over = 0; !is_over;)
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(is_over)
            : "r"(address), "l"(state)
            : "memory");
}
#else
BRICKLINE_INLINE void make_barriers_of_parts() {}
BRICKLINE_INLINE void wait_in_part(uint32_t barrier, uint32_t lanes) {
    if (barrier == ITEM_BARRIER) {
        asm volatile("bar.sync 1, %0;" ::"r"((lanes + 31) / 32 * 32) : "memory");
    } else {
        asm volatile("bar.sync 2, %0;" ::"r"((lanes + 31) / 32 * 32) : "memory");
    }
}
#endif
BRICKLINE_INLINE void wait_at(uint32_t barrier, uint32_t lanes) {
    if (barrier == BLOCK_BARRIER) {
        __syncthreads();
    } else if (barrier == PART_OF_WARP) {
        __syncwarp((1u << lanes) - 1);
    } else {
        wait_in_part(barrier, lanes);
    }
}
BRICKLINE_INLINE void wait_in_group() { __syncwarp(); }

// The value of the lane that is `distance` further on in a group; `present` has a bit per lane.
template <class T>
BRICKLINE_INLINE T from_lane_after(const T& value, uint32_t distance, uint32_t present) {
    static_assert(sizeof(T) % 4 == 0, "a group exchanges words of 4 bytes");
    struct { uint32_t word[sizeof(T) / 4]; } words;
    copy_bits(words, value);
    BRICKLINE_UNROLL
    for (uint32_t& word : words.word) word = __shfl_down_sync(present, word, distance);
    T result;
    copy_bits(result, words);
    return result;
}
template <class T>
BRICKLINE_INLINE T from_first_lane(const T& value, uint32_t present) {
    static_assert(sizeof(T) % 4 == 0, "a group exchanges words of 4 bytes");
    struct { uint32_t word[sizeof(T) / 4]; } words;
    copy_bits(words, value);
    BRICKLINE_UNROLL
    for (uint32_t& word : words.word) word = __shfl_sync(present, word, 0);
    T result;
    copy_bits(result, words);
    return result;
}

// What 32 lanes take at a time. The lanes compute an inner product themselves; see simd.h.
inline constexpr int ROUND_BYTES = 512;
template <int ELEMENT_BYTES>
BRICKLINE_INLINE void dot_rounds(const void*, const void*, int64_t, float*) {}

// A CUDA block has no memory beyond the one that it was launched with.
BRICKLINE_INLINE void* memory_beyond(void*, uint64_t) { return nullptr; }

BRICKLINE_INLINE void set_if_zero(uint32_t* word, uint32_t value) { atomicCAS(word, 0u, value); }
template <class T>
BRICKLINE_INLINE void atomic_add(T* to, T value) { atomicAdd(to, value); }
BRICKLINE_INLINE void atomic_add(int64_t* to, int64_t value) {  // two's complement wraps alike
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

// Words that several workers share. `load` acquires, `store` releases, what reads and writes at once does
// both; `peek` and `poke` order nothing.
#define BRICKLINE_ATOMICS(name, scope)                                                                  \
    struct name {                                                                                       \
        static BRICKLINE_INLINE uint32_t load(const uint32_t* word) {                                   \
            uint32_t value;                                                                             \
            asm volatile("ld.acquire." scope ".u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");    \
            return value;                                                                               \
        }                                                                                               \
        static BRICKLINE_INLINE void store(uint32_t* word, uint32_t value) {                            \
            asm volatile("st.release." scope ".u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");      \
        }                                                                                               \
        static BRICKLINE_INLINE uint32_t peek(const uint32_t* word) {                                   \
            uint32_t value;                                                                             \
            asm volatile("ld.relaxed." scope ".u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");    \
            return value;                                                                               \
        }                                                                                               \
        static BRICKLINE_INLINE void poke(uint32_t* word, uint32_t value) {                             \
            asm volatile("st.relaxed." scope ".u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");      \
        }                                                                                               \
        /* Whether the word was `expected`, and is `value` now. */                                      \
        static BRICKLINE_INLINE bool replace(uint32_t* word, uint32_t expected, uint32_t value) {       \
            uint32_t found;                                                                             \
            asm volatile("atom.acq_rel." scope ".cas.b32 %0, [%1], %2, %3;"                             \
                         : "=r"(found)                                                                  \
                         : "l"(word), "r"(expected), "r"(value)                                         \
                         : "memory");                                                                   \
            return found == expected;                                                                   \
        }                                                                                               \
        /* These return what the word was before. */                                                    \
        static BRICKLINE_INLINE uint32_t add(uint32_t* word, uint32_t value) {                          \
            uint32_t found;                                                                             \
            asm volatile("atom.acq_rel." scope ".add.u32 %0, [%1], %2;"                                 \
                         : "=r"(found)                                                                  \
                         : "l"(word), "r"(value)                                                        \
                         : "memory");                                                                   \
            return found;                                                                               \
        }                                                                                               \
        static BRICKLINE_INLINE uint32_t exchange(uint32_t* word, uint32_t value) {                     \
            uint32_t found;                                                                             \
            asm volatile("atom.acq_rel." scope ".exch.b32 %0, [%1], %2;"                                \
                         : "=r"(found)                                                                  \
                         : "l"(word), "r"(value)                                                        \
                         : "memory");                                                                   \
            return found;                                                                               \
        }                                                                                               \
    }
BRICKLINE_ATOMICS(Atomics, "sys");        // and the host, who may hold the other end
BRICKLINE_ATOMICS(DeviceAtomics, "gpu");  // blocks of one device
#undef BRICKLINE_ATOMICS

BRICKLINE_INLINE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
BRICKLINE_INLINE double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
BRICKLINE_INLINE float sqrt(float x) { return __fsqrt_rn(x); }
BRICKLINE_INLINE double sqrt(double x) { return __dsqrt_rn(x); }
BRICKLINE_INLINE float fabs(float x) { return ::fabsf(x); }
BRICKLINE_INLINE double fabs(double x) { return ::fabs(x); }
BRICKLINE_INLINE float log(float x) { return ::logf(x); }
BRICKLINE_INLINE double log(double x) { return ::log(x); }
BRICKLINE_INLINE double exp(double x) { return ::exp(x); }
BRICKLINE_INLINE float tanh(float x) { return ::tanhf(x); }
BRICKLINE_INLINE double tanh(double x) { return ::tanh(x); }
BRICKLINE_INLINE float sin(float x) { return ::sinf(x); }
BRICKLINE_INLINE double sin(double x) { return ::sin(x); }
BRICKLINE_INLINE float cos(float x) { return ::cosf(x); }
BRICKLINE_INLINE double cos(double x) { return ::cos(x); }
BRICKLINE_INLINE float pow(float x, float y) { return ::powf(x, y); }
BRICKLINE_INLINE double pow(double x, double y) { return ::pow(x, y); }
BRICKLINE_INLINE float floor(float x) { return ::floorf(x); }
BRICKLINE_INLINE double floor(double x) { return ::floor(x); }
BRICKLINE_INLINE float ceil(float x) { return ::ceilf(x); }
BRICKLINE_INLINE double ceil(double x) { return ::ceil(x); }

}  // namespace brickline::platform

#else  // a host compiler: gcc, clang or zig

#include <stdint.h>

#include "brickline/simd.h"

#define BRICKLINE static inline
#define BRICKLINE_INLINE inline __attribute__((always_inline))
#define BRICKLINE_UNROLL
#define BRICKLINE_IN_FLIGHT
#ifdef __clang__
#define BRICKLINE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic ignored "-Wpass-failed"  // a loop that stays scalar is no mistake
#else
#define BRICKLINE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace brickline::platform {

inline constexpr bool ONE_THREAD = true;

template <class To, class From>
BRICKLINE_INLINE void copy_bits(To& to, const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits have the same size");
    __builtin_memcpy(&to, &from, sizeof(To));
}
BRICKLINE_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    copy_bits(bits, value);
    return bits;
}
BRICKLINE_INLINE float float_of(uint32_t bits) {
    float value;
    copy_bits(value, bits);
    return value;
}

template <class To>
BRICKLINE_INLINE To load(const void* from) {
    constexpr int ALIGNED = sizeof(To) < 16 ? sizeof(To) : 16;
    To to;
    __builtin_memcpy(&to, __builtin_assume_aligned(from, ALIGNED), sizeof(To));
    return to;
}
template <class To>
BRICKLINE_INLINE To load_streamed(const void* from) { return load<To>(from); }
template <class To>
BRICKLINE_INLINE To load_near(const void* from) { return load<To>(from); }
template <class From>
BRICKLINE_INLINE void store(void* to, const From& from) {
    constexpr int ALIGNED = sizeof(From) < 16 ? sizeof(From) : 16;
    __builtin_memcpy(__builtin_assume_aligned(to, ALIGNED), &from, sizeof(From));
}

inline constexpr uint32_t PREFETCH_BYTES = 64;
BRICKLINE_INLINE void prefetch(const void* from, uint32_t) { __builtin_prefetch(from); }

// One thread has nobody to wait for, and no lane to ask.
BRICKLINE_INLINE void wait_at(uint32_t, uint32_t) {}
BRICKLINE_INLINE void wait_in_group() {}
BRICKLINE_INLINE uint64_t wait_for_phase(uint64_t*, uint32_t) { return 0; }
BRICKLINE_INLINE void arrive_together(uint64_t*, bool, uint32_t) {}
template <class T>
BRICKLINE_INLINE T from_lane_after(const T& value, uint32_t, uint32_t) { return value; }
template <class T>
BRICKLINE_INLINE T from_first_lane(const T& value, uint32_t) { return value; }

// Memory beyond what a block was launched with: a list, from the last chunk to the first.
struct alignas(16) Chunk {
    Chunk* before;
};
// Zeros, 16-byte aligned, which `owner` (a Chunk*, or null for none) then gives back; or null.
__attribute__((noinline, cold)) inline void* memory_beyond(void* owner, uint64_t size_bytes) {
    if (!owner || size_bytes > PTRDIFF_MAX - sizeof(Chunk)) return nullptr;
    Chunk** const last = static_cast<Chunk**>(owner);
    Chunk* const chunk = static_cast<Chunk*>(__builtin_calloc(1, sizeof(Chunk) + size_bytes));
    if (!chunk) return nullptr;
    chunk->before = *last;
    *last = chunk;
    return chunk + 1;
}
__attribute__((noinline, cold)) inline void give_back(Chunk* last) {
    while (last) {
        Chunk* const before = last->before;
        __builtin_free(last);
        last = before;
    }
}

BRICKLINE_INLINE void set_if_zero(uint32_t* word, uint32_t value) {
    uint32_t expected = 0;
    __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
// Other threads may execute other blocks of the launch at the same time.
template <class T>
BRICKLINE_INLINE void atomic_add(T* to, T value) {
    T before, after;
    __atomic_load(to, &before, __ATOMIC_RELAXED);
    do {
        after = static_cast<T>(before + value);
    } while (!__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
}

// Tests of threads hold them up before any step, so that they meet where they seldom do.
#ifdef BRICKLINE_HELD_UP
void hold_up();
#else
BRICKLINE_INLINE void hold_up() {}
#endif

// As above. What reads and writes at once is also in one order with all others that do, so that who
// goes to sleep and who has work for him see each other.
struct Atomics {
    static BRICKLINE_INLINE uint32_t load(const uint32_t* word) {
        hold_up();
        return __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
    static BRICKLINE_INLINE void store(uint32_t* word, uint32_t value) {
        hold_up();
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    }
    static BRICKLINE_INLINE uint32_t peek(const uint32_t* word) {
        hold_up();
        return __atomic_load_n(word, __ATOMIC_RELAXED);
    }
    static BRICKLINE_INLINE void poke(uint32_t* word, uint32_t value) {
        hold_up();
        __atomic_store_n(word, value, __ATOMIC_RELAXED);
    }
    static BRICKLINE_INLINE bool replace(uint32_t* word, uint32_t expected, uint32_t value) {
        hold_up();
        return __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_SEQ_CST,
                                           __ATOMIC_ACQUIRE);
    }
    static BRICKLINE_INLINE uint32_t add(uint32_t* word, uint32_t value) {
        hold_up();
        return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
    }
    static BRICKLINE_INLINE uint32_t exchange(uint32_t* word, uint32_t value) {
        hold_up();
        return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
    }
};

BRICKLINE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
BRICKLINE_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
BRICKLINE_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
BRICKLINE_INLINE double sqrt(double x) { return __builtin_sqrt(x); }
BRICKLINE_INLINE float fabs(float x) { return __builtin_fabsf(x); }
BRICKLINE_INLINE double fabs(double x) { return __builtin_fabs(x); }
BRICKLINE_INLINE float log(float x) { return __builtin_logf(x); }
BRICKLINE_INLINE double log(double x) { return __builtin_log(x); }
BRICKLINE_INLINE double exp(double x) { return __builtin_exp(x); }
BRICKLINE_INLINE float tanh(float x) { return __builtin_tanhf(x); }
BRICKLINE_INLINE double tanh(double x) { return __builtin_tanh(x); }
BRICKLINE_INLINE float sin(float x) { return __builtin_sinf(x); }
BRICKLINE_INLINE double sin(double x) { return __builtin_sin(x); }
BRICKLINE_INLINE float cos(float x) { return __builtin_cosf(x); }
BRICKLINE_INLINE double cos(double x) { return __builtin_cos(x); }
BRICKLINE_INLINE float pow(float x, float y) { return __builtin_powf(x, y); }
BRICKLINE_INLINE double pow(double x, double y) { return __builtin_pow(x, y); }
BRICKLINE_INLINE float floor(float x) { return __builtin_floorf(x); }
BRICKLINE_INLINE double floor(double x) { return __builtin_floor(x); }
BRICKLINE_INLINE float ceil(float x) { return __builtin_ceilf(x); }
BRICKLINE_INLINE double ceil(double x) { return __builtin_ceil(x); }

}  // namespace brickline::platform

#endif
