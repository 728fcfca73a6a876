// fingerprint_cuda.h: fingerprints of tensors in CUDA memory, one launch for up to eight of them.
// fingerprint.h says what a fingerprint is; this file, which NVRTC alone reads, how threads share it.
//
// A warp takes one block of 1024 elements at a time. Of a line of 64, GROUP elements belong to each of
// LANES threads: those whose BUCKETS the thread owns from the first block to the last, so that the sketch
// stays in its registers. Since places are columns, turned in groups, what a thread loads is a vector of
// the line, and a warp still loads whole lines. Four lines, a strip, are loaded at a time, and the next
// strip while the one before is added up.
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

// How far a warp is: its next block, and the cell of the stripes in which that begins.
struct Walk {
    uint64_t row, column;
    uint64_t cell_row, cell_begin, cell_end;
    uint32_t row_stripe, column_stripe, held_row, held_column;
    uint32_t stripe_left, row_left, rows_left;  // how far the block's stripes and its row go
    bool is_narrow, is_uniform, has_one_row_stripe;
};

inline constexpr uint32_t NO_STRIPE = ~0u;

// What a thread needs now and then, kept out of the registers of its loop.
template <class Value>
using OfThreads = Value[256];

// Shared memory of a team: one Partial, the keys, the parts of its warps and threads, and the column
// stripes of every thread for itself: columns[stripe * threads + thread]. Those are cleared by who
// needs them.
struct TeamMemory {
    Partial sums;
    uint32_t key[KEYS];
    WarpSums warp[8];
    Walk walk[8];
    OfThreads<double> row_sum, column_sum;  // of the stripes that are held
    OfThreads<double> low, high;
    OfThreads<uint32_t> zeros, subnormals, saturated, owns_columns;
    Hash factors[8][32];  // of the next blocks of each warp
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
// A quotient; nearly always of numbers for which 32 bits suffice, and in small tensors often 0.
BRICKLINE_INLINE uint64_t quotient(uint64_t a, uint64_t b) {
    if (a < b) return 0;
    if ((a | b) >> 32) return a / b;
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}
BRICKLINE_INLINE float smaller(float a, float b) { return fminf(a, b); }
BRICKLINE_INLINE float larger(float a, float b) { return fmaxf(a, b); }
BRICKLINE_INLINE double smaller(double a, double b) { return b < a ? b : a; }
BRICKLINE_INLINE double larger(double a, double b) { return b > a ? b : a; }

// Values whose bits are a sign and a magnitude, one to a word or two, as the extremes of those bits.
// Bits as signed numbers have the largest positive value on top, as unsigned ones the most negative.
template <class T> struct Bits { static constexpr bool IS_KNOWN = false, IS_BF16 = false; };
template <> struct Bits<float> {
    static constexpr bool IS_KNOWN = true, IS_BF16 = false;
    static constexpr uint32_t SIGN = 0x80000000u, TINY = 0x00800000u, MOST = 0x7f7fffffu;
};
template <uint32_t SMALLEST_NORMAL, uint32_t HIGHEST>
struct HalfBits {
    static constexpr bool IS_KNOWN = true, IS_BF16 = HIGHEST == 0x7f7f;
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
    static constexpr int ROUNDS = LANES / 8;              // strips of a thread in a block, consecutive
    static constexpr int WORDS = GROUP * sizeof(T) / 4;   // of a group
    static constexpr bool HAS_RANGE = Bits<T>::IS_KNOWN;
    static constexpr bool IS_BF16 = Bits<T>::IS_BF16;

    struct Raw {
        uint32_t word[WORDS];
    };
    struct Lines {  // a thread's part of a strip, and where in the block it lies
        Raw raw[STRIP];
        uint32_t first;

