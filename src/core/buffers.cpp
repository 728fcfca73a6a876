#include "buffers.h"
#include "dlpack.h"

#include <structmember.h>

#include <cstring>

#include "hot.h"

namespace brickline::hot {

PyTypeObject BufferType = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* device_name(DeviceKind kind, int number) {
    switch (kind) {
        case DeviceKind::Null: return PyUnicode_FromString("NULL");
        case DeviceKind::Cpu: return PyUnicode_FromString("CPU");
        default: return PyUnicode_FromFormat("CUDA:%d", number);
    }
}

PyObject* shape_tuple(const BufferObject* buffer) {
    PyObject* shape = PyTuple_New(buffer->dimensions);
    for (int i = 0; shape && i < buffer->dimensions; ++i) {
        PyObject* size = PyLong_FromLongLong(buffer->shape[i]);
        if (!size) Py_CLEAR(shape);
        else PyTuple_SET_ITEM(shape, i, size);
    }
    return shape;
}

namespace {

// Buffer(address, bytes, dtype, shape, kind, number, read_only, owner)
PyObject* buffer_new(PyTypeObject* type, PyObject* args, PyObject* names) {
    static const char* keys[] = {"address", "bytes", "dtype", "shape", "kind", "number", "read_only",
                                 "owner", nullptr};
    unsigned long long address = 0, bytes = 0;
    int dtype = 0, kind = 0, number = 0, read_only = 0;
    PyObject *shape = nullptr, *owner = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, names, "KKiO!iipO", const_cast<char**>(keys), &address, &bytes,
                                     &dtype, &PyTuple_Type, &shape, &kind, &number, &read_only, &owner)) {
        return nullptr;
    }
    if (PyTuple_GET_SIZE(shape) > MAX_DIMENSIONS) {
        return raise_error("LaunchError", "a buffer has at most %d dimensions, got %zd; reshape it",
                           MAX_DIMENSIONS, PyTuple_GET_SIZE(shape));
    }
    if (kind < int(DeviceKind::Null) || kind > int(DeviceKind::Cuda)) {
        return raise_error("LaunchError", "expected kind 0 (NULL), 1 (CPU) or 2 (CUDA), got %d", kind);
    }
    BufferObject* buffer = as_buffer(type->tp_alloc(type, 0));
    if (!buffer) return nullptr;
    buffer->address = address;
    buffer->bytes = bytes;
    buffer->kind = DeviceKind(kind);
    buffer->dtype = uint8_t(dtype);
    buffer->dimensions = uint8_t(PyTuple_GET_SIZE(shape));
    buffer->is_read_only = read_only != 0;
    buffer->number = number;
    buffer->owner = Py_NewRef(owner);
    for (int i = 0; i < buffer->dimensions; ++i) {
        buffer->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    }
    if (PyErr_Occurred()) Py_CLEAR(buffer);
    return reinterpret_cast<PyObject*>(buffer);
}

int buffer_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(as_buffer(self)->owner);
    return 0;
}

int buffer_clear(PyObject* self) {
    Py_CLEAR(as_buffer(self)->owner);
    return 0;
}

void buffer_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (as_buffer(self)->weakrefs) PyObject_ClearWeakRefs(self);
    buffer_clear(self);
    type->tp_free(self);
}

PyObject* get_shape(PyObject* self, void*) { return shape_tuple(as_buffer(self)); }
PyObject* get_device(PyObject* self, void*) {
    return device_name(as_buffer(self)->kind, as_buffer(self)->number);
}
PyObject* get_owner(PyObject* self, void*) { return Py_NewRef(as_buffer(self)->owner); }
PyObject* get_kind(PyObject* self, void*) { return PyLong_FromLong(long(as_buffer(self)->kind)); }
PyObject* get_read_only(PyObject* self, void*) {
    return PyBool_FromLong(as_buffer(self)->is_read_only);
}

// Host memory as plain bytes, for memoryview and NumPy.
int get_bytes(PyObject* self, Py_buffer* view, int flags) {
    BufferObject* buffer = as_buffer(self);
    if (buffer->kind != DeviceKind::Cpu) {
        view->obj = nullptr;
        PyErr_SetString(PyExc_BufferError, "this memory is not the host's; copy it with its device's to_numpy");
        return -1;
    }
    return PyBuffer_FillInfo(view, self, reinterpret_cast<void*>(buffer->address),
                             Py_ssize_t(buffer->bytes), buffer->is_read_only, flags);
}

// ------------------------------------------------------------------------------------------ DLPack
struct OurTensor {
    DLManagedTensor managed;  // first: others free it through a pointer to this
    int64_t strides[MAX_DIMENSIONS];
};

