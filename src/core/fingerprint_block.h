// The inner loops of host fingerprints, compiled once for each vector unit: fingerprint_plain.cpp,
// fingerprint_avx2.cpp and fingerprint_avx512.cpp include this file, each with its own `Lanes`, inside
// a namespace of its own. Everything here is internal to the including file, so that no function
// compiled for one unit is ever taken for another's by the linker.
//
// `Lanes` is a set of operations on eight doubles (`Doubles`), on a register of the values as they are
// (`Part`), and the hash of a block (`nh`). The rest is written once, below.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "fingerprint.h"

namespace brickline::fingerprint {
namespace {

constexpr int LANES = 8;               // doubles that are handled together
constexpr int PARTS = LINE / LANES;    // of a line

// 1 or -1 for each of some bits: one multiplication instead of three operations on signs.
template <int WIDTH>
struct alignas(64) SignTable {
    double sign[1 << WIDTH][WIDTH];
    constexpr SignTable() : sign() {
        for (int bits = 0; bits < 1 << WIDTH; ++bits)
            for (int k = 0; k < WIDTH; ++k) sign[bits][k] = bits >> k & 1 ? -1.0 : 1.0;
    }
};

struct alignas(64) Keys {
    uint32_t key[KEYS];
    constexpr Keys() : key() {
        for (uint32_t k = 0; k < KEYS; ++k) key[k] = key_of(k);
    }
};
constexpr Keys KEY_TABLE;

// Sums of a block, before it is known whether all of its values are finite.
template <class Value>
struct alignas(64) BlockSums {
    double sketch[LINE];          // by place
    double line[LINES][LANES];    // sums of lines, in parts, where they are asked for
    double total[LANES];          // of all lines, where not
    double l1, squares;
    Value minimum, maximum, smallest;  // smallest magnitude
};

// A block's elements as the numbers in which they are summed.
template <class T>
void widen(const void* raw, typename Numbers<T>::Value* values) {
    for (int k = 0; k < BLOCK; ++k) {
        T element;
        std::memcpy(&element, static_cast<const char*>(raw) + k * sizeof(T), sizeof(T));
        values[k] = value_of(element);
    }
}

// The signs of strip s and part p are byte 16 * (s / 2) + 4 * (p / 2) + 2 * (s % 2) + p % 2. Lines from
// the eighth on have the lanes of a part the other way round, four by four.
inline void sign_words(uint64_t block, uint32_t* words) {
    for (uint32_t k = 0; k < 4; ++k) words[k] = signs_of(block, 0, k);
    for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t word = signs_of(block, 1, k);
        words[4 + k] = (word >> QUAD & 0x0f0f0f0fu) | (word & 0x0f0f0f0fu) << QUAD;
    }
}

// Memory that is read next, fetched bit by bit while there is work to do. As a number: beyond the end
// of a tensor there is no pointer.
struct Ahead {
    uintptr_t at;
    uint32_t line_bytes;  // of raw elements

    inline __attribute__((always_inline)) void fetch_line() {
        for (uint32_t k = 0; k < line_bytes; k += 64) {
            __builtin_prefetch(reinterpret_cast<const void*>(at + k));
        }
        at += line_bytes;
    }
};

// Extremes of values and of their magnitudes, by registers of the values as they are.
template <class Part, class Value>
struct Extremes {
    typename Part::Type low, high, small;

