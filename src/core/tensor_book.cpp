// TensorBook: identities and fingerprints of torch's tensors, without Python where they are plain.
//
// A tensor is known by its object, a weak reference and its version, or as another view of the same
// memory. What the book cannot tell it asks `look`, which gives the row, or None once it has taught the
// book a class, a dtype or a device. A tensor of a device with a ring is taken here, see
// tensor_queue.cpp. All others are `take`'s.
#include "tensor_book.h"

#include <cstring>

#include "cuda_driver.h"

namespace brickline::hot {

PyTypeObject TensorBookType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

PyObject* g_is_neg = nullptr;

TensorBookObject* as_tensors(PyObject* object) { return reinterpret_cast<TensorBookObject*>(object); }

// A new reference to what a weak one refers to, or null.
PyObject* referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
    PyObject* found = nullptr;
    if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
    return found;
#else
    PyObject* found = PyWeakref_GetObject(reference);
    return found && found != Py_None ? Py_NewRef(found) : nullptr;
#endif
}

bool refers_to(PyObject* reference, PyObject* tensor) {
    PyObject* found = referent(reference);
    Py_XDECREF(found);
    return found == tensor;
}

template <class Key>
void forget(std::unordered_map<Key, SeenTensor>& seen) {
    // Dropping a weak reference runs no code, but the map must be whole while it is dropped.
    std::unordered_map<Key, SeenTensor> old;
    old.swap(seen);
    for (auto& [key, each] : old) Py_CLEAR(each.reference);
}

const KnownDType* find_dtype(const TensorBookState& state, const TensorFacts& facts) {
    for (const KnownDType& each : state.dtypes) {
        if (each.code == facts.code && each.bits == facts.bits) return &each;
    }
    return nullptr;
}

OperandRow row_of(const TensorFacts& facts, uint32_t dtype_name, int64_t version) {
    OperandRow row{};
    row.version = uint32_t(version);
    row.dtype = dtype_name;
    row.dimensions = uint32_t(facts.dimensions);
    for (int32_t k = 0; k < facts.dimensions && k < 8; ++k) {
        row.shape[k] = facts.shape[k];
        row.strides[k] = facts.strides[k];
    }
    return row;
}

uint64_t hash_of(uint64_t address, const OperandRow& row) {
    uint64_t words[FORM_BYTES / 8], hash = address;
    std::memcpy(words, &row.version, sizeof words);
    for (const uint64_t word : words) {
        hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
        hash ^= hash >> 32;
    }
    return hash;
}

void remember(SeenTensor& entry, PyObject* reference, int64_t version, uint64_t address, const OperandRow& row) {
    Py_XSETREF(entry.reference, Py_NewRef(reference));
    entry.version = version;
    entry.address = address;
    entry.row = row;
}

// Whether the tensor behind a view is still there and unmodified, so that the view holds what it held.
bool is_current(TensorBookObject* book, const SeenTensor& seen) {
    const int64_t version = seen.version;
    const uint64_t address = seen.address;
    PyObject* tensor = referent(seen.reference);  // from here on Python may run
    if (!tensor) return false;
    TensorFacts facts;
    const bool found = version_of(tensor) == version && read_facts(book, tensor, facts) && facts.address == address;
    Py_DECREF(tensor);
    return found;
}

bool is_negated(PyObject* tensor) {
    PyObject* said = PyObject_CallMethodNoArgs(tensor, g_is_neg);
    const bool found = said != Py_False;
    Py_XDECREF(said);
    PyErr_Clear();
    return found;
}

// The stream to take a tensor on; false where that must be left to Python.
bool find_stream(TensorBookObject* book, PyObject* tensor, int32_t device, uint64_t& stream) {
    void* current = nullptr;
    int capturing = 0;
    if (!book->exchange || is_negated(tensor)) return false;
    if (book->exchange->current_stream(DL_CUDA, device, &current)) {
        PyErr_Clear();
        return false;
    }
    const Driver& driver = cuda_driver();
    if (!driver.problem.empty() || driver.stream_is_capturing(current, &capturing) || capturing) return false;
    stream = reinterpret_cast<uint64_t>(current);
    return true;
}

bool ask_number(PyObject* said, uint64_t& number) {
    if (!said) return false;
    number = PyLong_AsUnsignedLongLong(said);
    Py_DECREF(said);
    return !PyErr_Occurred();
}

