// entry_cpu.h: from a brickline_launch to the Place of one of its blocks. For generated entries.

#pragma once

#include "brickline/kernel.h"
#include "brickline/launch.h"

namespace brickline {

// What `shared` handed out beyond the block's memory, until the block ends.
struct Overflow {
    platform::Chunk* last = nullptr;

    Overflow() = default;
    Overflow(const Overflow&) = delete;
    BRICKLINE_INLINE ~Overflow() {
        if (last) platform::give_back(last);
    }
};

BRICKLINE_INLINE Place place_of(const brickline_launch& launch, uint64_t linear,
                                Overflow& overflow) {
    constexpr uint64_t MOST = 0xfffffff0;  // a Place counts bytes in 32 bits
    Place place = {};
    place.index[0] = static_cast<uint32_t>(linear % launch.grid[0]);
    place.index[1] = static_cast<uint32_t>(linear / launch.grid[0] % launch.grid[1]);
    place.index[2] = static_cast<uint32_t>(linear / launch.grid[0] / launch.grid[1]);
    for (int axis = 0; axis < 3; ++axis) place.blocks[axis] = launch.grid[axis];
    place.lanes = launch.lanes[0] * launch.lanes[1] * launch.lanes[2];
    place.shared = launch.shared;
    place.shared_bytes = static_cast<uint32_t>(minimum(launch.shared_bytes, MOST));
    place.scratch = &overflow.last;
    place.fault = launch.fault;
    return place;
}

}  // namespace brickline