    explicit Extremes(const Value* x)
        : low(Part::all(x[0])), high(low), small(Part::all(x[0] < 0 ? -x[0] : x[0])) {}
    inline __attribute__((always_inline)) void add_line(const Value* x) {
#pragma GCC unroll 16
        for (int k = 0; k < LINE; k += Part::WIDTH) {
            const typename Part::Type value = Part::load(x + k);
            low = Part::least(low, value);
            high = Part::most(high, value);
            small = Part::nearest(small, value);
        }
    }
    void get(Value& minimum, Value& maximum, Value& smallest) const {
        minimum = Part::least_of(low), maximum = Part::most_of(high), smallest = Part::least_of(small);
    }
};

// What the lines of a block add to, in registers.
template <class Lanes>
struct Running {
    typename Lanes::Doubles sketch[PARTS], l1[2], squares[2], total;
};

// Four lines, the strip that begins at `x`; ODD: its lines' turns are 4 to 7, not 0 to 3, parts.
template <class Lanes, class Value, int ODD, bool WITH_LINES>
inline __attribute__((always_inline)) void sum_strip(const Value* x, const uint8_t* signs,
                                                     Running<Lanes>& to,
                                                     double (*line_sums)[LANES]) {
    using Doubles = typename Lanes::Doubles;
    Doubles sum[STRIP];
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
        // The one whose sign is turned, and the other three.
        const int turned = part % STRIP;
        Doubles value[STRIP];
#pragma GCC unroll 4
        for (int k = 0; k < STRIP; ++k) {
            const int line = k ^ turned;
            value[k] = Lanes::load(x + LINE * line + LANES * (part ^ (STRIP * ODD + line)));
            if constexpr (WITH_LINES) sum[line] = part ? Lanes::add(sum[line], value[k]) : value[k];
        }
        const Doubles two = Lanes::add(value[2], value[3]);
        const Doubles apart = Lanes::subtract(value[1], value[0]);
        const uint32_t bits = signs[part / 2 * 4 + ODD * 2 + part % 2];
        to.sketch[part] = Lanes::add_signed(to.sketch[part], Lanes::add(two, apart), bits);
        const Doubles others = Lanes::add(value[0], value[1]);
        if constexpr (!WITH_LINES) to.total = Lanes::add(to.total, Lanes::add(two, others));
        to.l1[0] = Lanes::add(to.l1[0], Lanes::sizes(others, apart));
        to.l1[1] = Lanes::add(to.l1[1], Lanes::sizes(two, Lanes::subtract(value[2], value[3])));
#pragma GCC unroll 4
        for (int k = 0; k < STRIP; ++k) to.squares[k & 1] = Lanes::add_square(to.squares[k & 1], value[k]);
    }
    if constexpr (WITH_LINES) {
        for (int line = 0; line < STRIP; ++line) Lanes::store(line_sums[line], sum[line]);
    }
}

template <class Lanes, bool WITH_LINES, class Value>
__attribute__((noinline)) void sum_block(const Value* x, uint64_t block, Ahead ahead,
                                         BlockSums<Value>& sums) {
    alignas(64) uint32_t words[8];
    sign_words(block, words);
    const uint8_t* signs = reinterpret_cast<const uint8_t*>(words);
    Running<Lanes> to;
    to.l1[0] = to.l1[1] = to.squares[0] = to.squares[1] = to.total = Lanes::zero();
    Extremes<typename Lanes::template Part<Value>, Value> extremes(x);
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) to.sketch[part] = Lanes::zero();
        const Value* const from = x + half * (BLOCK / 2);
        double(*const lines)[LANES] = sums.line + half * (LINES / 2);
        for (int line = 0; line < STRIP; ++line) extremes.add_line(from + LINE * line), ahead.fetch_line();
        sum_strip<Lanes, Value, 0, WITH_LINES>(from, signs + 16 * half, to, lines);
        for (int line = STRIP; line < 2 * STRIP; ++line) extremes.add_line(from + LINE * line), ahead.fetch_line();
        sum_strip<Lanes, Value, 1, WITH_LINES>(from + STRIP * LINE, signs + 16 * half, to, lines + STRIP);
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) {
            double* const place = sums.sketch + LANES * part;
            if (half == 0) Lanes::store(place, to.sketch[part]);
            else Lanes::add_swapped(place, to.sketch[part]);
        }
    }
    Lanes::store(sums.total, to.total);
    sums.l1 = Lanes::total(Lanes::add(to.l1[0], to.l1[1]));
    sums.squares = Lanes::total(Lanes::add(to.squares[0], to.squares[1]));
    extremes.get(sums.minimum, sums.maximum, sums.smallest);
}

// Walks the cells, a row stripe and a column stripe each, quad by quad.
class Cells {
  public:
    Cells(const Stripes& stripes, uint64_t first)
        : m_stripes(&stripes), m_row(first / stripes.columns), m_column(first % stripes.columns) {
        find();
    }

