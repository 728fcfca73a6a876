// brickline._core.ProfilerCore: the native base of BrickProfiler. This file holds what is called
// rarely (opening, closing, options, devices); handles.cpp, timers.cpp and steps.cpp measure.
#include "hot.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda_events.h"

namespace brickline::hot {

PyTypeObject ProfilerType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

constexpr uint32_t NO_INDEX = 0xffffffffu;

PyObject* g_vocabulary = nullptr;  // list of (label, category, (names…))

bool load_vocabulary(State& state) {
    state.brick_of_name = PyDict_New();
    if (!state.brick_of_name) return false;
    const Py_ssize_t count = g_vocabulary ? PyList_GET_SIZE(g_vocabulary) : 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        const char* label = nullptr;
        unsigned int category = 0;
        PyObject* names = nullptr;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(g_vocabulary, i), "sIO", &label, &category, &names)) {
            return false;
        }
        Brick brick;
        brick.name = label;
        brick.id = int32_t(i);
        brick.category = category;
        state.bricks.push_back(brick);
        PyObject* position = PyLong_FromSsize_t(i);
        if (!position) return false;
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names); ++k) {
            PyDict_SetItem(state.brick_of_name, PyTuple_GET_ITEM(names, k), position);
        }
        Py_DECREF(position);
    }
    return true;
}

void use_source(ProfilerObject* profiler) {
    profiler->source = profiler->state->source.get();
    const ClockKind kind = profiler->source->kind();
    profiler->reads_counter = kind == ClockKind::Tsc || kind == ClockKind::Cntvct;
}

PyObject* profiler_new(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = type->tp_alloc(type, 0);
    if (!self) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    profiler->mode = Mode::Off;
    profiler->enabled_mode = Mode::Host;
    profiler->sync = Sync::Deferred;
    profiler->index = NO_INDEX;
    profiler->state = new State;
    profiler->state->source = std::make_unique<TickSource>();
    use_source(profiler);
    if (!load_vocabulary(*profiler->state)) {
        Py_DECREF(self);
        return nullptr;
    }
    // Phase 0: outside any step.
    profiler->state->phases[""] = 0;
    SlotDefinition outside;
    outside.kind = SlotKind::Step;
    profiler->state->phase_slots.push_back(slot_for(profiler, outside));
    return self;
}

int profiler_traverse(PyObject* self, visitproc visit, void* arg) {
    State* state = as_profiler(self)->state;
    if (!state) return 0;
    for (Brick& brick : state->bricks) {
        for (HandleObject* handle : brick.by_layer) Py_VISIT(handle);
    }
    for (CachedHandle& cached : state->handles_with_work) Py_VISIT(cached.handle);
    Py_VISIT(state->stream_getter);
    return 0;
}

int profiler_clear(PyObject* self) {
    State* state = as_profiler(self)->state;
    if (!state) return 0;
    for (Brick& brick : state->bricks) {
        std::vector<HandleObject*> handles;
        handles.swap(brick.by_layer);
        for (HandleObject* handle : handles) Py_XDECREF(handle);
    }
    std::vector<InlineCall> calls;
    calls.swap(state->inline_calls);
    for (InlineCall& call : calls) {
        Py_XDECREF(call.brick);
        Py_XDECREF(call.layer);
        Py_XDECREF(call.names);
    }
    std::vector<CachedHandle> cached;
    cached.swap(state->handles_with_work);
    for (CachedHandle& entry : cached) Py_XDECREF(entry.handle);
    Py_CLEAR(state->stream_getter);
    return 0;
}

// Nothing may stay open over a pause or a reset: it would be left by an exit that is not its own.
void forget_all_open(ProfilerObject* profiler) {
    profiler->state->recorder->for_each_host_lane(
        [profiler](Lane& lane) { forget_open(profiler, lane); });
}

void shut(ProfilerObject* profiler) {
    profiler->mode = Mode::Off;
    State& state = *profiler->state;
    if (profiler->index != NO_INDEX) unregister_recorder(profiler->index);
    profiler->index = NO_INDEX;
    profiler->owner = nullptr;
    if (is_open(profiler)) forget_all_open(profiler);
    if (state.device) {
        Py_BEGIN_ALLOW_THREADS
        state.device->stop();
        Py_END_ALLOW_THREADS
        state.device.reset();
    }
    if (state.recorder) state.recorder->close();
    state.recorder.reset();
}

