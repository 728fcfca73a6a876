// FingerprintRing: tickets, labels and launches of one device's fingerprints. fingerprint_cuda.py owns
// the memory and compiles programs; what is asked of it once is remembered here.
#include "fingerprint_ring.h"

namespace brickline::hot {

PyTypeObject RingType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

RingObject* as_ring(PyObject* object) { return reinterpret_cast<RingObject*>(object); }

// Null with an exception set.
const RingState::Program* program_for(RingObject* ring, uint32_t dtype, int jobs) {
    RingState::Program& program = ring->state->programs[dtype % 16][jobs > 1];
    if (program.function) return &program;
    PyObject* found = PyObject_CallFunction(ring->program, "Ii", dtype, jobs > 1 ? int(fingerprint::JOBS) : 1);
    if (!found) return nullptr;
    unsigned long long function = 0, context = 0;
    PyObject* kept;
    if (PyArg_ParseTuple(found, "KKO", &function, &context, &kept)) program = {function, context};
    Py_DECREF(found);
    return PyErr_Occurred() ? nullptr : &program;
}

bool scratch_for(RingObject* ring, uint64_t stream, uint64_t& scratch) {
    const auto found = ring->state->scratch.find(stream);
    if (found != ring->state->scratch.end()) {
        scratch = found->second;
        return true;
    }
    PyObject* address = PyObject_CallFunction(ring->find_scratch, "K", static_cast<unsigned long long>(stream));
    if (!address) return false;
    scratch = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return false;
    ring->state->scratch[stream] = scratch;
    return true;
}

// A ticket for each of `count` tensors, the first of which is returned; -1 with an exception set.
int64_t reserve(RingObject* ring, uint64_t count) {
    RingState& state = *ring->state;
    while (state.taken + count - state.fetched > state.capacity) {
        PyObject* done = PyObject_CallNoArgs(ring->make_room);
        if (!done) return -1;
        Py_DECREF(done);
    }
    const uint64_t first = state.taken;
    state.taken += count;
    for (uint64_t k = 0; k < count; ++k) state.labels[(first + k) % state.capacity] = 0;
    return int64_t(first);
}

}  // namespace

bool ring_take(RingObject* ring, const RingTensor* tensors, int count, uint64_t stream) {
    RingState& state = *ring->state;
    const RingState::Program* program = program_for(ring, tensors[0].dtype, count);
    uint64_t scratch = 0;
    if (!program || !scratch_for(ring, stream, scratch)) return false;
    const int64_t first = reserve(ring, uint64_t(count));
    if (first < 0) return false;
    DeviceTensor given[fingerprint::JOBS];
    for (int k = 0; k < count; ++k) {
        const RingTensor& tensor = tensors[k];
        const uint64_t place = (uint64_t(first) + uint64_t(k)) % state.capacity;
        given[k] = {{reinterpret_cast<const void*>(tensor.address), fingerprint::DType(tensor.dtype),
                     tensor.dimensions, tensor.shape, tensor.strides},
                    state.address + place * state.slot_bytes};
        state.labels[place] = tensor.label;
    }
    const DeviceLaunch launch = share_out(given, count, state.processors);
    const std::string problem =
        launch_on_cuda(launch, count, program->function, program->context, stream, scratch);
    if (problem.empty()) return true;
    // Their places stay as they are: whoever fetches them finds no label.
    for (int k = 0; k < count; ++k) state.labels[(uint64_t(first) + uint64_t(k)) % state.capacity] = 0;
    raise_error("DeviceError", "%s", problem.c_str());
    return false;
}

namespace {

PyObject* ring_new(PyTypeObject* type, PyObject* args, PyObject*) {
    unsigned long long address, capacity, slot_bytes;
    unsigned int processors;
    PyObject *program, *scratch, *room;
    if (!PyArg_ParseTuple(args, "KKKIOOO", &address, &capacity, &slot_bytes, &processors, &program, &scratch,
                          &room)) {
        return nullptr;
    }
    auto* ring = reinterpret_cast<RingObject*>(type->tp_alloc(type, 0));
    if (!ring) return nullptr;
    ring->state = new RingState;
    ring->state->address = address;
    ring->state->capacity = capacity;
    ring->state->slot_bytes = slot_bytes;
    ring->state->processors = processors;
    ring->state->labels.resize(capacity);
    ring->program = Py_NewRef(program);
    ring->find_scratch = Py_NewRef(scratch);
    ring->make_room = Py_NewRef(room);
    return reinterpret_cast<PyObject*>(ring);
}

int ring_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(as_ring(self)->program);
    Py_VISIT(as_ring(self)->find_scratch);
    Py_VISIT(as_ring(self)->make_room);
    return 0;
}

