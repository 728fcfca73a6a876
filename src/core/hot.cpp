// The slow half of a measurement: lanes of threads, sampling, device clocks, bricks that are left out
// of order. handles.cpp and timers.cpp hold the fast half and come here for everything else.
#include "hot.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include <sys/syscall.h>
#include <unistd.h>

namespace brickline::hot {

constinit thread_local ThreadLanes* t_lanes = nullptr;

namespace {

std::mutex g_registry_mutex;
struct Registered {
    Recorder* recorder;
    ProfilerObject* profiler;
};
std::unordered_map<uint32_t, Registered> g_registry;
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
            if (found == g_registry.end()) continue;
            // Another thread may get this one's pointer; it must not find the lane under it.
            ProfilerObject* profiler = found->second.profiler;
            if (profiler->owner_lane && profiler->owner_lane->home == mine->lanes[index]) {
                profiler->owner = nullptr;
            }
            found->second.recorder->release_lane(mine->lanes[index]);
        }
        std::free(mine);
    }
};
thread_local ThreadExit t_exit;

std::string thread_name() {
    char name[32] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

bool is_timed(ProfilerObject* profiler, const Lane* lane, int32_t layer) {
    State& state = *profiler->state;
    if (state.device && state.device->is_capture_announced()) return true;
    if (!lane->step->is_open && state.sample_steps > 1) {
        // Outside steps every nth entry stands in for every nth step.
        return state.entry_counter++ % state.sample_steps == 0;
    }
    if (!lane->step->timed) return false;
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
    const Spending waiting(profiler, &SpoolHeader::waiting_ns);
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
    const bool may_wait = profiler->sync == Sync::Immediate || profiler->sync == Sync::PerLayer;
    const bool captured = may_wait && device.is_capturing(entry.stream);
    if (profiler->sync == Sync::Immediate && !captured) return synchronize(profiler, entry.stream);
    if (profiler->sync == Sync::PerLayer && layer != lane->last_layer) {
        if (lane->last_layer != -2 && !captured && !synchronize(profiler, entry.stream)) {
            return false;
        }
        lane->last_layer = layer;
    }
    const Spending enqueueing(profiler);
    std::string problem;
    entry.start_event = device.begin(entry.stream, problem);
    // No event and no problem: this entry is counted and not timed.
    entry.timed = entry.start_event != 0;
    return raise_driver(problem);
}

}  // namespace

bool enter_slow(ProfilerObject* profiler, uint32_t slot, int32_t layer, OpenKind kind, void* owner) {
    Lane* lane = caller_lane(profiler);
    if (!lane) return PyErr_Occurred() == nullptr;
    if (lane->depth == MAX_DEPTH) drop_abandoned(profiler, lane, 0);
    if (lane->depth == MAX_DEPTH) {
        lane->too_deep += 1;
        return true;
    }
    OpenEntry& entry = lane->stack[lane->depth];
    entry.slot = slot;
    entry.kind = kind;
    entry.disturbed = false;
    entry.owner = owner;
    entry.frame = frame_of(thread_state());
    entry.start_event = 0;
    entry.timed = profiler->mode == Mode::Host || is_timed(profiler, lane, layer);
    if (profiler->mode == Mode::Device && entry.timed && kind != OpenKind::Step &&
        kind != OpenKind::Tile && !begin_on_device(profiler, lane, entry, layer)) {
        return false;
    }
    lane->depth += 1;
    entry.start = ticks_now(profiler);
    return true;
}

void finish_entry(ProfilerObject* profiler, Lane* lane, const OpenEntry& entry, uint32_t depth,
                  uint64_t end, uint64_t elements, const WorkRecord* work) {
    uint8_t flags = entry.disturbed ? RECORD_OUT_OF_ORDER : 0;
    if (entry.kind == OpenKind::Tile) flags |= RECORD_TILE;
    if (!entry.timed) {
        lane->append(make_record(lane, entry, depth, end, elements, RECORD_UNTIMED), nullptr);
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
        span.record = make_record(lane, entry, depth, 0, elements, uint8_t(flags | RECORD_WORK));
        const TickScale scale = profiler->state->recorder->scale();
        span.host_start_ns = scale.time_ns(entry.start);
        const Spending enqueueing(profiler);
        raise_driver(device.finish(span));
        return;
    }
    if (work) flags |= RECORD_WORK;
    lane->append(make_record(lane, entry, depth, end, elements, flags), work);
}