// Where a capsule's tensor lies: (address, shape, strides or None, code, bits, lanes, device type,
// device number, read-only). The capsule keeps the memory and is not consumed.
PyObject* dlpack_facts(PyObject*, PyObject* capsule) {
    const DLTensor* found = nullptr;
    bool is_read_only = false;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const auto* managed = static_cast<const DLManagedTensorVersioned*>(
            PyCapsule_GetPointer(capsule, "dltensor_versioned"));
        if (managed->major != 1) {
            PyErr_Format(PyExc_BufferError, "expected DLPack 1, got %u", unsigned(managed->major));
            return nullptr;
        }
        found = &managed->tensor;
        is_read_only = managed->flags & DL_READ_ONLY;
    } else {
        const auto* managed =
            static_cast<const DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
        if (!managed) return nullptr;
        found = &managed->tensor;
    }
    const DLTensor& tensor = *found;
    PyObject* shape = PyTuple_New(tensor.dimensions);
    PyObject* strides = tensor.strides ? PyTuple_New(tensor.dimensions) : Py_NewRef(Py_None);
    for (int i = 0; shape && strides && i < tensor.dimensions; ++i) {
        PyTuple_SET_ITEM(shape, i, PyLong_FromLongLong(tensor.shape[i]));
        if (tensor.strides) PyTuple_SET_ITEM(strides, i, PyLong_FromLongLong(tensor.strides[i]));
    }
    if (!shape || !strides || PyErr_Occurred()) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return nullptr;
    }
    return Py_BuildValue("KNNiiiiiO", reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset, shape,
                         strides, int(tensor.dtype.code), int(tensor.dtype.bits), int(tensor.dtype.lanes),
                         int(tensor.device.type), int(tensor.device.number),
                         is_read_only ? Py_True : Py_False);
}

void free_managed(DLManagedTensor* managed) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(static_cast<PyObject*>(managed->context));
    PyMem_Free(managed);
    PyGILState_Release(state);
}

void free_capsule(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;  // somebody has taken it
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
}

// _dlpack(code, bits): the buffer as a capsule.
PyObject* buffer_dlpack(PyObject* self, PyObject* args) {
    int code = 0, bits = 0;
    if (!PyArg_ParseTuple(args, "ii", &code, &bits)) return nullptr;
    BufferObject* buffer = as_buffer(self);
    auto* ours = static_cast<OurTensor*>(PyMem_Calloc(1, sizeof(OurTensor)));
    if (!ours) return PyErr_NoMemory();
    DLManagedTensor* managed = &ours->managed;
    DLTensor& tensor = managed->tensor;
    tensor.data = reinterpret_cast<void*>(buffer->address);
    tensor.device = {buffer->kind == DeviceKind::Cuda ? DL_CUDA : DL_CPU, buffer->number};
    tensor.dimensions = buffer->dimensions;
    tensor.dtype = {uint8_t(code), uint8_t(bits), 1};
    tensor.shape = buffer->shape;
    tensor.strides = ours->strides;
    int64_t stride = 1;
    for (int i = buffer->dimensions; i-- > 0; stride *= buffer->shape[i]) ours->strides[i] = stride;
    managed->context = Py_NewRef(self);
    managed->deleter = free_managed;
    PyObject* capsule = PyCapsule_New(managed, "dltensor", free_capsule);
    if (!capsule) free_managed(managed);
    return capsule;
}

PyMethodDef buffer_methods[] = {
    {"_dlpack", buffer_dlpack, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef buffer_members[] = {
    {"address", T_ULONGLONG, offsetof(BufferObject, address), READONLY, "Where it lies on its device."},
    {"nbytes", T_ULONGLONG, offsetof(BufferObject, bytes), READONLY, "Size in bytes."},
    {"dtype_code", T_UBYTE, offsetof(BufferObject, dtype), READONLY, nullptr},
    {"number", T_INT, offsetof(BufferObject, number), READONLY, "Number of its device."},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef buffer_fields[] = {
    {"shape", get_shape, nullptr, "Elements in each dimension.", nullptr},
    {"device", get_device, nullptr, "Name of its device.", nullptr},
    {"kind", get_kind, nullptr, "0 NULL, 1 CPU, 2 CUDA.", nullptr},
    {"is_read_only", get_read_only, nullptr, "Whether a kernel may not write to it.", nullptr},
    {"owner", get_owner, nullptr, "What keeps the memory.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyBufferProcs buffer_protocol = {get_bytes, nullptr};

PyMethodDef module_functions[] = {
    {"dlpack_facts", dlpack_facts, METH_O, "Where the tensor of a DLPack capsule lies."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

int ready_buffer_type(PyObject* module) {
    BufferType.tp_name = "brickline._core.BufferCore";
    BufferType.tp_doc = "Memory of a device as a launch sees it.";
    BufferType.tp_basicsize = sizeof(BufferObject);
    BufferType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
    BufferType.tp_new = buffer_new;
    BufferType.tp_dealloc = buffer_dealloc;
    BufferType.tp_traverse = buffer_traverse;
    BufferType.tp_clear = buffer_clear;
    BufferType.tp_methods = buffer_methods;
    BufferType.tp_members = buffer_members;
    BufferType.tp_getset = buffer_fields;
    BufferType.tp_as_buffer = &buffer_protocol;
    BufferType.tp_weaklistoffset = offsetof(BufferObject, weakrefs);
    if (PyType_Ready(&BufferType)) return -1;
    if (PyModule_AddFunctions(module, module_functions)) return -1;
    return PyModule_AddObjectRef(module, "BufferCore", reinterpret_cast<PyObject*>(&BufferType));
}

}  // namespace brickline::hot