    uint32_t row() const { return uint32_t(m_row_stripe); }
    uint32_t column() const { return uint32_t(m_column_stripe); }
    // Quads from here on that lie in this cell, at least one.
    uint64_t quads() const { return (m_end - m_column + QUAD - 1) / QUAD; }

    void advance(uint64_t quads) {
        m_column += QUAD * quads;
        if (m_column < m_end) return;
        if (m_column >= m_stripes->columns) {
            const uint64_t rows = m_stripes->columns >= QUAD ? 1 : m_column / m_stripes->columns;
            m_row += rows;
            m_column -= rows * m_stripes->columns;
        }
        find();
    }

  private:
    void find() {
        m_row_stripe = m_row / m_stripes->height;
        m_column_stripe = m_column / m_stripes->width;
        m_end = (m_column_stripe + 1) * m_stripes->width;
        if (m_end > m_stripes->columns) m_end = m_stripes->columns;
    }

    const Stripes* m_stripes;
    uint64_t m_row, m_column, m_end = 0;
    uint64_t m_row_stripe = 0, m_column_stripe = 0;
};

// Sums of the stripes, in parts until all is added: nothing is added up across lanes on the way.
class StripeSums {
  public:
    StripeSums(const Stripes& stripes, uint64_t first, uint64_t elements)
        : m_stripes(stripes), m_cells(stripes, first),
          m_columns(int((stripes.columns + stripes.width - 1) / stripes.width)),
          m_first_row(stripes.row_of(first)), m_last_row(stripes.row_of(first + elements - 1)),
          m_is_vertical(stripes.columns % LINE == 0 && stripes.columns <= VERTICAL &&
                        stripes.columns / stripes.width > 1) {
        std::memset(m_row, 0, (m_last_row - m_first_row + 1) * sizeof(m_row[0]));
        std::memset(m_column, 0, m_columns * sizeof(m_column[0]));
        if (m_is_vertical) std::memset(m_vertical, 0, stripes.columns * sizeof(double));
        m_line_row = first / stripes.columns, m_line_column = first % stripes.columns;
    }

    // Whether the next block needs the sums of its lines; `quads` of it are within the tensor.
    bool needs_lines(uint64_t quads) const {
        return m_is_vertical || m_cells.quads() < BLOCK / QUAD || quads < BLOCK / QUAD;
    }

    // A block; beyond `quads` it is zero.
    template <class Lanes, class Value>
    void add(const Value* x, const BlockSums<Value>& block, uint64_t quads) {
        if (m_is_vertical) {
            add_vertically<Lanes>(x, block, quads);
        } else if (needs_lines(quads)) {
            add_lines<Lanes>(x, block, quads);
        } else {
            add_whole<Lanes>(block);
        }
    }

    void finish(Sums& sums) const {
        for (uint32_t k = m_first_row; k <= m_last_row; ++k) {
            sums.rows[k] += total_of(m_row[k - m_first_row]);
        }
        for (int k = 0; k < m_columns; ++k) sums.columns[k] += total_of(m_column[k]);
        if (!m_is_vertical) return;
        for (uint64_t k = 0; k < m_stripes.columns; ++k) {
            sums.columns[k / m_stripes.width] += m_vertical[k];
        }
    }

  private:
    static constexpr uint64_t VERTICAL = 2048;  // columns that are summed one by one

    static double total_of(const double* part) {
        return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    }

    // Every line is a part of one row, and columns are summed each for itself.
    template <class Lanes, class Value>
    void add_vertically(const Value* x, const BlockSums<Value>& block, uint64_t quads) {
        uint64_t stripe = m_line_row / m_stripes.height - m_first_row;
        for (int line = 0; line < LINES && quads; ++line) {
            quads = quads > QUADS ? quads - QUADS : 0;
            Lanes::add_line(m_vertical + m_line_column, x + LINE * line);
            Lanes::add_parts(m_row[stripe], block.line[line]);
            m_line_column += LINE;
            if (m_line_column == m_stripes.columns) {
                m_line_column = 0;
                ++m_line_row;
                stripe = m_line_row / m_stripes.height - m_first_row;
            }
        }
    }

