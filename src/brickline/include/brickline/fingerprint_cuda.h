// fingerprint_cuda.h: fingerprints of tensors in CUDA memory, one launch for up to eight of them.
// fingerprint.h says what a fingerprint is; this file, which NVRTC alone reads, how threads share it.
//
// A warp takes one block of 1024 elements at a time. Of a line of 64, GROUP elements belong to each of
// LANES threads: those whose PLACE the thread owns, so that a thread owns its buckets from the first
// block to the last and the sketch stays in its registers. Since places are columns, turned, what a
// thread loads is a permuted vector of the line, and a warp still loads whole lines.
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

// Shared memory of a team: one Partial, the keys, the parts of its warps, and the column stripes of
// every thread for itself: columns[stripe * threads + thread].
struct TeamMemory {
    Partial sums;
    uint32_t key[KEYS];
    double warp[8][SKETCH_BUCKETS];
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
BRICKLINE_INLINE double flipped(double value, uint32_t sign) {  // by the top bit of `sign`
    return __hiloint2double(__double2hiint(value) ^ static_cast<int>(sign & 0x80000000u),
                            __double2loint(value));
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

template <class T>
class Taker {
    using N = Numbers<T>;
    using Value = typename N::Value;
    static constexpr int GROUP = sizeof(T) >= 4 ? 4 : 8;  // elements of a line that a thread takes
    static constexpr int LANES = LINE / GROUP;            // threads of a line
    static constexpr int LINES_AT_ONCE = 32 / LANES;
    static constexpr int ROUNDS = LINES / LINES_AT_ONCE;  // lines of a thread, consecutive
    static constexpr int WORDS = GROUP * sizeof(T) / 4;   // of a group
    static constexpr int AHEAD = GROUP == 4 ? 4 : 2;  // lines that are loaded together
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

    // All blocks of this warp.
    __device__ void take() {
        const uint32_t warps = blockDim.x / 32;
        const uint64_t stride = static_cast<uint64_t>(m_job.teams) * warps;
        const uint64_t blocks = (m_job.elements + BLOCK - 1) / BLOCK;
        uint64_t block = static_cast<uint64_t>(blockIdx.x - m_job.first_team) * warps + threadIdx.x / 32;
        if (block >= blocks) return;
        m_row = quotient(block * BLOCK, m_job.stripes.columns);
        m_column = block * BLOCK - m_row * m_job.stripes.columns;
        m_row_stripe = static_cast<uint32_t>(quotient(m_row, m_job.stripes.height));
        m_held_stripe = m_row_stripe;
        uint32_t round = 0;
        for (; block < blocks; block += stride) {
            if (m_job.axes == 0) fetch_ahead(block + stride);
            take_block(block, round++);
            m_row += m_job.step_rows;
            m_column += m_job.step_columns;
            if (m_column >= m_job.stripes.columns) {
                m_column -= m_job.stripes.columns;
                ++m_row;
            }
        }
        mix_held(round % 16);
        flush_row(m_held_stripe);
    }

    // Adds what this thread has to the team's sums; all threads of the team come here.
    __device__ void give() {
        turn_sums(0);
        BRICKLINE_UNROLL
        for (int k = 0; k < GROUP; ++k) {
            BRICKLINE_UNROLL
            for (int mask = LANES; mask < 32; mask *= 2) m_sketch[k] += from_lane(m_sketch[k], mask);
            if (m_lane < LANES) m_team.warp[threadIdx.x / 32][m_lane * GROUP + k] = m_sketch[k];
        }
        add_to_team(m_team.sums.l1, m_l1[0] + m_l1[1]);
        add_to_team(m_team.sums.squares, m_squares[0] + m_squares[1]);
        add_to_team(m_team.sums.hash[0], m_hash.low);
        add_to_team(m_team.sums.hash[1], m_hash.high);
        if (__any_sync(ALL, m_zeros | m_subnormals | m_saturated)) {
            add_to_team(m_team.sums.zeros, static_cast<uint64_t>(m_zeros));
            add_to_team(m_team.sums.subnormals, static_cast<uint64_t>(m_subnormals));
            add_to_team(m_team.sums.saturated, static_cast<uint64_t>(m_saturated));
        }
        Value low = m_low, high = m_high;
        BRICKLINE_UNROLL
        for (uint32_t mask = 16; mask; mask /= 2) {
            const Value other_low = __shfl_xor_sync(ALL, low, mask);
            const Value other_high = __shfl_xor_sync(ALL, high, mask);
            low = other_low < low ? other_low : low;
            high = other_high > high ? other_high : high;
        }
        if (m_lane == 0) lower_and_raise(low, high);
    }

  private:
    __device__ void add_to_team(double& to, double value) {
        value = sum_over_warp(value);
        if (m_lane == 0) atomicAdd(&to, value);
    }
    __device__ void add_to_team(uint64_t& to, uint64_t value) {
        value = sum_over_warp(value);
        if (m_lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), value);
    }
    // Doubles in their order as integers: with the sign bit flipped, or all bits where it is set.
    __device__ static uint64_t ordered(double value) {
        const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(value + 0.0));
        return bits >> 63 ? ~bits : bits | 1ull << 63;
    }
    __device__ void lower_and_raise(double low, double high) {
        if (!(low <= high)) return;
        using Word = unsigned long long;
        atomicMin(reinterpret_cast<Word*>(&m_team.sums.minimum), static_cast<Word>(ordered(low)));
        atomicMax(reinterpret_cast<Word*>(&m_team.sums.maximum), static_cast<Word>(ordered(high)));
    }