// Gives the id of a tensor's fingerprint, 0 where none could be taken; false with an exception set.
bool take(TensorBookObject* book, PyObject* tensor, int64_t version, const TensorFacts& facts, uint32_t dtype,
          uint64_t& number) {
    auto& queues = book->state->queues;
    const auto found = facts.kind == DL_CUDA ? queues.find(facts.number) : queues.end();
    DeviceQueue* queue = found == queues.end() ? nullptr : &found->second;
    uint64_t stream = 0;
    if (!queue || !queue->ring || !find_stream(book, tensor, facts.number, stream)) {
        return ask_number(PyObject_CallFunction(book->take, "OL", tensor, static_cast<long long>(version)), number);
    }
    if (!ask_number(PyObject_CallNoArgs(book->reserve), number)) return false;
    book->state->taken += 1;
    RingTensor what{facts.address, dtype, facts.dimensions, {}, {}, number};
    uint64_t bytes = facts.bits / 8;
    for (int32_t k = 0; k < facts.dimensions; ++k) {
        what.shape[k] = facts.shape[k];
        what.strides[k] = facts.strides[k];
        bytes *= uint64_t(facts.shape[k]);
    }
    return enqueue_tensor(book, *queue, tensor, version, what, bytes, stream);
}

// ------------------------------------------------------------------------------------------- looking

enum class Found { Yes, Ask, Failed };

Found look_anew(TensorBookObject* book, PyObject* tensor, bool weight, int ahead, int64_t version,
                const TensorFacts& facts, OperandRow& row) {
    TensorBookState& state = *book->state;
    const KnownDType* found = find_dtype(state, facts);
    const bool is_cuda = facts.kind == DL_CUDA;
    if (!found || (facts.kind != DL_CPU && !is_cuda) || (is_cuda && !state.queues.contains(facts.number))) {
        return Found::Ask;
    }
    const KnownDType dtype = *found;
    row = row_of(facts, dtype.name, version);
    const bool has_form = !weight && facts.address && facts.dimensions <= 8;
    const uint64_t key = has_form ? hash_of(facts.address, row) : 0;
    bool is_alias = false;
    if (has_form && !ahead) {
        const auto seen = state.views.find(key);
        if (seen != state.views.end() && seen->second.address == facts.address &&
            !std::memcmp(&seen->second.row.version, &row.version, FORM_BYTES)) {
            const OperandRow held = seen->second.row;
            is_alias = is_current(book, seen->second);
            if (is_alias) row = held;
        }
    }
    if (!is_alias) {
        if (!take(book, tensor, version, facts, dtype.dtype, row.fingerprint)) return Found::Failed;
        if (!row.fingerprint) return Found::Yes;
        row.tensor = ++state.numbers;
    }
    PyObject* reference = PyWeakref_NewRef(tensor, nullptr);
    if (!reference) return Found::Failed;
    if (state.known.size() >= MOST_KNOWN) {
        forget(state.known);
        forget(state.views);
    }
    remember((weight ? state.weights : state.known)[tensor], reference, version, facts.address, row);
    if (has_form && !is_alias) remember(state.views[key], reference, version, facts.address, row);
    Py_DECREF(reference);
    return Found::Yes;
}

Found try_row(TensorBookObject* book, PyObject* tensor, bool weight, int ahead, OperandRow& row) {
    TensorBookState& state = *book->state;
    if (!state.types.contains(Py_TYPE(tensor))) return Found::Ask;
    const int64_t counted = version_of(tensor);
    if (counted < 0) return Found::Ask;
    const int64_t version = counted + ahead;
    TensorFacts facts;
    // A change of dtype or device gives a parameter other memory and leaves its version.
    if (weight && !read_facts(book, tensor, facts)) return Found::Ask;
    const auto& seen = weight ? state.weights : state.known;
    const auto found = ahead ? seen.end() : seen.find(tensor);
    if (found != seen.end() && found->second.version == version && refers_to(found->second.reference, tensor) &&
        (!weight || found->second.address == facts.address)) {
        row = found->second.row;
        return Found::Yes;
    }
    if (!weight && !read_facts(book, tensor, facts)) return Found::Ask;
    return look_anew(book, tensor, weight, ahead, version, facts, row);
}

}  // namespace

