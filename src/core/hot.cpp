// Measuring from Python in tens of nanoseconds: handles for `with`, timers, marks and tiles.
//
// An entry reads the clock last and an exit reads it first, so a measurement holds as little of
// itself as possible. The fast paths below cover the host clock without sampling; everything else
// goes through enter_slow and leave.
#include "hot.h"

#include <cmath>
#include <cstdarg>
#include <mutex>
#include <unordered_map>

#include <sys/syscall.h>
#include <unistd.h>

namespace brickline::hot {
namespace {

// The lanes of one thread, by profiler index. One pointer lives in thread-local storage.
struct ThreadLanes {
    Lane** lanes = nullptr;
    uint32_t size = 0;
};

thread_local ThreadLanes* t_lanes = nullptr;

std::mutex g_registry_mutex;
std::unordered_map<uint32_t, Recorder*> g_registry;
uint32_t g_next_index = 0;

// Gives a thread's lanes back when it ends; the next thread takes them over.
struct ThreadExit {
    bool armed = false;
    ~ThreadExit() {
        ThreadLanes* mine = t_lanes;
        t_lanes = nullptr;
        if (!mine) return;
        std::lock_guard guard(g_registry_mutex);
        for (uint32_t index = 0; index < mine->size; ++index) {
            if (!mine->lanes[index]) continue;
            const auto found = g_registry.find(index);
            if (found != g_registry.end()) found->second->release_lane(mine->lanes[index]);
        }
        delete[] mine->lanes;
        delete mine;
    }
};
thread_local ThreadExit t_exit;

constexpr int TIMER_POOL = 64;
TimerObject* g_timers[TIMER_POOL];
int g_timer_count = 0;
PyObject* g_disabled_timer = nullptr;
PyObject *g_layer_name, *g_elements_name, *g_bytes_name, *g_flops_name, *g_row_name, *g_col_name;

std::string thread_name() {
    char name[32] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

inline HandleObject* as_handle(PyObject* object) { return reinterpret_cast<HandleObject*>(object); }
inline ProfilerObject* as_profiler(PyObject* object) {
    return reinterpret_cast<ProfilerObject*>(object);
}

inline Lane* fast_lane(ProfilerObject* profiler) {
    const ThreadLanes* mine = t_lanes;
    if (mine && profiler->index < mine->size) [[likely]] {
        return mine->lanes[profiler->index];
    }
    return nullptr;
}

inline BrickRecord make_record(const ProfilerObject* profiler, const OpenEntry& entry, uint32_t depth,
                               uint64_t end, uint32_t elements_low, uint8_t elements_high,
                               uint8_t flags) {
    return {entry.start, end, entry.slot, elements_low, uint8_t(depth), profiler->phase, flags,
            elements_high, profiler->step};
}

// The last two words of a BrickRecord without flags.
inline uint64_t elements_word(uint32_t slot, uint32_t elements_low) {
    return uint64_t(slot) | uint64_t(elements_low) << 32;
}
inline uint64_t place_word(const ProfilerObject* profiler, uint32_t depth, uint8_t elements_high,
                           uint8_t flags) {
    return uint64_t(depth) | uint64_t(profiler->phase) << 8 | uint64_t(flags) << 16 |
           uint64_t(elements_high) << 24 | uint64_t(profiler->step) << 32;
}

bool is_timed(ProfilerObject* profiler, int32_t layer) {
    State& state = *profiler->state;
    if (!profiler->in_step && state.sample_steps > 1) {
        // Outside steps every nth entry stands in for every nth step.
        return state.entry_counter++ % state.sample_steps == 0;
    }
    if (!profiler->step_timed) return false;
    return state.sample_layers <= 1 || layer < 0 || layer % int32_t(state.sample_layers) == 0;
}

// The stream to record on: the fixed one, or what the caller's framework says is current.
bool current_stream(ProfilerObject* profiler, uint64_t& stream) {
    State& state = *profiler->state;
    stream = state.stream;
    if (!state.stream_getter) return true;
    PyObject* value = PyObject_CallOneArg(state.stream_getter, state.stream_argument);
    if (!value) return false;
    stream = PyLong_AsUnsignedLongLongMask(value);
    Py_DECREF(value);
    return !PyErr_Occurred();
}

bool raise_driver(const std::string& problem) {
    if (problem.empty()) return true;
    raise_error("DeviceError", "%s", problem.c_str());
    return false;
}

bool synchronize(ProfilerObject* profiler, uint64_t stream) {
    std::string problem;
    Py_BEGIN_ALLOW_THREADS
    problem = profiler->state->device->synchronize(stream);
    Py_END_ALLOW_THREADS
    return raise_driver(problem);
}

bool begin_on_device(ProfilerObject* profiler, Lane* lane, OpenEntry& entry, int32_t layer) {
    DeviceSpans& device = *profiler->state->device;
    if (!current_stream(profiler, entry.stream)) return false;
    entry.start_event = 0;
    if (profiler->sync == Sync::Immediate) {
        if (!device.is_capturing(entry.stream) && !synchronize(profiler, entry.stream)) return false;
        return true;
    }
    if (profiler->sync == Sync::PerLayer && layer != lane->last_layer) {
        if (lane->last_layer != -2 && !device.is_capturing(entry.stream) &&
            !synchronize(profiler, entry.stream)) {
            return false;
        }
        lane->last_layer = layer;
    }
    std::string problem;
    entry.start_event = device.begin(entry.stream, problem);
    // No event and no problem: this entry is counted and not timed.
    entry.timed = entry.start_event != 0;
    return raise_driver(problem);
}

// Pushes an entry with every option considered. Returns false with an exception set.
bool enter_slow(ProfilerObject* profiler, uint32_t slot, int32_t layer, OpenKind kind, void* owner) {
    Lane* lane = lane_of_thread(profiler);
    if (!lane) return PyErr_Occurred() == nullptr;
    if (lane->depth == MAX_DEPTH) {
        lane->too_deep += 1;
        return true;
    }
    OpenEntry& entry = lane->stack[lane->depth];
    entry.slot = slot;
    entry.kind = kind;
    entry.disturbed = false;
    entry.owner = owner;
    entry.start_event = 0;
    entry.timed = profiler->mode == Mode::Host || is_timed(profiler, layer);
    if (profiler->mode == Mode::Device && entry.timed && kind != OpenKind::Step &&
        kind != OpenKind::Tile && !begin_on_device(profiler, lane, entry, layer)) {
        return false;
    }
    lane->depth += 1;
    entry.start = profiler->source->now();
    return true;
}

// Writes the record of an entry that has left the stack.
void finish_entry(ProfilerObject* profiler, Lane* lane, const OpenEntry& entry, uint32_t depth,
                  uint64_t end, uint64_t elements, const WorkRecord* work) {
    uint8_t flags = entry.disturbed ? RECORD_OUT_OF_ORDER : 0;
    if (entry.kind == OpenKind::Tile) flags |= RECORD_TILE;
    if (!entry.timed) {
        lane->append(make_record(profiler, entry, depth, end, uint32_t(elements),
                                 uint8_t(elements >> 32), RECORD_UNTIMED), nullptr);
        return;
    }
    if (entry.start_event) {
        DeviceSpans& device = *profiler->state->device;
        DeviceSpan span{};
        span.start = entry.start_event;
        span.stream = entry.stream;
        span.thread = lane->header().thread;
        if (work) span.work = *work;
        span.work.detail =
            uint64_t(double(end - entry.start) * profiler->state->recorder->scale().ns_per_tick);
        span.work.flags = RECORD_IS_WORK;
        span.record = make_record(profiler, entry, depth, 0, uint32_t(elements),
                                  uint8_t(elements >> 32), uint8_t(flags | RECORD_WORK));
        const TickScale scale = profiler->state->recorder->scale();
        span.host_start_ns = scale.time_ns(entry.start);
        raise_driver(device.finish(span));
        return;
    }
    if (work) flags |= RECORD_WORK;
    lane->append(make_record(profiler, entry, depth, end, uint32_t(elements), uint8_t(elements >> 32),
                             flags), work);
}

void drop_owner(OpenEntry& entry) {
    if ((entry.kind == OpenKind::Timer || entry.kind == OpenKind::Tile) && entry.owner) {
        Py_DECREF(static_cast<PyObject*>(entry.owner));
        entry.owner = nullptr;
    }
}

// Ends marks that stand on top: what encloses them is being left.
void end_marks(ProfilerObject* profiler, Lane* lane, uint64_t end) {
    while (lane->depth && lane->stack[lane->depth - 1].kind == OpenKind::Mark) {
        const OpenEntry& entry = lane->stack[--lane->depth];
        if (entry.timed && !entry.disturbed && !entry.start_event) [[likely]] {
            lane->append_words(entry.start, end, elements_word(entry.slot, 1),
                               place_word(profiler, lane->depth, 0, 0));
        } else {
            const OpenEntry copy = entry;
            finish_entry(profiler, lane, copy, lane->depth, end, 1, nullptr);
        }
    }
}

// Timers above `keep` that nobody holds any more can never be stopped.
void drop_abandoned(ProfilerObject* profiler, Lane* lane, uint32_t keep) {
    for (uint32_t at = lane->depth; at-- > keep + 1;) {
        OpenEntry& entry = lane->stack[at];
        const bool is_timer = entry.kind == OpenKind::Timer || entry.kind == OpenKind::Tile;
        if (!is_timer || Py_REFCNT(static_cast<PyObject*>(entry.owner)) != 1) continue;
        if (entry.start_event) profiler->state->device->cancel(entry.start_event);
        auto* timer = static_cast<TimerObject*>(entry.owner);
        // A timer that was stopped on another thread leaves its entry here.
        if (!timer->stopped) profiler->state->recorder->spool().header().abandoned_timers += 1;
        timer->stopped = true;
        drop_owner(entry);
        std::move(lane->stack + at + 1, lane->stack + lane->depth, lane->stack + at);
        lane->depth -= 1;
    }
}

}  // namespace

void leave(ProfilerObject* profiler, Lane* lane, uint32_t slot, OpenKind kind, void* owner,
           uint64_t end, uint64_t elements, const WorkRecord* work) {
    if (lane->too_deep) {
        lane->too_deep -= 1;
        OpenEntry entry{};
        entry.slot = slot;
        finish_entry(profiler, lane, entry, MAX_DEPTH - 1, end, elements, nullptr);
        return;
    }
    if (kind != OpenKind::Mark) end_marks(profiler, lane, end);
    uint32_t at = lane->depth;
    while (at > 0) {
        const OpenEntry& entry = lane->stack[at - 1];
        const bool owned = kind == OpenKind::Timer || kind == OpenKind::Tile;
        if (entry.slot == slot && entry.kind == kind && (!owned || entry.owner == owner)) break;
        at -= 1;
    }
    if (at == 0) {
        // Entered before the profiler was enabled, or before this process was forked.
        profiler->state->recorder->spool().header().orphan_exits += 1;
        return;
    }
    at -= 1;
    if (at + 1 != lane->depth) drop_abandoned(profiler, lane, at);
    OpenEntry entry = lane->stack[at];
    const bool is_top = at + 1 == lane->depth;
    if (!is_top) {
        entry.disturbed = true;
        for (uint32_t above = at + 1; above < lane->depth; ++above) lane->stack[above].disturbed = true;
        std::move(lane->stack + at + 1, lane->stack + lane->depth, lane->stack + at);
    }
    lane->depth -= 1;
    if (profiler->mode == Mode::Device && profiler->sync == Sync::Immediate && entry.timed &&
        kind != OpenKind::Step && kind != OpenKind::Tile) {
        if (!profiler->state->device->is_capturing(entry.stream)) synchronize(profiler, entry.stream);
        end = profiler->source->now();
    }
    finish_entry(profiler, lane, entry, at, end, elements, work);
    drop_owner(entry);
}

void step_begin(ProfilerObject* profiler, Lane* lane, uint32_t slot, bool timed) {
    if (lane->depth == MAX_DEPTH) {
        lane->too_deep += 1;
        return;
    }
    OpenEntry& entry = lane->stack[lane->depth++];
    entry = {};
    entry.slot = slot;
    entry.kind = OpenKind::Step;
    entry.timed = timed;
    entry.start = profiler->source->now();
}

Lane* lane_of_thread(ProfilerObject* profiler) {
    Lane* lane = fast_lane(profiler);
    return lane ? lane : make_lane(profiler);
}

Lane* make_lane(ProfilerObject* profiler) {
    t_exit.armed = true;
    if (!t_lanes) t_lanes = new ThreadLanes;
    ThreadLanes& mine = *t_lanes;
    if (profiler->index >= mine.size) {
        const uint32_t size = std::max(8u, (profiler->index + 1) * 2);
        Lane** grown = new Lane*[size]();
        std::copy(mine.lanes, mine.lanes + mine.size, grown);
        delete[] mine.lanes;
        mine.lanes = grown;
        mine.size = size;
    }
    LaneIdentity identity;
    identity.thread = uint32_t(::syscall(SYS_gettid));
    identity.name = thread_name();
    if (profiler->source->kind() == ClockKind::Manual) identity.domain = ClockDomain::Manual;
    try {
        mine.lanes[profiler->index] = profiler->state->recorder->acquire_lane(identity);
    } catch (const SpoolError& error) {
        // A full disk must not end the program that is being measured: stop, and say so once.
        profiler->mode = Mode::Off;
        PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "brickline stopped recording: %s", error.what());
    }
    return mine.lanes[profiler->index];
}

void forget_lanes_after_fork() {
    t_lanes = nullptr;  // leaked on purpose: the lanes belong to the parent's mapping
    new (&g_registry_mutex) std::mutex;
    g_registry.clear();
}

uint32_t register_recorder(Recorder* recorder) {
    std::lock_guard guard(g_registry_mutex);
    // Indexes are never used twice, so a stale entry of a thread's table is never read.
    const uint32_t index = g_next_index++;
    g_registry[index] = recorder;
    return index;
}

void unregister_recorder(uint32_t index) {
    std::lock_guard guard(g_registry_mutex);
    g_registry.erase(index);
}

PyObject* raise_error(const char* name, const char* format, ...) {
    PyObject* module = PyImport_ImportModule("brickline.errors");
    if (!module) return nullptr;
    PyObject* type = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    if (!type) return nullptr;
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    Py_DECREF(type);
    return nullptr;
}

// ---------------------------------------------------------------------------------------- handles
namespace {

PyObject* enter_call(PyObject* self, PyObject* const*, size_t, PyObject*) {
    HandleObject* handle = reinterpret_cast<BoundObject*>(self)->handle;
    ProfilerObject* profiler = handle->profiler;
    if (profiler->mode == Mode::Host) {
        Lane* lane = fast_lane(profiler);
        if (lane && lane->depth < MAX_DEPTH) [[likely]] {
            OpenEntry& entry = lane->stack[lane->depth++];
            entry.word = open_word(handle->slot, OpenKind::Block);
            entry.start_event = 0;
            entry.start = profiler->source->now();
        } else if (!enter_slow(profiler, handle->slot, handle->layer, OpenKind::Block, nullptr)) {
            return nullptr;
        }
    } else if (profiler->mode != Mode::Off && !profiler->only_counts) {
        if (!enter_slow(profiler, handle->slot, handle->layer, OpenKind::Block, nullptr)) return nullptr;
    }
    return Py_NewRef(reinterpret_cast<PyObject*>(handle));
}

inline uint64_t handle_elements(const HandleObject* handle) {
    return uint64_t(handle->elements_high) << 32 | handle->elements_low;
}

// Whether the innermost brick is this one, entered before its step was left out.
inline bool is_open_block(const Lane* lane, uint32_t slot) {
    if (!lane->depth) return false;
    const OpenEntry& entry = lane->stack[lane->depth - 1];
    return entry.slot == slot && entry.kind == OpenKind::Block;
}

PyObject* exit_call(PyObject* self, PyObject* const*, size_t, PyObject*) {
    HandleObject* handle = reinterpret_cast<BoundObject*>(self)->handle;
    ProfilerObject* profiler = handle->profiler;
    if (profiler->mode == Mode::Off) Py_RETURN_NONE;
    Lane* lane = fast_lane(profiler);
    if (profiler->only_counts && lane && !is_open_block(lane, handle->slot)) {
        lane->append_words(0, 0, elements_word(handle->slot, handle->elements_low),
                           place_word(profiler, 0, handle->elements_high, RECORD_UNTIMED));
        Py_RETURN_NONE;
    }
    const uint64_t end = profiler->source->now();
    if (profiler->mode == Mode::Host && lane && lane->depth) [[likely]] {
        const OpenEntry& entry = lane->stack[lane->depth - 1];
        if (entry.word == open_word(handle->slot, OpenKind::Block) && !entry.start_event &&
            !lane->too_deep) [[likely]] {
            lane->depth -= 1;
            if (!handle->has_work) [[likely]] {
                lane->append_words(entry.start, end,
                                   elements_word(handle->slot, handle->elements_low),
                                   place_word(profiler, lane->depth, handle->elements_high, 0));
            } else {
                lane->append(make_record(profiler, entry, lane->depth, end, handle->elements_low,
                                         handle->elements_high, RECORD_WORK), &handle->work);
            }
            Py_RETURN_NONE;
        }
    }
    if (!lane && !(lane = lane_of_thread(profiler))) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    leave(profiler, lane, handle->slot, OpenKind::Block, nullptr, end, handle_elements(handle),
          handle->has_work ? &handle->work : nullptr);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyObject* bound_repr(PyObject* self) {
    return PyUnicode_FromFormat("<bound with-block call of %R>",
                                reinterpret_cast<BoundObject*>(self)->handle);
}

int bound_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(reinterpret_cast<BoundObject*>(self)->handle);
    return 0;
}

// The handle outlives its two callables in every order of collection: each holds the other, and
// only the handle's tp_clear breaks the ring.
int bound_clear(PyObject*) { return 0; }

void bound_dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(reinterpret_cast<BoundObject*>(self)->handle);
    PyObject_GC_Del(self);
}

// Stands in the type's dictionary as __enter__ (or __exit__): reading it from an instance gives the
// instance's own callable without making a bound method.
struct CachedMethod {
    PyObject_HEAD
    Py_ssize_t offset;
};

PyObject* cached_method_get(PyObject* self, PyObject* instance, PyObject*) {
    if (!instance) return Py_NewRef(self);
    char* base = reinterpret_cast<char*>(instance);
    return Py_NewRef(*reinterpret_cast<PyObject**>(base + reinterpret_cast<CachedMethod*>(self)->offset));
}

PyTypeObject CachedMethodType = {PyVarObject_HEAD_INIT(nullptr, 0)};

BoundObject* make_bound(HandleObject* handle, vectorcallfunc call) {
    BoundObject* bound = PyObject_GC_New(BoundObject, &BoundType);
    if (!bound) return nullptr;
    bound->call = call;
    bound->handle = reinterpret_cast<HandleObject*>(Py_NewRef(reinterpret_cast<PyObject*>(handle)));
    PyObject_GC_Track(reinterpret_cast<PyObject*>(bound));
    return bound;
}

HandleObject* make_handle(ProfilerObject* profiler, uint32_t brick, int32_t layer, uint64_t elements,
                          uint64_t bytes, double flops) {
    HandleObject* handle = PyObject_GC_New(HandleObject, &HandleType);
    if (!handle) return nullptr;
    handle->profiler =
        reinterpret_cast<ProfilerObject*>(Py_NewRef(reinterpret_cast<PyObject*>(profiler)));
    handle->enter = handle->exit = nullptr;
    handle->weakrefs = nullptr;
    handle->layer = layer;
    handle->brick = brick;
    handle->elements_low = uint32_t(elements);
    handle->elements_high = uint8_t(elements >> 32);
    handle->has_work = bytes != 0 || flops != 0;
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
    handle->enter = make_bound(handle, enter_call);
    handle->exit = make_bound(handle, exit_call);
    if (!handle->enter || !handle->exit || PyErr_Occurred()) {
        Py_DECREF(handle);
        return nullptr;
    }
    return handle;
}

int handle_traverse(PyObject* self, visitproc visit, void* arg) {
    HandleObject* handle = as_handle(self);
    Py_VISIT(handle->profiler);
    Py_VISIT(handle->enter);
    Py_VISIT(handle->exit);
    return 0;
}

int handle_clear(PyObject* self) {
    HandleObject* handle = as_handle(self);
    Py_CLEAR(handle->enter);
    Py_CLEAR(handle->exit);
    return 0;
}

void handle_dealloc(PyObject* self) {
    HandleObject* handle = as_handle(self);
    PyObject_GC_UnTrack(self);
    if (handle->weakrefs) PyObject_ClearWeakRefs(self);
    handle_clear(self);
    Py_CLEAR(handle->profiler);
    PyObject_GC_Del(self);
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
    PyObject* handle = enter_call(reinterpret_cast<PyObject*>(wrapped->handle->enter), nullptr, 0, nullptr);
    if (!handle) return nullptr;
    Py_DECREF(handle);
    PyObject* result = PyObject_Vectorcall(wrapped->function, args, count, names);
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    if (!result) PyErr_Fetch(&type, &value, &trace);
    PyObject* done = exit_call(reinterpret_cast<PyObject*>(wrapped->handle->exit), nullptr, 0, nullptr);
    Py_XDECREF(done);
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

// Calls on a handle decorate a function; brickline.profiler chooses the wrapper for coroutines and
// generators, so the plain one is offered under its own name.
PyObject* handle_call(PyObject* self, PyObject* args, PyObject* names) {
    PyObject* function = nullptr;
    if ((names && PyDict_GET_SIZE(names)) || !PyArg_ParseTuple(args, "O", &function)) {
        PyErr_Clear();
        return raise_error("UsageError", "a brick is called with one function to decorate");
    }
    PyObject* module = PyImport_ImportModule("brickline.profiler");
    if (!module) return nullptr;
    PyObject* result = PyObject_CallMethod(module, "decorate", "OO", self, function);
    Py_DECREF(module);
    return result;
}

PyMethodDef handle_methods[] = {
    {"wrap", handle_wrap, METH_O, "Wrap a plain function so that each call is one entry."},
    {nullptr, nullptr, 0, nullptr}};

// ------------------------------------------------------------------------------------------ timers

void timer_dealloc(PyObject* self) {
    TimerObject* timer = reinterpret_cast<TimerObject*>(self);
    Py_CLEAR(timer->profiler);
    if (g_timer_count < TIMER_POOL) {
        g_timers[g_timer_count++] = timer;
        return;
    }
    PyObject_Free(self);
}

inline TimerObject* new_timer() {
    if (g_timer_count) [[likely]] {
        TimerObject* timer = g_timers[--g_timer_count];
        PyObject_Init(reinterpret_cast<PyObject*>(timer), &TimerType);
        return timer;
    }
    return PyObject_New(TimerObject, &TimerType);
}

PyObject* timer_repr(PyObject* self) {
    TimerObject* timer = reinterpret_cast<TimerObject*>(self);
    if (timer->disabled) return PyUnicode_FromString("<timer of a disabled profiler>");
    return PyUnicode_FromFormat("<%s timer>", timer->stopped ? "stopped" : "running");
}

inline TimerObject* push_timer(ProfilerObject* profiler, uint32_t slot, int32_t layer, OpenKind kind) {
    TimerObject* timer = new_timer();
    if (!timer) return nullptr;
    timer->profiler =
        reinterpret_cast<ProfilerObject*>(Py_NewRef(reinterpret_cast<PyObject*>(profiler)));
    timer->slot = slot;
    timer->stopped = false;
    timer->disabled = false;
    timer->is_tile = kind == OpenKind::Tile;
    timer->generation = profiler->index;
    Lane* lane = fast_lane(profiler);
    if (profiler->mode == Mode::Host && lane && lane->depth < MAX_DEPTH) [[likely]] {
        timer->lane = lane;
        OpenEntry& entry = lane->stack[lane->depth++];
        entry.word = open_word(slot, kind);
        entry.owner = Py_NewRef(reinterpret_cast<PyObject*>(timer));
        entry.start_event = 0;
        timer->start = entry.start = profiler->source->now();
        return timer;
    }
    timer->lane = lane_of_thread(profiler);
    timer->start = profiler->source->now();
    PyObject* owner = Py_NewRef(reinterpret_cast<PyObject*>(timer));
    const uint32_t before = timer->lane ? timer->lane->depth : 0;
    if (!enter_slow(profiler, slot, layer, kind, owner) || !timer->lane ||
        timer->lane->depth == before) {
        Py_DECREF(owner);  // it never reached the stack
        if (PyErr_Occurred()) {
            Py_DECREF(timer);
            return nullptr;
        }
    }
    return timer;
}

bool check_timer(ProfilerObject* profiler, PyObject* object, bool is_tile) {
    if (!Py_IS_TYPE(object, &TimerType)) {
        raise_error("TimerError", "expected the timer that start returned, got %.200s",
                    Py_TYPE(object)->tp_name);
        return false;
    }
    TimerObject* timer = reinterpret_cast<TimerObject*>(object);
    if (timer->stopped) {
        raise_error("TimerError", "this timer is already stopped; start a new one for each entry");
        return false;
    }
    if (timer->profiler != profiler) {
        raise_error("TimerError",
                    "this timer belongs to another profiler; stop it with the profiler that started it");
        return false;
    }
    if (timer->is_tile != is_tile) {
        raise_error("TimerError", is_tile ? "this timer times a brick; stop it with stop_brick or stop"
                                          : "this timer times a tile; stop it with tiles.stop");
        return false;
    }
    return true;
}

// Stops a timer and records it; `work` may be null.
void finish_timer(ProfilerObject* profiler, TimerObject* timer, uint64_t end, uint64_t elements,
                  const WorkRecord* work) {
    timer->stopped = true;
    const OpenKind kind = timer->is_tile ? OpenKind::Tile : OpenKind::Timer;
    if (profiler->mode == Mode::Off || timer->generation != profiler->index) {
        return;  // disabled or reset meanwhile
    }
    Lane* lane = fast_lane(profiler);
    if (lane == timer->lane && lane && lane->depth) [[likely]] {
        OpenEntry& entry = lane->stack[lane->depth - 1];
        if (entry.word == open_word(timer->slot, kind) && entry.owner == timer && !entry.start_event &&
            profiler->mode == Mode::Host) [[likely]] {
            lane->depth -= 1;
            if (!work) [[likely]] {
                lane->append_words(entry.start, end, elements_word(timer->slot, uint32_t(elements)),
                                   place_word(profiler, lane->depth, uint8_t(elements >> 32), 0));
            } else {
                lane->append(make_record(profiler, entry, lane->depth, end, uint32_t(elements),
                                         uint8_t(elements >> 32), RECORD_TILE | RECORD_WORK), work);
            }
            Py_DECREF(static_cast<PyObject*>(entry.owner));
            return;
        }
    }
    lane = lane_of_thread(profiler);
    if (!lane) return;
    if (lane != timer->lane) {
        // Started on another thread: its entry there goes when an outer brick is left.
        OpenEntry entry{};
        entry.slot = timer->slot;
        entry.kind = kind;
        entry.timed = true;
        entry.disturbed = true;
        entry.start = timer->start;
        finish_entry(profiler, lane, entry, lane->depth < MAX_DEPTH ? lane->depth : MAX_DEPTH - 1, end,
                     elements, work);
        return;
    }
    leave(profiler, lane, timer->slot, kind, timer, end, elements, work);
}

inline bool name_is(PyObject* name, PyObject* interned) {
    return name == interned || PyUnicode_Compare(name, interned) == 0;
}

PyObject* unexpected_keyword(const char* call, PyObject* name) {
    return raise_error("UsageError", "%s() has no argument %R", call, name);
}

}  // namespace

bool parse_count(PyObject* value, const char* what, uint64_t limit, uint64_t& count) {
    if (PyLong_Check(value)) [[likely]] {
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow && number >= 0 && uint64_t(number) <= limit) [[likely]] {
            count = uint64_t(number);
            return true;
        }
    } else if (PyIndex_Check(value)) {  // numpy integers
        PyObject* number = PyNumber_Index(value);
        if (!number) return false;
        const bool sound = parse_count(number, what, limit, count);
        Py_DECREF(number);
        return sound;
    }
    raise_error("CountError", "%s: expected a whole number from 0 to %llu, got %R", what,
                static_cast<unsigned long long>(limit), value);
    return false;
}

