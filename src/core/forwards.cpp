// Watched calls: a Python function whose calls on chosen objects are timed or observed.
//
// Nothing is wrapped. A watched function stays the object it is and only its vectorcall entry leads
// here, so its signature, its source, pickling and copying of the objects it is called on, and what
// torch.compile traces are untouched; restoring the entry leaves nothing behind. An entry is found
// by the first argument (`self`), or by the function where it takes none.
//
// Knows neither torch nor models: who watches says what to call before and after.
#include "call_book.h"
#include "hot.h"

#include <unordered_map>

namespace brickline::hot {
namespace {

struct Entry {
    uint32_t holders;        // the table and the calls under way
    bool has_self;           // the key is the first argument, which observers are not shown
    bool is_opaque;          // calls inside it pass aside
    PyObject* key;
    PyObject* function;
    HandleObject* handle;    // null: not timed
    PyObject* before;        // null: timed only
    PyObject* after;
    PyObject* token;
    FastSite* fast;          // null: observers alone are asked
};

// All of these are touched under the GIL alone.
std::unordered_map<PyObject*, Entry*> g_entries;
std::unordered_map<PyObject*, uint32_t> g_functions;  // watched functions and how many entries each has
vectorcallfunc g_plain = nullptr;                     // what every Python function has by default
PyObject* g_frame_switch = nullptr;                   // torch's set_eval_frame
PyObject* g_gate = nullptr;                           // the function whose first callers are sought …
PyObject* g_found = nullptr;                          // … and who is told of them
uint64_t g_aside = 0;
uint64_t g_unknown = 0;
thread_local uint32_t t_depth = 0;                    // watched calls under way in this thread
thread_local uint32_t t_aside = 0;

Entry* find(PyObject* key) {
    const auto found = g_entries.find(key);
    return found == g_entries.end() ? nullptr : found->second;
}

void let_go(Entry* entry) {
    if (--entry->holders) return;
    Py_CLEAR(entry->handle);
    Py_CLEAR(entry->before);
    Py_CLEAR(entry->after);
    Py_CLEAR(entry->token);
    Py_CLEAR(entry->function);
    Py_CLEAR(entry->key);
    free_fast_site(entry->fast);
    delete entry;
}

void set_vectorcall(PyObject* function, vectorcallfunc call) {
    auto* object = reinterpret_cast<PyFunctionObject*>(function);
#if PY_VERSION_HEX >= 0x030c0000
    PyFunction_SetVectorcall(object, call);
#else
    object->func_version = 0;  // calls that are specialised for it look again
    object->vectorcall = call;
#endif
}

// Holds an exception while Python code runs that must not see it.
class HeldError {
  public:
    explicit HeldError(bool is_set) { if (is_set) PyErr_Fetch(&m_type, &m_value, &m_trace); }
    void restore() {
        if (m_type) PyErr_Restore(m_type, m_value, m_trace);
        m_type = nullptr;
    }

