// kernel.h: Block, what a single-source kernel is written against.
//
//     BRICKLINE void scale(Block& block, const float* x, float* y, int64_t n, float factor) {
//         block.each(n, [&](int64_t i) { y[i] = factor * x[i]; });
//     }
//
// A launch is a grid of blocks, a block has lanes, 32 lanes are a group. On CUDA each lane is a
// thread; on CPU one thread does the work of all lanes, in loops that vectorise. A kernel never
// names a lane: it says what happens for each index (`each`), what is reduced over all indices
// (`sum`, `max`, `reduce`), what a group does for each row (`groups`) and what happens once
// (`once`). Every lane calls every one of these, with the same arguments; inside `groups`, every
// lane of the group those of Group.
//
// Order of a reduction: reductions.h defines it. It depends on the number of lanes and on the width
// of a vector form alone, so the bits of a result depend neither on the device nor on who executes
// the block.
//
// Lanes run at once: an index may not read what another index of the same call writes. What one
// call wrote, the next may read after `sync()` or after a reduction of the block.
//
// The header knows nothing of how arguments arrive or where memory comes from: whoever executes a
// block says so in a Place.

#pragma once

#include "brickline/arithmetic.h"
#include "brickline/elements.h"
#include "brickline/platform.h"
#include "brickline/reductions.h"

namespace brickline {

inline constexpr uint32_t MAX_LANES = 1024;

// Codes that Block itself records. A kernel's own codes lie between FIRST_OWN_FAULT and LAST_OWN_FAULT.
enum Fault : uint32_t {
    FAULT_SHARED = 2,     // shared memory is used up
    FAULT_RAGGED = 3,     // a vector form was given a length that is no multiple of its width
    FAULT_NO_GROUP = 4,   // groups() in a block of fewer than 32 lanes
    FAULT_LANES = 5,      // no lane, or more than MAX_LANES; the block runs with one
    FAULT_CODE = 6,       // fault() was given a code above LAST_OWN_FAULT, or a negative one
    FIRST_OWN_FAULT = 16,
    LAST_OWN_FAULT = 0xfffffffe,
};

// Where a block stands and what it may use. On CUDA every lane has a copy that differs in `lane`.
struct Place {
    // Bytes of `scratch`: two sets of one value of at most 16 bytes for each of 32 groups.
    static constexpr uint32_t SCRATCH_BYTES = 2 * 32 * 16;

    uint32_t index[3];      // of the block in its grid
    uint32_t blocks[3];     // of the grid
    uint32_t lanes;         // 1 to MAX_LANES; the kernel's local size, whoever executes it
    uint32_t lane;          // CUDA: this thread; lanes 32k to 32k+31 are one warp. CPU: 0
    uint32_t barrier;       // CUDA: that of these lanes, see platform::wait_at
    uint32_t shared_bytes;
    void* shared;           // for the kernel, 16-byte aligned; null where shared_bytes is 0
    void* scratch;          // CUDA: SCRATCH_BYTES of shared memory, 16-byte aligned. CPU: owner of
                            // platform::memory_beyond, or null
    uint32_t* fault;        // one word for the whole launch
    const struct RowSource* rows;  // CUDA: rows that are copied ahead, or null
};

// Rows of a matrix that a producer copies into a ring of slots ahead of the blocks that read them: a
// chunk is as many whole rows of one block as a slot holds. Lies in shared memory; lanes only read it.
struct RowSource {
    unsigned char* slots;
    uint64_t* full;        // a barrier a slot: its chunk has come
    uint64_t* empty;       // and ARRIVALS say that it has been read
    const void* matrix;
    uint32_t slot_count, slot_bytes;
    uint32_t row_bytes;
    uint32_t rows;         // of the matrix
    uint32_t block_rows;   // block b reads the rows from b * block_rows on
    uint32_t chunk_rows;
    uint32_t block_chunks;
    uint32_t first_block;  // whose first chunk is ...
    uint32_t first_chunk;  // ... this one of all that pass through the ring, modulo 2 * slot_count

