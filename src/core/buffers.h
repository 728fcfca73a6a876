// BufferObject: memory of a device as a launch sees it. Raw C-API, because a launch checks several of
// them in tens of nanoseconds. buffers.py makes them from arrays and gives them their manners.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace brickline::hot {

enum class DeviceKind : uint8_t { Null = 0, Cpu = 1, Cuda = 2 };
constexpr int MAX_DIMENSIONS = 8;

struct BufferObject {
    PyObject_HEAD
    uint64_t address;
    uint64_t bytes;
    DeviceKind kind;
    uint8_t dtype;        // code of dtypes.py
    uint8_t dimensions;
    bool is_read_only;
    int32_t number;       // of the device
    int64_t shape[MAX_DIMENSIONS];
    PyObject* owner;      // keeps the memory
    PyObject* weakrefs;
};

extern PyTypeObject BufferType;

inline BufferObject* as_buffer(PyObject* object) { return reinterpret_cast<BufferObject*>(object); }
// "CPU", "CUDA:0" or "NULL".
PyObject* device_name(DeviceKind kind, int number);
// (1024, 8)
PyObject* shape_tuple(const BufferObject* buffer);

int ready_buffer_type(PyObject* module);
int ready_launcher_type(PyObject* module);

}  // namespace brickline::hot
