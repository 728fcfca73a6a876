#include "histogram.h"

namespace brickline::histogram_detail {

// Written out rather than computed: 64 correct bits need more than a double, and the tests compute
// every value again with exact arithmetic.
const uint64_t thresholds[17] = {
    0x8000000000000000ull, 0x85aac367cc487b14ull, 0x8b95c1e3ea8bd6e6ull,
    0x91c3d373ab11c336ull, 0x9837f0518db8a96full, 0x9ef5326091a111adull,
    0xa5fed6a9b15138eaull, 0xad583eea42a14ac6ull, 0xb504f333f9de6484ull,
    0xbd08a39f580c36beull, 0xc5672a115506daddull, 0xce248c151f8480e3ull,
    0xd744fccad69d6af4ull, 0xe0ccdeec2a94e111ull, 0xeac0c6e7dd24392eull,
    0xf5257d152486cc2cull, 0xffffffffffffffffull,
};

const uint8_t first[64] = {
    0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4,
    5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8, 9,
    9, 9, 9, 10, 10, 10, 10, 10, 11, 11, 11, 11, 12, 12, 12, 12,
    12, 13, 13, 13, 13, 13, 14, 14, 14, 14, 14, 15, 15, 15, 15, 15,
};

}  // namespace brickline::histogram_detail