    // A group arrives once for each row that it has read, and for the first row of a chunk as often as is
    // left. So nobody looks at chunks of which it reads nothing.
    static constexpr uint32_t ARRIVALS = 2048;

    BRICKLINE_INLINE int64_t count_of(uint32_t block) const {
        const int64_t left = int64_t{rows} - int64_t{block} * block_rows;
        return left < block_rows ? (left < 0 ? 0 : left) : block_rows;
    }
    BRICKLINE_INLINE bool has(const void* from, int64_t first, int64_t count, int64_t size_bytes,
                              uint32_t block) const {
        return from == matrix && size_bytes == row_bytes && first == int64_t{block} * block_rows &&
               count == count_of(block);
    }
    // f(row, values) for the rows `next`, `next` + step, ... of a block, counted from its first one, by
    // the lanes of a group. Returns the ticks that were waited for.
    template <class F>
    BRICKLINE_INLINE uint64_t each_row(uint32_t block, uint32_t next, uint32_t step, uint32_t lane, F f) const {
        const uint32_t count = static_cast<uint32_t>(count_of(block));
        const uint32_t turns = 2 * slot_count;
        const uint32_t base = (first_chunk + (block - first_block) % turns * block_chunks) % turns;
        uint64_t waited = 0;
        uint32_t unseen = 0;  // chunks from the first one that this group has not seen come
        for (; next < count; next += step) {
            const uint32_t chunk = next / chunk_rows, begin = chunk * chunk_rows;
            const uint32_t at = (base + chunk) % turns;
            const uint32_t phase = at < slot_count ? 0 : 1;
            const uint32_t slot = phase ? at - slot_count : at;
            // A phase tells only two rounds apart: of one that is further ahead, the round before first.
            if (chunk >= unseen + slot_count) waited += platform::wait_for_phase(full + slot, phase ^ 1);
            waited += platform::wait_for_phase(full + slot, phase);
            unseen = chunk + 1;
            f(next, slots + slot * slot_bytes + (next - begin) * row_bytes);
            platform::wait_in_group();
            platform::arrive_together(empty + slot, lane == 0,
                                      next != begin ? 1 : ARRIVALS + 1 - minimum(chunk_rows, count - begin));
        }
        return waited;
    }
};

// A row that Block::rows hands out.
template <class T>
struct Row {
    const T* from;
    bool is_near;  // in the memory of the block itself
    BRICKLINE_INLINE const T& operator[](int64_t i) const { return from[i]; }
};

namespace detail {

// A code as the launch's word of 32 bits holds it. One that does not fit becomes another, never 0.
BRICKLINE_INLINE uint32_t fault_word(uint64_t code) {
    return code <= LAST_OWN_FAULT ? static_cast<uint32_t>(code) : uint32_t{FAULT_CODE};
}

// Whether simd.h knows the inner product of A and B.
template <class A, class B>
inline constexpr bool HAS_DOT_ROUNDS = false;
template <>
inline constexpr bool HAS_DOT_ROUNDS<float, float> = true;
template <>
inline constexpr bool HAS_DOT_ROUNDS<bf16, bf16> = true;

}  // namespace detail

// A lane's share of a vector that it multiplies with many rows, in registers.
template <class A, class B>
struct Held {
    static constexpr int W = WIDEST<A>;
    static constexpr int PARTS = 64 / W;  // 64 values a lane
    // Of the vector, where the order of the products is that of reduce_vector<W>.
    static constexpr int64_t LENGTH = sizeof(A) == 2 && sizeof(B) == 2 ? 64 * GROUP_LANES : 0;

    BRICKLINE_INLINE Held(const B* vector, uint32_t lane) {
        BRICKLINE_UNROLL
        for (int k = 0; k < PARTS; ++k) part[k] = widened(load<W>(vector + (k * GROUP_LANES + lane) * W));
    }
    Vector<float, W> part[PARTS];
};

// 32 lanes that work on one row. Made by Block::groups.
class Group : public detail::Reductions<Group> {
public:
    // `lane` is this thread's place in the group on CUDA, 0 on CPU; `fault` is the launch's word.
    BRICKLINE_INLINE Group(uint32_t lane, uint32_t* fault) : m_lane(lane), m_fault(fault) {}

