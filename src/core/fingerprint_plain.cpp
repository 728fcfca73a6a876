// Host fingerprints for any machine: plain loops, which the compiler vectorises as far as it may.
#include "fingerprint_block.h"

namespace brickline::fingerprint {
namespace {

// 1 or -1 for each of four bits.
struct alignas(64) SignTable {
    double sign[16][QUAD];
    constexpr SignTable() : sign() {
        for (int bits = 0; bits < 16; ++bits)
            for (int k = 0; k < QUAD; ++k) sign[bits][k] = bits >> k & 1 ? -1.0 : 1.0;
    }
};
constexpr SignTable SIGNS;

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
    template <int TURN>
    BRICKLINE_OP Doubles turned(const Doubles& value) {
        Doubles to;
        for (int k = 0; k < PAIRS; ++k) {
            const Pair from = value.pair[k ^ TURN / 2];
            if constexpr (TURN % 2) to.pair[k] = Pair{from[1], from[0]};
            else to.pair[k] = from;
        }
        return to;
    }
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
    BRICKLINE_OP Doubles magnitude(Doubles a) {
        for (int k = 0; k < PAIRS; ++k) a.pair[k] = Pair(Bits(a.pair[k]) & INT64_MAX);
        return a;
    }
    BRICKLINE_OP double total(const Doubles& a) {
        const Pair sum = (a.pair[0] + a.pair[2]) + (a.pair[1] + a.pair[3]);
        return sum[0] + sum[1];
    }

    template <class Value>
    struct Extremes {
        // By the compiler's own vectors of 16 bytes: a plain loop over comparisons stays scalar.
        static constexpr int WIDTH = 16 / sizeof(Value);
        typedef Value Part __attribute__((vector_size(16)));
        Part low, high, small;

        explicit Extremes(const Value* x) {
            low = high = Part{} + x[0];
            small = low < 0 ? -low : low;
        }
        void add_line(const Value* x) {
            for (int k = 0; k < LINE; k += WIDTH) {
                Part value;
                std::memcpy(&value, x + k, sizeof(value));
                const Part size = value < 0 ? -value : value;
                low = value < low ? value : low;
                high = value > high ? value : high;
                small = size < small ? size : small;
            }
        }
        void get(Value& minimum, Value& maximum, Value& smallest) const {
            minimum = low[0], maximum = high[0], smallest = small[0];
            for (int k = 1; k < WIDTH; ++k) {
                minimum = low[k] < minimum ? low[k] : minimum;
                maximum = high[k] > maximum ? high[k] : maximum;
                smallest = small[k] < smallest ? small[k] : smallest;
            }
        }
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
    static void total_lines(double* to, const double (*lines)[LANES]) {
        for (int k = 0; k < LANES; ++k) to[k] = 0;
        for (int line = 0; line < LINES; ++line) add_parts(to, lines[line]);
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