  private:
    PyObject *m_type = nullptr, *m_value = nullptr, *m_trace = nullptr;
};

// While an observer runs, a compiler of frames must not look at its code. Gives what was switched
// off, or null with an exception set.
PyObject* switch_frames(PyObject* to) {
    if (!g_frame_switch) return Py_NewRef(Py_None);
    return PyObject_CallOneArg(g_frame_switch, to);
}

bool restore_frames(PyObject* prior) {
    PyObject* unused = prior == Py_None ? Py_NewRef(Py_None) : switch_frames(prior);
    Py_DECREF(prior);
    Py_XDECREF(unused);
    return unused != nullptr;
}

PyObject* call_before(const Entry* entry, PyObject* const* args, size_t flagged, PyObject* names,
                      bool compiled) {
    const Py_ssize_t count = PyVectorcall_NARGS(flagged), skipped = entry->has_self ? 1 : 0;
    PyObject* positional = PyTuple_New(count - skipped);
    if (!positional) return nullptr;
    for (Py_ssize_t i = skipped; i < count; ++i) {
        PyTuple_SET_ITEM(positional, i - skipped, Py_NewRef(args[i]));
    }
    PyObject* named = Py_NewRef(Py_None);
    if (names && PyTuple_GET_SIZE(names)) {
        Py_SETREF(named, PyDict_New());
        for (Py_ssize_t i = 0; named && i < PyTuple_GET_SIZE(names); ++i) {
            if (PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[count + i])) Py_CLEAR(named);
        }
    }
    PyObject* call = nullptr;
    if (named) {
        PyObject* given[] = {entry->token, positional, named, compiled ? Py_True : Py_False};
        call = PyObject_Vectorcall(entry->before, given, 4, nullptr);
    }
    Py_DECREF(positional);
    Py_XDECREF(named);
    return call;
}

// What `before` gives: False to let this call and those inside it pass aside, None not to hear of
// its end. `compiled`: a compiler of frames is at work on what is called.
PyObject* begin_observed(const Entry* entry, PyObject* const* args, size_t flagged, PyObject* names,
                         bool& compiled) {
    PyObject* prior = switch_frames(Py_None);
    if (!prior) return nullptr;
    compiled = prior != Py_None && prior != Py_False;
    PyObject* call = call_before(entry, args, flagged, names, compiled);
    HeldError error(!call);
    if (!restore_frames(prior)) Py_CLEAR(call);
    error.restore();
    return call;
}

bool end_observed(const Entry* entry, PyObject* call, PyObject* result) {
    PyObject* prior = switch_frames(Py_None);
    if (!prior) return false;
    PyObject* given[] = {call, result ? result : Py_None, result ? Py_False : Py_True};
    PyObject* done = PyObject_Vectorcall(entry->after, given, 3, nullptr);
    HeldError error(!done);
    const bool restored = restore_frames(prior);
    error.restore();
    Py_XDECREF(done);
    return done && restored;
}

PyObject* timed(const Entry* entry, PyObject* callable, PyObject* const* args, size_t flagged,
                PyObject* names) {
    if (!entry->handle) return g_plain(callable, args, flagged, names);
    if (!enter_handle(entry->handle)) return nullptr;
    PyObject* result = g_plain(callable, args, flagged, names);
    HeldError error(!result);
    const bool done = exit_handle(entry->handle);
    error.restore();
    if (result && !done) Py_CLEAR(result);
    return result;
}

PyObject* observed(const Entry* entry, PyObject* callable, PyObject* const* args, size_t flagged,
                   PyObject* names) {
    bool compiled = false;
    PyObject* call = begin_observed(entry, args, flagged, names, compiled);
    if (!call) return nullptr;
    const uint32_t aside = call == Py_False || compiled || entry->is_opaque;
    t_aside += aside;
    PyObject* result = call == Py_False ? g_plain(callable, args, flagged, names)
                                        : timed(entry, callable, args, flagged, names);
    t_aside -= aside;
    if (call != Py_None && call != Py_False) {
        HeldError error(!result);
        const bool done = end_observed(entry, call, result);
        if (!result && !done) PyErr_Clear();
        error.restore();
        if (result && !done) Py_CLEAR(result);
    }
    Py_DECREF(call);
    return result;
}

// Whether no compiler of frames is at work on what is called; it is left as it is.
bool is_uncompiled() {
    PyObject* prior = switch_frames(Py_None);
    const bool found = prior == Py_None;
    if (!prior || !restore_frames(prior)) PyErr_Clear();
    return found;
}

PyObject* watched_call(PyObject* callable, PyObject* const* args, size_t flagged, PyObject* names) {
    if (t_aside) {
        g_aside += 1;
        return g_plain(callable, args, flagged, names);
    }
    Entry* entry = PyVectorcall_NARGS(flagged) ? find(args[0]) : nullptr;
    if (!entry || entry->function != callable) {
        const bool is_unknown = !entry;
        entry = find(callable);
        if (!entry) {  // another object, or super().forward() of one that is watched elsewhere
            if (is_unknown && t_depth) g_unknown += 1;
            return g_plain(callable, args, flagged, names);
        }
    }
    entry->holders += 1;
    t_depth += 1;
    PyObject* result;
    if (entry->fast && may_go_fast(entry->fast) && is_uncompiled()) {
        result = fast_call(entry->fast, entry->handle, g_plain, callable, args, flagged, names);
    } else if (entry->before) {
        result = observed(entry, callable, args, flagged, names);
    } else {
        t_aside += entry->is_opaque;
        result = timed(entry, callable, args, flagged, names);
        t_aside -= entry->is_opaque;
    }
    t_depth -= 1;
    let_go(entry);
    return result;
}

bool tell_found(PyObject* object) {
    PyObject* prior = switch_frames(Py_None);
    if (!prior) return false;
    PyObject* done = PyObject_CallOneArg(g_found, object);
    HeldError error(!done);
    const bool restored = restore_frames(prior);
    error.restore();
    Py_XDECREF(done);
    return done && restored;
}

PyObject* gated_call(PyObject* callable, PyObject* const* args, size_t flagged, PyObject* names) {
    if (!t_depth && !t_aside && g_found && PyVectorcall_NARGS(flagged) && !find(args[0]) &&
        !tell_found(args[0])) {
        return nullptr;
    }
    return g_plain(callable, args, flagged, names);
}

// False with an exception set where calls of the object cannot be watched.
bool check_function(PyObject* function) {
    if (!PyFunction_Check(function)) {
        raise_error("UsageError", "expected a Python function to watch, got %.200s",
                    Py_TYPE(function)->tp_name);
        return false;
    }
    const vectorcallfunc current = reinterpret_cast<PyFunctionObject*>(function)->vectorcall;
    if (!g_plain && current != watched_call && current != gated_call) g_plain = current;
    if (current == g_plain || current == watched_call) return true;
    raise_error("UsageError", "calls of %R are watched by something else", function);
    return false;
}

PyObject* watch_call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 8) return raise_error("UsageError", "watch_call takes eight arguments, got %zd", count);
    PyObject *key = args[0], *function = args[1], *handle = args[2], *before = args[3];
    if (handle != Py_None && Py_TYPE(handle) != &HandleType) {
        return raise_error("UsageError", "expected a brick or None, got %R", handle);
    }
    if (find(key)) return raise_error("UsageError", "%.200s is watched already", Py_TYPE(key)->tp_name);
    if (!check_function(function)) return nullptr;
    FastSite* fast = args[7] == Py_None ? nullptr : make_fast_site(args[7], key != function);
    if (PyErr_Occurred()) return nullptr;
    auto given = [](PyObject* value) { return value == Py_None ? nullptr : Py_NewRef(value); };
    auto* entry = new Entry{1, key != function, args[6] == Py_True, Py_NewRef(key), Py_NewRef(function),
                            as_handle(given(handle)), given(before), given(args[4]), Py_NewRef(args[5]), fast};
    g_entries[key] = entry;
    if (g_functions[function]++ == 0) {
        Py_INCREF(function);
        set_vectorcall(function, watched_call);
    }
    Py_RETURN_NONE;
}

