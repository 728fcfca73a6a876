// Host fingerprints for x86-64 with AVX2, FMA and F16C: eight doubles are two registers. This file is
// compiled with those instructions allowed; it is entered only where the machine has them.
#include "fingerprint_block.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace brickline::fingerprint {
namespace {

// 1 or -1 for each of four bits.
struct alignas(64) SignTable {
    double sign[16][4];
    constexpr SignTable() : sign() {
        for (int bits = 0; bits < 16; ++bits)
            for (int k = 0; k < 4; ++k) sign[bits][k] = bits >> k & 1 ? -1.0 : 1.0;
    }
};
constexpr SignTable SIGNS;

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
    template <int TURN>
    BRICKLINE_OP Doubles turned(const Doubles& value) {
        const __m256d low = turned_quad<TURN>(value.low), high = turned_quad<TURN>(value.high);
        if constexpr ((TURN & 4) != 0) return {high, low};
        else return {low, high};
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
    BRICKLINE_OP Doubles magnitude(const Doubles& a) {
        const __m256d mask = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
        return {_mm256_and_pd(a.low, mask), _mm256_and_pd(a.high, mask)};
    }
    BRICKLINE_OP double total(const Doubles& a) {
        alignas(32) double lane[4];
        _mm256_store_pd(lane, _mm256_add_pd(a.low, a.high));
        return (lane[0] + lane[2]) + (lane[1] + lane[3]);
    }

    template <class Value>
    struct Extremes;

    BRICKLINE_OP void add_to(double* to, __m256d value) {
        _mm256_store_pd(to, _mm256_add_pd(_mm256_load_pd(to), value));
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
    BRICKLINE_OP void total_lines(double* to, const double (*lines)[LANES]) {
        Doubles sum = zero();
        for (int line = 0; line < LINES; ++line) sum = add(sum, load(lines[line]));
        store(to, sum);
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
struct Avx2Lanes::Extremes<float> {
    __m256 low, high, small, mask;
    explicit Extremes(const float* x) {
        mask = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
        low = high = _mm256_set1_ps(x[0]);
        small = _mm256_and_ps(low, mask);
    }
    inline __attribute__((always_inline)) void add_line(const float* x) {
#pragma GCC unroll 8
        for (int k = 0; k < LINE; k += 8) {
            const __m256 value = _mm256_loadu_ps(x + k);
            low = _mm256_min_ps(low, value);
            high = _mm256_max_ps(high, value);
            small = _mm256_min_ps(small, _mm256_and_ps(value, mask));
        }
    }
    void get(float& minimum, float& maximum, float& smallest) const {
        alignas(32) float a[8], b[8], c[8];
        _mm256_store_ps(a, low), _mm256_store_ps(b, high), _mm256_store_ps(c, small);
        minimum = a[0], maximum = b[0], smallest = c[0];
        for (int k = 1; k < 8; ++k) {
            minimum = a[k] < minimum ? a[k] : minimum;
            maximum = b[k] > maximum ? b[k] : maximum;
            smallest = c[k] < smallest ? c[k] : smallest;
        }
    }
};

template <>
struct Avx2Lanes::Extremes<double> {
    __m256d low, high, small, mask;
    explicit Extremes(const double* x) {
        mask = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
        low = high = _mm256_set1_pd(x[0]);
        small = _mm256_and_pd(low, mask);
    }
    inline __attribute__((always_inline)) void add_line(const double* x) {
#pragma GCC unroll 16
        for (int k = 0; k < LINE; k += 4) {
            const __m256d value = _mm256_loadu_pd(x + k);
            low = _mm256_min_pd(low, value);
            high = _mm256_max_pd(high, value);
            small = _mm256_min_pd(small, _mm256_and_pd(value, mask));
        }
    }
    void get(double& minimum, double& maximum, double& smallest) const {
        alignas(32) double a[4], b[4], c[4];
        _mm256_store_pd(a, low), _mm256_store_pd(b, high), _mm256_store_pd(c, small);
        minimum = a[0], maximum = b[0], smallest = c[0];
        for (int k = 1; k < 4; ++k) {
            minimum = a[k] < minimum ? a[k] : minimum;
            maximum = b[k] > maximum ? b[k] : maximum;
            smallest = c[k] < smallest ? c[k] : smallest;
        }
    }
};
#undef BRICKLINE_OP

}  // namespace

extern const FingerprintEngine AVX2_ENGINE;
constexpr FingerprintEngine AVX2_ENGINE = engine_of<Avx2Lanes>("avx2");

}  // namespace brickline::fingerprint

#endif