        // The line whose sign is turned comes first, then its neighbours. Numbers and turns of a
        // strip's lines differ in bits that nothing else of `first` is made of.
        BRICKLINE_INLINE uint32_t at(int line) const { return first ^ line * (LINE + line_turn(1)); }
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
        clear_mine();
        Walk walk = walk_from(first < blocks ? first * BLOCK : 0);
        const uint64_t whole = m_job.axes == 0 ? m_job.elements / BLOCK : 0;
        m_whole = first < whole ? static_cast<uint32_t>(quotient(whole - 1 - first, stride)) + 1 : 0;
        for (uint64_t block = first; block < blocks;) {
            find_stripes(walk);
            if (m_number < m_whole && walk.is_uniform) {
                const uint32_t count = blocks_alike(walk);
                walk.column += (count - 1) * m_job.step_columns;
                keep(walk);
                const double sum = take_alike(block, stride, count);
                walk = m_team.walk[threadIdx.x / 32];
                block += count * stride;
                mine(m_team.row_sum) += sum;
                mine(m_team.column_sum) += sum;
            } else {
                own_columns();
                take_block(walk, block, stride);
                block += stride;
            }
            walk.row += m_job.step_rows;
            walk.column += m_job.step_columns;
            if (walk.column >= m_job.stripes.columns) {
                walk.column -= m_job.stripes.columns;
                ++walk.row;
            }
        }
        keep(walk);
    }

    // Leaves what this warp has to its team; all threads of the team come here.
    __device__ void give() {
        WarpSums& left = m_team.warp[threadIdx.x / 32];
        const bool is_upper = m_lane >= 16;
        give_sketch(left.sketch);
        const double norm = sums_of_two(m_l1, m_squares, is_upper);
        const double sum = sums_of_two(mine(m_team.row_sum), mine(m_team.column_sum), is_upper);
        const uint64_t hash = sums_of_two(m_hash.low, m_hash.high, is_upper);
        if constexpr (HAS_RANGE) extend_range();
        double low = mine(m_team.low), high = mine(m_team.high);
        BRICKLINE_UNROLL
        for (uint32_t mask = 16; mask; mask /= 2) {
            low = smaller(low, from_lane(low, mask));
            high = larger(high, from_lane(high, mask));
        }
        if (m_lane % 16 == 0) {
            (is_upper ? left.squares : left.l1) = norm;
            (is_upper ? left.column : left.row) = sum;
            left.hash[is_upper] = hash;
        }
        if (m_lane == 0) {
            const Walk& walk = m_team.walk[threadIdx.x / 32];
            left.row_stripe = walk.held_row, left.column_stripe = walk.held_column;
            left.low = low, left.high = high;
        }
        const uint32_t zeros = mine(m_team.zeros), subnormals = mine(m_team.subnormals);
        const uint32_t saturated = mine(m_team.saturated);
        if (__any_sync(ALL, zeros | subnormals | saturated)) {
            add_to_team(m_team.sums.zeros, static_cast<uint64_t>(zeros));
            add_to_team(m_team.sums.subnormals, static_cast<uint64_t>(subnormals));
            add_to_team(m_team.sums.saturated, static_cast<uint64_t>(saturated));
        }
    }
    __device__ bool owns_columns() const { return mine(m_team.owns_columns); }

  private:
    __device__ uint64_t first_block() const {
        return static_cast<uint64_t>(blockIdx.x - m_job.first_team) * (blockDim.x / 32) + threadIdx.x / 32;
    }
    template <class Value>
    __device__ static Value& mine(OfThreads<Value>& values) { return values[threadIdx.x]; }