PyObject* unwatch_call(PyObject*, PyObject* key) {
    const auto found = g_entries.find(key);
    if (found == g_entries.end()) Py_RETURN_FALSE;
    Entry* entry = found->second;
    g_entries.erase(found);
    const auto watched = g_functions.find(entry->function);
    if (--watched->second == 0) {
        PyObject* function = watched->first;
        g_functions.erase(watched);
        set_vectorcall(function, g_plain);
        Py_DECREF(function);
    }
    let_go(entry);
    Py_RETURN_TRUE;
}

PyObject* gate_calls(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 2) return raise_error("UsageError", "gate_calls takes a function and who is told");
    if (g_gate) return raise_error("UsageError", "first calls are sought already");
    if (!check_function(args[0])) return nullptr;
    g_gate = Py_NewRef(args[0]);
    g_found = Py_NewRef(args[1]);
    set_vectorcall(g_gate, gated_call);
    Py_RETURN_NONE;
}

PyObject* ungate_calls(PyObject*, PyObject*) {
    if (!g_gate) Py_RETURN_FALSE;
    set_vectorcall(g_gate, g_plain);
    Py_CLEAR(g_gate);
    Py_CLEAR(g_found);
    Py_RETURN_TRUE;
}

PyObject* set_frame_switch(PyObject*, PyObject* callable) {
    Py_XSETREF(g_frame_switch, callable == Py_None ? nullptr : Py_NewRef(callable));
    Py_RETURN_NONE;
}

PyObject* watch_counts(PyObject*, PyObject*) {
    return Py_BuildValue("(KK)", static_cast<unsigned long long>(g_aside),
                         static_cast<unsigned long long>(g_unknown));
}

PyObject* is_watched(PyObject*, PyObject* key) { return PyBool_FromLong(find(key) != nullptr); }

PyCFunction fast(PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call));
}

PyMethodDef functions[] = {
    {"watch_call", fast(watch_call), METH_FASTCALL,
     "Watch a function's calls on `key`: (key, function, brick, before, after, token, opaque, fast)."},
    {"unwatch_call", unwatch_call, METH_O, "Stop watching calls on an object; False: it was not."},
    {"is_watched", is_watched, METH_O, "Whether calls on an object are watched."},
    {"gate_calls", fast(gate_calls), METH_FASTCALL,
     "Tell of every object that a function is called on outside watched calls."},
    {"ungate_calls", ungate_calls, METH_NOARGS, "Undo `gate_calls`."},
    {"set_frame_switch", set_frame_switch, METH_O,
     "What turns a compiler of frames off around observers; None: nothing."},
    {"watch_counts", watch_counts, METH_NOARGS,
     "Calls that passed aside, and calls on objects that are not watched."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

int ready_forwards(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace brickline::hot
