// brickline._core.fingerprint: a tensor in host memory to its record. Raw C-API, as it is called for
// every tensor of a recorded model.
#include "hot.h"

#include <new>

#include "fingerprint.h"

namespace brickline::hot {
namespace {

constexpr int64_t RELEASE_FROM = 8192;  // elements from which on others may run meanwhile

// Sizes or strides; -1 with an exception set.
int read_numbers(PyObject* numbers, int64_t* to, const char* what) {
    if (!PyTuple_Check(numbers)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a tuple, got %s", what, Py_TYPE(numbers)->tp_name);
        return -1;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(numbers);
    if (count > FINGERPRINT_DIMENSIONS) {
        raise_error("UsageError", "expected at most %d dimensions, got %zd; reshape the tensor",
                    int(FINGERPRINT_DIMENSIONS), count);
        return -1;
    }
    for (Py_ssize_t k = 0; k < count; ++k) {
        to[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, k));
    }
    return PyErr_Occurred() ? -1 : int(count);
}

void dense_strides(int dimensions, const int64_t* shape, int64_t* strides) {
    int64_t stride = 1;
    for (int k = dimensions; k-- > 0; stride *= shape[k]) strides[k] = stride;
}

const FingerprintEngine* engine_at(PyObject* number) {
    int count = 0;
    const FingerprintEngine* const* list = fingerprint_engines(count);
    const long place = number ? PyLong_AsLong(number) : 0;
    if (PyErr_Occurred()) return nullptr;
    if (place < 0 || place >= count) {
        PyErr_Format(PyExc_ValueError, "expected an engine from 0 to %d, got %ld", count - 1, place);
        return nullptr;
    }
    return list[place];
}

// What Python says of a tensor: address, dtype, shape, strides or None.
struct GivenTensor {
    int64_t shape[FINGERPRINT_DIMENSIONS], strides[FINGERPRINT_DIMENSIONS];
    TensorView view;
    int64_t elements = 1;

    // False with an exception set.
    bool read(PyObject* address, PyObject* code, PyObject* sizes, PyObject* steps) {
        const unsigned long long at = PyLong_AsUnsignedLongLong(address);
        const long dtype = PyLong_AsLong(code);
        if (PyErr_Occurred()) return false;
        const int dimensions = read_numbers(sizes, shape, "shape");
        if (dimensions < 0) return false;
        if (steps == Py_None) {
            dense_strides(dimensions, shape, strides);
        } else if (const int found = read_numbers(steps, strides, "strides"); found != dimensions) {
            if (found >= 0) PyErr_SetString(PyExc_ValueError, "shape and strides differ in length");
            return false;
        }
        if (dtype < 0 || !element_bytes(uint32_t(dtype))) {
            PyErr_Format(PyExc_ValueError, "there is no dtype %ld", dtype);
            return false;
        }
        view = {reinterpret_cast<const void*>(at), fingerprint::DType(dtype), dimensions, shape, strides};
        for (int k = 0; k < dimensions; ++k) elements *= shape[k];
        return true;
    }
};

// fingerprint(address, dtype, shape, strides or None, engine=0) -> bytes
PyObject* fingerprint_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count < 4 || count > 5) {
        PyErr_Format(PyExc_TypeError, "fingerprint takes 4 or 5 arguments, got %zd", count);
        return nullptr;
    }
    GivenTensor tensor;
    if (!tensor.read(args[0], args[1], args[2], args[3])) return nullptr;
    const FingerprintEngine* const engine = engine_at(count == 5 ? args[4] : nullptr);
    if (!engine) return nullptr;
    PyObject* const record = PyBytes_FromStringAndSize(nullptr, sizeof(FingerprintRow));
    if (!record) return nullptr;
    FingerprintRow row;
    bool has_memory = true;
    PyThreadState* const state = tensor.elements >= RELEASE_FROM ? PyEval_SaveThread() : nullptr;
    try {
        fingerprint_with(*engine, tensor.view, row);
    } catch (const std::bad_alloc&) {
        has_memory = false;
    }
    if (state) PyEval_RestoreThread(state);
    if (!has_memory) {
        Py_DECREF(record);
        return PyErr_NoMemory();
    }
    std::memcpy(PyBytes_AS_STRING(record), &row, sizeof row);
    return record;
}

// launch_fingerprints(function, context, stream, scratch, processors, jobs), a job being a tuple
// (row, address, dtype, shape, strides or None)
PyObject* launch_fingerprints(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 6 || !PyTuple_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "launch_fingerprints takes five numbers and a tuple of jobs");
        return nullptr;
    }
    uint64_t number[5];
    for (int k = 0; k < 5; ++k) number[k] = PyLong_AsUnsignedLongLong(args[k]);
    if (PyErr_Occurred()) return nullptr;
    const Py_ssize_t jobs = PyTuple_GET_SIZE(args[5]);
    if (jobs < 1 || jobs > Py_ssize_t(fingerprint::JOBS)) {
        PyErr_Format(PyExc_ValueError, "expected 1 to %d jobs, got %zd", int(fingerprint::JOBS), jobs);
        return nullptr;
    }
    GivenTensor given[fingerprint::JOBS];
    DeviceTensor tensors[fingerprint::JOBS];
    for (Py_ssize_t k = 0; k < jobs; ++k) {
        PyObject* const job = PyTuple_GET_ITEM(args[5], k);
        if (!PyTuple_Check(job) || PyTuple_GET_SIZE(job) != 5) {
            PyErr_SetString(PyExc_TypeError, "a job is (row, address, dtype, shape, strides)");
            return nullptr;
        }
        const uint64_t row = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(job, 0));
        if (PyErr_Occurred() ||
            !given[k].read(PyTuple_GET_ITEM(job, 1), PyTuple_GET_ITEM(job, 2), PyTuple_GET_ITEM(job, 3),
                           PyTuple_GET_ITEM(job, 4))) {
            return nullptr;
        }
        tensors[k] = {given[k].view, row};
    }
    const DeviceLaunch launch = share_out(tensors, int(jobs), uint32_t(number[4]));
    const std::string problem =
        launch_on_cuda(launch, int(jobs), number[0], number[1], number[2], number[3]);
    if (!problem.empty()) return raise_error("DeviceError", "%s", problem.c_str());
    Py_RETURN_NONE;
}

PyObject* engine_names(PyObject*, PyObject*) {
    int count = 0;
    const FingerprintEngine* const* list = fingerprint_engines(count);
    PyObject* names = PyTuple_New(count);
    for (int k = 0; names && k < count; ++k) {
        PyObject* name = PyUnicode_FromString(list[k]->name);
        if (!name) Py_CLEAR(names);
        else PyTuple_SET_ITEM(names, k, name);
    }
    return names;
}

PyMethodDef module_functions[] = {
    {"fingerprint", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fingerprint_of)),
     METH_FASTCALL, "The record of a tensor in host memory."},
    {"launch_fingerprints",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch_fingerprints)), METH_FASTCALL,
     "Enqueue the fingerprints of tensors of one dtype on a CUDA device."},
    {"fingerprint_engines", engine_names, METH_NOARGS,
     "Vector units that fingerprints can use here, the fastest first."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

int ready_fingerprints(PyObject* module) { return PyModule_AddFunctions(module, module_functions); }

}  // namespace brickline::hot