    // As the functions of Block of the same names, by the lanes of this group.
    template <class F>
    BRICKLINE_INLINE void each(int64_t n, F f) { each_vector<1>(n, f); }

    template <int W, class F>
    BRICKLINE_INLINE void each_vector(int64_t n, F f) {
        if (n % W != 0) fault(FAULT_RAGGED);
        if constexpr (platform::ONE_THREAD) {
            BRICKLINE_INDEPENDENT
            for (int64_t i = 0; i <= n - W; i += W) f(i);
        } else {
            BRICKLINE_IN_FLIGHT
            for (int64_t i = int64_t{m_lane} * W; i <= n - W; i += GROUP_LANES * W) f(i);
        }
    }

    template <int W, class T, class Combine, class Accumulate>
    BRICKLINE_INLINE T reduce_vector(int64_t n, T identity, Combine combine,
                                     Accumulate accumulate) {
        static_assert(detail::Reducible<T>::VALUE);
        if (n % W != 0) fault(FAULT_RAGGED);
        const detail::Share share = {n - n % W, 0, GROUP_LANES * W, GROUP_LANES, m_lane};
        if constexpr (platform::ONE_THREAD) {
            return detail::reduce_group_alone<W>(share, identity, combine, accumulate);
        } else {
            const T value = detail::reduce_group_together<W>(share, identity, combine, accumulate);
            return platform::from_first_lane(value, detail::mask_of(GROUP_LANES));
        }
    }

    // The sum of float(a[i]) * float(b[i]) over i in [0, n), each product rounded, then added. `a`
    // is streamed, `b` is read by other rows, too. Where n is a multiple of W = WIDEST<A>, both are
    // aligned to 16 bytes and the order is the one of reduce_vector<W>, else the one of reduce.
    template <class A, class B>
    BRICKLINE_INLINE float dot(int64_t n, const A* a, const B* b) {
        constexpr int W = WIDEST<A>;
        const auto add = [](float x, float y) { return x + y; };
        if (n % W != 0)
            return reduce(n, 0.0f, add, [&](int64_t i) { return float(a[i]) * float(b[i]); });
        if constexpr (!platform::ONE_THREAD) {
            return dot_together(n, a, b);
        } else if constexpr (detail::HAS_DOT_ROUNDS<A, B>) {
            return dot_alone(n, a, b);
        } else {
            return reduce_vector<W>(n, 0.0f, add, [&](Vector<float, W>& sums, int64_t i) {
                accumulate_products(sums, load<W>(a + i), load<W>(b + i));
            });
        }
    }

    // The same of a row that Block::rows hands out.
    template <class A, class B>
    BRICKLINE_INLINE float dot(int64_t n, Row<A> a, const B* b) {
        if constexpr (!platform::ONE_THREAD)
            if (a.is_near && n % WIDEST<A> == 0) return dot_from<A>(n, a, b);
        return dot(n, a.from, b);
    }

    // And with a vector that is held.
    template <class A, class B>
    BRICKLINE_INLINE float dot(Row<A> a, const Held<A, B>& b) const {
        constexpr int W = Held<A, B>::W;
        Vector<float, W> sums = {};
        BRICKLINE_UNROLL
        for (int first = 0; first < Held<A, B>::PARTS; first += BATCH) {
            Vector<A, W> batch[BATCH];
            BRICKLINE_UNROLL
            for (int k = 0; k < BATCH; ++k)
                batch[k] = fetch<W>(a, ((first + k) * int64_t{GROUP_LANES} + m_lane) * W);
            BRICKLINE_UNROLL
            for (int k = 0; k < BATCH; ++k) {
                const Vector<float, W> left = widened(batch[k]);
                BRICKLINE_UNROLL
                for (int i = 0; i < W; ++i) sums[i] = sums[i] + left[i] * b.part[first + k][i];
            }
        }
        return combined(sums);
    }