void profiler_dealloc(PyObject* self) {
    ProfilerObject* profiler = as_profiler(self);
    PyObject_GC_UnTrack(self);
    if (profiler->weakrefs) PyObject_ClearWeakRefs(self);
    profiler_clear(self);
    if (profiler->state) {
        shut(profiler);
        Py_CLEAR(profiler->state->brick_of_name);
        Py_CLEAR(profiler->state->stream_argument);
        Py_CLEAR(profiler->state->last_phase);
        delete profiler->state;
    }
    Py_TYPE(self)->tp_free(self);  // a subclass's own dealloc drops the type
}

// ------------------------------------------------------------------------------ opening and closing

PyObject* profiler_open(PyObject* self, PyObject* args, PyObject* names) {
    static const char* keys[] = {"path", "rank", "recent_records", nullptr};
    const char* path = nullptr;
    unsigned int rank = 0, recent = 0;
    if (!PyArg_ParseTupleAndKeywords(args, names, "s|II", const_cast<char**>(keys), &path, &rank,
                                     &recent)) {
        return nullptr;
    }
    ProfilerObject* profiler = as_profiler(self);
    shut(profiler);
    State& state = *profiler->state;
    if (!guarded([&] {
            state.recorder = std::make_unique<Recorder>(RecorderOptions{path, rank, recent},
                                                        *state.source, state.slots);
        })) {
        return nullptr;
    }
    profiler->index = register_recorder(state.recorder.get(), profiler);
    state.step_counter = 0;
    state.entry_counter = 0;
    std::fill(std::begin(state.phase_steps), std::end(state.phase_steps), 0);
    std::fill(std::begin(state.phase_clocks), std::end(state.phase_clocks), PhaseClock{});
    state.open_steps.clear();
    state.shared_step = {};
    state.failure.clear();
    Py_RETURN_NONE;
}

PyObject* profiler_close(PyObject* self, PyObject*) {
    shut(as_profiler(self));
    Py_RETURN_NONE;
}

// After fork: the child must neither write to nor close the parent's spool.
PyObject* profiler_abandon(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    profiler->mode = Mode::Off;
    profiler->index = NO_INDEX;
    profiler->owner = nullptr;
    State& state = *profiler->state;
    (void)state.device.release();  // its thread does not exist in the child
    if (state.recorder) {
        state.recorder->abandon();
        (void)state.recorder.release();  // its locks may be held by threads that are gone
    }
    Py_RETURN_NONE;
}

PyObject* profiler_set_enabled(PyObject* self, PyObject* value) {
    ProfilerObject* profiler = as_profiler(self);
    const int enabled = PyObject_IsTrue(value);
    if (enabled < 0 || (enabled && !require_open(profiler))) return nullptr;
    if (!enabled && is_open(profiler)) forget_all_open(profiler);
    profiler->mode = enabled ? profiler->enabled_mode : Mode::Off;
    Py_RETURN_NONE;
}

PyObject* profiler_is_enabled(PyObject* self, PyObject*) {
    return PyBool_FromLong(as_profiler(self)->mode != Mode::Off);
}

void choose_mode(ProfilerObject* profiler) {
    const State& state = *profiler->state;
    Mode mode = Mode::Host;
    if (state.sample_steps > 1 || state.sample_layers > 1) mode = Mode::Careful;
    if (state.device && profiler->sync != Sync::None) mode = Mode::Device;
    profiler->enabled_mode = mode;
    if (profiler->mode != Mode::Off) profiler->mode = mode;
}

PyObject* profiler_configure(PyObject* self, PyObject* args, PyObject* names) {
    static const char* keys[] = {"sync", "sample_steps", "sample_layers", "tiles", nullptr};
    ProfilerObject* profiler = as_profiler(self);
    State& state = *profiler->state;
    int sync = int(profiler->sync), tiles = state.tiles_enabled;
    unsigned int steps = state.sample_steps, layers = state.sample_layers;
    if (!PyArg_ParseTupleAndKeywords(args, names, "|$iIIp", const_cast<char**>(keys), &sync, &steps,
                                     &layers, &tiles)) {
        return nullptr;
    }
    profiler->sync = Sync(sync);
    state.sample_steps = steps;
    state.sample_layers = layers;
    state.tiles_enabled = tiles != 0;
    choose_mode(profiler);
    Py_RETURN_NONE;
}

PyObject* profiler_use_manual_clock(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    profiler->state->source = std::make_unique<TickSource>(ClockKind::Manual);
    use_source(profiler);
    Py_RETURN_NONE;
}