bool parse_layer(PyObject* value, int32_t& layer) {
    if (value == Py_None) {
        layer = -1;
        return true;
    }
    uint64_t number = 0;
    if (!parse_count(value, "layer", 1 << 20, number)) return false;
    layer = int32_t(number);
    return true;
}

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

PyObject* profiler_brick(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
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
        if (name_is(name, g_layer_name)) {
            if (!parse_layer(value, key.layer)) return nullptr;
        } else if (name_is(name, g_elements_name)) {
            if (!parse_count(value, "elements", MAX_ELEMENTS, key.elements)) return nullptr;
            has_work = true;
        } else if (name_is(name, g_bytes_name)) {
            if (!parse_count(value, "bytes", 1ull << 60, key.bytes)) return nullptr;
            has_work = true;
        } else if (name_is(name, g_flops_name)) {
            key.flops = PyFloat_AsDouble(value);
            if (key.flops == -1.0 && PyErr_Occurred()) PyErr_Clear(), key.flops = NAN;
            if (!std::isfinite(key.flops) || key.flops < 0) {
                return raise_error("CountError",
                                   "flops: expected a finite number from 0 on, got %R", value);
            }
            has_work = true;
        } else {
            return unexpected_keyword("brick", name);
        }
    }
    if (!has_work) {
        HandleObject* handle = handle_for(profiler, key.brick, key.layer);
        return handle ? Py_NewRef(reinterpret_cast<PyObject*>(handle)) : nullptr;
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

PyObject* profiler_start(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    if (profiler->mode == Mode::Off) return Py_NewRef(g_disabled_timer);
    if (count < 1 || count > 2) {
        return raise_error("UsageError", "start takes a BrickId or a name, and layer=");
    }
    const int64_t brick = find_brick(profiler, args[0]);
    if (brick < 0) return nullptr;
    int32_t layer = -1;
    if (count == 2 && !parse_layer(args[1], layer)) return nullptr;
    if (names) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
            PyObject* name = PyTuple_GET_ITEM(names, i);
            if (!name_is(name, g_layer_name)) return unexpected_keyword("start", name);
            if (!parse_layer(args[count + i], layer)) return nullptr;
        }
    }
    HandleObject* handle = handle_for(profiler, uint32_t(brick), layer);
    if (!handle) return nullptr;
    return reinterpret_cast<PyObject*>(push_timer(profiler, handle->slot, layer, OpenKind::Timer));
}

