// CallBook: module calls as rows of the spool, without Python on the way.
//
// The plain case of `adapters/torch_recorder.py`: a call inside a root's call, nothing to be saved and
// no gradients. Which tensor is which, the TensorBook says. Everything else goes the way through Python.
#include "call_book.h"

namespace brickline::hot {

PyTypeObject CallBookType = {PyVarObject_HEAD_INIT(nullptr, 0)};
thread_local std::vector<OpenCall> t_open_calls;

namespace {

struct Names {
    PyObject *is_cuda, *get_device;
};
Names g_names;

CallBookObject* as_book(PyObject* object) { return reinterpret_cast<CallBookObject*>(object); }

bool is_true(PyObject* tensor, PyObject* name) {
    PyObject* value = PyObject_GetAttr(tensor, name);
    const bool found = value == Py_True;
    Py_XDECREF(value);
    PyErr_Clear();
    return found;
}

bool add_tensor(CallBookObject* book, PyObject* tensor, uint64_t trace, uint32_t role, uint32_t index,
                bool weight, std::vector<OperandRow>& rows) {
    OperandRow row{};
    if (!tensor_row(book->tensors, tensor, weight, 0, row)) return false;
    row.trace = trace;
    row.role = role;
    row.index = index;
    rows.push_back(row);
    return true;
}

// Appends the tensors of a value in order, as Python's `flatten` does.
bool gather(CallBookObject* book, PyObject* value, int depth, std::vector<PyObject*>& tensors) {
    PyTypeObject* type = Py_TYPE(value);
    if (type == book->tensor_type || type == book->parameter_type) {
        tensors.push_back(Py_NewRef(value));
        return true;
    }
    if (value == Py_None || type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
        type == &PyUnicode_Type) {
        return true;
    }
    if (depth < 16 && (type == &PyTuple_Type || type == &PyList_Type)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
            PyObject* item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            const bool done = gather(book, item, depth + 1, tensors);
            Py_DECREF(item);
            if (!done) return false;
        }
        return true;
    }
    PyObject* found = PyObject_CallOneArg(book->spread, value);
    if (!found) return false;
    for (Py_ssize_t i = 0; PyList_Check(found) && i < PyList_GET_SIZE(found); ++i) {
        tensors.push_back(Py_NewRef(PyList_GET_ITEM(found, i)));
    }
    Py_DECREF(found);
    return true;
}

void drop(std::vector<PyObject*>& tensors) {
    for (PyObject* tensor : tensors) Py_DECREF(tensor);
    tensors.clear();
}

bool add_all(CallBookObject* book, const std::vector<PyObject*>& tensors, uint64_t trace, uint32_t role,
             std::vector<OperandRow>& rows) {
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (!add_tensor(book, tensors[i], trace, role, uint32_t(i), false, rows)) return false;
    }
    return true;
}

bool add_own(CallBookObject* book, PyObject* dict, bool weight, uint64_t trace, uint32_t& index,
             std::vector<OperandRow>& rows) {
    // A copy of the values: Python code may run in between.
    PyObject* values = PyDict_Size(dict) ? PyDict_Values(dict) : nullptr;
    if (!values) return !PyErr_Occurred();
    bool sound = true;
    for (Py_ssize_t i = 0; sound && i < PyList_GET_SIZE(values); ++i) {
        PyObject* tensor = PyList_GET_ITEM(values, i);
        if (tensor == Py_None) continue;
        sound = add_tensor(book, tensor, trace, 0, index++, weight, rows);
    }
    Py_DECREF(values);
    return sound;
}

// What failed is kept by Python and never the model's problem.
void report_failure(CallBookObject* book) {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace) PyException_SetTraceback(value, trace);  // where it was raised
    PyObject* done = PyObject_CallOneArg(book->failed, value ? value : Py_None);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