namespace {

void drop_owner(OpenEntry& entry) {
    if (entry.kind != OpenKind::Block && entry.kind != OpenKind::Step && entry.owner) {
        Py_DECREF(static_cast<PyObject*>(entry.owner));
        entry.owner = nullptr;
    }
}

}  // namespace

void end_marks(ProfilerObject* profiler, Lane* lane, uint64_t end) {
    while (lane->depth && lane->stack[lane->depth - 1].kind == OpenKind::Mark) {
        OpenEntry& entry = lane->stack[--lane->depth];
        if (entry.timed && !entry.disturbed && !entry.start_event && !entry.owner) [[likely]] {
            lane->append_words(entry.start, end, elements_word(entry.slot, 1),
                               place_word(lane, lane->depth, 0, 0));
        } else {
            const HandleObject* handle = static_cast<HandleObject*>(entry.owner);
            finish_entry(profiler, lane, entry, lane->depth, end, handle ? handle_elements(handle) : 1,
                         handle && handle->has_work ? &handle->work : nullptr);
            drop_owner(entry);
        }
    }
}

bool mark(ProfilerObject* profiler, Lane* lane, HandleObject* handle, uint64_t now) {
    end_marks(profiler, lane, now);
    if (handle && lane->only_counts) {  // nothing to time, so the entry counts at once
        count_entry(lane, handle);
    } else if (handle) {
        PyObject* owner = handle->is_plain ? nullptr : Py_NewRef(reinterpret_cast<PyObject*>(handle));
        if (profiler->mode == Mode::Host && lane->depth < MAX_DEPTH) [[likely]] {
            OpenEntry& entry = lane->stack[lane->depth++];
            entry.word = open_word(handle->slot, OpenKind::Mark);
            entry.owner = owner;
            entry.frame = frame_of(thread_state());
            entry.start_event = 0;
            entry.start = now;  // contiguous: the end of one is the start of the next
            return true;
        }
        const bool entered = enter_slow(profiler, handle->slot, handle->layer, OpenKind::Mark, owner);
        const bool is_on_stack = lane->depth && lane->stack[lane->depth - 1].owner == owner;
        if (!is_on_stack) Py_XDECREF(owner);
        if (!entered) return false;
    }
    return !PyErr_Occurred();
}

