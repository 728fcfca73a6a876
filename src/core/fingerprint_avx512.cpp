// Host fingerprints for x86-64 with AVX-512 (F, DQ, BW, VL): eight doubles are one register. This file
// is compiled with those instructions allowed; it is entered only where the machine has them.
#include "fingerprint_block.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace brickline::fingerprint {
namespace {

constexpr SignTable<LANES> SIGNS;

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
    BRICKLINE_OP Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
    BRICKLINE_OP Doubles subtract(Doubles a, Doubles b) { return _mm512_sub_pd(a, b); }
    // Of a + b and a - b, |a| + |b|: the larger magnitude.
    BRICKLINE_OP Doubles sizes(Doubles sum, Doubles apart) { return _mm512_range_pd(sum, apart, 0b1011); }
    BRICKLINE_OP Doubles add_square(Doubles a, Doubles b) { return _mm512_fmadd_pd(b, b, a); }
    BRICKLINE_OP Doubles add_signed(Doubles a, Doubles b, uint32_t signs) {
        return _mm512_fmadd_pd(b, _mm512_load_pd(SIGNS.sign[signs]), a);
    }
    BRICKLINE_OP double total(Doubles a) { return _mm512_reduce_add_pd(a); }

    template <class Value>
    struct Part;

    BRICKLINE_OP void add_to(double* to, Doubles value) {
        _mm512_store_pd(to, _mm512_add_pd(_mm512_load_pd(to), value));
    }
    BRICKLINE_OP void add_swapped(double* to, Doubles value) { add_to(to, turned_by(value, QUAD)); }
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
struct Avx512Lanes::Part<float> {
    using Type = __m512;
    static constexpr int WIDTH = 16;
    BRICKLINE_OP Type all(float value) { return _mm512_set1_ps(value); }
    BRICKLINE_OP Type load(const float* from) { return _mm512_loadu_ps(from); }
    BRICKLINE_OP Type least(Type a, Type b) { return _mm512_min_ps(a, b); }
    BRICKLINE_OP Type most(Type a, Type b) { return _mm512_max_ps(a, b); }
    BRICKLINE_OP Type nearest(Type a, Type b) { return _mm512_range_ps(a, b, 0b1010); }
    BRICKLINE_OP float least_of(Type a) { return _mm512_reduce_min_ps(a); }
    BRICKLINE_OP float most_of(Type a) { return _mm512_reduce_max_ps(a); }
};
template <>
struct Avx512Lanes::Part<double> {
    using Type = __m512d;
    static constexpr int WIDTH = 8;
    BRICKLINE_OP Type all(double value) { return _mm512_set1_pd(value); }
    BRICKLINE_OP Type load(const double* from) { return _mm512_loadu_pd(from); }
    BRICKLINE_OP Type least(Type a, Type b) { return _mm512_min_pd(a, b); }
    BRICKLINE_OP Type most(Type a, Type b) { return _mm512_max_pd(a, b); }
    BRICKLINE_OP Type nearest(Type a, Type b) { return _mm512_range_pd(a, b, 0b1010); }
    BRICKLINE_OP double least_of(Type a) { return _mm512_reduce_min_pd(a); }
    BRICKLINE_OP double most_of(Type a) { return _mm512_reduce_max_pd(a); }
};
#undef BRICKLINE_OP

}  // namespace

extern const FingerprintEngine AVX512_ENGINE;
constexpr FingerprintEngine AVX512_ENGINE = engine_of<Avx512Lanes>("avx512");

}  // namespace brickline::fingerprint

#endif