PyObject* profiler_stop(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    if (count >= 1 && args[0] == g_disabled_timer) Py_RETURN_NONE;
    const uint64_t end = profiler->source->now();
    uint64_t elements = 1;
    if (names) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
            PyObject* name = PyTuple_GET_ITEM(names, i);
            if (!name_is(name, g_elements_name)) return unexpected_keyword("stop", name);
            if (!parse_count(args[count + i], "elements", MAX_ELEMENTS, elements)) return nullptr;
        }
    }
    if (count < 1 || count > 2) return raise_error("UsageError", "stop takes a timer and elements");
    if (!check_timer(profiler, args[0], false)) return nullptr;
    if (count == 2 && !parse_count(args[1], "elements", MAX_ELEMENTS, elements)) return nullptr;
    finish_timer(profiler, reinterpret_cast<TimerObject*>(args[0]), end, elements, nullptr);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyObject* profiler_mark(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    if (profiler->mode == Mode::Off) Py_RETURN_NONE;
    uint64_t now = profiler->source->now();
    Lane* lane = lane_of_thread(profiler);
    if (!lane) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    int32_t layer = -1;
    if (count == 2 && !parse_layer(args[1], layer)) return nullptr;
    if (names) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
            PyObject* name = PyTuple_GET_ITEM(names, i);
            if (!name_is(name, g_layer_name)) return unexpected_keyword("mark", name);
            if (!parse_layer(args[count + i], layer)) return nullptr;
        }
    }
    HandleObject* handle = nullptr;
    if (count >= 1 && args[0] != Py_None) {
        const int64_t brick = find_brick(profiler, args[0]);
        if (brick < 0 || !(handle = handle_for(profiler, uint32_t(brick), layer))) return nullptr;
    }
    end_marks(profiler, lane, now);
    if (handle) {
        if (profiler->mode == Mode::Host && lane->depth < MAX_DEPTH) [[likely]] {
            OpenEntry& entry = lane->stack[lane->depth++];
            entry.word = open_word(handle->slot, OpenKind::Mark);
            entry.owner = nullptr;
            entry.start_event = 0;
            entry.start = now;  // contiguous: the end of one is the start of the next
        } else if (!enter_slow(profiler, handle->slot, layer, OpenKind::Mark, nullptr)) {
            return nullptr;
        }
    }
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