    template <class F>
    BRICKLINE_INLINE void once(F f) {
        if (m_lane == 0) f();
    }

    BRICKLINE_INLINE void sync() { platform::wait_in_group(); }
    BRICKLINE_INLINE void fault(uint64_t code) {
        platform::set_if_zero(m_fault, detail::fault_word(code));
    }

private:
    static constexpr int BATCH = 4;  // 64 bytes a lane: 32 warps then have 64 KiB under way
    template <int W>
    static constexpr int64_t STRIDE = GROUP_LANES * W;

    template <class A, class B, int W>
    static BRICKLINE_INLINE void accumulate_products(Vector<float, W>& sums, const Vector<A, W>& a,
                                                     const Vector<B, W>& b) {
        const Vector<float, W> left = widened(a), right = widened(b);
        BRICKLINE_UNROLL
        for (int k = 0; k < W; ++k) sums[k] = sums[k] + left[k] * right[k];
    }

    // The products of up to BATCH vectors of `a`, a group's stride apart, the first at i. All of
    // their loads are under way before the first is used: left to itself, a compiler saves
    // registers and waits for every one.
    template <bool WHOLE, int W, class A, class From, class B>
    BRICKLINE_INLINE void accumulate_batch(Vector<float, W>& sums, int64_t i, int64_t n, From a,
                                           const B* b) const {
        Vector<A, W> batch[BATCH];
        BRICKLINE_UNROLL
        for (int k = 0; k < BATCH; ++k)
            if (WHOLE || i + k * STRIDE<W> < n) batch[k] = fetch<W>(a, i + k * STRIDE<W>);
        BRICKLINE_UNROLL
        for (int k = 0; k < BATCH; ++k)
            if (WHOLE || i + k * STRIDE<W> < n)
                accumulate_products(sums, batch[k], load<W>(b + i + k * STRIDE<W>));
    }

    template <int W, class A>
    static BRICKLINE_INLINE Vector<A, W> fetch(const A* from, int64_t i) { return stream<W>(from + i); }
    template <int W, class A>
    static BRICKLINE_INLINE Vector<A, W> fetch(Row<A> from, int64_t i) {
        return platform::load_near<Vector<A, W>>(from.from + i);
    }

    template <class A, class B>
    BRICKLINE_INLINE float dot_together(int64_t n, const A* a, const B* b) const {
        return dot_from<A>(n, a, b);
    }

    template <class A, class From, class B>
    BRICKLINE_INLINE float dot_from(int64_t n, From a, const B* b) const {
        constexpr int W = WIDEST<A>;
        Vector<float, W> sums = {};
        int64_t i = int64_t{m_lane} * W;
        for (; i + (BATCH - 1) * STRIDE<W> < n; i += BATCH * STRIDE<W>)
            accumulate_batch<true, W, A>(sums, i, n, a, b);
        if (i < n) accumulate_batch<false, W, A>(sums, i, n, a, b);
        return combined(sums);
    }

    template <int W>
    BRICKLINE_INLINE float combined(const Vector<float, W>& sums) const {
        auto add = [](float x, float y) { return x + y; };
        const uint32_t all = detail::mask_of(GROUP_LANES);
        const float sum = detail::combine_lanes(detail::combine_partials(sums, add), m_lane,
                                                GROUP_LANES, all, add);
        return platform::from_first_lane(sum, all);
    }

    template <class T>
    static BRICKLINE_INLINE float dot_alone(int64_t n, const T* a, const T* b) {
        constexpr int W = WIDEST<T>;
        auto add = [](float x, float y) { return x + y; };
        alignas(64) float partial[GROUP_LANES * W];
        const int64_t rounds = n - n % STRIDE<W>;
        platform::dot_rounds<sizeof(T)>(a, b, rounds, partial);
        for (int64_t i = rounds; i < n; i += W) {
            Vector<float, W> sums = load<W>(partial + (i - rounds));
            accumulate_products(sums, load<W>(a + i), load<W>(b + i));
            store<W>(partial + (i - rounds), sums);
        }
        float value[GROUP_LANES];
        for (uint32_t lane = 0; lane < GROUP_LANES; ++lane)
            value[lane] = detail::combine_partials(load<W>(partial + lane * W), add);
        return detail::combine_array(value, GROUP_LANES, add);
    }

