// FingerprintRing: places for records in the memory of one CUDA device, and launches that fill them
// without Python on the way. See fingerprint_ring.cpp.
#pragma once

#include <unordered_map>
#include <vector>

#include "fingerprint.h"
#include "hot.h"

namespace brickline::hot {

// A tensor of the ring's device, and a number under which whoever took it finds its record.
struct RingTensor {
    uint64_t address;
    uint32_t dtype;
    int dimensions;
    int64_t shape[FINGERPRINT_DIMENSIONS], strides[FINGERPRINT_DIMENSIONS];
    uint64_t label;
};

struct RingState {
    uint64_t address, capacity, slot_bytes;
    uint32_t processors;
    uint64_t taken = 0, fetched = 0;  // tickets; those in between are still to be fetched
    std::vector<uint64_t> labels;     // by place in the ring; 0: none
    struct Program {
        uint64_t function = 0, context = 0;
    } programs[16][2];                // by dtype, for one tensor and for several
    std::unordered_map<uint64_t, uint64_t> scratch;  // by stream
};

struct RingObject {
    PyObject_HEAD
    RingState* state;
    PyObject *program, *find_scratch, *make_room;
};

extern PyTypeObject RingType;

// Enqueues the fingerprints of up to JOBS tensors of one dtype; false with an exception set. Waits where
// the ring is full.
bool ring_take(RingObject* ring, const RingTensor* tensors, int count, uint64_t stream);
int ready_ring_type(PyObject* module);

}  // namespace brickline::hot