bool tensor_row(TensorBookObject* book, PyObject* tensor, bool weight, int ahead, OperandRow& row) {
    for (int attempt = 0; attempt < 4; ++attempt) {
        const Found found = try_row(book, tensor, weight, ahead, row);
        if (found != Found::Ask) return found == Found::Yes;
        PyObject* said = PyObject_CallFunctionObjArgs(book->look, tensor, weight ? Py_True : Py_False, nullptr);
        if (!said) return false;
        const bool is_row = PyBytes_Check(said) && PyBytes_GET_SIZE(said) == LOOKED_BYTES;
        if (is_row) std::memcpy(&row.tensor, PyBytes_AS_STRING(said), LOOKED_BYTES);
        Py_DECREF(said);
        if (is_row) return true;
    }
    raise_error("InternalError", "expected to be taught how to look at a %.100s", Py_TYPE(tensor)->tp_name);
    return false;
}

namespace {

PyObject* tensors_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *look, *take, *lost, *reserve, *facts, *capsule;
    unsigned long long shared_bytes;
    if (!PyArg_ParseTuple(args, "OOOOOOK", &look, &take, &lost, &reserve, &facts, &capsule, &shared_bytes)) {
        return nullptr;
    }
    const DLPackExchangeAPI* exchange = nullptr;
    if (PyCapsule_IsValid(capsule, DL_EXCHANGE_NAME)) {
        exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, DL_EXCHANGE_NAME));
        if (exchange->major != DL_EXCHANGE_MAJOR || !exchange->tensor_from_object) exchange = nullptr;
    }
    auto* book = reinterpret_cast<TensorBookObject*>(type->tp_alloc(type, 0));
    if (!book) return nullptr;
    book->state = new TensorBookState;
    book->state->shared_bytes = shared_bytes;
    book->exchange = exchange;
    book->look = Py_NewRef(look);
    book->take = Py_NewRef(take);
    book->lost = Py_NewRef(lost);
    book->reserve = Py_NewRef(reserve);
    book->facts = Py_NewRef(facts);
    book->capsule = Py_NewRef(capsule);
    return reinterpret_cast<PyObject*>(book);
}

int tensors_traverse(PyObject* self, visitproc visit, void* arg) {
    TensorBookObject* book = as_tensors(self);
    Py_VISIT(book->look);
    Py_VISIT(book->take);
    Py_VISIT(book->lost);
    Py_VISIT(book->reserve);
    Py_VISIT(book->facts);
    for (auto& [device, queue] : book->state->queues) Py_VISIT(queue.ring);
    return 0;
}

void drop_tensors(TensorBookState& state) {
    forget(state.known);
    forget(state.weights);
    forget(state.views);
    for (auto& [device, queue] : state.queues) {
        for (auto& list : queue.waiting) {
            for (const WaitingTensor& each : list) Py_DECREF(each.tensor);
            list.clear();
        }
        queue.count = queue.bytes = 0;
    }
}

int tensors_clear(PyObject* self) {
    TensorBookObject* book = as_tensors(self);
    drop_tensors(*book->state);
    for (auto& [device, queue] : book->state->queues) Py_CLEAR(queue.ring);
    book->state->queues.clear();
    Py_CLEAR(book->look);
    Py_CLEAR(book->take);
    Py_CLEAR(book->lost);
    Py_CLEAR(book->reserve);
    Py_CLEAR(book->facts);
    return 0;
}

void tensors_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    tensors_clear(self);
    Py_CLEAR(as_tensors(self)->capsule);
    for (PyTypeObject* each : as_tensors(self)->state->types) Py_DECREF(each);
    delete as_tensors(self)->state;
    Py_TYPE(self)->tp_free(self);
}

PyObject* tensors_row(PyObject* self, PyObject* args) {
    PyObject* tensor;
    int weight = 0, ahead = 0;
    if (!PyArg_ParseTuple(args, "O|pp", &tensor, &weight, &ahead)) return nullptr;
    OperandRow row{};
    if (!tensor_row(as_tensors(self), tensor, weight, ahead, row)) return nullptr;
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&row.tensor), LOOKED_BYTES);
}

PyObject* tensors_add_type(PyObject* self, PyObject* type) {
    if (!PyType_Check(type)) return raise_error("UsageError", "expected a class, got %R", type);
    auto* given = reinterpret_cast<PyTypeObject*>(type);
    const bool is_new = as_tensors(self)->state->types.insert(given).second;
    if (is_new) Py_INCREF(type);
    return PyBool_FromLong(is_new);
}

