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
// Order of a reduction. Index i belongs to lane (i / W) % lanes, and there to partial i % W; W is 1
// except in reduce_vector<W>. A partial starts at the identity and takes its indices in ascending
// order. Then partials are combined pairwise, p[k] with p[k + d], for d halving down to 1:
//   1. the W partials of a lane, from d = W / 2;
//   2. the lanes of each group, from d = 16;
//   3. the groups of the block, from d = 16 (of a Group, this step is absent).
// A partner that does not exist is skipped. The order depends on the number of lanes and on W
// alone: not on the device, nor on who executes the block. Both compilers contract nothing, so the
// bits do not, either; of a NaN, only that it is one.
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

namespace brickline {

inline constexpr uint32_t GROUP_LANES = 32;
inline constexpr uint32_t MAX_LANES = 1024;

// Codes that Block itself records. A kernel's own codes are FIRST_OWN_FAULT and above.
enum Fault : uint32_t {
    FAULT_SHARED = 2,     // shared memory is used up
    FAULT_RAGGED = 3,     // a vector form was given a length that is no multiple of its width
    FAULT_NO_GROUP = 4,   // groups() in a block of fewer than 32 lanes
    FAULT_LANES = 5,      // no lane, or more than MAX_LANES; the block runs with one
    FIRST_OWN_FAULT = 16,
};

// Where a block stands and what it may use. On CUDA every lane has a copy that differs in `lane`.
struct Place {
    // Bytes of `scratch`: two sets of one value of at most 16 bytes for each of 32 groups.
    static constexpr uint32_t SCRATCH_BYTES = 2 * 32 * 16;

