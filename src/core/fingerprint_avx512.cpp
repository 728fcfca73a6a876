// Host fingerprints for x86-64 with AVX-512 (F, DQ, BW, VL): eight doubles are one register. This file
// is compiled with those instructions allowed; it is entered only where the machine has them.
#include "fingerprint_block.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace brickline::fingerprint {
namespace {

// 1 or -1 for each of eight bits: one multiplication instead of three operations on signs.
struct alignas(64) SignTable {
    double sign[256][8];
    constexpr SignTable() : sign() {
        for (int bits = 0; bits < 256; ++bits)
            for (int k = 0; k < 8; ++k) sign[bits][k] = bits >> k & 1 ? -1.0 : 1.0;
    }
};
constexpr SignTable SIGNS;

// Lane k takes lane k ^ turn.
struct alignas(64) TurnTable {
    int64_t lane[8][8];
    constexpr TurnTable() : lane() {
        for (int turn = 0; turn < 8; ++turn)
            for (int k = 0; k < 8; ++k) lane[turn][k] = k ^ turn;
    }
};
constexpr TurnTable TURNS;

struct Avx512Lanes {
    using Doubles = __m512d;
#define BRICKLINE_OP static inline __attribute__((always_inline))

    BRICKLINE_OP Doubles zero() { return _mm512_setzero_pd(); }
    BRICKLINE_OP Doubles load(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
    BRICKLINE_OP Doubles load(const double* from) { return _mm512_loadu_pd(from); }
    BRICKLINE_OP void store(double* to, Doubles from) { _mm512_store_pd(to, from); }
    BRICKLINE_OP Doubles turned_by(Doubles value, uint32_t turn) {
        return _mm512_permutexvar_pd(_mm512_load_si512(TURNS.lane[turn]), value);
    }
    template <int TURN>
    BRICKLINE_OP Doubles turned(Doubles value) {
        if constexpr (TURN == 0) return value;
        else return turned_by(value, TURN);
    }
    BRICKLINE_OP Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
    BRICKLINE_OP Doubles add_square(Doubles a, Doubles b) { return _mm512_fmadd_pd(b, b, a); }
    BRICKLINE_OP Doubles add_signed(Doubles a, Doubles b, uint32_t signs) {
        return _mm512_fmadd_pd(b, _mm512_load_pd(SIGNS.sign[signs]), a);
    }
    BRICKLINE_OP Doubles magnitude(Doubles a) { return _mm512_abs_pd(a); }
    BRICKLINE_OP double total(Doubles a) { return _mm512_reduce_add_pd(a); }

    template <class Value>
    struct Extremes;

    BRICKLINE_OP void add_to(double* to, Doubles value) {
        _mm512_store_pd(to, _mm512_add_pd(_mm512_load_pd(to), value));
    }
    template <class Value>
    BRICKLINE_OP void add_quads(double* row, double* column, const Value* x, uint64_t quads) {
        Doubles sum = zero();
        for (; quads >= 2; quads -= 2, x += 2 * QUAD) sum = add(sum, load(x));
        if (quads) sum = add(sum, _mm512_zextpd256_pd512(load_quad(x)));
        add_to(row, sum);
        add_to(column, sum);
    }
    template <class Value>
    BRICKLINE_OP void add_line(double* to, const Value* x) {
#pragma GCC unroll 8
        for (int k = 0; k < LINE; k += LANES) add_to(to + k, load(x + k));
    }
    BRICKLINE_OP void add_parts(double* to, const double* parts) { add_to(to, load(parts)); }
    BRICKLINE_OP void total_lines(double* to, const double (*lines)[LANES]) {
        Doubles sum[2] = {zero(), zero()};
#pragma GCC unroll 16
        for (int line = 0; line < LINES; ++line) sum[line & 1] = add(sum[line & 1], load(lines[line]));
        store(to, add(sum[0], sum[1]));
    }
    BRICKLINE_OP __m256d load_quad(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
    BRICKLINE_OP __m256d load_quad(const double* x) { return _mm256_loadu_pd(x); }

    BRICKLINE_OP void add_turned(double* sketch, const double* places, uint32_t turn) {
#pragma GCC unroll 8
        for (uint32_t part = 0; part < PARTS; ++part) {
            double* const to = sketch + LANES * (part ^ turn / LANES);
            const Doubles value = turned_by(_mm512_load_pd(places + LANES * part), turn % LANES);
            _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), value));
        }
    }