PyObject* profiler_advance(PyObject* self, PyObject* value) {
    uint64_t ns = 0;
    if (!parse_count(value, "nanoseconds", 1ull << 62, ns)) return nullptr;
    as_profiler(self)->source->advance(ns);
    Py_RETURN_NONE;
}

PyObject* profiler_use_cuda(PyObject* self, PyObject* args, PyObject* names) {
    static const char* keys[] = {"device", "stream", "stream_getter", nullptr};
    int device = 0;
    unsigned long long stream = 0;
    PyObject* getter = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, names, "i|KO", const_cast<char**>(keys), &device, &stream,
                                     &getter)) {
        return nullptr;
    }
    ProfilerObject* profiler = as_profiler(self);
    if (!require_open(profiler)) return nullptr;
    State& state = *profiler->state;
    std::string problem;
    std::unique_ptr<EventDriver> driver = open_cuda_events(device, problem);
    if (!driver) return raise_error("DeviceError", "%s", problem.c_str());
    state.device = std::make_unique<DeviceSpans>(std::move(driver), *state.recorder);
    state.stream = stream;
    Py_XSETREF(state.stream_getter, getter == Py_None ? nullptr : Py_NewRef(getter));
    Py_XSETREF(state.stream_argument, PyLong_FromLong(device));
    choose_mode(profiler);
    Py_RETURN_NONE;
}

// --------------------------------------------------------------------------------------- device use

PyObject* device_call(PyObject* self, const char* what, std::string (*call)(DeviceSpans&, uint64_t),
                      uint64_t argument) {
    DeviceSpans* device = as_profiler(self)->state->device.get();
    if (!device) {
        return raise_error("UsageError", "%s needs a profiler made with device=\"CUDA:n\"", what);
    }
    std::string problem;
    Py_BEGIN_ALLOW_THREADS
    problem = call(*device, argument);
    Py_END_ALLOW_THREADS
    if (!problem.empty()) return raise_error("DeviceError", "%s", problem.c_str());
    Py_RETURN_NONE;
}

PyObject* profiler_drain(PyObject* self, PyObject*) {
    if (!as_profiler(self)->state->device) Py_RETURN_NONE;
    return device_call(self, "drain", [](DeviceSpans& device, uint64_t) {
        device.drain();
        return std::string();
    }, 0);
}

PyObject* profiler_begin_capture(PyObject* self, PyObject*) {
    DeviceSpans* device = as_profiler(self)->state->device.get();
    if (!device) {
        return raise_error("UsageError", "capture() needs a profiler made with device=\"CUDA:n\"");
    }
    // What is captured is timed at every replay, so sampling does not apply to it.
    State& state = *as_profiler(self)->state;
    state.shared_step.only_counts = false;
    state.recorder->for_each_host_lane([](Lane& lane) {
        lane.own_step.only_counts = false;
        lane.own_step.timed = true;
        lane.only_counts = false;
    });
    return PyLong_FromUnsignedLongLong(device->begin_capture());
}

PyObject* profiler_end_capture(PyObject* self, PyObject*) {
    return device_call(self, "capture()", [](DeviceSpans& device, uint64_t) {
        device.end_capture();
        return std::string();
    }, 0);
}

PyObject* profiler_before_replay(PyObject* self, PyObject* graph) {
    const uint64_t id = PyLong_AsUnsignedLongLong(graph);
    if (PyErr_Occurred()) return nullptr;
    return device_call(self, "replay()", [](DeviceSpans& device, uint64_t argument) {
        return device.before_replay(argument);
    }, id);
}

PyObject* profiler_replayed(PyObject* self, PyObject* graph) {
    const uint64_t id = PyLong_AsUnsignedLongLong(graph);
    if (PyErr_Occurred()) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    if (profiler->state->device) {
        const StepState& step = profiler->state->shared_step;
        profiler->state->device->replayed(id, step.phase, step.step);
    }
    Py_RETURN_NONE;
}

