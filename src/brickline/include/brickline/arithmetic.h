// arithmetic.h: functions of numbers, for kernels. Namespace brickline hides the ones of the
// compiler, so a kernel's `exp(x)` is this one on every device.
//
// The same bits on CPU and CUDA: fma, sqrt, rsqrt, fabs, floor, ceil, minimum, maximum and exp of
// floats, and what + - * / give, as long as the compiler contracts nothing (-ffp-contract=off,
// -fmad=false). The platform's own, equal to a few units in the last place: log, pow, sin, cos,
// tanh, and exp of doubles.

#pragma once

#include "brickline/platform.h"

namespace brickline {

using platform::ceil;
using platform::cos;
using platform::exp;
using platform::fabs;
using platform::floor;
using platform::fma;
using platform::log;
using platform::pow;
using platform::sin;
using platform::sqrt;
using platform::tanh;

BRICKLINE_INLINE float rsqrt(float x) { return 1.0f / sqrt(x); }
BRICKLINE_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }

// A NaN on either side is the result, as with NumPy's minimum and maximum. Of two equal values,
// such as zeros of either sign, the second.
template <class T>
BRICKLINE_INLINE T minimum(T a, T b) { return a < b || a != a ? a : b; }
template <class T>
BRICKLINE_INLINE T maximum(T a, T b) { return a > b || a != a ? a : b; }

// e^x within one unit in the last place, over all floats, subnormal results included. It is made
// of operations that round alike everywhere and vectorise: e^x = 2^k e^r with |r| <= ln(2) / 2.
BRICKLINE_INLINE float exp(float x) {
    const float below = 89.0f < x ? 89.0f : x;  // a NaN passes
    const float clamped = -104.0f > below ? -104.0f : below;
    // Beside 1.5 * 2^23 the last place of a float is a one, so this sum rounds to a whole number.
    const float shifted = fma(clamped, 1.44269504f, 12582912.0f);
    const float whole = shifted - 12582912.0f;
    const uint32_t k = platform::bits_of(shifted) - platform::bits_of(12582912.0f);
    const float r = fma(whole, -1.42860677e-6f, fma(whole, -0.693145752f, clamped));
    float e = 1.38144672e-3f;  // 0.05 units in the last place from e^r, the least for this degree
    e = fma(e, r, 8.36878084e-3f);
    e = fma(e, r, 4.16683927e-2f);
    e = fma(e, r, 1.66665196e-1f);
    e = fma(e, r, 0.49999994f);
    e = fma(e, r, 1.0f);
    e = fma(e, r, 1.0f);
    // 2^k as a product of two powers, since k reaches from -150 to 128.
    const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(k) >> 1);
    return e * platform::float_of((half + 127) << 23) * platform::float_of((k - half + 127) << 23);
}

}  // namespace brickline
