// fingerprint.h: what a fingerprint of a tensor is, for CPU and CUDA alike. Knows neither memory
// layouts nor threads: how elements reach it is the matter of src/core/fingerprint.cpp and of
// fingerprint_cuda.h.
//
// Everything is a function of the values and of their LOGICAL index i (row-major), so that strides,
// devices and the order of work do not show. Elements are taken in blocks of 1024: 16 lines of 64.
//
//     i = 1024 * block + 64 * line + column          0 <= line < 16, 0 <= column < 64
//
// HASH    Two 64-bit numbers, each a sum over blocks, times an odd factor of the block's own. Of a
//         block it takes what its bytes (zeros beyond the end of the tensor), as 32-bit words w, make
//         of its keys k, with t = w + k modulo 2^32:
//             a = Σ t[4n] t[4n+1] + t[4n+2] t[4n+3]       b = Σ t[4n] t[4n+3] + t[4n+2] t[4n+1]
//             low = Σ a factor(block)                     high = Σ b factor'(block)
//         Each word has a key of its own, so a moved word changes a and b; factors are odd, so a
//         changed block changes the sums. A bijection of (low, high) is the hash. All of it is a sum
//         of products: threads may share a block in any way, and add up once, at the end.
// SKETCH  sketch[bucket(i)] += sign(i) * x[i], for finite x. Linear: the sketch of a difference is
//         the difference of the sketches, and its norm estimates that of the difference.
//             place  = column ^ 8 (line % 8) ^ 4 (line / 8)   elements of a line never meet; those of
//                                                         a column of the block neither
//             sign   = bit (strip, place) of the block's sign words, turned where line % 4 is
//                      place / 8 % 4
//             bucket = place ^ turn(block)                6 bits, so that a column is everywhere
//         Four lines are a strip, so one line of four counts the other way round: of vectors of four,
//         the four such combinations are orthogonal and keep the norm. A random sign a strip and place
//         is all it needs then. The map does not depend on the dtype: sketches of f32 and bf16 can be
//         compared.
// STRIPES rows[k] and columns[k] are sums of finite values. The tensor is seen as a matrix whose
//         columns are its last dimension. A row stripe is ceil(rows / 32) rows high, a column stripe
//         4 * ceil(columns / 128) columns wide. Four elements from i = 4 n on are one quad, which
//         counts where its first element lies; where the last dimension is a multiple of four, that
//         is exact.
// SUMS    l1, l2, total, minimum and maximum over finite values, in double.
// COUNTS  NaN, Inf, zeros, subnormals (of the tensor's dtype), saturated (equal to the largest or
//         smallest value of the dtype; 0 of unsigned integers is none, and bools never are).
//         nonfinite_hash = Σ mix64(4 i + kind), kind 1 NaN, 2 Inf, 3 -Inf.

#pragma once

#include "brickline/abi.h"
#include "brickline/elements.h"

namespace brickline::fingerprint {

inline constexpr int LINE = 64;      // elements of a line
inline constexpr int LINES = 16;     // lines of a block
inline constexpr int BLOCK = LINE * LINES;
inline constexpr int STRIP = 4;      // lines that share a sign for each place
inline constexpr int QUAD = 4;
inline constexpr int QUADS = LINE / QUAD;
inline constexpr int KEYS = 2 * BLOCK;  // words of the widest block

// --- Mixing -------------------------------------------------------------------------------------

// Bijections without visible structure: the finaliser of SplitMix64, and a 32-bit one of low bias.
BRICKLINE_INLINE constexpr uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
BRICKLINE_INLINE constexpr uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0x735a2d97u;
    return x ^ (x >> 15);
}

// Key of a block's word.
BRICKLINE_INLINE constexpr uint32_t key_of(uint32_t word) { return mix32(word + 0x5bd1e995u); }

// The upper 32 bits of a number matter for tensors of 2^37 elements only, but matter.
BRICKLINE_INLINE constexpr uint32_t folded(uint64_t number) {
    return static_cast<uint32_t>(number) ^ (static_cast<uint32_t>(number >> 32) * 0x9e3779b9u);
}