    uint32_t m_lane;
    uint32_t* m_fault;
};

class Block : public detail::Reductions<Block> {
public:
    BRICKLINE_INLINE explicit Block(const Place& place) : m_place(place), m_used(0), m_turn(0) {
        if (platform::ONE_THREAD && (place.lanes == 0 || place.lanes > MAX_LANES)) {
            fault(FAULT_LANES);
            m_place.lanes = 1;
        }
    }

    // Place of the block in the grid, and the grid's extent; axis 0, 1 or 2.
    BRICKLINE_INLINE int64_t index(int axis = 0) const { return m_place.index[axis]; }
    BRICKLINE_INLINE int64_t blocks(int axis = 0) const { return m_place.blocks[axis]; }
    BRICKLINE_INLINE int64_t lanes() const { return m_place.lanes; }

    // For who executes blocks: whether rows that were copied ahead were asked for, and the ticks that
    // they were waited for.
    BRICKLINE_INLINE bool has_rows() const { return m_has_rows; }
    BRICKLINE_INLINE uint64_t waited() const { return m_waited; }

    // f(i) for every i in [0, n).
    template <class F>
    BRICKLINE_INLINE void each(int64_t n, F f) { each_whole<1>(n, f); }

    // f(i) for i = 0, W, 2 W, ... below n: f takes care of W elements. n is a multiple of W, else
    // FAULT_RAGGED is recorded and what lies beyond the last multiple is left out.
    template <int W, class F>
    BRICKLINE_INLINE void each_vector(int64_t n, F f) {
        if (n % W != 0) fault(FAULT_RAGGED);
        each_whole<W>(n, f);
    }

    // As `reduce`, with W partials a lane: accumulate(partials, i) folds the elements i to
    // i + W - 1 into the W partials of a Vector<T, W>, element i + k into partial k. n as in
    // each_vector. All lanes return the same value, and the block is synchronised.
    template <int W, class T, class Combine, class Accumulate>
    BRICKLINE_INLINE T reduce_vector(int64_t n, T identity, Combine combine,
                                     Accumulate accumulate) {
        static_assert(detail::Reducible<T>::VALUE);
        if (n % W != 0) fault(FAULT_RAGGED);
        if constexpr (platform::ONE_THREAD) {
            return reduce_alone<W>(n, identity, combine, accumulate);
        } else {
            return reduce_together<W>(n, identity, combine, accumulate);
        }
    }

    // f(group, row) for every row in [0, rows), each by a group of 32 lanes: rows that are `lanes /
    // 32` apart one after the other. Lanes beyond the last whole group rest. Ends without a sync.
    template <class F>
    BRICKLINE_INLINE void groups(int64_t rows, F f) {
        const uint32_t count = m_place.lanes / GROUP_LANES;
        if (count == 0) {
            fault(FAULT_NO_GROUP);
        } else if constexpr (platform::ONE_THREAD) {
            Group group(0, m_place.fault);
            for (int64_t row = 0; row < rows; ++row) f(group, row);
        } else {
            const uint32_t mine = m_place.lane / GROUP_LANES;
            Group group(m_place.lane % GROUP_LANES, m_place.fault);
            if (mine < count)
                for (int64_t row = mine; row < rows; row += count) f(group, row);
        }
    }

