// fingerprint_cuda.h: fingerprints of tensors in CUDA memory, one launch for up to eight of them.
// fingerprint.h says what a fingerprint is; this file, which NVRTC alone reads, how threads share it.
//
// A warp takes one block of 1024 elements at a time. Of a line of 64, GROUP elements belong to each of
// LANES threads: those whose PLACE the thread owns, so that a thread owns its buckets from the first
// block to the last and the sketch stays in its registers. Since places are columns, turned, what a
// thread loads is a permuted vector of the line, and a warp still loads whole lines.
//
// Nearly all blocks of large tensors are whole and lie in one cell of the stripes, and nearly all values
// are usual. For them there is a path without branches, in which the additions of many elements overlap.
//
// At the end the threads of a CUDA block (a team) add up, each team leaves a partial result, and the
// last team to finish adds those in their order. Nothing depends on who is last.

#pragma once

#include "brickline/fingerprint.h"

// Brings a line of 128 bytes from memory nearer, without waiting and without a register for it.
#ifndef BRICKLINE_FETCH_AHEAD
#define BRICKLINE_FETCH_AHEAD(address) asm volatile("prefetch.global.L2 [%0];" ::"l"(address))
#endif

namespace brickline::fingerprint {

// What a team leaves, as 64-bit words: sums of doubles, sums of integers, smallest and largest.
struct Partial {
    double sketch[SKETCH_BUCKETS];
    double rows[STRIPES];
    double columns[STRIPES];
    double l1, squares;
    uint64_t hash[2];
    uint64_t nan, inf, zeros, subnormals, saturated, nonfinite_hash;
    uint64_t first_nan, first_inf;
    uint64_t minimum, maximum;  // doubles, as integers of the same order
    uint64_t reserved[2];
};
static_assert(sizeof(Partial) == 8 * PARTIAL_WORDS, "");
inline constexpr uint32_t DOUBLES = 130;   // words that are sums of doubles
inline constexpr uint32_t INTEGERS = 138;  // from DOUBLES up to here, sums of integers

inline constexpr uint32_t ALL = 0xffffffffu;

// What a warp leaves: of rows and columns the stripe that it held last.
struct WarpSums {
    double sketch[SKETCH_BUCKETS];
    double l1, squares, row, column;
    uint64_t hash[2];
    double low, high;
    uint32_t row_stripe, column_stripe;
};

struct BlockFacts {
    Hash factors;
    uint64_t turn;
};

// Shared memory of a team: one Partial, the keys, the parts of its warps, and the column stripes of
// every thread for itself: columns[stripe * threads + thread]. Those are cleared by who needs them.
struct TeamMemory {
    Partial sums;
    uint32_t key[KEYS];
    WarpSums warp[8];
    BlockFacts facts[8][32];  // of the next blocks of each warp
    uint32_t is_last;
};
static_assert((sizeof(TeamMemory) + 15) / 16 * 16 == TEAM_BYTES, "");

BRICKLINE_INLINE double from_lane(double value, uint32_t mask) {
    return __longlong_as_double(__shfl_xor_sync(ALL, __double_as_longlong(value), mask));
}
BRICKLINE_INLINE uint64_t from_lane(uint64_t value, uint32_t mask) {
    return __shfl_xor_sync(ALL, value, mask);
}
template <class Value>
BRICKLINE_INLINE Value sum_over_warp(Value value) {
    BRICKLINE_UNROLL
    for (uint32_t mask = 16; mask; mask /= 2) value += from_lane(value, mask);
    return value;
}
// Of two values, sums over the warp: the lower lanes get the first, the upper lanes the second.
template <class Value>
BRICKLINE_INLINE Value sums_of_two(Value first, Value second, bool is_upper) {
    Value mine = is_upper ? second : first;
    mine += from_lane(is_upper ? first : second, 16);
    BRICKLINE_UNROLL
    for (uint32_t mask = 8; mask; mask /= 2) mine += from_lane(mine, mask);
    return mine;
}
// A quotient; nearly always of numbers for which 32 bits suffice.
BRICKLINE_INLINE uint64_t quotient(uint64_t a, uint64_t b) {
    if ((a | b) >> 32) return a / b;
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}
BRICKLINE_INLINE float smaller(float a, float b) { return fminf(a, b); }
BRICKLINE_INLINE float larger(float a, float b) { return fmaxf(a, b); }
BRICKLINE_INLINE double smaller(double a, double b) { return b < a ? b : a; }
BRICKLINE_INLINE double larger(double a, double b) { return b > a ? b : a; }

// Values whose bits are a sign and a magnitude, one to a word or two, as the extremes of those bits.
// Bits as signed numbers have the largest positive value on top, as unsigned ones the most negative.
template <class T> struct Bits { static constexpr bool IS_KNOWN = false; };
template <> struct Bits<float> {
    static constexpr bool IS_KNOWN = true;
    static constexpr uint32_t SIGN = 0x80000000u, TINY = 0x00800000u, MOST = 0x7f7fffffu;
};
template <uint32_t SMALLEST_NORMAL, uint32_t HIGHEST>
struct HalfBits {
    static constexpr bool IS_KNOWN = true;
    static constexpr uint32_t SIGN = 0x80008000u, TINY = SMALLEST_NORMAL * 0x10001u;
    static constexpr uint32_t MOST = HIGHEST * 0x10001u;
};
template <> struct Bits<bf16> : HalfBits<0x0080, 0x7f7f> {};
template <> struct Bits<f16> : HalfBits<0x0400, 0x7bff> {};

template <class T>
struct BitRange {
    using B = Bits<T>;
    static constexpr bool IS_WORD = sizeof(T) == 4;
    static constexpr uint32_t ONE = IS_WORD ? 1 : 0x10001u;