    template <class Lanes, class Value>
    void add_whole(const BlockSums<Value>& block) {
        Lanes::add_parts(row(), block.total);
        Lanes::add_parts(column(), block.total);
        m_cells.advance(BLOCK / QUAD);
    }

    template <class Lanes, class Value>
    void add_lines(const Value* x, const BlockSums<Value>& block, uint64_t quads) {
        for (int line = 0; line < LINES && quads; ++line) {
            uint64_t left = quads < QUADS ? quads : QUADS;
            quads -= left;
            if (left == QUADS && m_cells.quads() >= QUADS) {
                Lanes::add_parts(row(), block.line[line]);
                Lanes::add_parts(column(), block.line[line]);
                m_cells.advance(QUADS);
                continue;
            }
            for (const Value* from = x + LINE * line; left;) {
                const uint64_t here = m_cells.quads() < left ? m_cells.quads() : left;
                Lanes::add_quads(row(), column(), from, here);
                m_cells.advance(here);
                from += QUAD * here;
                left -= here;
            }
        }
    }

    double* row() { return m_row[m_cells.row() - m_first_row]; }
    double* column() { return m_column[m_cells.column()]; }

    const Stripes m_stripes;
    Cells m_cells;
    const int m_columns;
    const uint32_t m_first_row, m_last_row;
    const bool m_is_vertical;
    uint64_t m_line_row, m_line_column;
    alignas(64) double m_row[STRIPES][LANES];
    alignas(64) double m_column[STRIPES][LANES];
    alignas(64) double m_vertical[VERTICAL];
};

// What a look at every element of a block finds.
struct Unusual {
    uint32_t zeros, tiny, saturated, nonfinite;
};

template <class T>
Unusual look(const typename Numbers<T>::Value* x, int elements) {
    using N = Numbers<T>;
    using Value = typename N::Value;
    uint32_t zeros = 0, tiny = 0, saturated = 0, nonfinite = 0;
    for (int k = 0; k < elements; ++k) {
        const Value size = x[k] < 0 ? -x[k] : x[k];
        zeros += x[k] == 0;
        tiny += size < N::TINY;
        saturated += (x[k] == N::LOWEST) | (x[k] == N::HIGHEST);
        if (N::HAS_NONFINITE) nonfinite += !(size <= N::HIGHEST);
    }
    return {zeros, tiny, saturated, nonfinite};
}

// Counts what is not finite, and puts zeros there.
template <class T>
void take_nonfinite(const typename Numbers<T>::Value* x, typename Numbers<T>::Value* finite,
                    int elements, uint64_t first, Counts& counts) {
    using Value = typename Numbers<T>::Value;
    for (int k = 0; k < BLOCK; ++k) {
        const bool is_finite = x[k] - x[k] == 0;
        finite[k] = is_finite ? x[k] : Value(0);
        if (!is_finite && k < elements) count_unusual<T>(counts, x[k], first + k);
    }
}

template <class Value>
void find_extremes(const Value* x, int elements, Value& minimum, Value& maximum) {
    minimum = Value(INFINITY), maximum = -Value(INFINITY);
    for (int k = 0; k < elements; ++k) {
        const bool is_finite = x[k] - x[k] == 0;
        minimum = is_finite && x[k] < minimum ? x[k] : minimum;
        maximum = is_finite && x[k] > maximum ? x[k] : maximum;
    }
}

// The values of a block with all that is known of them.
template <class Lanes, class T>
struct Block {
    using N = Numbers<T>;
    using Value = typename N::Value;

    alignas(64) Value finite[BLOCK];
    const Value* x;
    BlockSums<Value> sums;

    // Sums a block up; values beyond `elements` are zeros.
    void take(const Value* values, uint64_t number, int elements, bool with_lines, Ahead ahead, Counts& counts) {
        x = values;
        add_up(number, with_lines, ahead);
        // Whatever is not finite shows in l1.
        const bool is_usual = elements == BLOCK && sums.smallest >= N::TINY &&
                              (N::LOWEST > 0 || sums.minimum > N::LOWEST) &&
                              sums.maximum < N::HIGHEST && sums.l1 - sums.l1 == 0;
        if (!is_usual) take_unusual(number, elements, with_lines, counts);
    }