    // f(group, row, values) for the rows [first, first + count) of a matrix with n columns, each by a
    // group of 32 lanes; `values` is the row, a Row<T>. In a megakernel that knows what its blocks
    // stream, rows are copied ahead of the block that reads them. Every group sees every call. Ends
    // without a sync.
    template <class T, class F>
    BRICKLINE_INLINE void rows(const T* matrix, int64_t first, int64_t count, int64_t n, F f) {
        if constexpr (!platform::ONE_THREAD) {
            const RowSource* const source = m_place.rows;
            if (source && !m_has_rows &&
                source->has(matrix, first, count, n * int64_t{sizeof(T)}, m_place.index[0]))
                return rows_ahead<T>(*source, first, f);
        }
        groups(count, [&](Group& group, int64_t k) {
            f(group, first + k, Row<T>{matrix + (first + k) * n, false});
        });
    }

    // f(group, row, sum) for the same rows: the inner product of each with a vector, as Group::dot has it.
    template <class A, class B, class F>
    BRICKLINE_INLINE void products(const A* matrix, int64_t first, int64_t count, int64_t n, const B* vector,
                                   F f) {
        if constexpr (!platform::ONE_THREAD && Held<A, B>::LENGTH != 0) {
            if (m_place.rows && n == Held<A, B>::LENGTH) {
                const Held<A, B> held(vector, m_place.lane % GROUP_LANES);
                return rows(matrix, first, count, n, [&](Group& group, int64_t row, Row<A> values) {
                    f(group, row, values.is_near ? group.dot(values, held) : group.dot(n, values, vector));
                });
            }
        }
        rows(matrix, first, count, n, [&](Group& group, int64_t row, Row<A> values) {
            f(group, row, group.dot(n, values, vector));
        });
    }

    // f() by one lane.
    template <class F>
    BRICKLINE_INLINE void once(F f) {
        if (m_place.lane == 0) f();
    }

    // Waits for all lanes; what they wrote before, every lane sees after.
    BRICKLINE_INLINE void sync() { platform::wait_at(m_place.barrier, m_place.lanes); }

    // The next `count` elements of the block's shared memory, 16-byte aligned, not initialised.
    // When they do not fit, FAULT_SHARED is recorded and the launch raises when it has ended. Until
    // then, what the kernel writes must land somewhere: on CPU in memory of the host, as many
    // elements as asked for (none for a negative count), or null where the host has not as much. On
    // CUDA nothing is left and the result is null, for every lane alike: a kernel that writes to it
    // ends the process's use of the device, so run it on CPU first.
    template <class T>
    BRICKLINE_INLINE T* shared(int64_t count) {
        const uint32_t free = m_place.shared_bytes - m_used;
        if (count < 0 || static_cast<uint64_t>(count) > free / sizeof(T)) {
            fault(FAULT_SHARED);
            const uint64_t most = ~uint64_t{0} / sizeof(T);  // more than there is
            const uint64_t wanted = count < 0 ? 0 : minimum(static_cast<uint64_t>(count), most);
            return static_cast<T*>(
                platform::memory_beyond(m_place.scratch, wanted * sizeof(T)));
        }
        T* const found = reinterpret_cast<T*>(static_cast<unsigned char*>(m_place.shared) + m_used);
        const uint32_t end = (m_used + static_cast<uint32_t>(count * sizeof(T)) + 15) / 16 * 16;
        m_used = end < m_place.shared_bytes ? end : m_place.shared_bytes;
        return found;
    }

    // Records a code for the launch, which raises when it has ended. The first one stays; the kernel
    // goes on. 0 records nothing, and a code above LAST_OWN_FAULT or below 0 records FAULT_CODE.
    BRICKLINE_INLINE void fault(uint64_t code) {
        platform::set_if_zero(m_place.fault, detail::fault_word(code));
    }

