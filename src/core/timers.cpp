// BrickTimer: start and stop, marks, and tiles.
#include "hot.h"

#include <cmath>

namespace brickline::hot {

PyTypeObject TimerType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

constexpr int TIMER_POOL = 64;
TimerObject* g_timers[TIMER_POOL];
int g_timer_count = 0;
PyObject* g_disabled_timer = nullptr;  // what start returns while disabled

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
    const PyThreadState* state = thread_state();
    Lane* lane = fast_lane(profiler, state);
    if (profiler->mode == Mode::Host && lane && lane->depth < MAX_DEPTH) [[likely]] {
        timer->lane = lane;
        OpenEntry& entry = lane->stack[lane->depth++];
        entry.word = open_word(slot, kind);
        entry.owner = Py_NewRef(reinterpret_cast<PyObject*>(timer));
        entry.frame = frame_of(state);
        entry.start_event = 0;
        timer->start = entry.start = ticks_now(profiler);
        return timer;
    }
    timer->lane = caller_lane(profiler);
    timer->start = ticks_now(profiler);
    PyObject* owner = Py_NewRef(reinterpret_cast<PyObject*>(timer));
    const bool entered = timer->lane && enter_slow(profiler, slot, layer, kind, owner);
    const bool is_on_stack = entered && timer->lane->depth &&
                             timer->lane->stack[timer->lane->depth - 1].owner == timer;
    if (!is_on_stack) Py_DECREF(owner);
    if (PyErr_Occurred()) {
        Py_DECREF(timer);
        return nullptr;
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
                                   place_word(lane, lane->depth, uint8_t(elements >> 32), 0));
            } else {
                const uint8_t flags = kind == OpenKind::Tile ? RECORD_TILE | RECORD_WORK : RECORD_WORK;
                lane->append(make_record(lane, entry, lane->depth, end, elements, flags), work);
            }
            Py_DECREF(static_cast<PyObject*>(entry.owner));
            return;
        }
    }
    lane = caller_lane(profiler);
    if (!lane) return;
    if (!timer->lane || timer->lane->home != lane->home) {
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
    leave(profiler, timer->lane, timer->slot, kind, timer, end, elements, work);
}

}  // namespace

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
            if (!name_is(name, names_of_arguments.layer)) return unexpected_keyword("start", name);
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
    const uint64_t end = ticks_now(profiler);
    uint64_t elements = 1;
    if (names) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
            PyObject* name = PyTuple_GET_ITEM(names, i);
            if (!name_is(name, names_of_arguments.elements)) return unexpected_keyword("stop", name);
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

// Stops a timer with the work that a handle declares: what decorated coroutines use, whose entries may
// overlap and so cannot be told apart on a stack of blocks.
PyObject* profiler_stop_handle(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject*) {
    ProfilerObject* profiler = as_profiler(self);
    const uint64_t end = ticks_now(profiler);
    if (count != 2 || !Py_IS_TYPE(args[1], &HandleType)) {
        return raise_error("InternalError", "_stop_handle takes a timer and a handle");
    }
    if (args[0] == g_disabled_timer) Py_RETURN_NONE;
    if (!check_timer(profiler, args[0], false)) return nullptr;
    const HandleObject* handle = as_handle(args[1]);
    finish_timer(profiler, reinterpret_cast<TimerObject*>(args[0]), end, handle_elements(handle),
                 handle->has_work ? &handle->work : nullptr);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyObject* profiler_mark(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    if (profiler->mode == Mode::Off) Py_RETURN_NONE;
    const uint64_t now = ticks_now(profiler);
    Lane* lane = caller_lane(profiler);
    if (!lane) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    if (count > 2) return raise_error("UsageError", "mark takes a BrickId or a name, and layer=");
    int32_t layer = -1;
    if (count == 2 && !parse_layer(args[1], layer)) return nullptr;
    if (names) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
            PyObject* name = PyTuple_GET_ITEM(names, i);
            if (!name_is(name, names_of_arguments.layer)) return unexpected_keyword("mark", name);
            if (!parse_layer(args[count + i], layer)) return nullptr;
        }
    }
    HandleObject* handle = nullptr;
    if (count >= 1 && args[0] != Py_None) {
        const int64_t brick = find_brick(profiler, args[0]);
        if (brick < 0 || !(handle = handle_for(profiler, uint32_t(brick), layer))) return nullptr;
    }
    if (!mark(profiler, lane, handle, now)) return nullptr;
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
        const int which = name_is(name, names_of_arguments.row) ? 1 : name_is(name, names_of_arguments.column) ? 2 : 0;
        if (!which) return unexpected_keyword("tiles.start", name);
        if (!parse_count(args[count + i], labels[which], 0xfffffffeu, values[which])) return nullptr;
    }
    Lane* lane = caller_lane(profiler);
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
    const uint64_t end = ticks_now(profiler);
    if (count < 1 || count > 4) {
        return raise_error("UsageError", "tiles.stop takes a timer, elements, flops and bytes");
    }
    if (!check_timer(profiler, args[0], true)) return nullptr;
    PyObject* given[4] = {args[0], count > 1 ? args[1] : nullptr, count > 2 ? args[2] : nullptr,
                          count > 3 ? args[3] : nullptr};
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        const int which = name_is(name, names_of_arguments.elements) ? 1
                          : name_is(name, names_of_arguments.flops)  ? 2
                          : name_is(name, names_of_arguments.bytes)  ? 3 : 0;
        if (!which) return unexpected_keyword("tiles.stop", name);
        given[which] = args[count + i];
    }
    TimerObject* timer = reinterpret_cast<TimerObject*>(args[0]);
    WorkRecord work{};
    work.flags = RECORD_IS_WORK;
    work.detail = uint64_t(timer->row) << 32 | timer->column;
    uint64_t elements = 1;
    if (given[1] && !parse_count(given[1], "elements", MAX_ELEMENTS, elements)) return nullptr;
    if (given[2] && !parse_flops(given[2], work.flops)) return nullptr;
    if (given[3] && !parse_count(given[3], "bytes", 1ull << 60, work.bytes_in)) return nullptr;
    finish_timer(profiler, timer, end, elements, &work);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

int ready_timer_type(PyObject* module) {
    TimerType.tp_name = "brickline._core.BrickTimer";
    TimerType.tp_doc = "What start_brick and start return, to be handed to stop.";
    TimerType.tp_basicsize = sizeof(TimerObject);
    TimerType.tp_flags = Py_TPFLAGS_DEFAULT;
    TimerType.tp_dealloc = timer_dealloc;
    TimerType.tp_repr = timer_repr;
    if (PyType_Ready(&TimerType)) return -1;
    TimerObject* disabled = PyObject_New(TimerObject, &TimerType);
    if (!disabled) return -1;
    disabled->profiler = nullptr;
    disabled->disabled = true;
    disabled->stopped = false;
    g_disabled_timer = reinterpret_cast<PyObject*>(disabled);
    return PyModule_AddObjectRef(module, "BrickTimer", reinterpret_cast<PyObject*>(&TimerType));
}

}  // namespace brickline::hot