    uint32_t top = B::SIGN, bottom = 0, least = ~0u, nearest = ~B::SIGN;

    BRICKLINE_INLINE void add(uint32_t a, uint32_t b) {
        if constexpr (IS_WORD) {
            top = static_cast<uint32_t>(__vimax3_s32(int(top), int(a), int(b)));
            bottom = __vimax3_u32(bottom, a, b);
            least = __vimin3_u32(least, a, b);
            nearest = static_cast<uint32_t>(__vimin3_s32(int(nearest), int(a), int(b)));
        } else {
            top = __vimax3_s16x2(top, a, b);
            bottom = __vimax3_u16x2(bottom, a, b);
            least = __vimin3_u16x2(least, a, b);
            nearest = __vimin3_s16x2(nearest, a, b);
        }
    }
    // Whether all values are normal, finite and below the largest.
    BRICKLINE_INLINE bool is_usual() const {
        constexpr uint32_t HIGH = B::MOST - ONE, LOW = B::SIGN | HIGH, NEAR = B::SIGN | B::TINY;
        if constexpr (IS_WORD) {
            return int(top) <= int(HIGH) && bottom <= LOW && least >= B::TINY && int(nearest) >= int(NEAR);
        } else {  // a half that is beyond its limit changes it
            return ((__vimax3_s16x2(top, HIGH, HIGH) ^ HIGH) | (__vimax3_u16x2(bottom, LOW, LOW) ^ LOW) |
                    (__vimin3_u16x2(least, B::TINY, B::TINY) ^ B::TINY) |
                    (__vimin3_s16x2(nearest, NEAR, NEAR) ^ NEAR)) == 0;
        }
    }
    // Lowers and raises to the extremes of what was added, if anything was.
    BRICKLINE_INLINE void extend(float& low, float& high) const {
        if (least == ~0u) return;
        BRICKLINE_UNROLL
        for (int half = 0; half < (IS_WORD ? 1 : 2); ++half) {
            const bool has_positive = !(part(top, half) >> SIGN_BIT);
            const bool has_negative = part(bottom, half) >> SIGN_BIT;
            low = smaller(low, value(part(has_negative ? bottom : least, half)));
            high = larger(high, value(part(has_positive ? top : least, half)));
        }
    }

  private:
    static constexpr int SIGN_BIT = IS_WORD ? 31 : 15;

    BRICKLINE_INLINE static uint32_t part(uint32_t word, int half) {
        return IS_WORD ? word : word >> 16 * half & 0xffff;
    }
    BRICKLINE_INLINE static float value(uint32_t bits) {
        if constexpr (IS_WORD) {
            return platform::float_of(bits);
        } else {
            const uint16_t narrow = static_cast<uint16_t>(bits);
            T element;
            platform::copy_bits(element, narrow);
            return value_of(element);
        }
    }
};
struct NoRange {};
template <class T, bool IS_KNOWN = Bits<T>::IS_KNOWN> struct RangeOf { using Type = NoRange; };
template <class T> struct RangeOf<T, true> { using Type = BitRange<T>; };

template <class T>
class Taker {
    using N = Numbers<T>;
    using Value = typename N::Value;
    static constexpr int GROUP = sizeof(T) >= 4 ? 4 : 8;  // elements of a line that a thread takes
    static constexpr int LANES = LINE / GROUP;            // threads of a line
    static constexpr int LINES_AT_ONCE = 32 / LANES;
    static constexpr int ROUNDS = LINES / LINES_AT_ONCE;  // lines of a thread, consecutive
    static constexpr int WORDS = GROUP * sizeof(T) / 4;   // of a group
    static constexpr int AHEAD = sizeof(T) == 2 || sizeof(T) == 4 ? 4 : 2;  // lines that are loaded together
    static constexpr bool HAS_RANGE = Bits<T>::IS_KNOWN;
    static_assert(ROUNDS % 4 == 0, "of four lines it is fixed how each is turned");

    struct Raw {
        uint32_t word[WORDS];
    };
    struct Lines {  // what a thread loads together, and where in the block it lies
        Raw raw[AHEAD];
        uint32_t at[AHEAD];
    };

  public:
    __device__ Taker(const Job& job, TeamMemory& team, double* columns)
        : m_job(job), m_team(team), m_columns(columns + threadIdx.x), m_lane(threadIdx.x % 32) {}

    // Has the first block come nearer while there is something else to do.
    __device__ void prepare() const {
        const uint64_t block = first_block();
        if (m_job.axes == 0 && block < m_job.elements / BLOCK) fetch(block);
    }

