// Host fingerprints for any machine: plain loops, which the compiler vectorises as far as it may.
#include "fingerprint_block.h"

namespace brickline::fingerprint {
namespace {

constexpr SignTable<QUAD> SIGNS;

struct PlainLanes {
    // Two lanes at a time are what every machine has; the compiler's own type keeps them in registers.
    typedef double Pair __attribute__((vector_size(16)));
    typedef int64_t Bits __attribute__((vector_size(16)));
    static constexpr int PAIRS = LANES / 2;
    struct Doubles {
        Pair pair[PAIRS];
    };
#define BRICKLINE_OP static inline __attribute__((always_inline))

    BRICKLINE_OP Doubles zero() { return {}; }
    template <class Value>
    BRICKLINE_OP Doubles load(const Value* from) {
        Doubles to;
        for (int k = 0; k < PAIRS; ++k) to.pair[k] = Pair{double(from[2 * k]), double(from[2 * k + 1])};
        return to;
    }
    BRICKLINE_OP void store(double* to, const Doubles& from) { std::memcpy(to, &from, sizeof(from)); }
    BRICKLINE_OP Doubles add(Doubles a, const Doubles& b) {
        for (int k = 0; k < PAIRS; ++k) a.pair[k] += b.pair[k];
        return a;
    }
    BRICKLINE_OP Doubles add_square(Doubles a, const Doubles& b) {
        for (int k = 0; k < PAIRS; ++k) a.pair[k] += b.pair[k] * b.pair[k];
        return a;
    }
    BRICKLINE_OP Doubles add_signed(Doubles a, const Doubles& b, uint32_t signs) {
        for (int k = 0; k < PAIRS; ++k) {
            Pair sign;
            std::memcpy(&sign, SIGNS.sign[signs >> (k / 2 * QUAD) & 15] + k % 2 * 2, sizeof(sign));
            a.pair[k] += b.pair[k] * sign;
        }
        return a;
    }
    BRICKLINE_OP Doubles subtract(Doubles a, const Doubles& b) {
        for (int k = 0; k < PAIRS; ++k) a.pair[k] -= b.pair[k];
        return a;
    }
    // Of a + b and a - b, |a| + |b|: the larger magnitude.
    BRICKLINE_OP Doubles sizes(Doubles sum, const Doubles& apart) {
        for (int k = 0; k < PAIRS; ++k) {
            const Pair a = Pair(Bits(sum.pair[k]) & INT64_MAX), b = Pair(Bits(apart.pair[k]) & INT64_MAX);
            sum.pair[k] = a < b ? b : a;
        }
        return sum;
    }
    BRICKLINE_OP double total(const Doubles& a) {
        const Pair sum = (a.pair[0] + a.pair[2]) + (a.pair[1] + a.pair[3]);
        return sum[0] + sum[1];
    }

    template <class Value>
    struct Part {
        // By the compiler's own vectors of 16 bytes: a plain loop over comparisons stays scalar.
        static constexpr int WIDTH = 16 / sizeof(Value);
        typedef Value Type __attribute__((vector_size(16)));

        BRICKLINE_OP Type all(Value value) { return Type{} + value; }
        BRICKLINE_OP Type load(const Value* from) {
            Type value;
            std::memcpy(&value, from, sizeof(value));
            return value;
        }
        BRICKLINE_OP Type least(Type a, Type b) { return b < a ? b : a; }
        BRICKLINE_OP Type most(Type a, Type b) { return b > a ? b : a; }
        BRICKLINE_OP Type nearest(Type a, Type b) { return least(a, b < 0 ? -b : b); }
        BRICKLINE_OP Value least_of(Type a) {
            Value found = a[0];
            for (int k = 1; k < WIDTH; ++k) found = a[k] < found ? a[k] : found;
            return found;
        }
        BRICKLINE_OP Value most_of(Type a) { return -least_of(-a); }
    };

    template <class Value>
    static void add_quads(double* row, double* column, const Value* x, uint64_t quads) {
        double sum[QUAD] = {};
        for (; quads; --quads, x += QUAD)
            for (int k = 0; k < QUAD; ++k) sum[k] += x[k];
        for (int k = 0; k < QUAD; ++k) row[k] += sum[k], column[k] += sum[k];
    }
    template <class Value>
    static void add_line(double* to, const Value* x) {
        for (int k = 0; k < LINE; ++k) to[k] += x[k];
    }
    static void add_parts(double* to, const double* parts) {
        for (int k = 0; k < LANES; ++k) to[k] += parts[k];
    }
    static void add_swapped(double* to, const Doubles& value) {
        alignas(16) double lane[LANES];
        store(lane, value);
        for (int k = 0; k < LANES; ++k) to[k] += lane[k ^ QUAD];
    }
    static void add_turned(double* sketch, const double* places, uint32_t turn) {
        for (int k = 0; k < LINE; ++k) sketch[k ^ turn] += places[k];
    }
    template <class T>
    static void widen(const void* raw, typename Numbers<T>::Value* values) {
        fingerprint::widen<T>(raw, values);
    }

    static void nh(const void* raw, uint64_t bytes, uint64_t& a, uint64_t& b) {
        const char* from = static_cast<const char*>(raw);
        uint64_t sum_a = 0, sum_b = 0;
        for (uint64_t at = 0; at < bytes / 4; at += 4) {
            uint32_t t[4];
            std::memcpy(t, from + 4 * at, sizeof(t));
            for (int k = 0; k < 4; ++k) t[k] += KEY_TABLE.key[at + k];
            sum_a += uint64_t(t[0]) * t[1] + uint64_t(t[2]) * t[3];
            sum_b += uint64_t(t[0]) * t[3] + uint64_t(t[2]) * t[1];
        }
        a = sum_a, b = sum_b;
    }
};
#undef BRICKLINE_OP

}  // namespace

extern const FingerprintEngine PLAIN_ENGINE;
constexpr FingerprintEngine PLAIN_ENGINE = engine_of<PlainLanes>("plain");

}  // namespace brickline::fingerprint