// A sign word: of strips 2 * pair and 2 * pair + 1 of a block (bits 0 and on, and 16 and on), places
// 16 * quarter to 16 * quarter + 15.
BRICKLINE_INLINE constexpr uint32_t signs_of(uint64_t block, uint32_t pair, uint32_t quarter) {
    return mix32(folded(block) + (4 * pair + quarter) * 0x9e3779b9u + 0x3c6ef372u);
}
// How a block turns places into buckets.
BRICKLINE_INLINE constexpr uint32_t turn_of(uint64_t block) {
    return mix32(folded(block) + 0xdaa66d2bu) & (SKETCH_BUCKETS - 1);
}
// How a line turns columns into places.
BRICKLINE_INLINE constexpr uint32_t line_turn(uint32_t line) { return 8 * (line % 8) ^ 4 * (line / 8); }
BRICKLINE_INLINE constexpr uint32_t place_of(uint32_t line, uint32_t column) {
    return column ^ line_turn(line);
}
// Whether an element counts with the other sign.
BRICKLINE_INLINE constexpr bool is_turned(uint64_t block, uint32_t line, uint32_t place) {
    const uint32_t strip = line / STRIP, word = signs_of(block, strip / 2, place / 16);
    return ((word >> (strip % 2 * 16 + place % 16) & 1) != 0) != (line % STRIP == place / 8 % STRIP);
}

struct Hash {
    uint64_t low, high;

    BRICKLINE_INLINE void add(const Hash& other) { low += other.low, high += other.high; }
};

// By what a and b of a block count.
BRICKLINE_INLINE constexpr Hash factors_of(uint64_t block) {
    return {mix64(block + 0x243f6a8885a308d3ull) | 1, mix64(block + 0x13198a2e03707344ull) | 1};
}
// The hash, of the sums over all blocks; that of no elements is 0.
BRICKLINE_INLINE constexpr Hash mixed(const Hash& sums) {
    const uint64_t low = mix64(sums.low);
    return {low, mix64(sums.high ^ low)};
}

BRICKLINE_INLINE constexpr uint64_t nonfinite_term(uint64_t index, uint32_t kind) {
    return mix64(4 * index + kind);
}

// --- Element types ------------------------------------------------------------------------------

enum class DType : uint32_t {  // codes of dtypes.py
    F64 = 1, F32, F16, BF16, F8E4M3, F8E5M2, I64, I32, I16, I8, U64, U32, U16, U8, Bool,
};

// One byte, 0 or not: what memory holds need not be a bool that C++ allows.
struct Truth {
    uint8_t bits;
    BRICKLINE_INLINE explicit operator float() const { return bits ? 1.0f : 0.0f; }
};

// Element type T as the numbers in which it is summed up: Value, float where that is exact. Below
// TINY a value is subnormal or zero; LOWEST and HIGHEST count as saturated; a float type has NaN.
template <class T> struct Numbers;
template <class V, bool IS_FLOAT>
struct NumbersOf {
    using Value = V;
    static constexpr bool HAS_NONFINITE = IS_FLOAT;
};
#define BRICKLINE_NUMBERS(TYPE, VALUE, IS_FLOAT, SMALLEST_NORMAL, LOW, HIGH)     \
    template <> struct Numbers<TYPE> : NumbersOf<VALUE, IS_FLOAT> {             \
        static constexpr VALUE TINY = SMALLEST_NORMAL, LOWEST = LOW, HIGHEST = HIGH; \
    };