    // All blocks of this warp.
    __device__ void take() {
        const uint64_t stride = static_cast<uint64_t>(m_job.teams) * (blockDim.x / 32);
        const uint64_t blocks = (m_job.elements + BLOCK - 1) / BLOCK, first = first_block();
        if (first >= blocks) return;
        m_row = quotient(first * BLOCK, m_job.stripes.columns);
        m_column = first * BLOCK - m_row * m_job.stripes.columns;
        m_row_stripe = static_cast<uint32_t>(quotient(m_row, m_job.stripes.height));
        m_held_row = m_row_stripe;
        m_held_column = static_cast<uint32_t>(quotient(m_column, m_job.stripes.width));
        const uint64_t whole = m_job.axes == 0 ? m_job.elements / BLOCK : 0;
        m_whole = first < whole ? static_cast<uint32_t>(quotient(whole - 1 - first, stride)) + 1 : 0;
        for (uint64_t block = first; block < blocks;) {
            find_stripes();
            double sum = 0;
            if (m_number < m_whole && m_is_uniform) {
                const uint32_t count = blocks_alike();
                m_column += (count - 1) * m_job.step_columns;
#pragma unroll 1
                for (const uint32_t end = m_number + count; m_number < end; block += stride) {
                    take_block<true>(block, stride, sum);
                }
                m_row_sum += sum;
                m_column_sum += sum;
            } else {
                own_columns();
                take_block<false>(block, stride, sum);
                block += stride;
            }
            m_row += m_job.step_rows;
            m_column += m_job.step_columns;
            if (m_column >= m_job.stripes.columns) {
                m_column -= m_job.stripes.columns;
                ++m_row;
            }
        }
    }

    // Leaves what this warp has to its team; all threads of the team come here.
    __device__ void give() {
        WarpSums& mine = m_team.warp[threadIdx.x / 32];
        const bool is_upper = m_lane >= 16;
        turn_sums(0);
        give_sketch(mine.sketch);
        const double norm = sums_of_two(m_l1[0] + m_l1[1], m_squares[0] + m_squares[1], is_upper);
        const double sum = sums_of_two(m_row_sum, m_column_sum, is_upper);
        const uint64_t hash = sums_of_two(m_hash.low, m_hash.high, is_upper);
        if constexpr (HAS_RANGE) m_range.extend(m_low, m_high);
        Value low = m_low, high = m_high;
        BRICKLINE_UNROLL
        for (uint32_t mask = 16; mask; mask /= 2) {
            low = smaller(low, __shfl_xor_sync(ALL, low, mask));
            high = larger(high, __shfl_xor_sync(ALL, high, mask));
        }
        if (m_lane % 16 == 0) {
            (is_upper ? mine.squares : mine.l1) = norm;
            (is_upper ? mine.column : mine.row) = sum;
            mine.hash[is_upper] = hash;
        }
        if (m_lane == 0) {
            mine.row_stripe = m_held_row, mine.column_stripe = m_held_column;
            mine.low = low, mine.high = high;
        }
        if (__any_sync(ALL, m_zeros | m_subnormals | m_saturated)) {
            add_to_team(m_team.sums.zeros, static_cast<uint64_t>(m_zeros));
            add_to_team(m_team.sums.subnormals, static_cast<uint64_t>(m_subnormals));
            add_to_team(m_team.sums.saturated, static_cast<uint64_t>(m_saturated));
        }
    }
    __device__ bool owns_columns() const { return m_owns_columns; }