int ring_clear(PyObject* self) {
    Py_CLEAR(as_ring(self)->program);
    Py_CLEAR(as_ring(self)->find_scratch);
    Py_CLEAR(as_ring(self)->make_room);
    return 0;
}

void ring_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    ring_clear(self);
    delete as_ring(self)->state;
    Py_TYPE(self)->tp_free(self);
}

PyObject* ring_reserve(PyObject* self, PyObject* count) {
    const unsigned long long wanted = PyLong_AsUnsignedLongLong(count);
    if (PyErr_Occurred()) return nullptr;
    if (wanted > as_ring(self)->state->capacity) {
        return raise_error("UsageError", "expected at most %llu tensors at once, got %llu",
                           static_cast<unsigned long long>(as_ring(self)->state->capacity), wanted);
    }
    const int64_t first = reserve(as_ring(self), wanted);
    return first < 0 ? nullptr : PyLong_FromLongLong(first);
}

PyObject* ring_fetched_to(PyObject* self, PyObject* ticket) {
    const unsigned long long to = PyLong_AsUnsignedLongLong(ticket);
    if (PyErr_Occurred()) return nullptr;
    as_ring(self)->state->fetched = to;
    Py_RETURN_NONE;
}

PyObject* ring_set_label(PyObject* self, PyObject* args) {
    unsigned long long ticket, label;
    if (!PyArg_ParseTuple(args, "KK", &ticket, &label)) return nullptr;
    RingState& state = *as_ring(self)->state;
    state.labels[ticket % state.capacity] = label;
    Py_RETURN_NONE;
}

PyObject* ring_label(PyObject* self, PyObject* ticket) {
    const unsigned long long at = PyLong_AsUnsignedLongLong(ticket);
    if (PyErr_Occurred()) return nullptr;
    const RingState& state = *as_ring(self)->state;
    return PyLong_FromUnsignedLongLong(state.labels[at % state.capacity]);
}

PyObject* ring_taken(PyObject* self, void*) { return PyLong_FromUnsignedLongLong(as_ring(self)->state->taken); }

PyObject* ring_fetched(PyObject* self, void*) {
    return PyLong_FromUnsignedLongLong(as_ring(self)->state->fetched);
}

PyMethodDef ring_methods[] = {
    {"reserve", ring_reserve, METH_O, "Tickets for as many tensors, of which the first is returned."},
    {"fetched_to", ring_fetched_to, METH_O, "Records of all tickets before this one have been fetched."},
    {"set_label", ring_set_label, METH_VARARGS, "Give a ticket's record a number of one's own."},
    {"label", ring_label, METH_O, "That number; 0: none."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef ring_members[] = {
    {"taken", ring_taken, nullptr, "The next ticket.", nullptr},
    {"fetched", ring_fetched, nullptr, "The first ticket whose record has not been fetched.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

int ready_ring_type(PyObject* module) {
    RingType.tp_name = "brickline._core.FingerprintRing";
    RingType.tp_doc = "Tickets of one device's fingerprints.";
    RingType.tp_basicsize = sizeof(RingObject);
    RingType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    RingType.tp_new = ring_new;
    RingType.tp_traverse = ring_traverse;
    RingType.tp_clear = ring_clear;
    RingType.tp_dealloc = ring_dealloc;
    RingType.tp_methods = ring_methods;
    RingType.tp_getset = ring_members;
    if (PyType_Ready(&RingType)) return -1;
    return PyModule_AddObjectRef(module, "FingerprintRing", reinterpret_cast<PyObject*>(&RingType));
}

}  // namespace brickline::hot