PyObject* profiler_flush(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    if (is_open(profiler)) {
        profiler->state->recorder->for_each_host_lane(
            [profiler](Lane& lane) { drop_abandoned(profiler, &lane, 0); });
        if (!guarded([&] { profiler->state->recorder->flush(); })) return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* profiler_set_overhead(PyObject* self, PyObject* args) {
    double timed_ns, counted_ns;
    if (!PyArg_ParseTuple(args, "dd", &timed_ns, &counted_ns)) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    if (is_open(profiler)) {
        SpoolHeader& header = profiler->state->recorder->spool().header();
        header.overhead_ns = timed_ns;
        header.counting_ns = counted_ns;
    }
    Py_RETURN_NONE;
}

PyObject* profiler_spend(PyObject* self, PyObject* value) {
    const long long ns = PyLong_AsLongLong(value);
    if (ns == -1 && PyErr_Occurred()) return nullptr;
    spend(as_profiler(self), ns);
    Py_RETURN_NONE;
}

PyObject* profiler_now_ns(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    const TickSource& source = *profiler->source;
    return PyLong_FromUnsignedLongLong(source.kind() == ClockKind::Manual ? source.now()
                                                                          : monotonic_ns());
}

PyObject* profiler_where(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    const Lane* lane = is_open(profiler) ? fast_lane(profiler) : nullptr;
    const StepState& step = lane ? *lane->step : profiler->state->shared_step;
    const bool is_full = is_open(profiler) && (profiler->state->recorder->is_full_disk() ||
                                               !profiler->state->failure.empty());
    return Py_BuildValue("{s:I,s:I,s:O}", "step", step.step, "phase", unsigned(step.phase),
                         "full_disk", is_full ? Py_True : Py_False);
}

// ------------------------------------------------------------------------------------ graph and reset

// How many entries of the calling thread are open up to the innermost one that will be drawn; 0 where
// there is none. Tiles are not drawn, nor is what a device times or sampling leaves out.
uint32_t drawn_depth(const ProfilerObject* profiler, const Lane* lane) {
    if (profiler->mode == Mode::Off || !lane || !lane->observer()) return 0;
    for (uint32_t at = std::min(lane->depth, MAX_DEPTH); at-- > 0;) {
        const OpenEntry& entry = lane->stack[at];
        if (entry.kind != OpenKind::Tile && entry.timed && !entry.start_event) return at + 1;
    }
    return 0;
}

Lane* lane_of_caller(ProfilerObject* profiler) {
    return is_open(profiler) ? fast_lane(profiler) : nullptr;
}

PyObject* profiler_open_depth(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    return PyLong_FromUnsignedLong(drawn_depth(profiler, lane_of_caller(profiler)));
}

PyObject* profiler_place_in_open(PyObject* self, PyObject* args) {
    unsigned int node = 0, kind = 0;
    int in_sequence = 1;
    if (!PyArg_ParseTuple(args, "IIp", &node, &kind, &in_sequence)) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    Lane* lane = lane_of_caller(profiler);
    const uint32_t depth = drawn_depth(profiler, lane);
    if (!depth) return raise_error("InternalError", "no brick is open on this thread");
    const GraphChild child{node, EdgeKind(kind), in_sequence != 0};
    if (!guarded([&] { profiler->state->recorder->place_in_open(*lane, depth - 1, child); })) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* profiler_take_drawn(PyObject* self, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    Lane* lane = lane_of_caller(profiler);
    uint32_t node = NO_NODE;
    if (lane && !guarded([&] { node = profiler->state->recorder->take_drawn(*lane); })) return nullptr;
    if (node == NO_NODE) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(node);
}

PyObject* profiler_forget(PyObject* self, PyObject* args) {
    unsigned int kind = 0;
    PyObject* id_or_name = Py_None;
    if (!PyArg_ParseTuple(args, "I|O", &kind, &id_or_name)) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    State& state = *profiler->state;
    const int64_t brick = id_or_name == Py_None ? -1 : find_brick(profiler, id_or_name);
    if (PyErr_Occurred()) return nullptr;
    if (!is_open(profiler)) Py_RETURN_NONE;
    std::vector<bool> slots;
    for (const SlotDefinition& slot : state.slots) {
        slots.push_back(slot.kind == SlotKind(kind) &&
                        (brick < 0 || slot.name == state.bricks[size_t(brick)].name));
    }
    std::unique_lock<std::mutex> held;
    if (state.device) held = state.device->hold_lanes();
    if (!guarded([&] { state.recorder->forget(slots); })) return nullptr;
    Py_RETURN_NONE;
}

#define FAST(function) \
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function)), METH_FASTCALL | METH_KEYWORDS
#define KEYWORDS(function) \
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function)), METH_VARARGS | METH_KEYWORDS