// -------------------------------------------------------------------------------------------- tiles

int64_t tile_slot(ProfilerObject* profiler, Lane* lane, uint32_t level) {
    State& state = *profiler->state;
    // A tile belongs to the brick it is started in; tiles inside tiles belong to the same brick.
    uint32_t owner = 0xffffffffu;
    for (uint32_t at = lane->depth; at-- > 0;) {
        if (lane->stack[at].kind == OpenKind::Tile || lane->stack[at].kind == OpenKind::Step) continue;
        owner = lane->stack[at].slot;
        break;
    }
    const auto key = std::make_pair(level, owner);
    const auto found = state.tile_slots.find(key);
    if (found != state.tile_slots.end()) return found->second;
    SlotDefinition slot;
    slot.kind = SlotKind::Tile;
    slot.level = level;
    slot.owner = owner;
    if (owner != 0xffffffffu) {
        slot.name = state.slots[owner].name;
        slot.brick = state.slots[owner].brick;
        slot.layer = state.slots[owner].layer;
        slot.category = state.slots[owner].category;
    }
    const uint32_t id = slot_for(profiler, slot);
    if (PyErr_Occurred()) return -1;
    state.tile_slots.emplace(key, id);
    return id;
}

PyObject* tile_start(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    State& state = *profiler->state;
    if (profiler->mode == Mode::Off || !state.tiles_enabled) return Py_NewRef(g_disabled_timer);
    uint64_t values[3] = {0, 0, 0};
    if (count < 1 || count > 3 || (names && PyTuple_GET_SIZE(names) && count != 1)) {
        return raise_error("UsageError", "tiles.start takes a TileLevel, a row and a column");
    }
    static const char* const labels[3] = {"level", "row", "column"};
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!parse_count(args[i], labels[i], i ? 0xfffffffeu : 2, values[i])) return nullptr;
    }
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        const int which = name_is(name, g_row_name) ? 1 : name_is(name, g_col_name) ? 2 : 0;
        if (!which) return unexpected_keyword("tiles.start", name);
        if (!parse_count(args[count + i], labels[which], 0xfffffffeu, values[which])) return nullptr;
    }
    Lane* lane = lane_of_thread(profiler);
    if (!lane) {
        if (PyErr_Occurred()) return nullptr;
        return Py_NewRef(g_disabled_timer);
    }
    const int64_t slot = tile_slot(profiler, lane, uint32_t(values[0]));
    if (slot < 0) return nullptr;
    TimerObject* timer = push_timer(profiler, uint32_t(slot), -1, OpenKind::Tile);
    if (!timer) return nullptr;
    timer->row = uint32_t(values[1]);
    timer->column = uint32_t(values[2]);
    return reinterpret_cast<PyObject*>(timer);
}

