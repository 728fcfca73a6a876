// entry_cuda.h: from a CUDA thread to the Place of its block. For generated entries, in which the
// CUDA block is the block and its dynamic shared memory is the kernel's.

#pragma once

#include "brickline/kernel.h"

namespace brickline {

// `scratch` is Place::SCRATCH_BYTES of static shared memory.
BRICKLINE_INLINE Place place_of_thread(void* scratch, void* shared, uint32_t* fault) {
    Place place = {};
    place.index[0] = blockIdx.x, place.index[1] = blockIdx.y, place.index[2] = blockIdx.z;
    place.blocks[0] = gridDim.x, place.blocks[1] = gridDim.y, place.blocks[2] = gridDim.z;
    place.lanes = blockDim.x * blockDim.y * blockDim.z;
    place.lane = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    place.shared = shared;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(place.shared_bytes));
    place.scratch = scratch;
    place.fault = fault;
    return place;
}

}  // namespace brickline
