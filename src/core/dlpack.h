// The structs of the DLPack specification: capsules of version 0.8, which every library takes, and the
// C interface of version 1.3, by which a tensor says what it is without a call of Python.
#pragma once

#include <cstdint>

namespace brickline::hot {

struct DLDevice {
    int32_t type;
    int32_t number;
};
struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t dimensions;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor tensor;
    void* context;
    void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
    uint32_t major, minor;
    void* context;
    void (*deleter)(DLManagedTensorVersioned*);
    uint64_t flags;
    DLTensor tensor;
};
constexpr uint64_t DL_READ_ONLY = 1;
constexpr int DL_CPU = 1, DL_CUDA = 2;

// What a class of tensors has as `__dlpack_c_exchange_api__`. Entries return 0, or -1 with an exception.
struct DLPackExchangeAPI {
    uint32_t major, minor;
    void* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);  // borrows; may be null
    int (*current_stream)(int32_t device_type, int32_t number, void** out);
};
constexpr uint32_t DL_EXCHANGE_MAJOR = 1;
constexpr const char* DL_EXCHANGE_NAME = "dlpack_exchange_api";

}  // namespace brickline::hot
