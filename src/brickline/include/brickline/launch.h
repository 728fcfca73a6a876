// launch.h: what the core hands to a compiled CPU kernel. Plain C, and all that the two share.
//
// A compiled kernel exports `void ENTRY(const brickline_launch*)`. It executes the linear blocks
// [first, last) of the grid one after the other, so several threads may each execute a part of one
// launch, every one with its own `shared`.

#ifndef BRICKLINE_LAUNCH_H
#define BRICKLINE_LAUNCH_H

#include <stdint.h>

typedef struct brickline_launch {
    void* const* arguments;  // pointers to argument values, in signature order, as CUDA takes them
    uint32_t grid[3];        // blocks along each axis
    uint32_t lanes[3];       // local size: lanes of one block along each axis
    uint64_t first, last;    // linear blocks that this call executes; axis 0 runs fastest
    void* shared;            // memory of one block at a time, 64-byte aligned
    uint64_t shared_bytes;
    uint32_t* fault;         // one word, 0 before the launch; the first fault code wins
} brickline_launch;

#endif