    uint32_t index[3];      // of the block in its grid
    uint32_t blocks[3];     // of the grid
    uint32_t lanes;         // 1 to MAX_LANES; the kernel's local size, whoever executes it
    uint32_t lane;          // CUDA: this thread; lanes 32k to 32k+31 are one warp. CPU: 0
    uint32_t barrier;       // CUDA: the named barrier of these lanes, 0 if they are the CUDA block
    uint32_t shared_bytes;
    void* shared;           // for the kernel, 16-byte aligned; null where shared_bytes is 0
    void* scratch;          // CUDA: SCRATCH_BYTES of shared memory, 16-byte aligned. CPU: owner of
                            // platform::memory_beyond, or null
    uint32_t* fault;        // one word for the whole launch
};

namespace detail {

template <class T>
struct Lowest {
    static constexpr bool SIGNED = T(-1) < T(0);
    static BRICKLINE_INLINE T value() {
        return SIGNED ? static_cast<T>(uint64_t{1} << (8 * sizeof(T) - 1)) : T(0);
    }
};
template <>
struct Lowest<float> {
    static BRICKLINE_INLINE float value() { return platform::float_of(0xff800000); }
};
template <>
struct Lowest<double> {
    static BRICKLINE_INLINE double value() { return static_cast<double>(Lowest<float>::value()); }
};

// Step 1 of the order: the partials of one lane. The distance is a constant of each round, so that
// they stay in registers.
template <int DISTANCE, class T, int W, class Combine>
BRICKLINE_INLINE T combine_halves(Vector<T, W>& partial, Combine& combine) {
    BRICKLINE_UNROLL
    for (int k = 0; k < DISTANCE; ++k) partial[k] = combine(partial[k], partial[k + DISTANCE]);
    if constexpr (DISTANCE > 1) {
        return combine_halves<DISTANCE / 2>(partial, combine);
    } else {
        return partial[0];
    }
}
template <class T, int W, class Combine>
BRICKLINE_INLINE T combine_partials(Vector<T, W> partial, Combine& combine) {
    return combine_halves<W / 2>(partial, combine);
}

// Steps 2 and 3 where one thread has all `count` values, at most 32 of them. The distance is a
// constant of each round, so that a whole group is combined in vectors.
template <uint32_t DISTANCE = GROUP_LANES / 2, class T, class Combine>
BRICKLINE_INLINE T combine_array(T* value, uint32_t count, Combine& combine) {
    if (count == GROUP_LANES) {
        for (uint32_t k = 0; k < DISTANCE; ++k) value[k] = combine(value[k], value[k + DISTANCE]);
    } else {
        for (uint32_t k = 0; k < DISTANCE && k + DISTANCE < count; ++k)
            value[k] = combine(value[k], value[k + DISTANCE]);
    }
    if constexpr (DISTANCE == 1) {
        return value[0];
    } else {
        return combine_array<DISTANCE / 2>(value, count, combine);
    }
}

// Steps 2 and 3 where lane k of a warp has value k; `present` lanes call. Lane 0 has the result.
template <class T, class Combine>
BRICKLINE_INLINE T combine_lanes(T value, uint32_t lane, uint32_t count, uint32_t present,
                                 Combine& combine) {
    BRICKLINE_UNROLL
    for (uint32_t distance = GROUP_LANES / 2; distance > 0; distance /= 2) {
        const T other = platform::from_lane_after(value, distance, present);
        if (lane + distance < count) value = combine(value, other);
    }
    return value;
}

// Whether simd.h knows the inner product of A and B.
template <class A, class B>
inline constexpr bool HAS_DOT_ROUNDS = false;
template <>
inline constexpr bool HAS_DOT_ROUNDS<float, float> = true;
template <>
inline constexpr bool HAS_DOT_ROUNDS<bf16, bf16> = true;

// A bit for each of the first `count` lanes of a group.
BRICKLINE_INLINE uint32_t mask_of(uint32_t count) { return 0xffffffffu >> (GROUP_LANES - count); }

// The indices that a group takes of [0, n): `first` on, W for each of its lanes, every `stride`.
struct Share {
    int64_t n;
    int64_t first;
    int64_t stride;
    uint32_t lanes;  // of this group: 32, or fewer in the last group of a block
    uint32_t lane;   // CUDA: this thread's place in its group
};

// Partials and steps 1 and 2 on CPU, for all lanes of a group.
template <int W, class T, class Combine, class Accumulate>
BRICKLINE_INLINE T reduce_group_alone(const Share& share, const T& identity, Combine& combine,
                                      Accumulate& accumulate) {
    Vector<T, W> partial[GROUP_LANES];
    for (auto& lane : partial)
        for (int k = 0; k < W; ++k) lane[k] = identity;
    int64_t base = share.first;
    if (share.lanes == GROUP_LANES) {
        // Whole rounds have a fixed length, so that partials may stay in registers.
        constexpr int64_t ROUND = GROUP_LANES * W;
        for (; base + ROUND <= share.n; base += share.stride) {
            BRICKLINE_INDEPENDENT
            for (uint32_t lane = 0; lane < GROUP_LANES; ++lane)
                accumulate(partial[lane], base + lane * W);
        }
    }
    for (; base < share.n; base += share.stride)
        for (uint32_t lane = 0; lane < share.lanes && base + lane * W < share.n; ++lane)
            accumulate(partial[lane], base + lane * W);
    T value[GROUP_LANES];
    for (uint32_t lane = 0; lane < GROUP_LANES; ++lane)
        value[lane] = combine_partials(partial[lane], combine);
    return combine_array(value, share.lanes, combine);
}

// Partials and steps 1 and 2 on CUDA, called by every lane of a group; lane 0 has the result.
template <int W, class T, class Combine, class Accumulate>
BRICKLINE_INLINE T reduce_group_together(const Share& share, const T& identity, Combine& combine,
                                         Accumulate& accumulate) {
    Vector<T, W> partial;
    BRICKLINE_UNROLL
    for (int k = 0; k < W; ++k) partial[k] = identity;
    BRICKLINE_IN_FLIGHT
    for (int64_t i = share.first + share.lane * W; i < share.n; i += share.stride)
        accumulate(partial, i);
    return combine_lanes(combine_partials(partial, combine), share.lane, share.lanes,
                         mask_of(share.lanes), combine);
}

// Lanes of a group exchange words of 4 bytes. Every device refuses what one would refuse, at the
// first use of a type, before code that does not suit it is looked at.
template <class T>
struct Reducible {
    static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 16,
                  "reduce values of 4 or 8 bytes, or a struct of up to 16: return float(x[i])");
    static constexpr bool VALUE = true;
};

// reduce, sum and max in terms of reduce_vector, for Block and Group alike.
template <class Self>
class Reductions {
public:
    // combine(... combine(identity, f(i)) ...) over i in [0, n), in the order of this file's top.
    // The result is what f returns, a number or a plain struct of 4, 8, 12 or 16 bytes.
    template <class T, class Combine, class F>
    BRICKLINE_INLINE T reduce(int64_t n, T identity, Combine combine, F f) {
        static_assert(Reducible<T>::VALUE);
        return self().template reduce_vector<1>(
            n, identity, combine,
            [&](Vector<T, 1>& partial, int64_t i) { partial[0] = combine(partial[0], f(i)); });
    }