bool add_inputs(FastSite* site, PyObject* const* args, size_t flagged, PyObject* names, uint64_t trace,
                std::vector<PyObject*>& inputs, std::vector<OperandRow>& rows) {
    CallBookObject* book = site->book;
    const Py_ssize_t count = PyVectorcall_NARGS(flagged);
    const Py_ssize_t total = count + (names ? PyTuple_GET_SIZE(names) : 0);
    for (Py_ssize_t i = site->has_self; i < total; ++i) {
        if (!gather(book, args[i], 0, inputs)) return false;
    }
    if (!add_all(book, inputs, trace, 0, rows)) return false;
    uint32_t index = PARAMETER_INDEX;
    if (!add_own(book, site->parameters, true, trace, index, rows)) return false;
    if (!add_own(book, site->buffers, false, trace, index, rows)) return false;
    return !site->mutates || flush_tensors(book->tensors);
}

void write_rows(FastSite* site, const OpenCall& call, uint32_t ordinal, int64_t start_ns, int64_t end_ns,
                bool failed, PyObject* shown, const std::vector<OperandRow>& rows) {
    CallBookObject* book = site->book;
    ProfilerObject* profiler = book->profiler;
    if (profiler->mode == Mode::Off || !is_open(profiler)) return;
    const bool is_cuda = shown && is_true(shown, g_names.is_cuda);
    TraceRow row{};
    row.trace = call.trace;
    row.parent = call.parent;
    row.entries = 1;
    row.timed = is_cuda ? 0 : 1;
    row.enqueue_ns = start_ns;
    row.start_ns = is_cuda ? -1 : start_ns;
    row.end_ns = is_cuda ? -1 : end_ns;
    row.item = row.worker = row.region = -1;
    row.name = site->name;
    row.slot = site->slot;
    row.layer = site->layer;
    row.position = call.place->position;
    row.ordinal = ordinal;
    row.rank = book->rank;
    row.process = call.place->process;
    row.thread = call.place->thread;
    row.device = -1;
    row.step = call.place->step;
    row.params = failed ? site->raised : site->params;
    row.backend = is_cuda ? book->cuda_backend : book->cpu_backend;
    row.phase = uint8_t(call.place->phase);
    if (is_cuda) {
        PyObject* number = PyObject_CallMethodNoArgs(shown, g_names.get_device);
        row.device = number ? int32_t(PyLong_AsLong(number)) : 0;
        Py_XDECREF(number);
        PyErr_Clear();
    }
    if (!written(profiler, [&] {
            Spool& spool = profiler->state->recorder->spool();
            if (!rows.empty()) {
                spool.append(ExtentKind::Operand, rows.data(), rows.size() * sizeof(OperandRow));
            }
            spool.append(ExtentKind::Trace, &row, sizeof row);
        })) {
        report_failure(book);
        return;
    }
    if (profiler->mode != Mode::Off) book->state->taken += 1;
}

// Leaves the tensors of a call that broke without fingerprints, and says that there may be others:
// with some of them, what came of an input that is missing would look like the call's own doing.
void hide_tensors(std::vector<OperandRow>& rows, uint64_t trace) {
    for (OperandRow& row : rows) row.fingerprint = 0;
    for (const uint32_t role : {0, 1}) {
        OperandRow row{};
        row.trace = trace;
        row.role = role;
        row.index = UNSEEN_INDEX;
        rows.push_back(row);
    }
}

uint32_t next_ordinal(PyObject* ordinals, PyObject* path) {
    PyObject* found = PyDict_GetItemWithError(ordinals, path);
    const unsigned long ordinal = found ? PyLong_AsUnsignedLong(found) : 0;
    PyObject* next = PyLong_FromUnsignedLong(ordinal + 1);
    if (!next || PyDict_SetItem(ordinals, path, next)) PyErr_Clear();
    Py_XDECREF(next);
    return uint32_t(ordinal);
}

}  // namespace

bool may_go_fast(const FastSite* site) {
    if (t_open_calls.empty()) return false;
    const OpenCall& open = t_open_calls.back();
    return open.book == site->book && open.place->fast;
}