BRICKLINE_NUMBERS(double, double, true, 0x1p-1022, -0x1.fffffffffffffp1023, 0x1.fffffffffffffp1023)
BRICKLINE_NUMBERS(float, float, true, 0x1p-126f, -0x1.fffffep127f, 0x1.fffffep127f)
BRICKLINE_NUMBERS(f16, float, true, 0x1p-14f, -65504.0f, 65504.0f)
BRICKLINE_NUMBERS(bf16, float, true, 0x1p-126f, -0x1.fep127f, 0x1.fep127f)
BRICKLINE_NUMBERS(f8e4m3, float, true, 0x1p-6f, -448.0f, 448.0f)
BRICKLINE_NUMBERS(f8e5m2, float, true, 0x1p-14f, -57344.0f, 57344.0f)
BRICKLINE_NUMBERS(int64_t, double, false, 1.0, -0x1p63, 0x1p63)
BRICKLINE_NUMBERS(int32_t, double, false, 1.0, -0x1p31, 0x1p31 - 1)
BRICKLINE_NUMBERS(int16_t, float, false, 1.0f, -32768.0f, 32767.0f)
BRICKLINE_NUMBERS(int8_t, float, false, 1.0f, -128.0f, 127.0f)
// LOWEST as HIGHEST: nothing below counts.
BRICKLINE_NUMBERS(uint64_t, double, false, 1.0, 0x1p64, 0x1p64)
BRICKLINE_NUMBERS(uint32_t, double, false, 1.0, 0x1p32 - 1, 0x1p32 - 1)
BRICKLINE_NUMBERS(uint16_t, float, false, 1.0f, 65535.0f, 65535.0f)
BRICKLINE_NUMBERS(uint8_t, float, false, 1.0f, 255.0f, 255.0f)
BRICKLINE_NUMBERS(Truth, float, false, 1.0f, 2.0f, 2.0f)
#undef BRICKLINE_NUMBERS

template <class T>
BRICKLINE_INLINE typename Numbers<T>::Value value_of(const T& element) {
    return static_cast<typename Numbers<T>::Value>(element);
}

// --- Where an element lies ----------------------------------------------------------------------

// The tensor as a matrix, cut into stripes.
struct Stripes {
    uint64_t columns;  // of the matrix, at least 1
    uint64_t width;    // columns of a stripe, a multiple of four
    uint64_t height;   // rows of a stripe, at least 1

    BRICKLINE_INLINE static Stripes of(uint64_t elements, uint64_t columns) {
        const uint64_t wide = columns ? columns : 1, rows = elements / wide;
        return {wide, QUAD * ((wide + QUAD * STRIPES - 1) / (QUAD * STRIPES)),
                rows ? (rows + STRIPES - 1) / STRIPES : 1};
    }
    BRICKLINE_INLINE uint32_t row_of(uint64_t index) const {
        return static_cast<uint32_t>(index / columns / height);
    }
    BRICKLINE_INLINE uint32_t column_of(uint64_t index) const {
        return static_cast<uint32_t>(index % columns / width);
    }
};

// --- What is summed up --------------------------------------------------------------------------

struct Counts {
    uint64_t nan, inf, zeros, subnormals, saturated;
    uint64_t first_nan, first_inf;  // ~0: none
    uint64_t nonfinite_hash;
};

// A fingerprint under way; sums of parts of a tensor add up to that of the whole.
struct Sums {
    double sketch[SKETCH_BUCKETS];
    double rows[STRIPES];
    double columns[STRIPES];
    double l1, squares;
    double minimum, maximum;  // +inf and -inf as long as there is no finite value
    Hash hash;
    Counts counts;

    BRICKLINE_INLINE void clear() {
        for (double& each : sketch) each = 0;
        for (double& each : rows) each = 0;
        for (double& each : columns) each = 0;
        l1 = squares = 0;
        minimum = 1e308 * 10, maximum = -1e308 * 10;
        hash = {0, 0};
        counts = {0, 0, 0, 0, 0, ~0ull, ~0ull, 0};
    }
};

template <class V>
BRICKLINE_INLINE V magnitude(V x) { return platform::fabs(x); }