    __device__ void clear_mine() {
        mine(m_team.row_sum) = mine(m_team.column_sum) = 0;
        mine(m_team.low) = 1e308 * 10, mine(m_team.high) = -1e308 * 10;
        mine(m_team.zeros) = mine(m_team.subnormals) = mine(m_team.saturated) = 0;
        mine(m_team.owns_columns) = 0;
    }
    __device__ Walk walk_from(uint64_t index) const {
        Walk walk = {};
        walk.row = quotient(index, m_job.stripes.columns);
        walk.column = index - walk.row * m_job.stripes.columns;
        walk.cell_row = ~0ull;
        walk.row_stripe = walk.held_row = static_cast<uint32_t>(quotient(walk.row, m_job.stripes.height));
        walk.held_column = NO_STRIPE;
        return walk;
    }
    // For all lanes, which hold the same.
    __device__ void keep(const Walk& walk) {
        __syncwarp();  // nobody still reads what was kept before
        if (m_lane == 0) m_team.walk[threadIdx.x / 32] = walk;
        __syncwarp();
    }
    __device__ void add_to_team(uint64_t& to, uint64_t value) {
        value = sum_over_warp(value);
        if (m_lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), value);
    }
    // Threads with the same places add up: each time one half of them takes one half of the places.
    __device__ void give_sketch(double* sketch) {
        if (GROUP > QUAD && m_lane >= 16) {  // whose elements were those of the other half of the group
            BRICKLINE_UNROLL
            for (int k = 0; k < QUAD; ++k) {
                const double kept = m_sketch[k];
                m_sketch[k] = m_sketch[k ^ GROUP / 2];
                m_sketch[k ^ GROUP / 2] = kept;
            }
        }
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
    __device__ uint32_t blocks_alike(const Walk& walk) const {
        if (m_job.step_rows) return 1;
        const uint64_t left = m_whole - m_number - 1;
        if (!left) return 1;
        const uint64_t here = quotient(walk.cell_end - BLOCK - walk.column, m_job.step_columns);
        return static_cast<uint32_t>(left < here ? left : here) + 1;
    }

    // Which group of places this thread has in a block.
    __device__ uint32_t group_of(uint32_t turn) const { return (m_lane % LANES) ^ (turn / GROUP); }

    // The signs of a block: bit 16 * round + k belongs to element k of the lines of that round.
    __device__ uint32_t my_signs(uint64_t block, uint32_t group) const {
        const uint32_t place = group * GROUP, pair = m_lane / 16;
        uint32_t signs = signs_of(block, pair, place / 16) >> place % 16;
        if constexpr (GROUP > QUAD) {
            signs >>= m_lane / 8 % 2 * 16;
            if (pair) signs = signs >> QUAD & 0xf | signs << QUAD;
        }
        return signs;
    }
    // By what a and b of a block count; 32 lanes find it for 32 blocks at once.
    __device__ Hash my_factors(uint64_t block, uint64_t stride) {
        Hash* const factors = m_team.factors[threadIdx.x / 32];
        if (m_number % 32 == 0) {
            __syncwarp();
            factors[m_lane] = factors_of(block + m_lane * stride);
            __syncwarp();
        }
        return factors[m_number % 32];
    }

    // `count` blocks, which are whole, contiguous, and in one cell of the stripes.
    __device__ __forceinline__ double take_alike(uint64_t block, uint64_t stride, uint32_t count) {
        double sum = 0;
        uint32_t next_turn = turn_of(block);
        Lines next = located(0, next_turn);
        load_lines(block, next);
#pragma unroll 1
        for (const uint32_t end = m_number + count; m_number < end; block += stride) {
            const uint32_t turn = next_turn;
            const Hash factors = my_factors(block, stride);
            const bool has_next = ++m_number < end;
            if (m_number + 1 < end) fetch(block + 2 * stride);
            const uint32_t signs = my_signs(block, group_of(turn));
            uint64_t a = 0, b = 0;
            next_turn = turn_of(block + stride);
            BRICKLINE_UNROLL
            for (int round = 0; round < ROUNDS; ++round) {
                Lines lines = next;
                if (round + 1 < ROUNDS) {
                    next = located(round + 1, turn);
                    load_lines(block, next);
                } else if (has_next) {
                    next = located(0, next_turn);
                    load_lines(block + stride, next);
                }
                sum += take_strip<true>(nullptr, block, lines, true, turn, signs >> 16 * round, a, b);
            }
            m_hash.add({a * factors.low, b * factors.high});
        }
        return sum;
    }

    // Any block.
    __device__ __forceinline__ void take_block(const Walk& walk, uint64_t block, uint64_t stride) {
        const Hash factors = my_factors(block, stride);
        const bool is_whole = m_number < m_whole;
        if (++m_number < m_whole) fetch(block + stride);
        const uint32_t turn = turn_of(block);
        uint32_t signs = my_signs(block, group_of(turn));
        uint64_t a = 0, b = 0;
#pragma unroll 1
        for (int round = 0; round < ROUNDS; ++round) {
            Lines lines = located(round, turn);
            if (is_whole) load_lines(block, lines);
            else lines = gathered(m_job, block, lines);
            take_strip<false>(&walk, block, lines, is_whole, turn, signs, a, b);
            signs >>= 16;
        }
        m_hash.add({a * factors.low, b * factors.high});
    }

    // Where a strip has what belongs to this thread.
    __device__ Lines located(uint32_t round, uint32_t turn) const {
        Lines lines;
        const uint32_t line = (m_lane / LANES * ROUNDS + round) * STRIP;
        const uint32_t place = group_of(turn) * GROUP;
        lines.first = line * LINE + (place ^ line_turn(line) / GROUP * GROUP);
        lines.first ^= place / 8 % STRIP * (LINE + line_turn(1));
        return lines;
    }

    // One strip; IS_FAST: all of it lies in one cell of the stripes, whose sum is asked for.
    template <bool IS_FAST>
    __device__ __forceinline__ double take_strip(const Walk* walk, uint64_t block, Lines& lines, bool is_whole,
                                                 uint32_t turn, uint32_t signs, uint64_t& a, uint64_t& b) {
        hash_lines(lines, a, b);
        check(lines, block, is_whole);
        double given[GROUP], quad[STRIP], sum = 0;
        BRICKLINE_UNROLL
        for (int k = 0; k < GROUP; ++k) {
            double x[STRIP];
            BRICKLINE_UNROLL
            for (int line = 0; line < STRIP; ++line) x[line] = value_at(lines.raw[line], k);
            const double three = (x[1] + x[2]) + x[3];
            given[k] = turned_sign(three - x[0], signs << (31 - k));
            if constexpr (IS_FAST) sum += three + x[0];
            if constexpr (!IS_FAST) {
                BRICKLINE_UNROLL
                for (int line = 0; line < STRIP; ++line) {
                    quad[line] = k % QUAD ? quad[line] + x[line] : x[line];
                    if (k % QUAD == QUAD - 1) add_quad(*walk, lines.at(line) + k / QUAD * QUAD, quad[line]);
                }
            }
            m_l1 += (fabs(x[0]) + fabs(x[1])) + (fabs(x[2]) + fabs(x[3]));
            BRICKLINE_UNROLL
            for (int line = 0; line < STRIP; ++line) {
                m_squares = platform::fma(x[line], x[line], m_squares);
            }
        }
        add_turned(turn, given);
        return sum;
    }
    __device__ static Value value_at(const Raw& raw, int k) {
        if constexpr (IS_BF16) {  // which the compiler would do in two steps
            return platform::float_of(k % 2 ? raw.word[k / 2] & 0xffff0000u : raw.word[k / 2] << 16);
        } else {
            T element[GROUP];
            platform::copy_bits(element, raw);
            return value_of(element[k]);
        }
    }
    // The value, with the other sign where the upper bit is set.
    __device__ static double turned_sign(double value, uint32_t bits) {
        const int high = __double2hiint(value) ^ static_cast<int>(bits & 0x80000000u);
        return __hiloint2double(high, __double2loint(value));
    }

    // Sums by place to those by bucket. All lanes turn alike.
    __device__ __forceinline__ void add_turned(uint32_t turn, const double (&given)[GROUP]) {
        switch (turn % GROUP) {
            case 0: return add_to_buckets<0>(given);
            case 1: return add_to_buckets<1>(given);
            case 2: return add_to_buckets<2>(given);
            case 3: return add_to_buckets<3>(given);
            case 4: return add_to_buckets<4 % GROUP>(given);
            case 5: return add_to_buckets<5 % GROUP>(given);
            case 6: return add_to_buckets<6 % GROUP>(given);
            default: return add_to_buckets<7 % GROUP>(given);
        }
    }
    template <int TURN>
    __device__ __forceinline__ void add_to_buckets(const double (&given)[GROUP]) {
        BRICKLINE_UNROLL
        for (int k = 0; k < GROUP; ++k) m_sketch[k ^ TURN] += given[k];
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
        for (int k = 0; k < STRIP; ++k) {
            lines.raw[k] = platform::load_streamed<Raw>(data + lines.at(k) * sizeof(T));
        }
    }

    // One by one, by strides; zeros beyond the end.
    __device__ __noinline__ static Lines gathered(const Job& job, uint64_t block, Lines lines) {
        BRICKLINE_UNROLL
        for (int line = 0; line < STRIP; ++line) {
            T element[GROUP];
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) element[k] = at_index(job, block * BLOCK + lines.at(line) + k);
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

    __device__ __forceinline__ void hash_lines(const Lines& lines, uint64_t& a, uint64_t& b) const {
        uint32_t crossed[STRIP];
        if constexpr (WORDS == 2) {
            // The other half of the sixteen bytes is the neighbour's, who has the lines the other way round.
            BRICKLINE_UNROLL
            for (int line = 0; line < STRIP; ++line) {
                crossed[line] = __shfl_xor_sync(ALL, keyed(lines, line ^ 1).word[1], 1);
            }
        }
        BRICKLINE_UNROLL
        for (int line = 0; line < STRIP; ++line) {
            const Raw t = keyed(lines, line);
            if constexpr (WORDS == 2) {
                a += static_cast<uint64_t>(t.word[0]) * t.word[1];
                b += static_cast<uint64_t>(t.word[0]) * crossed[line];
            } else {
                BRICKLINE_UNROLL
                for (int k = 0; k < WORDS; k += 4) {
                    a += static_cast<uint64_t>(t.word[k]) * t.word[k + 1];
                    a += static_cast<uint64_t>(t.word[k + 2]) * t.word[k + 3];
                    b += static_cast<uint64_t>(t.word[k]) * t.word[k + 3];
                    b += static_cast<uint64_t>(t.word[k + 2]) * t.word[k + 1];
                }
            }
        }
    }
    __device__ __forceinline__ Raw keyed(const Lines& lines, int line) const {
        Raw t = platform::load<Raw>(m_team.key + lines.at(line) * sizeof(T) / 4);
        BRICKLINE_UNROLL
        for (int k = 0; k < WORDS; ++k) t.word[k] += lines.raw[line].word[k];
        return t;
    }

    // --- Stripes ---

    // Where the block begins, and how far its stripes and its row go, at most 2 * BLOCK. Most blocks
    // of wide tensors lie in the cell of the one before.
    __device__ void find_stripes(Walk& walk) {
        const Stripes& stripes = m_job.stripes;
        if (walk.row == walk.cell_row && walk.column >= walk.cell_begin && walk.column + BLOCK <= walk.cell_end) return;
        walk.column_stripe = static_cast<uint32_t>(quotient(walk.column / QUAD, stripes.width / QUAD));
        walk.cell_row = walk.row;
        walk.cell_begin = walk.column_stripe * stripes.width;
        walk.cell_end = walk.cell_begin + stripes.width;
        if (walk.cell_end > stripes.columns) walk.cell_end = stripes.columns;
        walk.is_narrow = stripes.columns < NARROW;
        walk.stripe_left = clipped(walk.cell_begin + stripes.width - walk.column);
        walk.row_left = clipped(stripes.columns - walk.column);
        while (walk.row >= (walk.row_stripe + 1ull) * stripes.height) ++walk.row_stripe;
        walk.rows_left = clipped((walk.row_stripe + 1ull) * stripes.height - walk.row);
        walk.is_uniform = walk.column + BLOCK <= walk.cell_end;
        // Whether no row of the block is beyond its row stripe.
        walk.has_one_row_stripe = walk.rows_left > BLOCK || walk.rows_left * stripes.columns >= BLOCK + walk.column;
        if (walk.row_stripe != walk.held_row) flush_row(walk);
        if (walk.held_column == NO_STRIPE) walk.held_column = walk.column_stripe;
        if (walk.column_stripe != walk.held_column) flush_column(walk);
    }
    __device__ static uint32_t clipped(uint64_t length) {
        return static_cast<uint32_t>(length < 2 * BLOCK ? length : 2 * BLOCK);
    }

    // Adds a quad to the stripes of its first element, `at` elements into the block.
    __device__ void add_quad(const Walk& walk, uint32_t at, double sum) {
        uint32_t rows = at >= walk.row_left, column;
        if (walk.is_narrow) {
            const uint32_t columns = static_cast<uint32_t>(m_job.stripes.columns);
            uint32_t place = static_cast<uint32_t>(walk.column) + at;
            if (columns < BLOCK) rows = columns == 1 ? place : __umulhi(place, m_job.row_magic);
            place -= rows * columns;
            column = m_job.column_magic ? __umulhi(place / QUAD, m_job.column_magic) : place / QUAD;
        } else {
            column = rows ? 0 : walk.column_stripe + (at >= walk.stripe_left);
        }
        m_columns[column * blockDim.x] += sum;
        if (walk.has_one_row_stripe) {
            mine(m_team.row_sum) += sum;
        } else {
            uint32_t stripe = walk.row_stripe;
            if (rows >= walk.rows_left) {
                stripe += 1 + (rows - walk.rows_left) / static_cast<uint32_t>(m_job.stripes.height);
            }
            atomicAdd(&m_team.sums.rows[stripe < STRIPES ? stripe : 0], sum);
        }
    }
    // All threads of the warp hold the same stripe, and come here together.
    __device__ void flush_row(Walk& walk) {
        const double sum = sum_over_warp(mine(m_team.row_sum));
        if (m_lane == 0) atomicAdd(&m_team.sums.rows[walk.held_row], sum);
        mine(m_team.row_sum) = 0;
        walk.held_row = walk.row_stripe;
    }
    __device__ void flush_column(Walk& walk) {
        own_columns();
        m_columns[walk.held_column * blockDim.x] += mine(m_team.column_sum);
        mine(m_team.column_sum) = 0;
        walk.held_column = walk.column_stripe;
    }
    __device__ void own_columns() {
        if (mine(m_team.owns_columns)) return;
        mine(m_team.owns_columns) = 1;
        for (uint32_t k = 0; k < STRIPES; ++k) m_columns[k * blockDim.x] = 0;
    }

    // --- Values ---

    // Extremes, and whatever is unusual: counted, and zero from then on where it is not finite.
    __device__ void check(Lines& lines, uint64_t block, bool is_whole) {
        if constexpr (HAS_RANGE) {
            auto range = m_range;
            BRICKLINE_UNROLL
            for (int line = 0; line < STRIP; ++line) {
                BRICKLINE_UNROLL
                for (int k = 0; k < WORDS; k += 2) {
                    range.add(lines.raw[line].word[k], lines.raw[line].word[k + 1]);
                }
            }
            if (is_whole && range.is_usual()) m_range = range;
            else check_each(lines, block);
        } else if (!is_whole || !check_values(lines)) {
            check_each(lines, block);
        }
    }
    // Whether all values are usual; then their extremes are known.
    __device__ __forceinline__ bool check_values(const Lines& lines) {
        constexpr Value MOST = N::LOWEST < 0 && -N::LOWEST < N::HIGHEST ? -N::LOWEST : N::HIGHEST;
        bool is_usual = true;
        Value low = value_at(lines.raw[0], 0), high = low;
        BRICKLINE_UNROLL
        for (int line = 0; line < STRIP; ++line) {
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) {
                const Value x = value_at(lines.raw[line], k), size = magnitude(x);
                is_usual = is_usual && size >= N::TINY && size < MOST;
                low = smaller(low, x);
                high = larger(high, x);
            }
        }
        if (!is_usual) return false;
        mine(m_team.low) = smaller(mine(m_team.low), static_cast<double>(low));
        mine(m_team.high) = larger(mine(m_team.high), static_cast<double>(high));
        return true;
    }
    __device__ void extend_range() {
        float low = static_cast<float>(mine(m_team.low)), high = static_cast<float>(mine(m_team.high));
        m_range.extend(low, high);
        mine(m_team.low) = low, mine(m_team.high) = high;
    }
    // One line after the other: the first of four is looked at, and put behind the others.
    __device__ __forceinline__ void check_each(Lines& lines, uint64_t block) {
        const uint64_t first = block * BLOCK, left = m_job.elements - first;
#pragma unroll 1
        for (int line = 0; line < STRIP; ++line) {
            const uint32_t at = lines.at(line);
            const Raw raw = looked_at(lines.raw[0], first + at, at < left ? left - at : 0);
            BRICKLINE_UNROLL
            for (int k = 1; k < STRIP; ++k) lines.raw[k - 1] = lines.raw[k];
            lines.raw[STRIP - 1] = raw;
        }
    }
    // Counts what is unusual in a group, of which `left` elements are within the tensor. What is not
    // finite is zero in what it returns.
    __device__ __forceinline__ Raw looked_at(const Raw& raw, uint64_t index, uint64_t left) {
        double low = mine(m_team.low), high = mine(m_team.high);
        uint32_t zeros = 0, subnormals = 0, saturated = 0, nonfinite = 0;
        BRICKLINE_UNROLL
        for (int k = 0; k < GROUP; ++k) {
            const Value x = value_at(raw, k), size = magnitude(x);
            const bool is_finite = !N::HAS_NONFINITE || size <= N::HIGHEST;
            if (!is_finite) nonfinite |= 1u << k;
            if (!is_finite || k >= left) continue;
            zeros += x == 0;
            subnormals += x != 0 && size < N::TINY;
            saturated += x == N::LOWEST || x == N::HIGHEST;
            low = smaller(low, static_cast<double>(x));
            high = larger(high, static_cast<double>(x));
        }
        mine(m_team.low) = low, mine(m_team.high) = high;
        mine(m_team.zeros) += zeros;
        mine(m_team.subnormals) += subnormals;
        mine(m_team.saturated) += saturated;
        if (N::HAS_NONFINITE && nonfinite) return without_nonfinite(raw, nonfinite, index);
        return raw;
    }
    __device__ __forceinline__ Raw without_nonfinite(const Raw& raw, uint32_t nonfinite, uint64_t index) {
        T element[GROUP];
        platform::copy_bits(element, raw);
#pragma unroll 1
        for (int number = 0; number < GROUP; ++number) {
            if (!(nonfinite >> number & 1)) continue;
            Value x = 0;
            BRICKLINE_UNROLL
            for (int k = 0; k < GROUP; ++k) {
                if (k != number) continue;
                x = value_of(element[k]);
                element[k] = T();
            }
            count_nonfinite(m_team.sums, x, index + number);
        }
        Raw kept;
        platform::copy_bits(kept, element);
        return kept;
    }
    __device__ __forceinline__ static void count_nonfinite(Partial& sums, Value x, uint64_t index) {
        using Word = unsigned long long;
        const bool is_nan = x != x;
        atomicAdd(reinterpret_cast<Word*>(is_nan ? &sums.nan : &sums.inf), 1ull);
        atomicMin(reinterpret_cast<Word*>(is_nan ? &sums.first_nan : &sums.first_inf), static_cast<Word>(index));
        atomicAdd(reinterpret_cast<Word*>(&sums.nonfinite_hash),
                  static_cast<Word>(nonfinite_term(index, is_nan ? 1 : x > 0 ? 2 : 3)));
    }

    const Job& m_job;
    TeamMemory& m_team;
    double* const m_columns;
    const uint32_t m_lane;
    double m_sketch[GROUP] = {};
    double m_l1 = 0, m_squares = 0;
    Hash m_hash = {0, 0};
    typename RangeOf<T>::Type m_range;
    uint32_t m_number = 0, m_whole = 0;  // blocks that were taken, and how many are whole and contiguous
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
        __syncthreads();
        uint32_t* const counter = reinterpret_cast<uint32_t*>(scratch) + number;
        if (threadIdx.x == 0) {  // whose fence holds for what the others wrote before the barrier
            __threadfence();
            team.is_last = atomicAdd(counter, 1u) + 1 == job.teams;
        }
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