    template <class F>
    BRICKLINE_INLINE auto sum(int64_t n, F f) {
        using T = decltype(f(n));
        static_assert(Reducible<T>::VALUE);
        return reduce(n, T(0), [](T a, T b) { return a + b; }, f);
    }

    // Of no index: minus infinity, or the smallest integer. A NaN is the largest number.
    template <class F>
    BRICKLINE_INLINE auto max(int64_t n, F f) {
        using T = decltype(f(n));
        static_assert(Reducible<T>::VALUE);
        return reduce(n, Lowest<T>::value(), [](T a, T b) { return maximum(a, b); }, f);
    }

private:
    BRICKLINE_INLINE Self& self() { return static_cast<Self&>(*this); }
};

}  // namespace detail

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

    template <class F>
    BRICKLINE_INLINE void once(F f) {
        if (m_lane == 0) f();
    }

    BRICKLINE_INLINE void sync() { platform::wait_in_group(); }
    BRICKLINE_INLINE void fault(uint32_t code) { platform::set_if_zero(m_fault, code); }

private:
    static constexpr int BATCH = 4;  // 64 bytes a lane: 32 warps then have 64 KiB under way
    template <int W>
    static constexpr int64_t STRIDE = GROUP_LANES * W;

    template <class A, class B, int W>
    static BRICKLINE_INLINE void accumulate_products(Vector<float, W>& sums, const Vector<A, W>& a,
                                                     const Vector<B, W>& b) {
        BRICKLINE_UNROLL
        for (int k = 0; k < W; ++k) sums[k] = sums[k] + float(a[k]) * float(b[k]);
    }

    // The products of up to BATCH vectors of `a`, a group's stride apart, the first at i. All of
    // their loads are under way before the first is used: left to itself, a compiler saves
    // registers and waits for every one.
    template <bool WHOLE, int W, class A, class B>
    BRICKLINE_INLINE void accumulate_batch(Vector<float, W>& sums, int64_t i, int64_t n, const A* a,
                                           const B* b) const {
        Vector<A, W> batch[BATCH];
        BRICKLINE_UNROLL
        for (int k = 0; k < BATCH; ++k)
            if (WHOLE || i + k * STRIDE<W> < n) batch[k] = stream<W>(a + i + k * STRIDE<W>);
        BRICKLINE_UNROLL
        for (int k = 0; k < BATCH; ++k)
            if (WHOLE || i + k * STRIDE<W> < n)
                accumulate_products(sums, batch[k], load<W>(b + i + k * STRIDE<W>));
    }

    template <class A, class B>
    BRICKLINE_INLINE float dot_together(int64_t n, const A* a, const B* b) const {
        constexpr int W = WIDEST<A>;
        auto add = [](float x, float y) { return x + y; };
        Vector<float, W> sums = {};
        int64_t i = int64_t{m_lane} * W;
        for (; i + (BATCH - 1) * STRIDE<W> < n; i += BATCH * STRIDE<W>)
            accumulate_batch<true>(sums, i, n, a, b);
        if (i < n) accumulate_batch<false>(sums, i, n, a, b);
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

    // Records a code other than 0 for the launch. The first one stays; the kernel goes on.
    BRICKLINE_INLINE void fault(uint32_t code) { platform::set_if_zero(m_place.fault, code); }

    // Adds to memory that other lanes and blocks add to, in no particular order: its parameter
    // declares accumulate="add". float, double and integers of 32 and 64 bits.
    template <class T>
    BRICKLINE_INLINE void atomic_add(T* to, T value) { platform::atomic_add(to, value); }

private:
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
};

}  // namespace brickline