  private:
    __device__ uint64_t first_block() const {
        return static_cast<uint64_t>(blockIdx.x - m_job.first_team) * (blockDim.x / 32) + threadIdx.x / 32;
    }
    __device__ void add_to_team(uint64_t& to, uint64_t value) {
        value = sum_over_warp(value);
        if (m_lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), value);
    }
    // Threads with the same places add up: each time one half of them takes one half of the places.
    __device__ void give_sketch(double* sketch) {
        uint32_t at = m_lane % LANES * GROUP;
        int count = GROUP;
        BRICKLINE_UNROLL
        for (int mask = 16; mask >= LANES; mask /= 2) {
            const bool is_upper = m_lane & mask;
            count /= 2;
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP / 2; ++k) {
                if (k >= count) continue;
                const double kept = is_upper ? m_sketch[k + count] : m_sketch[k];
                const double given = is_upper ? m_sketch[k] : m_sketch[k + count];
                m_sketch[k] = kept + from_lane(given, mask);
            }
            if (is_upper) at += count;
        }
        BRICKLINE_UNROLL
        for (int k = 0; k < GROUP * LANES / 32; ++k) sketch[at + k] = m_sketch[k];
    }

    // How many blocks of this warp from this one on, which is whole, are whole and in its cell.
    __device__ uint32_t blocks_alike() const {
        if (m_job.step_rows) return 1;
        const uint64_t left = m_whole - m_number - 1;
        const uint64_t here = quotient(m_cell_end - BLOCK - m_column, m_job.step_columns);
        return static_cast<uint32_t>(left < here ? left : here) + 1;
    }

    // A block; IS_FAST: it is whole, contiguous, and in one cell of the stripes.
    template <bool IS_FAST>
    __device__ __forceinline__ void take_block(uint64_t block, uint64_t stride, double& sum) {
        BlockFacts* const facts = m_team.facts[threadIdx.x / 32];
        if (m_number % 32 == 0) {  // 32 lanes find those of 32 blocks at once
            const uint64_t mine = block + m_lane * stride;
            __syncwarp();
            facts[m_lane] = {factors_of(mine), turn_of(mine)};
            __syncwarp();
        }
        const Hash factors = facts[m_number % 32].factors;
        const uint32_t turn = static_cast<uint32_t>(facts[m_number % 32].turn);
        const bool is_whole = m_number < m_whole;
        if (++m_number < m_whole) fetch(block + stride);
        turn_sums(turn % GROUP);
        const uint32_t place_group = (m_lane % LANES) ^ (turn / GROUP);
        const uint32_t first_line = m_lane / LANES * ROUNDS;
        const uint32_t half = signs_of(block * LINES + m_lane % 16, m_lane / 16);
        const uint32_t sign_lane = first_line + place_group * GROUP / 32 * 16;
        const SignLanes signs = {half, sign_lane, place_group * GROUP % 32};
        uint64_t a = 0, b = 0;
        if constexpr (IS_FAST) {
            BRICKLINE_UNROLL
            for (int from = 0; from < ROUNDS; from += AHEAD) {
                Lines lines = located(first_line + from, place_group);
                load_lines(block, lines);
                take_lines<true>(block, from, from % 4, lines, true, signs, sum, a, b);
            }
        } else {
#pragma unroll 1
            for (uint32_t from = 0; from < ROUNDS; from += 4) {
                BRICKLINE_UNROLL
                for (int part = 0; part < 4; part += AHEAD) {
                    Lines lines = located(first_line + from + part, place_group);
                    if (is_whole) load_lines(block, lines);
                    else lines = gathered(m_job, block, lines);
                    take_lines<false>(block, from + part, part, lines, is_whole, signs, sum, a, b);
                }
            }
        }
        m_hash.add({a * factors.low, b * factors.high});
    }

    struct SignLanes {  // which lane has a line's signs, and where in its word they are
        uint32_t word, lane, shift;
    };

    // Where lines `line` and on of a block have what belongs to this thread.
    __device__ static Lines located(uint32_t line, uint32_t place_group) {
        Lines lines;
        BRICKLINE_UNROLL
        for (uint32_t k = 0; k < AHEAD; ++k) {
            lines.at[k] = (line + k) * LINE + (place_group ^ (QUAD * (line + k) / GROUP)) * GROUP;
        }
        return lines;
    }

    // Lines `from` and on of this thread, AHEAD of them; `part` is known to be from % 4.
    template <bool IS_FAST>
    __device__ __forceinline__ void take_lines(uint64_t block, uint32_t from, int part, Lines& lines,
                                               bool is_whole, const SignLanes& signs, double& sum,
                                               uint64_t& a, uint64_t& b) {
        BRICKLINE_UNROLL
        for (int k = 0; k < AHEAD; ++k) hash_group(lines.raw[k], lines.at[k], a, b);
        check(lines, block, is_whole);
        BRICKLINE_UNROLL
        for (int k = 0; k < AHEAD; ++k) {
            const uint32_t word = __shfl_sync(ALL, signs.word, signs.lane + from + k);
            const int line = part + k;  // of four
            const int turn = (QUAD * line ^ line) % GROUP;
            sum_group<IS_FAST>(lines.raw[k], turn, word >> signs.shift, lines.at[k], sum);
        }
    }

    // Sums are kept by place; where places meet buckets changes with the block.
    __device__ void turn_sums(uint32_t turn) {
        const uint32_t change = turn ^ m_turn;
        m_turn = turn;
        BRICKLINE_UNROLL
        for (int bit = 1; bit < GROUP; bit *= 2) {
            if (!(change & bit)) continue;
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) {
                if (k & bit) continue;
                const double kept = m_sketch[k];
                m_sketch[k] = m_sketch[k | bit];
                m_sketch[k | bit] = kept;
            }
        }
    }

    // --- Elements ---

    // Brings a whole block nearer.
    __device__ void fetch(uint64_t block) const {
        constexpr uint32_t BYTES = BLOCK * sizeof(T);
        BRICKLINE_UNROLL
        for (uint32_t k = 0; k < BYTES; k += 4096) {
            const uint32_t at = m_lane * 128 + k;
            if (at < BYTES) BRICKLINE_FETCH_AHEAD(m_job.data + block * BYTES + at);
        }
    }

    __device__ void load_lines(uint64_t block, Lines& lines) const {
        const char* const data = reinterpret_cast<const char*>(m_job.data + block * (BLOCK * sizeof(T)));
        BRICKLINE_UNROLL
        for (int k = 0; k < AHEAD; ++k) {
            lines.raw[k] = platform::load_streamed<Raw>(data + lines.at[k] * sizeof(T));
        }
    }

    // One by one, by strides; zeros beyond the end.
    __device__ __noinline__ static Lines gathered(const Job& job, uint64_t block, Lines lines) {
        BRICKLINE_UNROLL
        for (int line = 0; line < AHEAD; ++line) {
            T element[GROUP];
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) element[k] = at_index(job, block * BLOCK + lines.at[line] + k);
            platform::copy_bits(lines.raw[line], element);
        }
        return lines;
    }
    __device__ __noinline__ static T at_index(const Job& job, uint64_t index) {
        if (index >= job.elements) return T();
        if (!job.axes) return reinterpret_cast<const T*>(job.data)[index];
        int64_t offset = 0;
#pragma unroll 1
        for (uint32_t axis = job.axes; axis-- > 0;) {
            const uint64_t size = job.axis_size[axis], rest = quotient(index, size);
            offset += static_cast<int64_t>(index - rest * size) * job.axis_stride[axis];
            index = rest;
        }
        return reinterpret_cast<const T*>(job.data)[offset];
    }

    // --- Hash ---

    __device__ void hash_group(const Raw& raw, uint32_t at, uint64_t& a, uint64_t& b) const {
        const Raw key = platform::load<Raw>(m_team.key + at * sizeof(T) / 4);
        uint32_t t[WORDS];
        BRICKLINE_UNROLL
        for (int k = 0; k < WORDS; ++k) t[k] = raw.word[k] + key.word[k];
        if constexpr (WORDS == 2) {  // the other half of the sixteen bytes is the neighbour's
            const uint32_t crossed = __shfl_xor_sync(ALL, t[1], 1);
            a += static_cast<uint64_t>(t[0]) * t[1];
            b += static_cast<uint64_t>(t[0]) * crossed;
        } else {
            BRICKLINE_UNROLL
            for (int k = 0; k < WORDS; k += 4) {
                a += static_cast<uint64_t>(t[k]) * t[k + 1];
                a += static_cast<uint64_t>(t[k + 2]) * t[k + 3];
                b += static_cast<uint64_t>(t[k]) * t[k + 3];
                b += static_cast<uint64_t>(t[k + 2]) * t[k + 1];
            }
        }
    }

    // --- Stripes ---

    // Where the block begins, and how far its stripes and its row go, at most 2 * BLOCK. Most blocks
    // of wide tensors lie in the cell of the one before.
    __device__ void find_stripes() {
        const Stripes& stripes = m_job.stripes;
        if (m_row == m_cell_row && m_column >= m_cell_begin && m_column + BLOCK <= m_cell_end) return;
        m_column_stripe = static_cast<uint32_t>(quotient(m_column / QUAD, stripes.width / QUAD));
        m_cell_row = m_row;
        m_cell_begin = m_column_stripe * stripes.width;
        m_cell_end = m_cell_begin + stripes.width;
        if (m_cell_end > stripes.columns) m_cell_end = stripes.columns;
        m_is_narrow = stripes.columns < NARROW;
        m_stripe_left = clipped(m_cell_begin + stripes.width - m_column);
        m_row_left = clipped(stripes.columns - m_column);
        while (m_row >= (m_row_stripe + 1ull) * stripes.height) ++m_row_stripe;
        m_rows_left = clipped((m_row_stripe + 1ull) * stripes.height - m_row);
        m_is_uniform = m_column + BLOCK <= m_cell_end;
        // Whether no row of the block is beyond its row stripe.
        m_has_one_row_stripe = m_rows_left > BLOCK || m_rows_left * stripes.columns >= BLOCK + m_column;
        if (m_row_stripe != m_held_row) flush_row(m_row_stripe);
        if (m_column_stripe != m_held_column) flush_column(m_column_stripe);
    }
    __device__ static uint32_t clipped(uint64_t length) {
        return static_cast<uint32_t>(length < 2 * BLOCK ? length : 2 * BLOCK);
    }

    // Adds a quad to the stripes of its first element, `at` elements into the block.
    __device__ void add_quad(uint32_t at, double sum) {
        uint32_t rows = at >= m_row_left, column;
        if (m_is_narrow) {
            const uint32_t columns = static_cast<uint32_t>(m_job.stripes.columns);
            uint32_t place = static_cast<uint32_t>(m_column) + at;
            if (columns < BLOCK) rows = columns == 1 ? place : __umulhi(place, m_job.row_magic);
            place -= rows * columns;
            column = m_job.column_magic ? __umulhi(place / QUAD, m_job.column_magic) : place / QUAD;
        } else {
            column = rows ? 0 : m_column_stripe + (at >= m_stripe_left);
        }
        m_columns[column * blockDim.x] += sum;
        if (m_has_one_row_stripe) {
            m_row_sum += sum;
        } else {
            uint32_t stripe = m_row_stripe;
            if (rows >= m_rows_left) {
                stripe += 1 + (rows - m_rows_left) / static_cast<uint32_t>(m_job.stripes.height);
            }
            atomicAdd(&m_team.sums.rows[stripe < STRIPES ? stripe : 0], sum);
        }
    }
    // All threads of the warp hold the same stripe, and come here together.
    __device__ void flush_row(uint32_t next) {
        const double sum = sum_over_warp(m_row_sum);
        if (m_lane == 0) atomicAdd(&m_team.sums.rows[m_held_row], sum);
        m_row_sum = 0;
        m_held_row = next;
    }
    __device__ void flush_column(uint32_t next) {
        own_columns();
        m_columns[m_held_column * blockDim.x] += m_column_sum;
        m_column_sum = 0;
        m_held_column = next;
    }
    __device__ void own_columns() {
        if (m_owns_columns) return;
        m_owns_columns = true;
        for (uint32_t k = 0; k < STRIPES; ++k) m_columns[k * blockDim.x] = 0;
    }

    // --- Values ---

    // Extremes, and whatever is unusual: counted, and zero from then on where it is not finite.
    __device__ void check(Lines& lines, uint64_t block, bool is_whole) {
        if constexpr (HAS_RANGE) {
            auto range = m_range;
            BRICKLINE_UNROLL
            for (int line = 0; line < AHEAD; ++line) {
                BRICKLINE_UNROLL
                for (int k = 0; k < WORDS; k += 2) {
                    range.add(lines.raw[line].word[k], lines.raw[line].word[k + 1]);
                }
            }
            if (is_whole && range.is_usual()) m_range = range;
            else check_each(lines, block);
        } else {
            check_values(lines, block, is_whole);
        }
    }
    __device__ void check_values(Lines& lines, uint64_t block, bool is_whole) {
        constexpr Value MOST = N::LOWEST < 0 && -N::LOWEST < N::HIGHEST ? -N::LOWEST : N::HIGHEST;
        bool is_usual = is_whole;
        Value low = m_low, high = m_high;
        BRICKLINE_UNROLL
        for (int line = 0; line < AHEAD; ++line) {
            T element[GROUP];
            platform::copy_bits(element, lines.raw[line]);
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) {
                const Value x = value_of(element[k]), size = magnitude(x);
                is_usual = is_usual && size >= N::TINY && size < MOST;
                low = smaller(low, x);
                high = larger(high, x);
            }
        }
        if (is_usual) {
            m_low = low, m_high = high;
            return;
        }
        check_each(lines, block);
    }
    __device__ void check_each(Lines& lines, uint64_t block) {
        const Checked found = checked({lines, m_low, m_high}, block * BLOCK, m_job, m_team.sums);
        m_low = found.low, m_high = found.high;
        m_zeros += found.counts & 0xff;
        m_subnormals += found.counts >> 8 & 0xff;
        m_saturated += found.counts >> 16;
        if constexpr (N::HAS_NONFINITE) {
            BRICKLINE_UNROLL
            for (int line = 0; line < AHEAD; ++line) {
                T element[GROUP];
                platform::copy_bits(element, lines.raw[line]);
                BRICKLINE_UNROLL
                for (int k = 0; k < GROUP; ++k) {
                    if (!(magnitude(value_of(element[k])) <= N::HIGHEST)) element[k] = T();
                }
                platform::copy_bits(lines.raw[line], element);
            }
        }
    }

    struct Given {
        Lines lines;
        Value low, high;
    };
    struct Checked {
        Value low, high;
        uint32_t counts;  // zeros, subnormals and saturated, eight bits each
    };
    // Looks at every element by itself.
    __device__ __noinline__ static Checked checked(Given given, uint64_t first, const Job& job,
                                                   Partial& sums) {
        Checked found = {given.low, given.high, 0};
        BRICKLINE_UNROLL
        for (int line = 0; line < AHEAD; ++line) {
            T element[GROUP];
            platform::copy_bits(element, given.lines.raw[line]);
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) {
                const Value x = value_of(element[k]), size = magnitude(x);
                const uint64_t index = first + given.lines.at[line] + k;
                if (index >= job.elements) continue;
                if (N::HAS_NONFINITE && !(size <= N::HIGHEST)) {
                    count_nonfinite(sums, x, index);
                    continue;
                }
                found.counts += x == 0 ? 1 : size < N::TINY ? 1 << 8 : 0;
                found.counts += x == N::LOWEST || x == N::HIGHEST ? 1 << 16 : 0;
                found.low = smaller(found.low, x);
                found.high = larger(found.high, x);
            }
        }
        return found;
    }
    __device__ __noinline__ static void count_nonfinite(Partial& sums, Value x, uint64_t index) {
        using Word = unsigned long long;
        Counts counts = {0, 0, 0, 0, 0, ~0ull, ~0ull, 0};
        count_unusual<T>(counts, x, index);
        atomicAdd(reinterpret_cast<Word*>(counts.nan ? &sums.nan : &sums.inf), 1ull);
        atomicMin(reinterpret_cast<Word*>(counts.nan ? &sums.first_nan : &sums.first_inf),
                  static_cast<Word>(index));
        atomicAdd(reinterpret_cast<Word*>(&sums.nonfinite_hash),
                  static_cast<Word>(counts.nonfinite_hash));
    }

    // Sketch, norms and stripes.
    template <bool IS_FAST>
    __device__ __forceinline__ void sum_group(const Raw& raw, int turn, uint32_t signs, uint32_t at,
                                              double& sum) {
        T element[GROUP];
        platform::copy_bits(element, raw);
        BRICKLINE_UNROLL
        for (int quad = 0; quad < GROUP; quad += QUAD) {
            double wide[QUAD];
            BRICKLINE_UNROLL
            for (int k = 0; k < QUAD; ++k) {
                wide[k] = value_of(element[quad + k]);
                const int place = (quad + k) ^ turn;
                m_sketch[place] = platform::fma(wide[k], signs >> place & 1 ? -1.0 : 1.0, m_sketch[place]);
                m_l1[k & 1] += fabs(wide[k]);
                m_squares[k & 1] = platform::fma(wide[k], wide[k], m_squares[k & 1]);
            }
            const double four = (wide[0] + wide[1]) + (wide[2] + wide[3]);
            if constexpr (IS_FAST) sum += four;
            else add_quad(at + quad, four);
        }
    }

    const Job& m_job;
    TeamMemory& m_team;
    double* const m_columns;
    const uint32_t m_lane;
    double m_sketch[GROUP] = {};
    double m_l1[2] = {}, m_squares[2] = {};
    double m_row_sum = 0, m_column_sum = 0;  // of the stripes that are held
    Value m_low = static_cast<Value>(1e308 * 10), m_high = static_cast<Value>(-1e308 * 10);
    Hash m_hash = {0, 0};
    typename RangeOf<T>::Type m_range;
    uint64_t m_row = 0, m_column = 0;
    uint64_t m_cell_row = ~0ull, m_cell_begin = 0, m_cell_end = 0;
    uint32_t m_zeros = 0, m_subnormals = 0, m_saturated = 0;
    uint32_t m_turn = 0;
    uint32_t m_number = 0, m_whole = 0;  // blocks that were taken, and how many are whole and contiguous
    uint32_t m_row_stripe = 0, m_column_stripe = 0, m_held_row = 0, m_held_column = 0;
    uint32_t m_stripe_left = 0, m_row_left = 0, m_rows_left = 0;
    bool m_is_narrow = true, m_is_uniform = false, m_has_one_row_stripe = false;
    bool m_owns_columns = false;
};