    // Adds to memory that other lanes and blocks add to, in no particular order: its parameter
    // declares accumulate="add". float, double and integers of 32 and 64 bits.
    template <class T>
    BRICKLINE_INLINE void atomic_add(T* to, T value) { platform::atomic_add(to, value); }

private:
    template <class T, class F>
    BRICKLINE_INLINE void rows_ahead(const RowSource& source, int64_t first, F& f) {
        m_has_rows = true;
        const uint32_t groups = m_place.lanes / GROUP_LANES;
        const uint32_t mine = m_place.lane / GROUP_LANES, lane = m_place.lane % GROUP_LANES;
        if (mine >= groups) return;
        Group group(lane, m_place.fault);
        m_waited += source.each_row(m_place.index[0], mine, groups, lane,
                                    [&](uint32_t row, const unsigned char* values) {
            f(group, first + row, Row<T>{reinterpret_cast<const T*>(values), true});
        });
    }

    template <int W, class F>
    BRICKLINE_INLINE void each_whole(int64_t n, F& f) {
        if constexpr (platform::ONE_THREAD) {
            BRICKLINE_INDEPENDENT
            for (int64_t i = 0; i <= n - W; i += W) f(i);
        } else {
            const int64_t stride = lanes() * W;
            BRICKLINE_IN_FLIGHT
            for (int64_t i = int64_t{m_place.lane} * W; i <= n - W; i += stride) f(i);
        }
    }

    // What group `group` of the block takes of a reduction.
    template <int W>
    BRICKLINE_INLINE detail::Share share_of(uint32_t group, int64_t n) const {
        const uint32_t rest = m_place.lanes - group * GROUP_LANES;
        return {n - n % W, int64_t{group} * GROUP_LANES * W, lanes() * W,
                rest < GROUP_LANES ? rest : GROUP_LANES, m_place.lane % GROUP_LANES};
    }

    BRICKLINE_INLINE uint32_t group_count() const {
        return (m_place.lanes + GROUP_LANES - 1) / GROUP_LANES;
    }

    template <int W, class T, class Combine, class Accumulate>
    BRICKLINE_INLINE T reduce_alone(int64_t n, const T& identity, Combine& combine,
                                    Accumulate& accumulate) {
        T value[MAX_LANES / GROUP_LANES];
        for (T& each : value) each = identity;
        const uint32_t count = group_count();
        for (uint32_t group = 0; group < count; ++group)
            value[group] = detail::reduce_group_alone<W>(share_of<W>(group, n), identity, combine,
                                                         accumulate);
        return detail::combine_array(value, count, combine);
    }

    // Two sets of scratch take turns. A lane that writes a set has passed the barrier of the turn
    // between, hence every lane has read what the set held before: one barrier a reduction.
    template <int W, class T, class Combine, class Accumulate>
    BRICKLINE_INLINE T reduce_together(int64_t n, const T& identity, Combine& combine,
                                       Accumulate& accumulate) {
        const uint32_t lane = m_place.lane % GROUP_LANES;
        const uint32_t group = m_place.lane / GROUP_LANES;
        const uint32_t count = group_count();
        const detail::Share share = share_of<W>(group, n);
        T value = detail::reduce_group_together<W>(share, identity, combine, accumulate);
        unsigned char* const scratch = static_cast<unsigned char*>(m_place.scratch);
        T* const set = reinterpret_cast<T*>(scratch + m_turn * (Place::SCRATCH_BYTES / 2));
        m_turn ^= 1;
        if (lane == 0) set[group] = value;
        sync();
        if (count == 1) return set[0];
        // Every whole group combines the groups' values for itself; a last group with too few lanes
        // waits for the first one's result instead.
        const bool ragged = m_place.lanes % GROUP_LANES != 0;
        if (!ragged || group == 0) {
            const uint32_t all = detail::mask_of(GROUP_LANES);
            value = set[lane < count ? lane : 0];
            value = detail::combine_lanes(value, lane, count, all, combine);
            value = platform::from_first_lane(value, all);
        }
        if (ragged) {
            platform::wait_in_group();  // the first group has read the set
            if (m_place.lane == 0) set[0] = value;
            sync();
            value = set[0];
        }
        return value;
    }

    Place m_place;
    uint32_t m_used;  // bytes of shared memory handed out
    uint32_t m_turn;  // the set of scratch that the next reduction uses
    bool m_has_rows = false;
    uint64_t m_waited = 0;
};

}  // namespace brickline