PyMethodDef profiler_methods[] = {
    {"brick", FAST(profiler_brick),
     "brick(id_or_name, layer=None, *, elements=1, bytes=0, flops=0)\n--\n\n"
     "Return the cached handle of a brick, for `with` or as a decorator."},
    {"step", FAST(profiler_step),
     "step(tokens=1, phase=\"\")\n--\n\nMark one pass of the model: use it in `with`."},
    {"start_brick", FAST(profiler_start),
     "start_brick(id, layer=None)\n--\n\nStart timing a brick; hand the timer to stop_brick."},
    {"stop_brick", FAST(profiler_stop),
     "stop_brick(timer, elements=1)\n--\n\nStop a timer and record the sample."},
    {"start", FAST(profiler_start), "start(name, layer=None)\n--\n\nStart timing a brick by name."},
    {"stop", FAST(profiler_stop), "stop(timer, elements=1)\n--\n\nStop a timer and record the sample."},
    {"mark", FAST(profiler_mark),
     "mark(id_or_name=None, layer=None)\n--\n\n"
     "End the marked brick, if any, and begin the next one at the same instant."},
    {"_stop_handle", FAST(profiler_stop_handle), nullptr},
    {"_tile_start", FAST(tile_start), nullptr},
    {"_tile_stop", FAST(tile_stop), nullptr},
    {"_tile_record", profiler_record_tile, METH_VARARGS, nullptr},
    {"_open", KEYWORDS(profiler_open), nullptr},
    {"_close", profiler_close, METH_NOARGS, nullptr},
    {"_abandon", profiler_abandon, METH_NOARGS, nullptr},
    {"_set_enabled", profiler_set_enabled, METH_O, nullptr},
    {"is_enabled", profiler_is_enabled, METH_NOARGS, "is_enabled()\n--\n\nWhether bricks are recorded."},
    {"_configure", KEYWORDS(profiler_configure), nullptr},
    {"_use_manual_clock", profiler_use_manual_clock, METH_NOARGS, nullptr},
    {"_advance", profiler_advance, METH_O, nullptr},
    {"_use_cuda", KEYWORDS(profiler_use_cuda), nullptr},
    {"_drain", profiler_drain, METH_NOARGS, nullptr},
    {"_begin_capture", profiler_begin_capture, METH_NOARGS, nullptr},
    {"_end_capture", profiler_end_capture, METH_NOARGS, nullptr},
    {"_before_replay", profiler_before_replay, METH_O, nullptr},
    {"_replayed", profiler_replayed, METH_O, nullptr},
    {"_record", KEYWORDS(profiler_record), nullptr},
    {"_fact", profiler_fact, METH_VARARGS, nullptr},
    {"_intern", profiler_intern, METH_O, nullptr},
    {"_append", profiler_append, METH_VARARGS, nullptr},
    {"_flush", profiler_flush, METH_NOARGS, nullptr},
    {"_set_overhead", profiler_set_overhead, METH_VARARGS, nullptr},
    {"_spend", profiler_spend, METH_O, nullptr},
    {"_now_ns", profiler_now_ns, METH_NOARGS, nullptr},
    {"_where", profiler_where, METH_NOARGS, nullptr},
    {"_open_depth", profiler_open_depth, METH_NOARGS, nullptr},
    {"_place_in_open", profiler_place_in_open, METH_VARARGS, nullptr},
    {"_take_drawn", profiler_take_drawn, METH_NOARGS, nullptr},
    {"_forget", profiler_forget, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyObject* set_vocabulary(PyObject*, PyObject* list) {
    if (!PyList_Check(list)) return raise_error("InternalError", "the vocabulary is a list");
    Py_XSETREF(g_vocabulary, Py_NewRef(list));
    Py_RETURN_NONE;
}

PyObject* after_fork_in_child(PyObject*, PyObject*) {
    forget_lanes_after_fork();
    Py_RETURN_NONE;
}

// The interpreter's fast calls apply only where a method descriptor's type is exactly that of the
// object, so BrickProfiler carries descriptors of its own: ten nanoseconds a call.
PyObject* adopt_methods(PyObject*, PyObject* type) {
    if (!PyType_Check(type) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), &ProfilerType)) {
        return raise_error("InternalError", "expected a subclass of ProfilerCore");
    }
    for (PyMethodDef* method = profiler_methods; method->ml_name; ++method) {
        PyObject* descriptor = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), method);
        if (!descriptor) return nullptr;
        const int failed = PyObject_SetAttrString(type, method->ml_name, descriptor);
        Py_DECREF(descriptor);
        if (failed) return nullptr;
    }
    Py_RETURN_NONE;
}

