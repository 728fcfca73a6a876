// Fingerprints of tensors in host memory: any strides, any dtype, by the widest vector unit that this
// machine has. What a fingerprint is, brickline/fingerprint.h says. Knows no Python.
#pragma once

#include <cstdint>
#include <string>

#include "brickline/fingerprint.h"

namespace brickline {

// A tensor as memory holds it; strides in elements, of any sign.
struct TensorView {
    const void* data;
    fingerprint::DType dtype;
    int dimensions;
    const int64_t* shape;
    const int64_t* strides;
};

// Bytes of one element; 0 for a code that is none.
uint32_t element_bytes(uint32_t dtype);

// The record of a tensor with at most FINGERPRINT_DIMENSIONS dimensions.
void fingerprint_tensor(const TensorView& tensor, FingerprintRow& row);

// Adds `elements` contiguous elements, of which the first has logical index `first` (a multiple of
// BLOCK), to the sums. Several threads may add parts of one tensor to sums of their own.
using AddElements = void (*)(const void* data, uint64_t first, uint64_t elements,
                             const fingerprint::Stripes& stripes, fingerprint::Sums& sums);

// One implementation: an entry for each dtype code.
struct FingerprintEngine {
    const char* name;
    AddElements add[16];
};

// All that were compiled and that this machine can execute, the fastest first; `count` of them.
const FingerprintEngine* const* fingerprint_engines(int& count);

// As fingerprint_tensor, with one of those engines.
void fingerprint_with(const FingerprintEngine& engine, const TensorView& tensor, FingerprintRow& row);

// The axes of a tensor without those of one element; neighbours that follow each other in memory are
// one. Returns their number; sizes and strides hold FINGERPRINT_DIMENSIONS.
int merged_axes(const TensorView& tensor, uint64_t* sizes, int64_t* strides);

// --- Fingerprints on CUDA: what a launch of fingerprint_cuda.h is handed -----------------------------

struct DeviceTensor {
    TensorView view;
    uint64_t row;         // address of the record
};

// How the work of up to JOBS tensors of one dtype is shared out; jobs without elements have one team.
struct DeviceLaunch {
    fingerprint::Batch<fingerprint::JOBS> batch;
    uint32_t teams, threads, shared_bytes;
};
DeviceLaunch share_out(const DeviceTensor* tensors, int count, uint32_t processors);

// Enqueues it; "" or the driver's words. `function` takes a Batch<1> where count is 1.
std::string launch_on_cuda(const DeviceLaunch& launch, int count, uint64_t function, uint64_t context,
                           uint64_t stream, uint64_t scratch);

}  // namespace brickline