  private:
    void add_up(uint64_t number, bool with_lines, Ahead ahead) {
        if (with_lines) sum_block<Lanes, true>(x, number, ahead, sums);
        else sum_block<Lanes, false>(x, number, ahead, sums);
    }
    __attribute__((noinline)) void take_unusual(uint64_t number, int elements, bool with_lines,
                                                Counts& counts) {
        const Unusual found = look<T>(x, elements);
        counts.zeros += found.zeros;
        counts.subnormals += found.tiny - found.zeros;
        counts.saturated += found.saturated;
        const Value* const original = x;
        if (found.nonfinite) {
            take_nonfinite<T>(x, finite, elements, number * BLOCK, counts);
            x = finite;
            add_up(number, with_lines, Ahead{});
        }
        if (found.nonfinite || elements < BLOCK) {
            find_extremes(original, elements, sums.minimum, sums.maximum);
        }
    }
};

template <class Lanes, class T>
void add_elements(const void* data, uint64_t first, uint64_t elements, const Stripes& stripes,
                  Sums& sums) {
    using Value = typename Numbers<T>::Value;
    constexpr bool IS_VALUE = std::is_same_v<T, Value>;
    constexpr uint64_t BYTES = BLOCK * sizeof(T);
    alignas(64) unsigned char padded[BYTES];
    alignas(64) Value values[BLOCK];
    Block<Lanes, T> block;
    StripeSums stripe_sums(stripes, first, elements);
    for (uint64_t at = 0; at < elements; at += BLOCK) {
        const uint64_t number = (first + at) / BLOCK;
        const int count = elements - at < BLOCK ? int(elements - at) : BLOCK;
        const unsigned char* raw = static_cast<const unsigned char*>(data) + at * sizeof(T);
        if (count < BLOCK || (IS_VALUE && reinterpret_cast<uintptr_t>(raw) % sizeof(T))) {
            std::memcpy(padded, raw, count * sizeof(T));
            std::memset(padded + count * sizeof(T), 0, BYTES - count * sizeof(T));
            raw = padded;
        }
        uint64_t a = 0, b = 0;
        Lanes::nh(raw, BYTES, a, b);
        const Hash factors = factors_of(number);
        sums.hash.add({a * factors.low, b * factors.high});
        if constexpr (!IS_VALUE) Lanes::template widen<T>(raw, values);
        const Ahead ahead = {reinterpret_cast<uintptr_t>(raw) + 2 * BYTES, LINE * sizeof(T)};
        const uint64_t quads = (uint64_t(count) + QUAD - 1) / QUAD;
        block.take(IS_VALUE ? reinterpret_cast<const Value*>(raw) : values, number, count,
                   stripe_sums.needs_lines(quads), ahead, sums.counts);
        stripe_sums.template add<Lanes>(block.x, block.sums, quads);
        Lanes::add_turned(sums.sketch, block.sums.sketch, turn_of(number));
        sums.l1 += block.sums.l1;
        sums.squares += block.sums.squares;
        if (block.sums.minimum < sums.minimum) sums.minimum = block.sums.minimum;
        if (block.sums.maximum > sums.maximum) sums.maximum = block.sums.maximum;
    }
    stripe_sums.finish(sums);
}

template <class Lanes>
constexpr FingerprintEngine engine_of(const char* name) {
    return {name,
            {nullptr, add_elements<Lanes, double>, add_elements<Lanes, float>,
             add_elements<Lanes, f16>, add_elements<Lanes, bf16>, add_elements<Lanes, f8e4m3>,
             add_elements<Lanes, f8e5m2>, add_elements<Lanes, int64_t>, add_elements<Lanes, int32_t>,
             add_elements<Lanes, int16_t>, add_elements<Lanes, int8_t>, add_elements<Lanes, uint64_t>,
             add_elements<Lanes, uint32_t>, add_elements<Lanes, uint16_t>,
             add_elements<Lanes, uint8_t>, add_elements<Lanes, Truth>}};
}

}  // namespace
}  // namespace brickline::fingerprint
