#include "fingerprint.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace brickline {
namespace fingerprint {
extern const FingerprintEngine PLAIN_ENGINE;
extern const FingerprintEngine AVX2_ENGINE;
extern const FingerprintEngine AVX512_ENGINE;
}  // namespace fingerprint

namespace {

using namespace fingerprint;

// Elements that are brought into logical order before they are summed up.
constexpr uint64_t STAGED = 32 * BLOCK;
constexpr uint64_t TILE_ROWS = 16;

struct Engines {
    const FingerprintEngine* list[3];
    int count = 0;

    Engines() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
            list[count++] = &AVX512_ENGINE;
        }
        if (has_avx2 && __builtin_cpu_supports("f16c")) list[count++] = &AVX2_ENGINE;
#endif
        list[count++] = &PLAIN_ENGINE;
    }
};

const Engines& engines() {
    static const Engines instance;
    return instance;
}

// Subnormals count as they are, whatever the thread flushes to zero otherwise.
class PlainArithmetic {
  public:
#if defined(__x86_64__)
    PlainArithmetic() : m_before(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~PlainArithmetic() { _mm_setcsr(m_before); }

  private:
    unsigned m_before;
#elif defined(__aarch64__)
    PlainArithmetic() : m_before(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
    ~PlainArithmetic() { __builtin_aarch64_set_fpcr(m_before); }

  private:
    unsigned m_before;
#endif
};

struct Axis {
    uint64_t size;
    int64_t stride;
};

// Brings elements into logical order and hands them on in whole blocks.
template <class Word>
class Stage {
  public:
    Stage(AddElements add, const Stripes& stripes, Sums& sums)
        : m_add(add), m_stripes(stripes), m_sums(sums),
          m_words(static_cast<Word*>(std::aligned_alloc(64, (STAGED + BLOCK) * sizeof(Word)))) {
        if (!m_words) throw std::bad_alloc();
    }
    ~Stage() { std::free(m_words); }
    Stage(const Stage&) = delete;
    Stage& operator=(const Stage&) = delete;

    // A matrix in logical order: `rows` times `columns`.
    void add(const Word* from, Axis rows, Axis columns) {
        const bool is_transposed =
            std::llabs(rows.stride) < std::llabs(columns.stride) && columns.size <= STAGED / 2;
        uint64_t tile = columns.size < STAGED ? STAGED / columns.size : 1;
        if (is_transposed && tile > TILE_ROWS) tile = TILE_ROWS > 1024 / columns.size ? TILE_ROWS : 1024 / columns.size;
        for (uint64_t row = 0; row < rows.size; row += tile) {
            const uint64_t here = rows.size - row < tile ? rows.size - row : tile;
            add_tile(from + int64_t(row) * rows.stride, {here, rows.stride}, columns, is_transposed);
        }
    }
    void finish() {
        if (m_held) m_add(m_words, m_done, m_held, m_stripes, m_sums);
        m_held = 0;
    }

  private:
    void add_tile(const Word* from, Axis rows, Axis columns, bool is_transposed) {
        if (rows.size * columns.size > STAGED) return add_long_row(from, columns);
        make_room(rows.size * columns.size);
        Word* const to = m_words + m_held;
        m_held += rows.size * columns.size;
        if (columns.stride == 1) {
            for (uint64_t row = 0; row < rows.size; ++row)
                std::memcpy(to + row * columns.size, from + int64_t(row) * rows.stride,
                            columns.size * sizeof(Word));
        } else if (is_transposed) {
            for (uint64_t column = 0; column < columns.size; ++column)
                for (uint64_t row = 0; row < rows.size; ++row)
                    to[row * columns.size + column] =
                        from[int64_t(row) * rows.stride + int64_t(column) * columns.stride];
        } else {
            for (uint64_t row = 0; row < rows.size; ++row)
                for (uint64_t column = 0; column < columns.size; ++column)
                    to[row * columns.size + column] =
                        from[int64_t(row) * rows.stride + int64_t(column) * columns.stride];
        }
    }
    void add_long_row(const Word* from, Axis columns) {
        for (uint64_t at = 0; at < columns.size; at += STAGED) {
            const uint64_t here = columns.size - at < STAGED ? columns.size - at : STAGED;
            add_tile(from + int64_t(at) * columns.stride, {1, 0}, {here, columns.stride}, false);
        }
    }
    void make_room(uint64_t elements) {
        if (m_held + elements <= STAGED + BLOCK) return;
        const uint64_t whole = m_held / BLOCK * BLOCK;
        m_add(m_words, m_done, whole, m_stripes, m_sums);
        m_done += whole;
        m_held -= whole;
        std::memmove(m_words, m_words + whole, m_held * sizeof(Word));
    }

    AddElements m_add;
    const Stripes& m_stripes;
    Sums& m_sums;
    Word* m_words;
    uint64_t m_held = 0, m_done = 0;
};

template <class Word>
void add_strided(AddElements add, const void* data, Axis* axes, int count, const Stripes& stripes,
                 Sums& sums) {
    Stage<Word> stage(add, stripes, sums);
    const Word* from = static_cast<const Word*>(data);
    const Axis columns = axes[count - 1], rows = count > 1 ? axes[count - 2] : Axis{1, 0};
    const int outer = count > 2 ? count - 2 : 0;
    uint64_t index[FINGERPRINT_DIMENSIONS] = {};
    for (;;) {
        stage.add(from, rows, columns);
        int k = outer - 1;
        for (; k >= 0; --k) {
            from += axes[k].stride;
            if (++index[k] < axes[k].size) break;
            from -= axes[k].stride * int64_t(axes[k].size);
            index[k] = 0;
        }
        if (k < 0) break;
    }
    stage.finish();
}

void add_all(const FingerprintEngine& engine, const TensorView& tensor, uint64_t elements,
             const Stripes& stripes, Sums& sums) {
    uint64_t sizes[FINGERPRINT_DIMENSIONS];
    int64_t strides[FINGERPRINT_DIMENSIONS];
    const int count = merged_axes(tensor, sizes, strides);
    Axis axes[FINGERPRINT_DIMENSIONS];
    for (int k = 0; k < count; ++k) axes[k] = {sizes[k], strides[k]};
    const AddElements add = engine.add[uint32_t(tensor.dtype)];
    if (count == 0 || (count == 1 && axes[0].stride == 1)) {
        add(tensor.data, 0, elements, stripes, sums);
        return;
    }
    switch (element_bytes(uint32_t(tensor.dtype))) {
        case 1: return add_strided<uint8_t>(add, tensor.data, axes, count, stripes, sums);
        case 2: return add_strided<uint16_t>(add, tensor.data, axes, count, stripes, sums);
        case 4: return add_strided<uint32_t>(add, tensor.data, axes, count, stripes, sums);
        default: return add_strided<uint64_t>(add, tensor.data, axes, count, stripes, sums);
    }
}

}  // namespace

int merged_axes(const TensorView& tensor, uint64_t* sizes, int64_t* strides) {
    int count = 0;
    for (int k = 0; k < tensor.dimensions; ++k) {
        const uint64_t size = uint64_t(tensor.shape[k]);
        const int64_t stride = tensor.strides[k];
        if (size == 1) continue;
        if (count && strides[count - 1] == stride * int64_t(size)) {
            sizes[count - 1] *= size;
            strides[count - 1] = stride;
        } else {
            sizes[count] = size;
            strides[count++] = stride;
        }
    }
    return count;
}

uint32_t element_bytes(uint32_t dtype) {
    constexpr uint8_t BYTES[16] = {0, 8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 8, 4, 2, 1, 1};
    return dtype < 16 ? BYTES[dtype] : 0;
}

const FingerprintEngine* const* fingerprint_engines(int& count) {
    count = engines().count;
    return engines().list;
}

void fingerprint_with(const FingerprintEngine& engine, const TensorView& tensor, FingerprintRow& row) {
    uint64_t elements = 1;
    for (int k = 0; k < tensor.dimensions; ++k) elements *= uint64_t(tensor.shape[k]);
    const uint64_t columns = tensor.dimensions ? uint64_t(tensor.shape[tensor.dimensions - 1]) : 1;
    Sums sums;
    sums.clear();
    if (elements) {
        const PlainArithmetic arithmetic;
        add_all(engine, tensor, elements, Stripes::of(elements, columns), sums);
    }
    std::memset(&row, 0, sizeof row);
    finish(sums, elements, row);
    row.dtype = uint32_t(tensor.dtype);
    row.dimensions = uint32_t(tensor.dimensions);
    for (int k = 0; k < tensor.dimensions; ++k) row.shape[k] = tensor.shape[k];
}

void fingerprint_tensor(const TensorView& tensor, FingerprintRow& row) {
    fingerprint_with(*engines().list[0], tensor, row);
}

}  // namespace brickline
