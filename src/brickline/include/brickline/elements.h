// elements.h: element types narrower than float, vectors of elements, and how they are read and
// written.
//
// Narrow types store; arithmetic happens in float. Widening is exact. Narrowing rounds to nearest,
// ties to even, and every NaN becomes the type's positive quiet NaN, so the bits are the same on
// every device.
//
//   type    exponent  mantissa  largest   beyond it
//   bf16           8         7  3.39e38   infinity
//   f16            5        10    65504   infinity
//   f8e5m2         5         2    57344   infinity
//   f8e4m3         4         3      448   NaN (there is no infinity; NumPy: float8_e4m3fn)

#pragma once

#include "brickline/platform.h"

namespace brickline {

struct bf16 {
    uint16_t bits;

    bf16() = default;
    BRICKLINE_INLINE explicit bf16(float value) {
        const uint32_t wide = platform::bits_of(value);
        const uint32_t even = (wide >> 16) & 1;
        bits = static_cast<uint16_t>(value != value ? 0x7fc0 : (wide + 0x7fff + even) >> 16);
    }
    BRICKLINE_INLINE explicit operator float() const {
        return platform::float_of(static_cast<uint32_t>(bits) << 16);
    }
};

// A float of 1 + EXPONENT + MANTISSA bits, fewer than bf16 has exponents: its subnormals are normal
// floats, so neither direction ever computes with a subnormal float.
template <int EXPONENT, int MANTISSA, bool HAS_INFINITY, class Bits>
struct SmallFloat {
    Bits bits;

    SmallFloat() = default;

    BRICKLINE_INLINE explicit SmallFloat(float value) {
        const uint32_t wide = platform::bits_of(value);
        const uint32_t sign = (wide >> 31) << (EXPONENT + MANTISSA);
        const uint32_t size = wide & 0x7fffffff;
        // Normal: drop the surplus mantissa bits, rounding, and change the bias of the exponent.
        const uint32_t even = (size >> DROPPED) & 1;
        const uint32_t normal =
            (size + (HALF - 1) + even - (BIAS_CHANGE << 23)) >> DROPPED;
        // Subnormal: beside MAGIC the float unit itself rounds at the last place that is kept.
        const uint32_t subnormal =
            platform::bits_of(platform::float_of(size) + platform::float_of(MAGIC)) - MAGIC;
        const uint32_t finite = size < SMALLEST_NORMAL ? subnormal : normal;
        const bool too_large = size >= TOO_LARGE;
        const bool is_nan = value != value || (!HAS_INFINITY && too_large);
        bits = static_cast<Bits>(is_nan ? NAN_BITS : sign | (too_large ? INFINITE : finite));
    }

    BRICKLINE_INLINE explicit operator float() const {
        const uint32_t sign = static_cast<uint32_t>(bits) >> (EXPONENT + MANTISSA) << 31;
        const uint32_t size = bits & ((1u << (EXPONENT + MANTISSA)) - 1);
        const uint32_t shifted = size << DROPPED;
        const uint32_t normal = shifted + (BIAS_CHANGE << 23);
        // Subnormal: put a one before the mantissa and subtract it again.
        const uint32_t subnormal =
            platform::bits_of(platform::float_of(shifted + SMALLEST_NORMAL) -
                              platform::float_of(SMALLEST_NORMAL));
        uint32_t wide = size >> MANTISSA == 0 ? subnormal : normal;
        if constexpr (HAS_INFINITY) {
            wide = size >= INFINITE ? shifted | 0x7f800000 : wide;
        } else {
            wide = size == NAN_BITS ? 0x7fc00000 : wide;
        }
        return platform::float_of(sign | wide);
    }

private:
    static constexpr uint32_t BIAS = (1u << (EXPONENT - 1)) - 1;
    static constexpr uint32_t BIAS_CHANGE = 127 - BIAS;
    static constexpr uint32_t DROPPED = 23 - MANTISSA;
    static constexpr uint32_t HALF = 1u << (DROPPED - 1);
    static constexpr uint32_t SMALLEST_NORMAL = (BIAS_CHANGE + 1) << 23;  // as a float's bits
    static constexpr uint32_t MAGIC = (BIAS_CHANGE + 1 + DROPPED) << 23;
    static constexpr uint32_t INFINITE = ((1u << EXPONENT) - 1) << MANTISSA;
    static constexpr uint32_t NAN_BITS =
        HAS_INFINITY ? INFINITE | 1u << (MANTISSA - 1) : INFINITE | ((1u << MANTISSA) - 1);
    // The largest finite value, and the first float that no longer rounds to it.
    static constexpr uint32_t LARGEST = HAS_INFINITY ? INFINITE - 1 : NAN_BITS - 1;
    static constexpr uint32_t TOO_LARGE =
        (LARGEST << DROPPED) + (BIAS_CHANGE << 23) + HALF + (LARGEST & 1 ? 0 : 1);
};

using f16 = SmallFloat<5, 10, true, uint16_t>;
using f8e5m2 = SmallFloat<5, 2, true, uint8_t>;
using f8e4m3 = SmallFloat<4, 3, false, uint8_t>;

// W consecutive elements, W a power of two. Without a constructor: `Vector<float, 4> v{};` is zero.
template <class T, int W>
struct Vector {
    static_assert(W > 0 && (W & (W - 1)) == 0, "the width of a vector is a power of two");
    static constexpr int WIDTH = W;
    T element[W];

    BRICKLINE_INLINE T& operator[](int k) { return element[k]; }
    BRICKLINE_INLINE const T& operator[](int k) const { return element[k]; }
};

// How many elements of T one access of 16 bytes holds.
template <class T>
inline constexpr int WIDEST = 16 / static_cast<int>(sizeof(T));

// Reads or writes W elements in accesses of 16 bytes, or of all of them where they are smaller; the
// pointer is aligned to that. `stream` is for what a launch reads once: it leaves the caches to
// what is read again.
template <int W, class T>
BRICKLINE_INLINE Vector<T, W> load(const T* from) {
    return platform::load<Vector<T, W>>(from);
}
template <int W, class T>
BRICKLINE_INLINE Vector<T, W> stream(const T* from) {
    return platform::load_streamed<Vector<T, W>>(from);
}
template <int W, class T>
BRICKLINE_INLINE void store(T* to, const Vector<T, W>& value) {
    platform::store(to, value);
}

// As floats. Two values of bf16 are the halves of a word, and a float is a half with zeros behind it:
// an operation each, where one that is taken out by itself costs three.
template <int W, class T>
BRICKLINE_INLINE Vector<float, W> widened(const Vector<T, W>& values) {
    Vector<float, W> wide;
    BRICKLINE_UNROLL
    for (int k = 0; k < W; ++k) wide[k] = float(values[k]);
    return wide;
}
template <int W>
BRICKLINE_INLINE Vector<float, W> widened(const Vector<bf16, W>& values) {
    if constexpr (platform::ONE_THREAD || W == 1) {
        return widened<W, bf16>(values);
    } else {
        Vector<uint32_t, W / 2> words;
        platform::copy_bits(words, values);
        Vector<float, W> wide;
        BRICKLINE_UNROLL
        for (int k = 0; k < W; k += 2) {
            wide[k] = platform::float_of(words[k / 2] << 16);
            wide[k + 1] = platform::float_of(words[k / 2] & 0xffff0000u);
        }
        return wide;
    }
}

}  // namespace brickline