// --- Teams ----------------------------------------------------------------------------------------

inline constexpr uint64_t NO_MINIMUM = ~0ull, NO_MAXIMUM = 0;

__device__ inline void clear_team(TeamMemory& team, uint32_t key_count) {
    uint64_t* const words = reinterpret_cast<uint64_t*>(&team.sums);
    for (uint32_t k = threadIdx.x; k < PARTIAL_WORDS; k += blockDim.x) {
        words[k] = k == INTEGERS || k == INTEGERS + 1 ? ~0ull : 0;
    }
    for (uint32_t k = threadIdx.x; k < key_count; k += blockDim.x) team.key[k] = key_of(k);
    __syncthreads();
}

// Doubles in their order as integers: with the sign bit flipped, or all bits where it is set.
__device__ inline uint64_t ordered(double value) {
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(value + 0.0));
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// Word k of a team's sums, of what its warps leave.
__device__ inline void add_up_warps(TeamMemory& team, uint32_t k) {
    const uint32_t warps = blockDim.x / 32;
    Partial& sums = team.sums;
    if (k < DOUBLES) {
        const uint32_t stripe = k % STRIPES;
        const bool is_row = k >= SKETCH_BUCKETS && k < SKETCH_BUCKETS + STRIPES;
        const bool is_column = k >= SKETCH_BUCKETS + STRIPES && k < SKETCH_BUCKETS + 2 * STRIPES;
        double* const to = sums.sketch + k;
        double sum = *to;
        for (uint32_t number = 0; number < warps; ++number) {
            const WarpSums& warp = team.warp[number];
            if (is_row) sum += warp.row_stripe == stripe ? warp.row : 0;
            else if (is_column) sum += warp.column_stripe == stripe ? warp.column : 0;
            else sum += k < SKETCH_BUCKETS ? warp.sketch[k] : k == DOUBLES - 2 ? warp.l1 : warp.squares;
        }
        *to = sum;
    } else if (k < DOUBLES + 2) {
        uint64_t sum = 0;
        for (uint32_t number = 0; number < warps; ++number) sum += team.warp[number].hash[k - DOUBLES];
        sums.hash[k - DOUBLES] = sum;
    } else if (k == DOUBLES + 2) {
        double low = team.warp[0].low, high = team.warp[0].high;
        for (uint32_t number = 1; number < warps; ++number) {
            low = smaller(low, team.warp[number].low);
            high = larger(high, team.warp[number].high);
        }
        const bool has_finite = low <= high;
        sums.minimum = has_finite ? ordered(low) : NO_MINIMUM;
        sums.maximum = has_finite ? ordered(high) : NO_MAXIMUM;
    }
}

