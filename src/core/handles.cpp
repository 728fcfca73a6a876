// BrickHandle: `with brick:` without an allocation, and bricks as decorators.
//
// An entry reads the clock last and an exit reads it first, so a measurement holds as little of
// itself as possible. The fast paths cover the host clock without sampling; hot.cpp has the rest.
#include "hot.h"

#include <cmath>

namespace brickline::hot {
namespace {

// Whether the innermost brick is this one, entered before its step was left out.
inline bool is_open_block(const Lane* lane, uint32_t slot) {
    if (lane->depth == lane->counting_depth || !lane->depth) return false;
    const OpenEntry& entry = lane->stack[lane->depth - 1];
    return entry.slot == slot && entry.kind == OpenKind::Block;
}

bool enter(HandleObject* handle) {
    ProfilerObject* profiler = handle->profiler;
    if (profiler->mode == Mode::Off) return true;
    const PyThreadState* state = thread_state();
    Lane* lane = caller_lane(profiler, state);
    if (!lane) [[unlikely]] return !PyErr_Occurred();
    if (profiler->mode == Mode::Host && lane->depth < MAX_DEPTH) [[likely]] {
        OpenEntry& entry = lane->stack[lane->depth++];
        entry.word = open_word(handle->slot, OpenKind::Block);
        entry.frame = frame_of(state);
        entry.start_event = 0;
        entry.start = ticks_now(profiler);
        return true;
    }
    if (lane->only_counts) return true;
    return enter_slow(profiler, handle->slot, handle->layer, OpenKind::Block, nullptr);
}

bool exit(HandleObject* handle) {
    ProfilerObject* profiler = handle->profiler;
    if (profiler->mode == Mode::Off) return true;
    const PyThreadState* state = thread_state();
    Lane* lane = caller_lane(profiler, state);
    if (!lane) [[unlikely]] return !PyErr_Occurred();
    if (lane->only_counts && !is_open_block(lane, handle->slot)) {
        count_entry(lane, handle);
        return true;
    }
    const uint64_t end = ticks_now(profiler);
    if (lane->depth) [[likely]] {
        const OpenEntry& entry = lane->stack[lane->depth - 1];
        if (entry.word == open_word(handle->slot, OpenKind::Block) &&
            entry.frame == frame_of(state) && !entry.start_event && !lane->too_deep &&
            profiler->mode == Mode::Host) [[likely]] {
            lane->depth -= 1;
            if (!handle->has_work) [[likely]] {
                lane->append_words(entry.start, end,
                                   elements_word(handle->slot, handle->elements_low),
                                   place_word(lane, lane->depth, handle->elements_high, 0));
            } else {
                lane->append(make_record(lane, entry, lane->depth, end, handle_elements(handle),
                                         RECORD_WORK), &handle->work);
            }
            return true;
        }
    }
    leave(profiler, lane, handle->slot, OpenKind::Block, nullptr, end, handle_elements(handle),
          handle->has_work ? &handle->work : nullptr);
    return !PyErr_Occurred();
}

PyObject* decorate(HandleObject* handle, PyObject* function) {
    PyObject* module = PyImport_ImportModule("brickline.timed_functions");
    if (!module) return nullptr;
    PyObject* result = PyObject_CallMethod(module, "decorate", "OO", handle, function);
    Py_DECREF(module);
    return result;
}

HandleObject* handle_of(PyObject* bound) {
    return reinterpret_cast<HandleObject*>(reinterpret_cast<char*>(bound) - offsetof(HandleObject, bound));
}

// A handle whose last reference went while its callable was still held: `with` lets go of what it
// enters before it enters it, and another thread may have taken its place among the cached ones.
PyObject* revived(HandleObject* handle) {
    PyObject* object = PyObject_Init(reinterpret_cast<PyObject*>(handle), Py_TYPE(handle));
    Py_INCREF(reinterpret_cast<PyObject*>(&handle->bound));
    PyObject_GC_Track(object);
    return object;
}

PyObject* bound_call(PyObject* self, PyObject* const*, size_t flagged, PyObject*) {
    HandleObject* handle = handle_of(self);
    if (PyVectorcall_NARGS(flagged) == 0) {
        if (!enter(handle)) return nullptr;
        if (Py_REFCNT(reinterpret_cast<PyObject*>(handle)) == 0) [[unlikely]] return revived(handle);
        return Py_NewRef(reinterpret_cast<PyObject*>(handle));
    }
    if (!exit(handle)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* bound_get(PyObject* self, PyObject* instance, PyObject*) {
    if (!instance) return Py_NewRef(self);
    return Py_NewRef(reinterpret_cast<PyObject*>(&as_handle(instance)->bound));
}

PyObject* handle_call(PyObject* self, PyObject* args, PyObject* names) {
    if (PyTuple_GET_SIZE(args) != 1 || (names && PyDict_GET_SIZE(names))) {
        return raise_error("UsageError", "a brick is called with one function to decorate; "
                                         "to time a block, write `with brick:`");
    }
    return decorate(as_handle(self), PyTuple_GET_ITEM(args, 0));
}

PyTypeObject BoundType = {PyVarObject_HEAD_INIT(nullptr, 0)};

HandleObject* make_handle(ProfilerObject* profiler, uint32_t brick, int32_t layer, uint64_t elements,
                          uint64_t bytes, double flops) {
    HandleObject* handle = PyObject_GC_New(HandleObject, &HandleType);
    if (!handle) return nullptr;
    handle->profiler =
        reinterpret_cast<ProfilerObject*>(Py_NewRef(reinterpret_cast<PyObject*>(profiler)));
    PyObject_Init(reinterpret_cast<PyObject*>(&handle->bound), &BoundType);
    handle->bound.call = bound_call;
    handle->weakrefs = nullptr;
    handle->layer = layer;
    handle->brick = brick;
    handle->elements_low = uint32_t(elements);
    handle->elements_high = uint8_t(elements >> 32);
    handle->has_work = bytes != 0 || flops != 0;
    handle->is_plain = !handle->has_work && elements == 1;
    handle->work = WorkRecord{};
    handle->work.bytes_in = bytes;
    handle->work.flops = flops;
    handle->work.flags = RECORD_IS_WORK;
    const Brick& entry = profiler->state->bricks[brick];
    SlotDefinition slot;
    slot.name = entry.name;
    slot.brick = entry.id;
    slot.layer = layer;
    slot.category = entry.category;
    handle->slot = slot_for(profiler, slot);
    PyObject_GC_Track(reinterpret_cast<PyObject*>(handle));
    if (PyErr_Occurred()) {
        Py_DECREF(handle);
        return nullptr;
    }
    return handle;
}

int handle_traverse(PyObject* self, visitproc visit, void* arg) {
    HandleObject* handle = as_handle(self);
    Py_VISIT(handle->profiler);
    return 0;
}

void free_handle(HandleObject* handle) {
    Py_CLEAR(handle->profiler);
    PyObject_GC_Del(handle);
}

// The handle holds one reference to the callable inside it. Where somebody else still holds it when
// the handle dies, the memory lives on and goes with the callable.
void handle_dealloc(PyObject* self) {
    HandleObject* handle = as_handle(self);
    PyObject_GC_UnTrack(self);
    if (handle->weakrefs) PyObject_ClearWeakRefs(self);
    handle->weakrefs = nullptr;
    Py_DECREF(reinterpret_cast<PyObject*>(&handle->bound));
}

void bound_dealloc(PyObject* self) {
    free_handle(handle_of(self));
}

PyObject* handle_repr(PyObject* self) {
    HandleObject* handle = as_handle(self);
    const Brick& brick = handle->profiler->state->bricks[handle->brick];
    if (handle->layer < 0) return PyUnicode_FromFormat("<brick %s>", brick.name.c_str());
    return PyUnicode_FromFormat("<brick %s, layer %d>", brick.name.c_str(), handle->layer);
}

PyObject* handle_get(PyObject* self, void* field) {
    HandleObject* handle = as_handle(self);
    const Brick& brick = handle->profiler->state->bricks[handle->brick];
    switch (reinterpret_cast<intptr_t>(field)) {
        case 0: return PyUnicode_FromString(brick.name.c_str());
        case 1: if (handle->layer < 0) Py_RETURN_NONE; return PyLong_FromLong(handle->layer);
        case 2: return PyLong_FromUnsignedLongLong(handle_elements(handle));
        case 3: return PyLong_FromUnsignedLongLong(handle->work.bytes_in);
        case 4: return PyFloat_FromDouble(handle->work.flops);
        case 6: return PyLong_FromUnsignedLong(handle->slot);
        default: return Py_NewRef(reinterpret_cast<PyObject*>(handle->profiler));
    }
}

PyGetSetDef handle_fields[] = {
    {"name", handle_get, nullptr, "Name of the brick.", reinterpret_cast<void*>(0)},
    {"layer", handle_get, nullptr, "Layer, or None.", reinterpret_cast<void*>(1)},
    {"elements", handle_get, nullptr, "Elements counted per entry.", reinterpret_cast<void*>(2)},
    {"bytes", handle_get, nullptr, "Bytes moved per entry, as declared.", reinterpret_cast<void*>(3)},
    {"flops", handle_get, nullptr, "Operations per entry, as declared.", reinterpret_cast<void*>(4)},
    {"profiler", handle_get, nullptr, "The profiler it records into.", reinterpret_cast<void*>(5)},
    {"slot", handle_get, nullptr, "Its number among the slots of the run.", reinterpret_cast<void*>(6)},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

// ----------------------------------------------------------------------------- decorated functions

struct WrappedObject {
    PyObject_HEAD
    vectorcallfunc call;
    HandleObject* handle;
    PyObject* function;
    PyObject* dict;
    PyObject* weakrefs;
};

PyTypeObject WrappedType = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* wrapped_call(PyObject* self, PyObject* const* args, size_t count, PyObject* names) {
    WrappedObject* wrapped = reinterpret_cast<WrappedObject*>(self);
    if (!enter(wrapped->handle)) return nullptr;
    PyObject* result = PyObject_Vectorcall(wrapped->function, args, count, names);
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    if (!result) PyErr_Fetch(&type, &value, &trace);
    const bool done = exit(wrapped->handle);
    if (!result) {
        PyErr_Restore(type, value, trace);
    } else if (!done) {
        Py_CLEAR(result);
    }
    return result;
}

int wrapped_traverse(PyObject* self, visitproc visit, void* arg) {
    WrappedObject* wrapped = reinterpret_cast<WrappedObject*>(self);
    Py_VISIT(wrapped->handle);
    Py_VISIT(wrapped->function);
    Py_VISIT(wrapped->dict);
    return 0;
}

int wrapped_clear(PyObject* self) {
    WrappedObject* wrapped = reinterpret_cast<WrappedObject*>(self);
    Py_CLEAR(wrapped->dict);
    return 0;
}

void wrapped_dealloc(PyObject* self) {
    WrappedObject* wrapped = reinterpret_cast<WrappedObject*>(self);
    PyObject_GC_UnTrack(self);
    if (wrapped->weakrefs) PyObject_ClearWeakRefs(self);
    Py_CLEAR(wrapped->dict);
    Py_CLEAR(wrapped->function);
    Py_CLEAR(wrapped->handle);
    PyObject_GC_Del(self);
}

PyObject* wrapped_get(PyObject* self, PyObject* instance, PyObject*) {
    if (!instance || instance == Py_None) return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

PyObject* handle_wrap(PyObject* self, PyObject* function) {
    if (!PyCallable_Check(function)) {
        return raise_error("UsageError",
                           "a brick decorates a function: expected a callable, got %.200s; "
                           "write @profiler.brick(\"Name\") above a def",
                           Py_TYPE(function)->tp_name);
    }
    WrappedObject* wrapped = PyObject_GC_New(WrappedObject, &WrappedType);
    if (!wrapped) return nullptr;
    wrapped->call = wrapped_call;
    wrapped->handle = as_handle(Py_NewRef(self));
    wrapped->function = Py_NewRef(function);
    wrapped->dict = nullptr;
    wrapped->weakrefs = nullptr;
    PyObject_GC_Track(reinterpret_cast<PyObject*>(wrapped));
    return reinterpret_cast<PyObject*>(wrapped);
}

PyMemberDef wrapped_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(WrappedObject, call), READONLY, nullptr},
    {"__dictoffset__", T_PYSSIZET, offsetof(WrappedObject, dict), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef wrapped_fields[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyObject* handle_start(PyObject* self, PyObject*) {
    if (!enter(as_handle(self))) return nullptr;
    Py_RETURN_NONE;
}

PyObject* handle_stop(PyObject* self, PyObject*) {
    if (!exit(as_handle(self))) return nullptr;
    Py_RETURN_NONE;
}

PyObject* handle_mark(PyObject* self, PyObject*) {
    HandleObject* handle = as_handle(self);
    ProfilerObject* profiler = handle->profiler;
    if (profiler->mode == Mode::Off) Py_RETURN_NONE;
    Lane* lane = caller_lane(profiler);
    if (lane && lane->only_counts && lane->depth == lane->counting_depth) {
        count_entry(lane, handle);
        Py_RETURN_NONE;
    }
    const uint64_t now = ticks_now(profiler);
    if (lane && lane->depth && handle->is_plain && profiler->mode == Mode::Host) [[likely]] {
        OpenEntry& entry = lane->stack[lane->depth - 1];
        const bool is_mark = (entry.word ^ open_word(0, OpenKind::Mark)) >> 32 == 0;
        if (is_mark && !entry.owner && !entry.start_event) [[likely]] {
            lane->append_words(entry.start, now, elements_word(entry.slot, 1),
                               place_word(lane, lane->depth - 1, 0, 0));
            entry.slot = handle->slot;
            entry.start = now;
            Py_RETURN_NONE;
        }
    }
    if (lane && !mark(profiler, lane, handle, now)) return nullptr;
    if (!lane && PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyMethodDef handle_methods[] = {
    {"start", handle_start, METH_NOARGS,
     "Begin an entry, as `with` does; `stop` ends it. Cheaper than `with`: two plain calls."},
    {"stop", handle_stop, METH_NOARGS, "End the entry that `start` began."},
    {"mark", handle_mark, METH_NOARGS,
     "End the marked brick, if any, and begin this one at the same instant."},
    {"wrap", handle_wrap, METH_O, "Wrap a plain function so that each call is one entry."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool enter_handle(HandleObject* handle) { return enter(handle); }
bool exit_handle(HandleObject* handle) { return exit(handle); }

HandleObject* handle_for(ProfilerObject* profiler, uint32_t brick, int32_t layer) {
    std::vector<HandleObject*>& handles = profiler->state->bricks[brick].by_layer;
    const size_t place = size_t(layer + 1);
    if (place < handles.size() && handles[place]) [[likely]] {
        return handles[place];
    }
    HandleObject* handle = make_handle(profiler, brick, layer, 1, 0, 0);
    if (!handle) return nullptr;
    // make_handle may have grown State::bricks' slots, so look the vector up again.
    std::vector<HandleObject*>& again = profiler->state->bricks[brick].by_layer;
    if (place >= again.size()) again.resize(place + 1);
    again[place] = handle;
    return handle;
}

namespace {

size_t inline_place(PyObject* brick, PyObject* layer) {
    const uint64_t mixed = (reinterpret_cast<uint64_t>(brick) >> 4) * 31 + (reinterpret_cast<uint64_t>(layer) >> 4);
    return (mixed ^ mixed >> 9) % INLINE_CALLS;
}

void remember_inline(State& state, PyObject* brick, PyObject* layer, PyObject* names,
                     HandleObject* handle) {
    // Subclasses of int and str may compare as they like; only the plain ones and BrickId do not.
    if (!PyLong_Check(layer) || !(PyLong_Check(brick) || PyUnicode_CheckExact(brick))) return;
    if (state.inline_calls.empty()) state.inline_calls.resize(INLINE_CALLS);
    InlineCall& call = state.inline_calls[inline_place(brick, layer)];
    Py_XSETREF(call.brick, Py_NewRef(brick));
    Py_XSETREF(call.layer, Py_NewRef(layer));
    Py_XSETREF(call.names, Py_NewRef(names));
    call.handle = handle;  // State::bricks keeps it
}

}  // namespace

PyObject* profiler_brick(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    const bool is_plain = count == 1 && names && PyTuple_GET_SIZE(names) == 1;
    if (is_plain && !profiler->state->inline_calls.empty()) [[likely]] {
        const InlineCall& call = profiler->state->inline_calls[inline_place(args[0], args[1])];
        if (call.brick == args[0] && call.layer == args[1] && call.names == names) [[likely]] {
            return Py_NewRef(reinterpret_cast<PyObject*>(call.handle));
        }
    }
    if (count < 1 || count > 2) {
        return raise_error("UsageError", "brick() takes a BrickId or a name, then layer=, elements=, "
                                         "bytes=, flops=");
    }
    const int64_t brick = find_brick(profiler, args[0]);
    if (brick < 0) return nullptr;
    int32_t layer = -1;
    if (count == 2 && !parse_layer(args[1], layer)) return nullptr;
    WorkKey key{uint32_t(brick), layer, 1, 0, 0};
    bool has_work = false;
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        PyObject* value = args[count + i];
        if (name_is(name, names_of_arguments.layer)) {
            if (!parse_layer(value, key.layer)) return nullptr;
        } else if (name_is(name, names_of_arguments.elements)) {
            if (!parse_count(value, "elements", MAX_ELEMENTS, key.elements)) return nullptr;
            has_work = true;
        } else if (name_is(name, names_of_arguments.bytes)) {
            if (!parse_count(value, "bytes", 1ull << 60, key.bytes)) return nullptr;
            has_work = true;
        } else if (name_is(name, names_of_arguments.flops)) {
            if (!parse_flops(value, key.flops)) return nullptr;
            has_work = true;
        } else {
            return unexpected_keyword("brick", name);
        }
    }
    if (!has_work) {
        HandleObject* handle = handle_for(profiler, key.brick, key.layer);
        if (!handle) return nullptr;
        if (is_plain) remember_inline(*profiler->state, args[0], args[1], names, handle);
        return Py_NewRef(reinterpret_cast<PyObject*>(handle));
    }
    // Work that changes with every call (a growing KV cache) must not grow memory: a bounded,
    // direct-mapped cache of handles that share one slot.
    std::vector<CachedHandle>& cache = profiler->state->handles_with_work;
    if (cache.empty()) cache.resize(1024);
    uint64_t hash = key.elements * 0x9e3779b97f4a7c15ull ^ key.bytes * 0xc2b2ae3d27d4eb4full;
    hash ^= (uint64_t(key.brick) << 32 | uint32_t(key.layer)) * 0xff51afd7ed558ccdull;
    hash ^= std::hash<double>{}(key.flops);
    CachedHandle& cached = cache[(hash ^ hash >> 32) % cache.size()];
    if (!cached.handle || !(cached.key == key)) {
        HandleObject* handle =
            make_handle(profiler, key.brick, key.layer, key.elements, key.bytes, key.flops);
        if (!handle) return nullptr;
        Py_XSETREF(cached.handle, handle);
        cached.key = key;
    }
    return Py_NewRef(reinterpret_cast<PyObject*>(cached.handle));
}

PyTypeObject HandleType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

// Stands in a type's dictionary as __enter__ or __exit__.
struct WithMethod {
    PyObject_HEAD
    PyTypeObject* type;
    descrgetfunc get;
};

PyTypeObject WithMethodType = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* with_method_get(PyObject* self, PyObject* instance, PyObject* type) {
    return reinterpret_cast<WithMethod*>(self)->get(self, instance, type);
}

// As ExitStack calls it: by the type, with the brick or the step as the first argument.
PyObject* with_method_call(PyObject* self, PyObject* args, PyObject* names) {
    WithMethod* method = reinterpret_cast<WithMethod*>(self);
    PyObject* instance = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : Py_None;
    if (!PyObject_TypeCheck(instance, method->type)) {
        return raise_error("UsageError", "expected a %s as the first argument, got %.200s",
                           method->type->tp_name, Py_TYPE(instance)->tp_name);
    }
    PyObject* bound = method->get(self, instance, reinterpret_cast<PyObject*>(Py_TYPE(instance)));
    PyObject* rest = bound ? PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)) : nullptr;
    PyObject* result = rest ? PyObject_Call(bound, rest, names) : nullptr;
    Py_XDECREF(rest);
    Py_XDECREF(bound);
    return result;
}

void ready_wrapped_type() {
    WrappedType.tp_name = "brickline._core.Wrapped";
    WrappedType.tp_basicsize = sizeof(WrappedObject);
    WrappedType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC |
                           Py_TPFLAGS_METHOD_DESCRIPTOR;
    WrappedType.tp_vectorcall_offset = offsetof(WrappedObject, call);
    WrappedType.tp_call = PyVectorcall_Call;
    WrappedType.tp_members = wrapped_members;
    WrappedType.tp_getset = wrapped_fields;
    WrappedType.tp_dictoffset = offsetof(WrappedObject, dict);
    WrappedType.tp_weaklistoffset = offsetof(WrappedObject, weakrefs);
    WrappedType.tp_traverse = wrapped_traverse;
    WrappedType.tp_clear = wrapped_clear;
    WrappedType.tp_dealloc = wrapped_dealloc;
    WrappedType.tp_descr_get = wrapped_get;
}

void fill_handle_type() {
    HandleType.tp_name = "brickline._core.BrickHandle";
    HandleType.tp_doc = "A brick of one profiler: use it in `with`, or to decorate a function.";
    HandleType.tp_basicsize = sizeof(HandleObject);
    HandleType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    HandleType.tp_call = handle_call;
    HandleType.tp_traverse = handle_traverse;
    HandleType.tp_dealloc = handle_dealloc;
    HandleType.tp_repr = handle_repr;
    HandleType.tp_getset = handle_fields;
    HandleType.tp_methods = handle_methods;
    HandleType.tp_weaklistoffset = offsetof(HandleObject, weakrefs);
}

}  // namespace

int add_with_methods(PyTypeObject* type, descrgetfunc get) {
    for (const char* name : {"__enter__", "__exit__"}) {
        WithMethod* method = PyObject_New(WithMethod, &WithMethodType);
        if (!method) return -1;
        method->type = type;
        method->get = get;
        const int failed = PyDict_SetItemString(type->tp_dict, name, reinterpret_cast<PyObject*>(method));
        Py_DECREF(method);
        if (failed) return -1;
    }
    PyType_Modified(type);
    return 0;
}

int ready_handle_type(PyObject* module) {
    WithMethodType.tp_name = "brickline._core.WithMethod";
    WithMethodType.tp_basicsize = sizeof(WithMethod);
    WithMethodType.tp_flags = Py_TPFLAGS_DEFAULT;
    WithMethodType.tp_descr_get = with_method_get;
    WithMethodType.tp_call = with_method_call;
    WithMethodType.tp_dealloc = [](PyObject* self) { PyObject_Free(self); };
    BoundType.tp_name = "brickline._core.BoundCall";
    BoundType.tp_basicsize = sizeof(BoundObject);
    BoundType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    BoundType.tp_vectorcall_offset = offsetof(BoundObject, call);
    BoundType.tp_call = PyVectorcall_Call;
    BoundType.tp_dealloc = bound_dealloc;
    ready_wrapped_type();
    fill_handle_type();
    if (PyType_Ready(&WithMethodType) || PyType_Ready(&BoundType) || PyType_Ready(&WrappedType) ||
        PyType_Ready(&HandleType) || add_with_methods(&HandleType, bound_get)) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "BrickHandle", reinterpret_cast<PyObject*>(&HandleType));
}

}  // namespace brickline::hot
