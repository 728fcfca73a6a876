// Host fingerprints for x86-64 with AVX2, FMA and F16C: eight doubles are two registers. This file is
// compiled with those instructions allowed; it is entered only where the machine has them.
#include "fingerprint_block.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace brickline::fingerprint {
namespace {

constexpr SignTable<QUAD> SIGNS;

struct Avx2Lanes {
    struct Doubles {
        __m256d low, high;
    };
#define BRICKLINE_OP static inline __attribute__((always_inline))

    BRICKLINE_OP Doubles zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    BRICKLINE_OP Doubles load(const float* from) {
        return {_mm256_cvtps_pd(_mm_loadu_ps(from)), _mm256_cvtps_pd(_mm_loadu_ps(from + 4))};
    }
    BRICKLINE_OP Doubles load(const double* from) {
        return {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4)};
    }
    BRICKLINE_OP void store(double* to, const Doubles& from) {
        _mm256_store_pd(to, from.low);
        _mm256_store_pd(to + 4, from.high);
    }
    template <int TURN>
    BRICKLINE_OP __m256d turned_quad(__m256d value) {
        if constexpr ((TURN & 3) == 0) return value;
        constexpr int T = TURN & 3;
        return _mm256_permute4x64_pd(value, (0 ^ T) | (1 ^ T) << 2 | (2 ^ T) << 4 | (3 ^ T) << 6);
    }
    BRICKLINE_OP Doubles add(const Doubles& a, const Doubles& b) {
        return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
    }
    BRICKLINE_OP Doubles add_square(const Doubles& a, const Doubles& b) {
        return {_mm256_fmadd_pd(b.low, b.low, a.low), _mm256_fmadd_pd(b.high, b.high, a.high)};
    }
    BRICKLINE_OP Doubles add_signed(const Doubles& a, const Doubles& b, uint32_t signs) {
        return {_mm256_fmadd_pd(b.low, _mm256_load_pd(SIGNS.sign[signs & 15]), a.low),
                _mm256_fmadd_pd(b.high, _mm256_load_pd(SIGNS.sign[signs >> 4]), a.high)};
    }
    BRICKLINE_OP Doubles subtract(const Doubles& a, const Doubles& b) {
        return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)};
    }
    // Of a + b and a - b, |a| + |b|: the larger magnitude.
    BRICKLINE_OP Doubles sizes(const Doubles& sum, const Doubles& apart) {
        return {larger_size(sum.low, apart.low), larger_size(sum.high, apart.high)};
    }
    BRICKLINE_OP __m256d larger_size(__m256d a, __m256d b) {
        const __m256d sign = _mm256_set1_pd(-0.0);
        return _mm256_max_pd(_mm256_andnot_pd(sign, a), _mm256_andnot_pd(sign, b));
    }
    BRICKLINE_OP double total(const Doubles& a) {
        alignas(32) double lane[4];
        _mm256_store_pd(lane, _mm256_add_pd(a.low, a.high));
        return (lane[0] + lane[2]) + (lane[1] + lane[3]);
    }

    template <class Value>
    struct Part;

    BRICKLINE_OP void add_to(double* to, __m256d value) {
        _mm256_store_pd(to, _mm256_add_pd(_mm256_load_pd(to), value));
    }
    BRICKLINE_OP void add_swapped(double* to, const Doubles& value) {
        add_to(to, value.high);
        add_to(to + QUAD, value.low);
    }
    template <class Value>
    BRICKLINE_OP void add_quads(double* row, double* column, const Value* x, uint64_t quads) {
        __m256d sum = load_quad(x);
        while (--quads) sum = _mm256_add_pd(sum, load_quad(x += QUAD));
        add_to(row, sum);
        add_to(column, sum);
    }
    template <class Value>
    BRICKLINE_OP void add_line(double* to, const Value* x) {
#pragma GCC unroll 16
        for (int k = 0; k < LINE; k += QUAD) add_to(to + k, load_quad(x + k));
    }
    BRICKLINE_OP void add_parts(double* to, const double* parts) {
        add_to(to, _mm256_load_pd(parts));
        add_to(to + QUAD, _mm256_load_pd(parts + QUAD));
    }
    BRICKLINE_OP __m256d load_quad(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
    BRICKLINE_OP __m256d load_quad(const double* x) { return _mm256_loadu_pd(x); }

    template <int TURN>
    BRICKLINE_OP void add_turned_by(double* sketch, const double* places, uint32_t turn) {
        const uint32_t quads = turn / QUAD;
        for (uint32_t quad = 0; quad < QUADS; ++quad) {
            double* const to = sketch + QUAD * (quad ^ quads);
            const __m256d value = turned_quad<TURN>(_mm256_load_pd(places + QUAD * quad));
            _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), value));
        }
    }
    BRICKLINE_OP void add_turned(double* sketch, const double* places, uint32_t turn) {
        switch (turn & 3) {
            case 0: return add_turned_by<0>(sketch, places, turn);
            case 1: return add_turned_by<1>(sketch, places, turn);
            case 2: return add_turned_by<2>(sketch, places, turn);
            default: return add_turned_by<3>(sketch, places, turn);
        }
    }

    template <class T>
    BRICKLINE_OP void widen(const void* raw, typename Numbers<T>::Value* values) {
        if constexpr (std::is_same_v<T, f16>) {
            for (int k = 0; k < BLOCK; k += 8) {
                const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(
                    static_cast<const uint16_t*>(raw) + k));
                _mm256_store_ps(values + k, _mm256_cvtph_ps(bits));
            }
        } else {
            fingerprint::widen<T>(raw, values);
        }
    }

    BRICKLINE_OP void nh(const void* raw, uint64_t bytes, uint64_t& a, uint64_t& b) {
        const __m256i* const from = static_cast<const __m256i*>(raw);
        const __m256i* const keys = reinterpret_cast<const __m256i*>(KEY_TABLE.key);
        __m256i sum_a = _mm256_setzero_si256(), sum_b = sum_a;
        for (uint64_t k = 0; k < bytes / 32; ++k) {
            const __m256i t = _mm256_add_epi32(_mm256_loadu_si256(from + k), keys[k]);
            // Words 1 and 3 beside 0 and 2, then the other way round.
            const __m256i odd = _mm256_srli_epi64(t, 32), crossed = _mm256_shuffle_epi32(t, 0x13);
            sum_a = _mm256_add_epi64(sum_a, _mm256_mul_epu32(t, odd));
            sum_b = _mm256_add_epi64(sum_b, _mm256_mul_epu32(t, crossed));
        }
        a = total(sum_a), b = total(sum_b);
    }
    BRICKLINE_OP uint64_t total(__m256i sum) {
        alignas(32) uint64_t lane[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lane), sum);
        return lane[0] + lane[1] + lane[2] + lane[3];
    }
};