PyObject* fast_call(FastSite* site, HandleObject* handle, vectorcallfunc plain, PyObject* callable,
                    PyObject* const* args, size_t flagged, PyObject* names) {
    CallBookObject* book = site->book;
    const OpenCall around = t_open_calls.back();
    const int64_t began_ns = now_ns(book->profiler);
    std::vector<OperandRow> rows;
    std::vector<PyObject*> inputs, outputs;
    rows.reserve(8);
    PyObject* number = PyIter_Next(book->ids);
    if (!number) return nullptr;
    OpenCall call{book, around.place, PyLong_AsUnsignedLongLong(number), around.trace};
    Py_DECREF(number);
    const uint32_t ordinal = next_ordinal(call.place->ordinals, site->path);
    bool is_whole = add_inputs(site, args, flagged, names, call.trace, inputs, rows);
    if (!is_whole) report_failure(book);
    t_open_calls.push_back(call);
    const int64_t start_ns = now_ns(book->profiler);
    PyObject* result = nullptr;
    if (!handle || enter_handle(handle)) {
        result = plain(callable, args, flagged, names);
    }
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    if (!result) PyErr_Fetch(&type, &value, &trace);
    if (handle && !exit_handle(handle)) report_failure(book);
    const int64_t end_ns = now_ns(book->profiler);
    // A root that was left by an exception of its own may have taken this call's place.
    if (!t_open_calls.empty() && t_open_calls.back().trace == call.trace) t_open_calls.pop_back();
    if (result && !(gather(book, result, 0, outputs) && add_all(book, outputs, call.trace, 1, rows))) {
        report_failure(book);
        is_whole = false;
    }
    if (!is_whole) hide_tensors(rows, call.trace);
    PyObject* shown = !outputs.empty() ? outputs[0] : !inputs.empty() ? inputs[0] : nullptr;
    write_rows(site, call, ordinal, start_ns, end_ns, !result, shown, rows);
    drop(inputs);
    drop(outputs);
    spend(book->profiler, start_ns - began_ns + now_ns(book->profiler) - end_ns);
    if (!result) PyErr_Restore(type, value, trace);
    return result;
}

namespace {

PyObject* book_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *profiler, *ids, *tensors, *spread, *failed, *tensor, *parameter;
    unsigned int rank, cpu, cuda;
    if (!PyArg_ParseTuple(args, "O!OO!OOO!O!III", &ProfilerType, &profiler, &ids, &TensorBookType,
                          &tensors, &spread, &failed, &PyType_Type, &tensor, &PyType_Type, &parameter, &rank, &cpu, &cuda)) {
        return nullptr;
    }
    auto* book = reinterpret_cast<CallBookObject*>(type->tp_alloc(type, 0));
    if (!book) return nullptr;
    book->state = new CallBookState;
    book->profiler = as_profiler(Py_NewRef(profiler));
    book->ids = Py_NewRef(ids);
    book->tensors = reinterpret_cast<TensorBookObject*>(Py_NewRef(tensors));
    book->spread = Py_NewRef(spread);
    book->failed = Py_NewRef(failed);
    book->tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tensor));
    book->parameter_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(parameter));
    book->rank = rank;
    book->cpu_backend = cpu;
    book->cuda_backend = cuda;
    return reinterpret_cast<PyObject*>(book);
}

int book_traverse(PyObject* self, visitproc visit, void* arg) {
    CallBookObject* book = as_book(self);
    Py_VISIT(book->profiler);
    Py_VISIT(book->ids);
    Py_VISIT(book->tensors);
    Py_VISIT(book->spread);
    Py_VISIT(book->failed);
    return 0;
}

int book_clear(PyObject* self) {
    CallBookObject* book = as_book(self);
    Py_CLEAR(book->tensors);
    Py_CLEAR(book->spread);
    Py_CLEAR(book->failed);
    return 0;
}