// The warps' sums, and the column stripes of the threads where somebody has any.
__device__ inline void add_up_team(TeamMemory& team, double* columns, bool owns_columns) {
    const bool have_columns = __syncthreads_or(owns_columns);
    for (uint32_t k = threadIdx.x; k < DOUBLES + 3; k += blockDim.x) add_up_warps(team, k);
    if (have_columns) {
        for (uint32_t k = 0; k < STRIPES && !owns_columns; ++k) columns[k * blockDim.x + threadIdx.x] = 0;
        __syncthreads();
        const uint32_t lane = threadIdx.x % 32;
        for (uint32_t stripe = threadIdx.x / 32; stripe < STRIPES; stripe += blockDim.x / 32) {
            double sum = 0;
            for (uint32_t k = lane; k < blockDim.x; k += 32) sum += columns[stripe * blockDim.x + k];
            sum = sum_over_warp(sum);
            if (lane == 0) team.sums.columns[stripe] += sum;
        }
    }
    __syncthreads();
}

// Adds word k of `count` partial results, in a fixed order.
__device__ inline uint64_t joined(const uint64_t* partials, uint32_t count, uint32_t k) {
    constexpr uint32_t AT_ONCE = 32;
    const uint64_t* const words = partials + k;
    const bool is_least = k >= INTEGERS && k != INTEGERS + 3;
    const uint64_t none = is_least ? ~0ull : 0;
    double sum[4] = {};
    uint64_t whole = 0, extreme = none;
#pragma unroll 1
    for (uint32_t from = 0; from < count; from += AT_ONCE) {
        uint64_t word[AT_ONCE];
        BRICKLINE_UNROLL
        for (uint32_t j = 0; j < AT_ONCE; ++j) {
            word[j] = from + j < count ? __ldcg(words + uint64_t(from + j) * PARTIAL_WORDS) : none;
        }
        if (k < DOUBLES) {
            BRICKLINE_UNROLL
            for (uint32_t j = 0; j < AT_ONCE; ++j) {
                sum[j % 4] += __longlong_as_double(static_cast<int64_t>(word[j]));
            }
        } else {
            BRICKLINE_UNROLL
            for (uint32_t j = 0; j < AT_ONCE; ++j) {
                whole += word[j];
                extreme = (word[j] < extreme) == is_least ? word[j] : extreme;
            }
        }
    }
    if (k >= DOUBLES) return k < INTEGERS ? whole : extreme;
    return static_cast<uint64_t>(__double_as_longlong((sum[0] + sum[1]) + (sum[2] + sum[3])));
}