PyMethodDef module_functions[] = {
    {"adopt_methods", adopt_methods, METH_O,
     "Give a subclass of ProfilerCore method descriptors of its own."},
    {"set_vocabulary", set_vocabulary, METH_O, "Hand the known bricks to the core, once."},
    {"after_fork_in_child", after_fork_in_child, METH_NOARGS, "Forget the parent's lanes."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool require_open(ProfilerObject* profiler) {
    if (is_open(profiler)) return true;
    raise_error("UsageError",
                "this profiler records nothing yet: make it with enabled=True, or call enable()");
    return false;
}

uint32_t slot_for(ProfilerObject* profiler, const SlotDefinition& slot) {
    State& state = *profiler->state;
    const auto key = std::make_tuple(uint32_t(slot.kind), slot.name, slot.layer, slot.level, slot.owner);
    const auto found = state.slot_ids.find(key);
    if (found != state.slot_ids.end()) return found->second;
    const uint32_t id = uint32_t(state.slots.size());
    if (is_open(profiler)) {
        try {
            state.recorder->add_slot(id, slot);
        } catch (const SpoolError& error) {
            // Entries of a slot that the file does not know could not be read back.
            if (profiler->mode != Mode::Off) stop_recording(profiler, error);
        }
    }
    state.slots.push_back(slot);
    state.slot_ids.emplace(key, id);
    return id;
}

int64_t find_brick(ProfilerObject* profiler, PyObject* id_or_name) {
    State& state = *profiler->state;
    if (PyLong_Check(id_or_name)) [[likely]] {
        const long id = PyLong_AsLong(id_or_name);
        if (id >= 0 && g_vocabulary && id < PyList_GET_SIZE(g_vocabulary)) [[likely]] {
            return id;
        }
        PyErr_Clear();
        raise_error("UsageError", "there is no brick with id %R; ids go from 0 to %zd, and any other "
                    "brick is named by a string", id_or_name,
                    (g_vocabulary ? PyList_GET_SIZE(g_vocabulary) : 0) - 1);
        return -1;
    }
    if (!PyUnicode_Check(id_or_name)) {
        raise_error("UsageError", "a brick is a BrickId or a name: expected int or str, got %.200s",
                    Py_TYPE(id_or_name)->tp_name);
        return -1;
    }
    PyObject* known = PyDict_GetItemWithError(state.brick_of_name, id_or_name);
    if (known) [[likely]] {
        return PyLong_AsLong(known);
    }
    if (PyErr_Occurred()) return -1;
    Py_ssize_t length = 0;
    const char* name = utf8_of(id_or_name, "a brick's name", &length);
    if (!name) return -1;
    if (length == 0 || length > 1024) {
        raise_error("UsageError", "a brick's name has 1 to 1024 bytes, this one has %zd", length);
        return -1;
    }
    PyObject* position = PyLong_FromSize_t(state.bricks.size());
    if (!position || PyDict_SetItem(state.brick_of_name, id_or_name, position) < 0) return -1;
    Py_DECREF(position);
    Brick brick;
    brick.name.assign(name, size_t(length));
    state.bricks.push_back(brick);
    return int64_t(state.bricks.size() - 1);
}

PyObject* raise_spool_error(const SpoolError& error) {
    switch (error.fault()) {
        case SpoolFault::NotASpool: return raise_error("NotARun", "%s", error.what());
        case SpoolFault::Version: return raise_error("RunVersion", "%s", error.what());
        case SpoolFault::Damaged: return raise_error("RunDamaged", "%s", error.what());
        default: return raise_error("RunError", "%s", error.what());
    }
}

int ready_profiler_type(PyObject* module) {
    ProfilerType.tp_name = "brickline._core.ProfilerCore";
    ProfilerType.tp_doc = "Native base of BrickProfiler.";
    ProfilerType.tp_basicsize = sizeof(ProfilerObject);
    ProfilerType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
    ProfilerType.tp_new = profiler_new;
    ProfilerType.tp_dealloc = profiler_dealloc;
    ProfilerType.tp_traverse = profiler_traverse;
    ProfilerType.tp_clear = profiler_clear;
    ProfilerType.tp_methods = profiler_methods;
    ProfilerType.tp_weaklistoffset = offsetof(ProfilerObject, weakrefs);
    if (PyType_Ready(&ProfilerType)) return -1;
    return PyModule_AddFunctions(module, module_functions) ||
           PyModule_AddObjectRef(module, "ProfilerCore", reinterpret_cast<PyObject*>(&ProfilerType));
}

}  // namespace brickline::hot