PyObject* tensors_add_dtype(PyObject* self, PyObject* args) {
    KnownDType dtype;
    if (!PyArg_ParseTuple(args, "bbII", &dtype.code, &dtype.bits, &dtype.dtype, &dtype.name)) return nullptr;
    if (!dtype.dtype || dtype.dtype > 15) return raise_error("UsageError", "there is no dtype %u", dtype.dtype);
    TensorFacts facts;
    facts.code = dtype.code;
    facts.bits = dtype.bits;
    const bool is_new = !find_dtype(*as_tensors(self)->state, facts);
    if (is_new) as_tensors(self)->state->dtypes.push_back(dtype);
    return PyBool_FromLong(is_new);
}

PyObject* tensors_add_device(PyObject* self, PyObject* args) {
    int device;
    PyObject* ring;
    if (!PyArg_ParseTuple(args, "iO", &device, &ring)) return nullptr;
    if (ring != Py_None && Py_TYPE(ring) != &RingType) {
        return raise_error("UsageError", "expected a FingerprintRing or None, got %R", ring);
    }
    auto& queues = as_tensors(self)->state->queues;
    const bool is_new = !queues.contains(device);
    if (is_new) queues[device].ring = ring == Py_None ? nullptr : reinterpret_cast<RingObject*>(Py_NewRef(ring));
    return PyBool_FromLong(is_new);
}

PyObject* tensors_flush(PyObject* self, PyObject*) {
    if (!flush_tensors(as_tensors(self))) return nullptr;
    Py_RETURN_NONE;
}

PyObject* tensors_begin_step(PyObject* self, PyObject*) {
    forget(as_tensors(self)->state->known);
    forget(as_tensors(self)->state->views);
    Py_RETURN_NONE;
}

PyObject* tensors_end_step(PyObject* self, PyObject*) {
    if (!judge_trial(as_tensors(self))) return nullptr;
    Py_RETURN_NONE;
}

PyObject* tensors_next_number(PyObject* self, PyObject*) {
    return PyLong_FromUnsignedLongLong(++as_tensors(self)->state->numbers);
}

PyObject* tensors_taken(PyObject* self, void*) {
    return PyLong_FromUnsignedLongLong(as_tensors(self)->state->taken);
}

PyMethodDef tensors_methods[] = {
    {"row", tensors_row, METH_VARARGS, "A tensor's operand row after the trace: (tensor, weight, ahead)."},
    {"add_type", tensors_add_type, METH_O, "Tensors of this class are their own memory; False: known before."},
    {"add_dtype", tensors_add_dtype, METH_VARARGS,
     "Teach a dtype: (DLPack's code, bits, our code, id of its name); False: known before."},
    {"add_device", tensors_add_device, METH_VARARGS,
     "Teach a CUDA device: (number, ring, or None where Python takes its tensors); False: known before."},
    {"next_number", tensors_next_number, METH_NOARGS, "A number for a tensor that the book does not know."},
    {"flush", tensors_flush, METH_NOARGS, "Take the fingerprints that wait."},
    {"begin_step", tensors_begin_step, METH_NOARGS, "Look at every tensor but weights anew."},
    {"end_step", tensors_end_step, METH_NOARGS, "Flush, and see whether tensors may share launches."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef tensors_members[] = {
    {"taken", tensors_taken, nullptr, "Fingerprints that were taken without Python.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

int ready_tensor_book_type(PyObject* module) {
    g_is_neg = PyUnicode_InternFromString("is_neg");
    TensorBookType.tp_name = "brickline._core.TensorBook";
    TensorBookType.tp_doc = "Knows tensors, and has their fingerprints taken.";
    TensorBookType.tp_basicsize = sizeof(TensorBookObject);
    TensorBookType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    TensorBookType.tp_new = tensors_new;
    TensorBookType.tp_traverse = tensors_traverse;
    TensorBookType.tp_clear = tensors_clear;
    TensorBookType.tp_dealloc = tensors_dealloc;
    TensorBookType.tp_methods = tensors_methods;
    TensorBookType.tp_getset = tensors_members;
    if (PyType_Ready(&TensorBookType)) return -1;
    return PyModule_AddObjectRef(module, "TensorBook", reinterpret_cast<PyObject*>(&TensorBookType));
}

}  // namespace brickline::hot