PyObject* tile_stop(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    if (count >= 1 && args[0] == g_disabled_timer) Py_RETURN_NONE;
    const uint64_t end = profiler->source->now();
    if (count < 1 || count > 4) {
        return raise_error("UsageError", "tiles.stop takes a timer, elements, flops and bytes");
    }
    if (!check_timer(profiler, args[0], true)) return nullptr;
    PyObject* given[4] = {args[0], count > 1 ? args[1] : nullptr, count > 2 ? args[2] : nullptr,
                          count > 3 ? args[3] : nullptr};
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        const int which = name_is(name, g_elements_name) ? 1
                          : name_is(name, g_flops_name)  ? 2
                          : name_is(name, g_bytes_name)  ? 3 : 0;
        if (!which) return unexpected_keyword("tiles.stop", name);
        given[which] = args[count + i];
    }
    TimerObject* timer = reinterpret_cast<TimerObject*>(args[0]);
    WorkRecord work{};
    work.flags = RECORD_IS_WORK;
    work.detail = uint64_t(timer->row) << 32 | timer->column;
    uint64_t elements = 1;
    if (given[1] && !parse_count(given[1], "elements", MAX_ELEMENTS, elements)) return nullptr;
    if (given[2]) {
        work.flops = PyFloat_AsDouble(given[2]);
        if (work.flops == -1.0 && PyErr_Occurred()) return nullptr;
        if (!std::isfinite(work.flops) || work.flops < 0) {
            return raise_error("CountError", "flops: expected a finite number from 0 on, got %R",
                               given[2]);
        }
    }
    if (given[3] && !parse_count(given[3], "bytes", 1ull << 60, work.bytes_in)) return nullptr;
    finish_timer(profiler, timer, end, elements, &work);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

