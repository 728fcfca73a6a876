// reductions.h: the order in which a reduction combines its values, as one thread or as a group of
// lanes carries it out. Block and Group of kernel.h reduce with it.
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
// The header knows shares of indices and values, nothing of blocks, grids, faults or shared memory.

#pragma once

#include "brickline/arithmetic.h"
#include "brickline/elements.h"
#include "brickline/platform.h"

namespace brickline {

inline constexpr uint32_t GROUP_LANES = 32;

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

}  // namespace brickline