    __device__ void take_block(uint64_t block, uint32_t round) {
        const uint32_t turn = turn_of(block);
        turn_sums(turn % GROUP);
        const uint32_t place_group = (m_lane % LANES) ^ (turn / GROUP);
        const uint32_t first_line = m_lane / LANES * ROUNDS;
        const uint32_t half = signs_of(block * LINES + m_lane % 16, m_lane / 16);
        const uint32_t sign_lane = first_line + place_group * GROUP / 32 * 16;
        const uint32_t sign_shift = place_group * GROUP % 32;
        find_stripes();
        m_block_sum = 0;
        uint64_t a = 0, b = 0;
        const bool is_whole = m_job.axes == 0 && (block + 1) * BLOCK <= m_job.elements;
        const SignLanes sign_lanes = {half, sign_lane, sign_shift};
#pragma unroll 1
        for (uint32_t from = 0; from < ROUNDS; from += 4) {
            BRICKLINE_UNROLL
            for (int part = 0; part < 4; part += AHEAD) {
                take_lines(block, first_line, from, part, place_group, is_whole, sign_lanes, a, b);
            }
        }
        if (m_is_uniform) {
            m_columns[m_column_stripe * blockDim.x] += m_block_sum;
            m_row_sum += m_block_sum;
        }
        hold(a, b, block, round);
    }

    struct SignLanes {  // which lane has a line's signs, and where in its word they are
        uint32_t word, lane, shift;
    };