void book_dealloc(PyObject* self) {
    CallBookObject* book = as_book(self);
    PyObject_GC_UnTrack(self);
    book_clear(self);
    Py_CLEAR(book->profiler);
    Py_CLEAR(book->ids);
    Py_CLEAR(book->tensor_type);
    Py_CLEAR(book->parameter_type);
    delete book->state;
    Py_TYPE(self)->tp_free(self);
}

PyObject* book_begin(PyObject* self, PyObject* args) {
    CallBookObject* book = as_book(self);
    unsigned int position, step, phase, thread, process;
    unsigned long long trace;
    int fast;
    PyObject* ordinals;
    if (!PyArg_ParseTuple(args, "IKIIIIpO!", &position, &trace, &step, &phase, &thread, &process, &fast,
                          &PyDict_Type, &ordinals)) {
        return nullptr;
    }
    auto place = std::make_shared<CallPlace>();
    place->position = position;
    place->step = step;
    place->phase = phase;
    place->thread = thread;
    place->process = process;
    place->fast = fast;
    place->ordinals = Py_NewRef(ordinals);
    t_open_calls.push_back({book, std::move(place), trace, 0});
    Py_RETURN_NONE;
}

PyObject* book_end(PyObject* self, PyObject*) {
    while (!t_open_calls.empty() && t_open_calls.back().book != as_book(self)) t_open_calls.pop_back();
    if (!t_open_calls.empty()) t_open_calls.pop_back();
    const uint64_t taken = as_book(self)->state->taken;
    as_book(self)->state->taken = 0;
    return PyLong_FromUnsignedLongLong(taken);
}

PyObject* book_current(PyObject* self, PyObject*) {
    const bool mine = !t_open_calls.empty() && t_open_calls.back().book == as_book(self) &&
                      t_open_calls.back().place->fast;
    return PyLong_FromUnsignedLongLong(mine ? t_open_calls.back().trace : 0);
}

PyMethodDef book_methods[] = {
    {"begin", book_begin, METH_VARARGS,
     "A root's call begins in this thread: (position, trace, step, phase, thread, process,"
     " fast, ordinals)."},
    {"end", book_end, METH_NOARGS, "It has ended; gives how many calls were written since the last."},
    {"current", book_current, METH_NOARGS, "The trace of the innermost call that it writes in this thread; 0: none."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

FastSite* make_fast_site(PyObject* given, bool has_self) {
    PyObject *book, *path, *parameters, *buffers;
    unsigned int name, params, raised, slot;
    int layer, mutates;
    if (!PyArg_ParseTuple(given, "O!UIIIIiO!O!p", &CallBookType, &book, &path, &name, &params, &raised,
                          &slot, &layer, &PyDict_Type, &parameters, &PyDict_Type, &buffers, &mutates)) {
        return nullptr;
    }
    return new FastSite{as_book(Py_NewRef(book)), Py_NewRef(path), name, params, raised, slot, layer, has_self,
                        bool(mutates), Py_NewRef(parameters), Py_NewRef(buffers)};
}

void free_fast_site(FastSite* site) {
    if (!site) return;
    Py_DECREF(reinterpret_cast<PyObject*>(site->book));
    Py_DECREF(site->path);
    Py_DECREF(site->parameters);
    Py_DECREF(site->buffers);
    delete site;
}

int ready_call_book_type(PyObject* module) {
    g_names = {PyUnicode_InternFromString("is_cuda"), PyUnicode_InternFromString("get_device")};
    CallBookType.tp_name = "brickline._core.CallBook";
    CallBookType.tp_doc = "Writes the calls of modules inside a root's call.";
    CallBookType.tp_basicsize = sizeof(CallBookObject);
    CallBookType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    CallBookType.tp_new = book_new;
    CallBookType.tp_traverse = book_traverse;
    CallBookType.tp_clear = book_clear;
    CallBookType.tp_dealloc = book_dealloc;
    CallBookType.tp_methods = book_methods;
    if (PyType_Ready(&CallBookType)) return -1;
    return PyModule_AddObjectRef(module, "CallBook", reinterpret_cast<PyObject*>(&CallBookType));
}

}  // namespace brickline::hot
