// What a tensor says of itself: by the C interface of DLPack, or else through Python.
#include "tensor_book.h"

namespace brickline::hot {
namespace {

PyObject* g_version_name = nullptr;

bool read_sizes(PyObject* tuple, int32_t count, int64_t* to) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) return false;
    for (int32_t k = 0; k < count; ++k) to[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, k));
    return !PyErr_Occurred();
}

bool ask_facts(TensorBookObject* book, PyObject* tensor, TensorFacts& facts) {
    PyObject* said = PyObject_CallOneArg(book->facts, tensor);
    PyObject *shape, *strides;
    unsigned long long address;
    const bool sound = said && PyTuple_Check(said) &&
                       PyArg_ParseTuple(said, "KbbiiOO", &address, &facts.code, &facts.bits, &facts.kind,
                                        &facts.number, &shape, &strides) &&
                       PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) <= Py_ssize_t(FINGERPRINT_DIMENSIONS);
    if (sound) {
        facts.address = address;
        facts.dimensions = int32_t(PyTuple_GET_SIZE(shape));
    }
    const bool done = sound && read_sizes(shape, facts.dimensions, facts.shape) &&
                      read_sizes(strides, facts.dimensions, facts.strides);
    Py_XDECREF(said);
    return done;
}

}  // namespace

bool read_facts(TensorBookObject* book, PyObject* tensor, TensorFacts& facts) {
    if (!book->exchange) {
        const bool done = ask_facts(book, tensor, facts);
        PyErr_Clear();
        return done;
    }
    DLTensor found = {};
    if (book->exchange->tensor_from_object(tensor, &found)) {
        PyErr_Clear();
        return false;
    }
    if (found.dtype.lanes != 1 || found.dimensions > int32_t(FINGERPRINT_DIMENSIONS)) return false;
    facts.address = reinterpret_cast<uint64_t>(found.data) + found.byte_offset;
    facts.code = found.dtype.code;
    facts.bits = found.dtype.bits;
    facts.kind = found.device.type;
    facts.number = found.device.number;
    facts.dimensions = found.dimensions;
    for (int32_t k = 0; k < found.dimensions; ++k) {
        facts.shape[k] = found.shape[k];
        facts.strides[k] = found.strides[k];
    }
    return true;
}

int64_t version_of(PyObject* tensor) {
    if (!g_version_name) g_version_name = PyUnicode_InternFromString("_version");
    PyObject* value = PyObject_GetAttr(tensor, g_version_name);
    const int64_t version = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return -1;
    }
    return version;
}

}  // namespace brickline::hot
