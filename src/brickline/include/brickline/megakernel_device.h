// megakernel_device.h: what both engines of a megakernel need on a CUDA device, that of plans and that of
// queues.

#pragma once

#include "brickline/kernel.h"

namespace brickline {
namespace mega {

// An argument of an op, from the word that holds its bits.
template <class T>
__device__ __forceinline__ T argument(uint64_t word) {
    T value;
    memcpy(&value, &word, sizeof(T));
    return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

}  // namespace mega
}  // namespace brickline