// ------------------------------------------------------------------------------------------- types

PyTypeObject HandleType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject TimerType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject BoundType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

PyMemberDef bound_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(BoundObject, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

int add_cached_method(const char* name, Py_ssize_t offset) {
    CachedMethod* method = PyObject_New(CachedMethod, &CachedMethodType);
    if (!method) return -1;
    method->offset = offset;
    const int failed =
        PyDict_SetItemString(HandleType.tp_dict, name, reinterpret_cast<PyObject*>(method));
    Py_DECREF(method);
    return failed;
}

int ready_bound_types() {
    BoundType.tp_name = "brickline._core.BoundCall";
    BoundType.tp_basicsize = sizeof(BoundObject);
    BoundType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    BoundType.tp_vectorcall_offset = offsetof(BoundObject, call);
    BoundType.tp_call = PyVectorcall_Call;
    BoundType.tp_members = bound_members;
    BoundType.tp_repr = bound_repr;
    BoundType.tp_traverse = bound_traverse;
    BoundType.tp_clear = bound_clear;
    BoundType.tp_dealloc = bound_dealloc;
    CachedMethodType.tp_name = "brickline._core.CachedMethod";
    CachedMethodType.tp_basicsize = sizeof(CachedMethod);
    CachedMethodType.tp_flags = Py_TPFLAGS_DEFAULT;
    CachedMethodType.tp_descr_get = cached_method_get;
    CachedMethodType.tp_dealloc = [](PyObject* self) { PyObject_Free(self); };
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
    return PyType_Ready(&BoundType) || PyType_Ready(&CachedMethodType) || PyType_Ready(&WrappedType);
}

int ready_handle_types() {
    HandleType.tp_name = "brickline._core.BrickHandle";
    HandleType.tp_doc = "A brick of one profiler: use it in `with`, or to decorate a function.";
    HandleType.tp_basicsize = sizeof(HandleObject);
    HandleType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    HandleType.tp_traverse = handle_traverse;
    HandleType.tp_clear = handle_clear;
    HandleType.tp_dealloc = handle_dealloc;
    HandleType.tp_repr = handle_repr;
    HandleType.tp_getset = handle_fields;
    HandleType.tp_methods = handle_methods;
    HandleType.tp_call = handle_call;
    HandleType.tp_weaklistoffset = offsetof(HandleObject, weakrefs);
    TimerType.tp_name = "brickline._core.BrickTimer";
    TimerType.tp_doc = "What start_brick and start return, to be handed to stop.";
    TimerType.tp_basicsize = sizeof(TimerObject);
    TimerType.tp_flags = Py_TPFLAGS_DEFAULT;
    TimerType.tp_dealloc = timer_dealloc;
    TimerType.tp_repr = timer_repr;
    return PyType_Ready(&HandleType) || PyType_Ready(&TimerType) ||
           add_cached_method("__enter__", offsetof(HandleObject, enter)) ||
           add_cached_method("__exit__", offsetof(HandleObject, exit));
}

int intern_names() {
    g_layer_name = PyUnicode_InternFromString("layer");
    g_elements_name = PyUnicode_InternFromString("elements");
    g_bytes_name = PyUnicode_InternFromString("bytes");
    g_flops_name = PyUnicode_InternFromString("flops");
    g_row_name = PyUnicode_InternFromString("row");
    g_col_name = PyUnicode_InternFromString("column");
    TimerObject* disabled = PyObject_New(TimerObject, &TimerType);
    if (!disabled || !g_col_name) return -1;
    disabled->profiler = nullptr;
    disabled->disabled = true;
    disabled->stopped = false;
    g_disabled_timer = reinterpret_cast<PyObject*>(disabled);
    return 0;
}

}  // namespace

int ready_hot_types(PyObject* module) {
    if (ready_bound_types() || ready_handle_types() || intern_names()) return -1;
    return PyModule_AddObjectRef(module, "BrickHandle", reinterpret_cast<PyObject*>(&HandleType)) ||
           PyModule_AddObjectRef(module, "BrickTimer", reinterpret_cast<PyObject*>(&TimerType));
}

}  // namespace brickline::hot