// The team's sums to the record, which is put together where the keys were.
__device__ inline void finish_team(const Job& job, TeamMemory& team) {
    Partial& sums = team.sums;
    FingerprintRow& row = *reinterpret_cast<FingerprintRow*>(team.key);
    const uint32_t thread = threadIdx.x;
    for (uint32_t k = thread; k < SKETCH_BUCKETS; k += blockDim.x) row.sketch[k] = sums.sketch[k];
    if (thread < STRIPES) {
        row.rows[thread] = static_cast<float>(sums.rows[thread]);
        row.columns[thread] = static_cast<float>(sums.columns[thread]);
    }
    if (thread < FINGERPRINT_DIMENSIONS) row.shape[thread] = job.shape[thread];
    if (thread / 32 == 1) {
        const double total = sum_over_warp(sums.rows[thread % 32]);
        if (thread == 32) {
            const uint64_t low = sums.minimum, high = sums.maximum;
            const bool has_finite = low != NO_MINIMUM;
            const double minimum = __longlong_as_double(
                static_cast<int64_t>(low >> 63 ? low & ~(1ull << 63) : ~low));
            const double maximum = __longlong_as_double(
                static_cast<int64_t>(high >> 63 ? high & ~(1ull << 63) : ~high));
            row.total = total;
            row.minimum = has_finite ? minimum + 0.0 : 0.0;
            row.maximum = has_finite ? maximum + 0.0 : 0.0;
            row.absmax = row.maximum > -row.minimum ? row.maximum : -row.minimum + 0.0;
        }
    }
    if (thread == 64) {
        const Hash hash = mixed({sums.hash[0], sums.hash[1]});
        row.hash[0] = hash.low, row.hash[1] = hash.high;
        row.l1 = sums.l1;
        row.l2 = platform::sqrt(sums.squares);
        row.elements = job.elements;
        row.nan_count = sums.nan;
        row.inf_count = sums.inf;
        row.first_nan = static_cast<int64_t>(sums.first_nan);
        row.first_inf = static_cast<int64_t>(sums.first_inf);
        row.nonfinite_hash = sums.nonfinite_hash;
        row.zeros = sums.zeros;
        row.subnormals = sums.subnormals;
        row.saturated = sums.saturated;
        row.dtype = job.dtype;
        row.dimensions = job.dimensions;
        row.version = FINGERPRINT_VERSION;
        row.reserved = 0;
    }
    __syncthreads();
    uint64_t* const to = reinterpret_cast<uint64_t*>(job.row);
    const uint64_t* const from = reinterpret_cast<const uint64_t*>(&row);
    for (uint32_t k = thread; k < sizeof(row) / 8; k += blockDim.x) to[k] = from[k];
}