// Counts one element that is zero, subnormal, saturated or not finite, and says whether it is finite.
template <class T>
BRICKLINE_INLINE bool count_unusual(Counts& counts, typename Numbers<T>::Value x, uint64_t index) {
    using N = Numbers<T>;
    if (N::HAS_NONFINITE && !(magnitude(x) <= N::HIGHEST)) {
        uint64_t& first = x != x ? counts.first_nan : counts.first_inf;
        if (index < first) first = index;
        ++(x != x ? counts.nan : counts.inf);
        counts.nonfinite_hash += nonfinite_term(index, x != x ? 1 : x > 0 ? 2 : 3);
        return false;
    }
    if (x == 0) ++counts.zeros;
    else if (magnitude(x) < N::TINY) ++counts.subnormals;
    if (x == N::LOWEST || x == N::HIGHEST) ++counts.saturated;
    return true;
}

// Sums to the record; dtype, shape and dimensions are the caller's.
BRICKLINE_INLINE void finish(const Sums& sums, uint64_t elements, FingerprintRow& row) {
    const bool has_finite = sums.minimum <= sums.maximum;
    double total = 0;
    const Hash hash = mixed(sums.hash);
    row.hash[0] = hash.low, row.hash[1] = hash.high;
    for (uint32_t k = 0; k < SKETCH_BUCKETS; ++k) row.sketch[k] = sums.sketch[k];
    for (uint32_t k = 0; k < STRIPES; ++k) {
        row.rows[k] = static_cast<float>(sums.rows[k]);
        row.columns[k] = static_cast<float>(sums.columns[k]);
        total += sums.rows[k];
    }
    row.l1 = sums.l1;
    row.l2 = platform::sqrt(sums.squares);
    row.total = total;
    row.minimum = has_finite ? sums.minimum + 0.0 : 0.0;  // there is no minimum of -0
    row.maximum = has_finite ? sums.maximum + 0.0 : 0.0;
    row.absmax = row.maximum > -row.minimum ? row.maximum : -row.minimum + 0.0;
    row.elements = elements;
    row.nan_count = sums.counts.nan;
    row.inf_count = sums.counts.inf;
    row.first_nan = static_cast<int64_t>(sums.counts.first_nan);
    row.first_inf = static_cast<int64_t>(sums.counts.first_inf);
    row.nonfinite_hash = sums.counts.nonfinite_hash;
    row.zeros = sums.counts.zeros;
    row.subnormals = sums.counts.subnormals;
    row.saturated = sums.counts.saturated;
    row.version = FINGERPRINT_VERSION;
    row.reserved = 0;
}

// --- What a device is handed --------------------------------------------------------------------

// One tensor on a device, as fingerprint_cuda.h takes it. Its blocks are shared out among `teams`
// CUDA blocks from `first_team` on; every warp takes one block of elements at a time.
struct Job {
    uint64_t data;             // address
    uint64_t row;              // address of the FingerprintRow to be written
    uint64_t elements;
    Stripes stripes;
    uint64_t step_rows;        // from a warp's block to its next one, in rows and columns
    uint64_t step_columns;
    uint32_t column_magic;     // narrow tensors: ceil(2^32 / (width / 4))
    uint32_t row_magic;        // columns below 1024: ceil(2^32 / columns)
    uint32_t first_team;
    uint32_t teams;
    uint32_t dtype;
    uint32_t dimensions;
    uint32_t axes;             // 0: contiguous, and aligned to 16 bytes
    uint32_t reserved;
    int64_t shape[FINGERPRINT_DIMENSIONS];
    uint64_t axis_size[FINGERPRINT_DIMENSIONS];
    int64_t axis_stride[FINGERPRINT_DIMENSIONS];
};
static_assert(sizeof(Job) == 384);

inline constexpr uint32_t JOBS = 8;                // tensors of one launch, at most
inline constexpr uint64_t NARROW = 1ull << 20;     // columns up to which column_magic is exact
inline constexpr uint32_t PARTIAL_WORDS = 144;     // 64-bit words that a team leaves of a tensor
inline constexpr uint32_t COUNTER_BYTES = 256;     // before the first of those

// Shared memory of a team: its own, and a double per stripe and thread.
inline constexpr uint32_t TEAM_BYTES = 30992;
inline constexpr uint32_t THREAD_BYTES = STRIPES * 8;

template <uint32_t COUNT>
struct Batch {
    Job job[COUNT];
};

}  // namespace brickline::fingerprint
