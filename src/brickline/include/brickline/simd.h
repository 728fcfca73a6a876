// simd.h: the inner product of two rows with all its partials in vector registers, on CPU only.
// platform.h includes it there.
//
// It stands beside the loops of reductions.h because no compiler keeps hundreds of partials of a
// plain loop in registers, and because a row that is read once needs its prefetches: the hardware's
// stop at each page. It gives the bits that reductions.h defines for 32 lanes of 16 bytes.

#pragma once

#include <stdint.h>

namespace brickline::platform {

inline constexpr int ROUND_BYTES = 512;  // what 32 lanes take at a time, 16 bytes each

namespace detail {

// Vectors of the compiler's own; where the machine's are narrower it takes several.
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

inline constexpr int UNITS = ROUND_BYTES / 64;
inline constexpr int AHEAD_BYTES = 4096;  // a page: what lies there, the hardware does not fetch

// 64 bytes of elements as PARTS vectors of floats. Element PARTS * j + k is place j of part k: the
// upper and lower halves of a word come apart without moving anything between places.
template <int ELEMENT_BYTES>
struct Unit {
    static constexpr int PARTS = 4 / ELEMENT_BYTES;
    Floats part[PARTS];

    inline __attribute__((always_inline)) explicit Unit(const void* from) {
        Bits bits;
        __builtin_memcpy(&bits, from, sizeof(bits));
        if constexpr (ELEMENT_BYTES == 4) {
            part[0] = reinterpret_cast<Floats>(bits);
        } else {
            part[0] = reinterpret_cast<Floats>(bits << 16);
            part[1] = reinterpret_cast<Floats>(bits & 0xffff0000u);
        }
    }
};

}  // namespace detail

// partial[v] = the sum of a[i] * b[i] over i = v, v + V, v + 2 V, ..., each product rounded, then
// added, in this order; V = ROUND_BYTES / ELEMENT_BYTES, and n is a multiple of V. Elements are
// floats (4 bytes) or bf16 (2 bytes), and a host that is little-endian, as all that are supported.
template <int ELEMENT_BYTES>
inline __attribute__((always_inline)) void dot_rounds(const void* a, const void* b, int64_t n,
                                                      float* partial) {
    using namespace detail;
    using Elements = Unit<ELEMENT_BYTES>;
    const unsigned char* const streamed = static_cast<const unsigned char*>(a);
    const unsigned char* const kept = static_cast<const unsigned char*>(b);
    Floats sum[UNITS][Elements::PARTS] = {};
    for (int64_t at = 0; at < n * ELEMENT_BYTES; at += ROUND_BYTES) {
#pragma GCC unroll 8
        for (int unit = 0; unit < UNITS; ++unit) {
            const int64_t place = at + unit * 64;
            // As a number: beyond the end of the rows there is no pointer.
            const uintptr_t ahead = reinterpret_cast<uintptr_t>(streamed + place) + AHEAD_BYTES;
            __builtin_prefetch(reinterpret_cast<const void*>(ahead));
            const Elements left(streamed + place);
            const Elements right(kept + place);
#pragma GCC unroll 2
            for (int k = 0; k < Elements::PARTS; ++k)
                sum[unit][k] += left.part[k] * right.part[k];
        }
    }
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; ++unit)
        for (int j = 0; j < 16; ++j)
#pragma GCC unroll 2
            for (int k = 0; k < Elements::PARTS; ++k)
                partial[(unit * 16 + j) * Elements::PARTS + k] = sum[unit][k][j];
}

}  // namespace brickline::platform