template <>
struct Avx2Lanes::Part<float> {
    using Type = __m256;
    static constexpr int WIDTH = 8;
    BRICKLINE_OP Type all(float value) { return _mm256_set1_ps(value); }
    BRICKLINE_OP Type load(const float* from) { return _mm256_loadu_ps(from); }
    BRICKLINE_OP Type least(Type a, Type b) { return _mm256_min_ps(a, b); }
    BRICKLINE_OP Type most(Type a, Type b) { return _mm256_max_ps(a, b); }
    BRICKLINE_OP Type nearest(Type a, Type b) { return _mm256_min_ps(a, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), b)); }
    BRICKLINE_OP float least_of(Type a) {
        __m128 half = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        half = _mm_min_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
    }
    BRICKLINE_OP float most_of(Type a) { return -least_of(_mm256_xor_ps(a, _mm256_set1_ps(-0.0f))); }
};
template <>
struct Avx2Lanes::Part<double> {
    using Type = __m256d;
    static constexpr int WIDTH = 4;
    BRICKLINE_OP Type all(double value) { return _mm256_set1_pd(value); }
    BRICKLINE_OP Type load(const double* from) { return _mm256_loadu_pd(from); }
    BRICKLINE_OP Type least(Type a, Type b) { return _mm256_min_pd(a, b); }
    BRICKLINE_OP Type most(Type a, Type b) { return _mm256_max_pd(a, b); }
    BRICKLINE_OP Type nearest(Type a, Type b) { return _mm256_min_pd(a, _mm256_andnot_pd(_mm256_set1_pd(-0.0), b)); }
    BRICKLINE_OP double least_of(Type a) {
        const __m128d half = _mm_min_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
        return _mm_cvtsd_f64(_mm_min_sd(half, _mm_unpackhi_pd(half, half)));
    }
    BRICKLINE_OP double most_of(Type a) { return -least_of(_mm256_xor_pd(a, _mm256_set1_pd(-0.0))); }
};
#undef BRICKLINE_OP

}  // namespace

extern const FingerprintEngine AVX2_ENGINE;
constexpr FingerprintEngine AVX2_ENGINE = engine_of<Avx2Lanes>("avx2");

}  // namespace brickline::fingerprint

#endif