    // Lines `from` + `part` and on of this thread, AHEAD of them.
    __device__ __forceinline__ void take_lines(uint64_t block, uint32_t first_line, uint32_t from,
                                               int part, uint32_t place_group, bool is_whole,
                                               const SignLanes& signs, uint64_t& a, uint64_t& b) {
        Lines lines;
        BRICKLINE_UNROLL
        for (uint32_t k = 0; k < AHEAD; ++k) {
            const uint32_t line = first_line + from + part + k;
            lines.at[k] = line * LINE + (place_group ^ (QUAD * line / GROUP)) * GROUP;
            if (is_whole) lines.raw[k] = load(block, lines.at[k]);
        }
        if (!is_whole) lines = gathered(m_job, block, lines);
        BRICKLINE_UNROLL
        for (int k = 0; k < AHEAD; ++k) hash_group(lines.raw[k], lines.at[k], a, b);
        check(lines, block, is_whole);
        BRICKLINE_UNROLL
        for (int k = 0; k < AHEAD; ++k) {
            const uint32_t word = __shfl_sync(ALL, signs.word, signs.lane + from + part + k);
            const int line = part + k;  // of four
            sum_group(lines.raw[k], (QUAD * line ^ line) % GROUP, word >> signs.shift, lines.at[k]);
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

    __device__ void fetch_ahead(uint64_t block) const {
        const uint64_t at = block * BLOCK * sizeof(T) + m_lane * 128;
        BRICKLINE_UNROLL
        for (uint32_t k = 0; k < (BLOCK * sizeof(T) + 4095) / 4096; ++k) {
            const bool is_there = m_lane * 128 + k * 4096 < BLOCK * sizeof(T) &&
                                  at + k * 4096 < m_job.elements * sizeof(T);
            if (is_there) BRICKLINE_FETCH_AHEAD(m_job.data + at + k * 4096);
        }
    }

    __device__ Raw load(uint64_t block, uint32_t at) const {
        const char* const data = reinterpret_cast<const char*>(m_job.data);
        return platform::load_streamed<Raw>(data + (block * BLOCK + at) * sizeof(T));
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

    // Sums of a block over the warp. Lanes 0 to 15 hold a of sixteen blocks, the others their b, and
    // when they are full each pair is mixed at once.
    __device__ void hold(uint64_t a, uint64_t b, uint64_t block, uint32_t round) {
        const bool is_upper = m_lane >= 16;
        uint64_t mine = is_upper ? b : a;
        mine += from_lane(is_upper ? a : b, 16);
        BRICKLINE_UNROLL
        for (uint32_t mask = 8; mask; mask /= 2) mine += from_lane(mine, mask);
        if (m_lane % 16 == round % 16) {
            m_held = mine;
            m_held_block = block;
        }
        if (round % 16 == 15) mix_held(16);
    }
    __device__ void mix_held(uint32_t held) {
        const uint64_t other = from_lane(m_held, 16);
        if (m_lane < held) m_hash.add(mixed(m_held, other, m_held_block));
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
        if (m_row_stripe != m_held_stripe) flush_row(m_row_stripe);
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
        if (m_lane == 0) atomicAdd(&m_team.sums.rows[m_held_stripe], sum);
        m_row_sum = 0;
        m_held_stripe = next;
    }

    // --- Values ---

    // Extremes, and whatever is unusual: counted, and zero from then on where it is not finite.
    __device__ void check(Lines& lines, uint64_t block, bool is_whole) {
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
        const Checked found = checked({lines, m_low, m_high}, block * BLOCK, m_job, m_team.sums);
        m_low = found.low, m_high = found.high;
        m_zeros += found.counts & 0xff;
        m_subnormals += found.counts >> 8 & 0xff;
        m_saturated += found.counts >> 16;
        if (!N::HAS_NONFINITE) return;  // beyond the end there are zeros
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
    __device__ void sum_group(const Raw& raw, int turn, uint32_t signs, uint32_t at) {
        T element[GROUP];
        platform::copy_bits(element, raw);
        BRICKLINE_UNROLL
        for (int quad = 0; quad < GROUP; quad += QUAD) {
            double wide[QUAD];
            BRICKLINE_UNROLL
            for (int k = 0; k < QUAD; ++k) {
                wide[k] = value_of(element[quad + k]);
                const int place = (quad + k) ^ turn;
                m_sketch[place] += flipped(wide[k], signs << (31 - place));
                m_l1[k & 1] += fabs(wide[k]);
                m_squares[k & 1] = platform::fma(wide[k], wide[k], m_squares[k & 1]);
            }
            const double sum = (wide[0] + wide[1]) + (wide[2] + wide[3]);
            if (m_is_uniform) m_block_sum += sum;
            else add_quad(at + quad, sum);
        }
    }

    const Job& m_job;
    TeamMemory& m_team;
    double* const m_columns;
    const uint32_t m_lane;
    double m_sketch[GROUP] = {};
    double m_l1[2] = {}, m_squares[2] = {};
    double m_row_sum = 0, m_block_sum = 0;
    Value m_low = static_cast<Value>(1e308 * 10), m_high = static_cast<Value>(-1e308 * 10);
    Hash m_hash = {0, 0};
    uint64_t m_held = 0, m_held_block = 0;
    uint64_t m_row = 0, m_column = 0;
    uint64_t m_cell_row = ~0ull, m_cell_begin = 0, m_cell_end = 0;
    uint32_t m_zeros = 0, m_subnormals = 0, m_saturated = 0;
    uint32_t m_turn = 0;
    uint32_t m_row_stripe = 0, m_held_stripe = 0, m_column_stripe = 0;
    uint32_t m_stripe_left = 0, m_row_left = 0, m_rows_left = 0;
    bool m_is_narrow = true, m_is_uniform = false, m_has_one_row_stripe = false;
};

// --- Teams ----------------------------------------------------------------------------------------

inline constexpr uint64_t NO_MINIMUM = ~0ull, NO_MAXIMUM = 0;

__device__ inline void clear_team(TeamMemory& team, double* columns, uint32_t key_count) {
    uint64_t* const words = reinterpret_cast<uint64_t*>(&team.sums);
    for (uint32_t k = threadIdx.x; k < PARTIAL_WORDS; k += blockDim.x) words[k] = 0;
    for (uint32_t k = 0; k < STRIPES; ++k) columns[k * blockDim.x + threadIdx.x] = 0;
    for (uint32_t k = threadIdx.x; k < key_count; k += blockDim.x) team.key[k] = key_of(k);
    __syncthreads();
    if (threadIdx.x == 0) {
        team.sums.first_nan = team.sums.first_inf = ~0ull;
        team.sums.minimum = NO_MINIMUM;
        team.sums.maximum = NO_MAXIMUM;
    }
    __syncthreads();
}

// The sketch from the warps, the column stripes from the threads.
__device__ inline void add_up_team(TeamMemory& team, const double* columns) {
    __syncthreads();
    const uint32_t warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (uint32_t k = threadIdx.x; k < SKETCH_BUCKETS; k += blockDim.x) {
        double sum = 0;
        for (uint32_t warp = 0; warp < warps; ++warp) sum += team.warp[warp][k];
        team.sums.sketch[k] = sum;
    }
    for (uint32_t stripe = threadIdx.x / 32; stripe < STRIPES; stripe += warps) {
        double sum = 0;
        for (uint32_t k = lane; k < blockDim.x; k += 32) sum += columns[stripe * blockDim.x + k];
        sum = sum_over_warp(sum);
        if (lane == 0) team.sums.columns[stripe] = sum;
    }
    __syncthreads();
}

// Adds word k of `count` partial results, in a fixed order.
__device__ inline uint64_t joined(const uint64_t* partials, uint32_t count, uint32_t k) {
    constexpr uint32_t AT_ONCE = 32;
    const uint64_t* const words = partials + k;
    if (k < DOUBLES) {
        double sum[4] = {};
#pragma unroll 1
        for (uint32_t from = 0; from < count; from += AT_ONCE) {
            uint64_t word[AT_ONCE];
            BRICKLINE_UNROLL
            for (uint32_t j = 0; j < AT_ONCE; ++j) {
                word[j] = from + j < count ? __ldcg(words + uint64_t(from + j) * PARTIAL_WORDS) : 0;
            }
            BRICKLINE_UNROLL
            for (uint32_t j = 0; j < AT_ONCE; ++j) {
                sum[j % 4] += __longlong_as_double(static_cast<int64_t>(word[j]));
            }
        }
        return static_cast<uint64_t>(__double_as_longlong((sum[0] + sum[1]) + (sum[2] + sum[3])));
    }
    uint64_t whole = 0, least = ~0ull, most = 0;
#pragma unroll 8
    for (uint32_t j = 0; j < count; ++j) {
        const uint64_t word = __ldcg(words + uint64_t(j) * PARTIAL_WORDS);
        whole += word;
        least = word < least ? word : least;
        most = word > most ? word : most;
    }
    return k < INTEGERS ? whole : k == INTEGERS + 3 ? most : least;
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
        row.hash[0] = sums.hash[0], row.hash[1] = sums.hash[1];
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
    clear_team(team, columns, BLOCK * sizeof(T) / 4);
    {
        Taker<T> taker(job, team, columns);
        taker.take();
        taker.give();
    }
    add_up_team(team, columns);
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
