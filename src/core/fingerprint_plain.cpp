// Host fingerprints for any machine: plain loops, which the compiler vectorises as far as it may.
#include "fingerprint_block.h"

namespace brickline::fingerprint {
namespace {

struct PlainLanes {
    struct Doubles {
        double lane[LANES];
    };

    static Doubles zero() { return {}; }
    template <class Value>
    static Doubles load(const Value* from) {
        Doubles to;
        for (int k = 0; k < LANES; ++k) to.lane[k] = from[k];
        return to;
    }
    static void store(double* to, const Doubles& from) { std::memcpy(to, from.lane, sizeof(from)); }
    template <int TURN>
    static Doubles turned(const Doubles& value) {
        Doubles to;
        for (int k = 0; k < LANES; ++k) to.lane[k] = value.lane[k ^ TURN];
        return to;
    }
    static Doubles add(Doubles a, const Doubles& b) {
        for (int k = 0; k < LANES; ++k) a.lane[k] += b.lane[k];
        return a;
    }
    static Doubles add_square(Doubles a, const Doubles& b) {
        for (int k = 0; k < LANES; ++k) a.lane[k] += b.lane[k] * b.lane[k];
        return a;
    }
    static Doubles add_signed(Doubles a, const Doubles& b, uint32_t signs) {
        for (int k = 0; k < LANES; ++k) a.lane[k] += signs >> k & 1 ? -b.lane[k] : b.lane[k];
        return a;
    }
    static Doubles magnitude(Doubles a) {
        for (double& each : a.lane) each = __builtin_fabs(each);
        return a;
    }
    static double total(const Doubles& a) {
        return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) +
               ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
    }

    template <class Value>
    struct Extremes {
        Value low, high, small;
        explicit Extremes(const Value* x) : low(x[0]), high(x[0]), small(Value(__builtin_fabs(x[0]))) {}
        void add_line(const Value* x) {
            for (int k = 0; k < LINE; ++k) {
                const Value size = x[k] < 0 ? -x[k] : x[k];
                low = x[k] < low ? x[k] : low;
                high = x[k] > high ? x[k] : high;
                small = size < small ? size : small;
            }
        }
        void get(Value& minimum, Value& maximum, Value& smallest) const {
            minimum = low, maximum = high, smallest = small;
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

}  // namespace

extern const FingerprintEngine PLAIN_ENGINE;
constexpr FingerprintEngine PLAIN_ENGINE = engine_of<PlainLanes>("plain");

}  // namespace brickline::fingerprint