// One CUDA block's part of a launch. `scratch` holds a counter for each job, and the partial results.
template <class T, uint32_t COUNT>
__device__ void take_batch(const Batch<COUNT>& batch, char* scratch) {
    extern __shared__ uint4 memory[];
    TeamMemory& team = *reinterpret_cast<TeamMemory*>(memory);
    double* const columns = reinterpret_cast<double*>(memory + TEAM_BYTES / 16);
    uint32_t number = 0;
    if constexpr (COUNT > 1) {
        while (number + 1 < COUNT && batch.job[number + 1].teams &&
               blockIdx.x >= batch.job[number + 1].first_team) {
            ++number;
        }
    }
    const Job& job = batch.job[number];
    {
        Taker<T> taker(job, team, columns);
        taker.prepare();
        clear_team(team, BLOCK * sizeof(T) / 4);
        taker.take();
        taker.give();
        add_up_team(team, columns, taker.owns_columns());
    }
    if (job.teams > 1) {
        uint64_t* const partials = reinterpret_cast<uint64_t*>(scratch + COUNTER_BYTES) +
                                   uint64_t(job.first_team) * PARTIAL_WORDS;
        uint64_t* const mine = partials + uint64_t(blockIdx.x - job.first_team) * PARTIAL_WORDS;
        uint64_t* const words = reinterpret_cast<uint64_t*>(&team.sums);
        for (uint32_t k = threadIdx.x; k < PARTIAL_WORDS; k += blockDim.x) __stcg(mine + k, words[k]);
        __threadfence();
        __syncthreads();
        uint32_t* const counter = reinterpret_cast<uint32_t*>(scratch) + number;
        if (threadIdx.x == 0) team.is_last = atomicAdd(counter, 1u) + 1 == job.teams;
        __syncthreads();
        if (!team.is_last) return;
        __threadfence();
        if (threadIdx.x == 0) *counter = 0;
        for (uint32_t k = threadIdx.x; k < PARTIAL_WORDS; k += blockDim.x) {
            words[k] = joined(partials, job.teams, k);
        }
        __syncthreads();
    }
    finish_team(job, team);
}

}  // namespace brickline::fingerprint