// Timers from `first` on that nobody holds any more can never be stopped.
void drop_abandoned(ProfilerObject* profiler, Lane* lane, uint32_t first) {
    for (uint32_t at = lane->depth; at-- > first;) {
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

void forget_open(ProfilerObject* profiler, Lane& lane) {
    if (lane.depth == 0 && lane.too_deep == 0) return;
    for (uint32_t at = 0; at < lane.depth; ++at) {
        OpenEntry& entry = lane.stack[at];
        if (entry.start_event) profiler->state->device->cancel(entry.start_event);
        drop_owner(entry);
    }
    lane.depth = lane.too_deep = 0;
    lane.fence();
}

namespace {

struct OpenPlace {
    Lane* lane;  // null where there is none
    uint32_t at;
};

template <class Match>
OpenPlace find_innermost(Lane* lane, Match&& matches) {
    for (uint32_t at = lane->depth; at-- > 0;) {
        if (matches(lane->stack[at])) return {lane, at};
    }
    return {nullptr, 0};
}

// On the lane itself, then on those of other tasks of its thread: a generator may be closed by another
// task than the one that ran it.
template <class Match>
OpenPlace find_in_thread(Lane* lane, Match&& matches) {
    OpenPlace place = find_innermost(lane, matches);
    for (Lane* other : lane->home->of_thread) {
        if (place.lane) break;
        place = find_innermost(other, matches);
    }
    return place;
}

// The entry that is being left. Timers, tiles and steps are told apart by their owner. A block is left
// by the frame that entered it, wherever that stands; where another calls, as ExitStack does, the
// innermost of its brick is meant.
OpenPlace find_open(Lane* lane, uint32_t slot, OpenKind kind, const void* owner) {
    if (kind != OpenKind::Block) {
        return find_innermost(lane, [=](const OpenEntry& entry) {
            return entry.slot == slot && entry.kind == kind && entry.owner == owner;
        });
    }
    const auto is_brick = [=](const OpenEntry& entry) {
        return entry.slot == slot && entry.kind == OpenKind::Block;
    };
    const void* frame = frame_of(thread_state());
    const OpenPlace entered_here = find_in_thread(
        lane, [=](const OpenEntry& entry) { return is_brick(entry) && entry.frame == frame; });
    return entered_here.lane ? entered_here : find_in_thread(lane, is_brick);
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
    const OpenPlace place = find_open(lane, slot, kind, owner);
    lane = place.lane;
    if (!lane) {
        // Entered before the profiler was enabled, or before this process was forked.
        profiler->state->recorder->spool().header().orphan_exits += 1;
        return;
    }
    end_marks(profiler, lane, end);
    const uint32_t at = place.at;
    if (at + 1 != lane->depth) drop_abandoned(profiler, lane, at + 1);
    OpenEntry entry = lane->stack[at];
    const bool is_top = at + 1 == lane->depth;
    if (!is_top) {
        entry.disturbed = true;
        for (uint32_t above = at + 1; above < lane->depth; ++above) lane->stack[above].disturbed = true;
        std::move(lane->stack + at + 1, lane->stack + lane->depth, lane->stack + at);
    }
    lane->depth -= 1;
    if (profiler->mode == Mode::Device && profiler->sync == Sync::Immediate && entry.timed &&
        !entry.start_event && kind != OpenKind::Step && kind != OpenKind::Tile) {
        synchronize(profiler, entry.stream);
        end = ticks_now(profiler);
    }
    finish_entry(profiler, lane, entry, at, end, elements, work);
    drop_owner(entry);
}

Lane* home_lane(const ProfilerObject* profiler) {
    const ThreadLanes* mine = t_lanes;
    return mine && profiler->index < mine->size ? mine->lanes[profiler->index] : nullptr;
}

namespace {

// Tasks of one thread that may have entries open at once on lanes of their own. Those of further tasks
// stand among the thread's, out of order.
constexpr size_t MAX_TASK_LANES = 256;

LaneIdentity identity_of_thread(const ProfilerObject* profiler) {
    LaneIdentity identity;
    identity.thread = uint32_t(::syscall(SYS_gettid));
    identity.name = thread_name();
    if (profiler->source->kind() == ClockKind::Manual) identity.domain = ClockDomain::Manual;
    return identity;
}

// Whether entries are open on the lane and code in this context began the innermost.
bool is_held_by(Lane* lane, const void* context) {
    std::vector<Segment>& segments = lane->segments;
    while (!segments.empty() && segments.back().first >= lane->depth) segments.pop_back();
    return !segments.empty() && segments.back().context == context;
}

// What enters now lies inside the lane's innermost entry, and begins a context of its own there.
Lane* nest_in(Lane* lane, const void* context) {
    lane->segments.push_back({context, lane->depth});
    return lane;
}

// The lane for entries of the context that a thread runs in. Code that waits in another task holds the
// lane on which its entries are open; code that runs, further down the stack of calls, encloses what is
// entered now.
Lane* lane_of_context(ProfilerObject* profiler, Lane* home, const PyThreadState* state) {
    const void* context = context_of(state);
    Lane* empty = nullptr;
    for (Lane* lane : home->of_thread) {
        if (is_held_by(lane, context)) return lane;
        if (!empty && lane->depth == 0) empty = lane;
    }
    if (empty == home && home->of_thread.size() == 1) return nest_in(home, context);
    for (const void* frame = frame_of(state); frame; frame = calling_frame(frame)) {
        for (Lane* lane : home->of_thread) {
            if (lane->depth && lane->stack[lane->depth - 1].frame == frame) return nest_in(lane, context);
        }
    }
    if (empty) return nest_in(empty, context);
    if (home->of_thread.size() > MAX_TASK_LANES) return home;
    try {
        Lane* lane =
            profiler->state->recorder->acquire_task_lane(*home, identity_of_thread(profiler));
        lane->set_step(&profiler->state->shared_step);
        return nest_in(lane, context);
    } catch (const SpoolError& error) {
        stop_recording(profiler, error);
        return home;
    }
}

}  // namespace

Lane* find_lane(ProfilerObject* profiler, const PyThreadState* state) {
    Lane* home = home_lane(profiler);
    if (!home) return nullptr;
    profiler->owner_lane = lane_of_context(profiler, home, state);
    profiler->owner_context = context_of(state);
    profiler->owner = __builtin_thread_pointer();
    return profiler->owner_lane;
}

// A full disk must not end the program that is being measured: stop, and say so once.
void stop_recording(ProfilerObject* profiler, const SpoolError& error) {
    profiler->mode = Mode::Off;
    profiler->state->failure = error.what();
    if (is_open(profiler)) {
        std::atomic_ref<uint64_t>(profiler->state->recorder->spool().header().lost_records)
            .fetch_add(1, std::memory_order_relaxed);
    }
    PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "brickline stopped recording: %s", error.what());
}

Lane* make_lane(ProfilerObject* profiler) {
    t_exit.armed = true;
    if (!t_lanes || profiler->index >= t_lanes->size) {
        const uint32_t before = t_lanes ? t_lanes->size : 0;
        const uint32_t size = std::max(8u, (profiler->index + 1) * 2);
        auto* grown = static_cast<ThreadLanes*>(
            std::realloc(t_lanes, sizeof(ThreadLanes) + size * sizeof(Lane*)));
        if (!grown) {
            PyErr_NoMemory();
            return nullptr;
        }
        std::fill(grown->lanes + before, grown->lanes + size, nullptr);
        grown->size = size;
        t_lanes = grown;
    }
    ThreadLanes& mine = *t_lanes;
    try {
        Lane* lane = profiler->state->recorder->acquire_lane(identity_of_thread(profiler));
        lane->set_step(&profiler->state->shared_step);
        mine.lanes[profiler->index] = lane;
    } catch (const SpoolError& error) {
        stop_recording(profiler, error);
    }
    return find_lane(profiler, thread_state());
}

void forget_lanes_after_fork() {
    t_lanes = nullptr;  // leaked on purpose: the lanes belong to the parent's mapping
    new (&g_registry_mutex) std::mutex;
    g_registry.clear();
}

uint32_t register_recorder(Recorder* recorder, ProfilerObject* profiler) {
    std::lock_guard guard(g_registry_mutex);
    // Indexes are never used twice, so a stale entry of a thread's table is never read.
    const uint32_t index = g_next_index++;
    g_registry[index] = {recorder, profiler};
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

const char* utf8_of(PyObject* text, const char* what, Py_ssize_t* length) {
    const char* bytes = PyUnicode_AsUTF8AndSize(text, length);
    if (!bytes && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        raise_error("UsageError", "%s: expected valid Unicode, got %R, which holds half of a surrogate pair; "
                    "encode it again, for example with errors=\"replace\"", what, text);
    }
    return bytes;
}

ArgumentNames names_of_arguments;

int intern_argument_names() {
    names_of_arguments = {
        PyUnicode_InternFromString("layer"), PyUnicode_InternFromString("elements"),
        PyUnicode_InternFromString("bytes"), PyUnicode_InternFromString("flops"),
        PyUnicode_InternFromString("row"),   PyUnicode_InternFromString("column"),
        PyUnicode_InternFromString("tokens"), PyUnicode_InternFromString("phase"),
    };
    return names_of_arguments.phase ? 0 : -1;
}

PyObject* unexpected_keyword(const char* call, PyObject* name) {
    return raise_error("UsageError", "%s() has no argument %R", call, name);
}

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

bool parse_flops(PyObject* value, double& flops) {
    flops = PyFloat_AsDouble(value);
    const bool is_number = !(flops == -1.0 && PyErr_Occurred());
    PyErr_Clear();
    if (is_number && flops >= 0 && flops <= MAX_FLOPS) return true;
    raise_error("CountError", "flops: expected a number from 0 to 1e+30, got %R", value);
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

}  // namespace brickline::hot