    template <class T>
    BRICKLINE_OP void widen(const void* raw, typename Numbers<T>::Value* values) {
        if constexpr (std::is_same_v<T, f16>) {
            for (int k = 0; k < BLOCK; k += 16) {
                const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
                    static_cast<const uint16_t*>(raw) + k));
                _mm512_store_ps(values + k, _mm512_cvtph_ps(bits));
            }
        } else {
            fingerprint::widen<T>(raw, values);
        }
    }

    BRICKLINE_OP void nh(const void* raw, uint64_t bytes, uint64_t& a, uint64_t& b) {
        const char* const from = static_cast<const char*>(raw);
        const char* const keys = reinterpret_cast<const char*>(KEY_TABLE.key);
        __m512i sum_a = _mm512_setzero_si512(), sum_b = sum_a;
        for (uint64_t at = 0; at < bytes; at += 64) {
            const __m512i t = _mm512_add_epi32(_mm512_loadu_si512(from + at), _mm512_load_si512(keys + at));
            // Words 1 and 3 beside 0 and 2, then the other way round.
            const __m512i odd = _mm512_srli_epi64(t, 32);
            const __m512i crossed = _mm512_shuffle_epi32(t, _MM_PERM_ENUM(0x13));
            sum_a = _mm512_add_epi64(sum_a, _mm512_mul_epu32(t, odd));
            sum_b = _mm512_add_epi64(sum_b, _mm512_mul_epu32(t, crossed));
        }
        a = total(sum_a), b = total(sum_b);
    }
    BRICKLINE_OP uint64_t total(__m512i sum) {  // modulo 2^64; the header's own adds signed numbers
        alignas(64) uint64_t lane[8];
        _mm512_store_si512(lane, sum);
        return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    }
};

template <>
struct Avx512Lanes::Extremes<float> {
    __m512 low, high, small;
    explicit Extremes(const float* x) {
        low = high = _mm512_set1_ps(x[0]);
        small = _mm512_abs_ps(low);
    }
    inline __attribute__((always_inline)) void add_line(const float* x) {
#pragma GCC unroll 4
        for (int k = 0; k < LINE; k += 16) {
            const __m512 value = _mm512_loadu_ps(x + k);
            low = _mm512_min_ps(low, value);
            high = _mm512_max_ps(high, value);
            small = _mm512_min_ps(small, _mm512_abs_ps(value));
        }
    }
    void get(float& minimum, float& maximum, float& smallest) const {
        minimum = _mm512_reduce_min_ps(low), maximum = _mm512_reduce_max_ps(high);
        smallest = _mm512_reduce_min_ps(small);
    }
};

template <>
struct Avx512Lanes::Extremes<double> {
    __m512d low, high, small;
    explicit Extremes(const double* x) {
        low = high = _mm512_set1_pd(x[0]);
        small = _mm512_abs_pd(low);
    }
    inline __attribute__((always_inline)) void add_line(const double* x) {
#pragma GCC unroll 8
        for (int k = 0; k < LINE; k += 8) {
            const __m512d value = _mm512_loadu_pd(x + k);
            low = _mm512_min_pd(low, value);
            high = _mm512_max_pd(high, value);
            small = _mm512_min_pd(small, _mm512_abs_pd(value));
        }
    }
    void get(double& minimum, double& maximum, double& smallest) const {
        minimum = _mm512_reduce_min_pd(low), maximum = _mm512_reduce_max_pd(high);
        smallest = _mm512_reduce_min_pd(small);
    }
};
#undef BRICKLINE_OP

}  // namespace

extern const FingerprintEngine AVX512_ENGINE;
constexpr FingerprintEngine AVX512_ENGINE = engine_of<Avx512Lanes>("avx512");

}  // namespace brickline::fingerprint

#endif
