// Python objects of the hot path. Shared by hot.cpp, which measures, and profiler_type.cpp, which
// holds the calls that are made rarely. Raw C-API: nanobind costs twice as much a call.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "device_spans.h"
#include "python_frames.h"
#include "recorder.h"

namespace brickline::hot {

enum class Mode : uint8_t {
    Off,      // nothing is recorded
    Host,     // every entry is timed by the host's clock
    Careful,  // host clock with sampling
    Device,   // a device's clock, or host time around a sync
};

enum class Sync : uint8_t { Immediate, PerLayer, Deferred, None };

struct ProfilerObject;

// What reading handle.__enter__ or handle.__exit__ gives: one callable, told apart by its arguments
// (none enters, three exit). It lies inside the handle, so a `with` allocates no bound method and
// touches one cache line. See handle_dealloc for who frees what.
struct BoundObject {
    PyObject_HEAD
    vectorcallfunc call;
};

struct HandleObject {
    PyObject_HEAD
    BoundObject bound;
    ProfilerObject* profiler;
    uint32_t slot;
    int32_t layer;
    uint32_t elements_low;
    uint8_t elements_high;
    bool has_work;         // bytes or operations were declared
    bool is_plain;         // neither those nor other elements than one
    // Up to here one cache line; what follows is touched only by bricks with declared work.
    uint32_t brick;        // position in State::bricks
    WorkRecord work;
    PyObject* weakrefs;
};

// One pass of the model; it is its own __enter__ and __exit__.
struct StepObject {
    PyObject_HEAD
    vectorcallfunc call;
    ProfilerObject* profiler;
    Lane* lane;            // null unless it is open
    uint64_t tokens;
    StepState before;      // what the thread was in when it began
    bool had_own;
    uint32_t generation;   // of the profiler's recorder
    uint8_t phase;
};

struct TimerObject {
    PyObject_HEAD
    ProfilerObject* profiler;  // null once stopped, or when started while disabled
    Lane* lane;
    uint64_t start;
    uint32_t generation;       // of the profiler's recorder
    bool stopped;
    bool disabled;
    bool is_tile;
    uint32_t slot;
    uint32_t row;
    uint32_t column;
};

struct Brick {
    std::string name;
    int32_t id = -1;
    uint32_t category = 3;
    std::vector<HandleObject*> by_layer;  // layer + 1; strong
};

struct WorkKey {
    uint32_t brick;
    int32_t layer;
    uint64_t elements;
    uint64_t bytes;
    double flops;
    bool operator==(const WorkKey&) const = default;
};

struct CachedHandle {
    WorkKey key{};
    HandleObject* handle = nullptr;  // strong
};

// What an inline `profiler.brick(id, layer=n)` was given, by identity. All three are immutable, so the
// same objects mean the same handle; the entry keeps them alive.
struct InlineCall {
    PyObject* brick = nullptr;
    PyObject* layer = nullptr;
    PyObject* names = nullptr;
    HandleObject* handle = nullptr;
};
constexpr size_t INLINE_CALLS = 512;

// Passes of a phase that are open, in whatever threads and tasks, and the moment up to which the time
// that they ran is counted.
struct PhaseClock {
    uint32_t open;
    uint64_t counted_to;
};

struct State {
    std::vector<Brick> bricks;
    PyObject* brick_of_name = nullptr;  // dict: name or alias -> position in bricks
    std::vector<SlotDefinition> slots;
    std::map<std::tuple<uint32_t, std::string, int32_t, uint32_t, uint32_t>, uint32_t> slot_ids;
    std::vector<CachedHandle> handles_with_work;  // direct-mapped
    std::vector<InlineCall> inline_calls;         // direct-mapped
    std::map<std::string, uint8_t> phases;
    PyObject* last_phase = nullptr;  // the name of a phase that was just looked up, and its id
    uint8_t last_phase_id = 0;
    StepState shared_step;           // of threads that are in no step of their own
    std::vector<const StepState*> open_steps;
    std::vector<uint32_t> phase_slots;
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> tile_slots;  // (level, owner) -> slot
    std::unique_ptr<TickSource> source;
    std::unique_ptr<Recorder> recorder;
    std::unique_ptr<DeviceSpans> device;
    PyObject* stream_getter = nullptr;  // callable(device) -> int, or null: fixed stream
    PyObject* stream_argument = nullptr;
    uint64_t stream = 0;
    uint32_t step_counter = 0;
    uint32_t phase_steps[MAX_PHASES] = {};
    PhaseClock phase_clocks[MAX_PHASES] = {};
    uint32_t sample_steps = 1;
    uint32_t sample_layers = 1;
    uint64_t entry_counter = 0;
    bool tiles_enabled = true;
    std::string failure;  // why recording stopped by itself
};

struct ProfilerObject {
    PyObject_HEAD
    Mode mode;
    Mode enabled_mode;   // what `mode` becomes when enabled
    Sync sync;
    bool reads_counter;  // the clock is the machine's counter, read without a call
    uint32_t index;      // place of this profiler's lane in a thread's table
    void* owner;         // the thread that asked last, by its pointer, …
    const void* owner_context;  // …the context it ran then…
    Lane* owner_lane;    // …and the lane of both: what fast_lane tries before the thread's table
    TickSource* source;
    State* state;
    PyObject* weakrefs;
};

extern PyTypeObject ProfilerType, HandleType, TimerType, StepType;

// Makes reading __enter__ and __exit__ of a type's objects give what `get` returns.
int add_with_methods(PyTypeObject* type, descrgetfunc get);

inline uint64_t ticks_now(const ProfilerObject* profiler) {
    return profiler->reads_counter ? counter_ticks() : profiler->source->now();
}

// The lanes of one thread, by profiler index. One pointer lives in thread-local storage.
struct ThreadLanes {
    uint32_t size;
    Lane* lanes[];
};
extern constinit thread_local ThreadLanes* t_lanes;

// The calling thread's own lane, or null.
Lane* home_lane(const ProfilerObject* profiler);
// The lane of what the calling thread runs, or null; remembers it in the profiler.
Lane* find_lane(ProfilerObject* profiler, const PyThreadState* state);

// The caller's lane: the thread's own, or that of the task it runs while others hold that one.
inline Lane* fast_lane(ProfilerObject* profiler, const PyThreadState* state = thread_state()) {
    if (profiler->owner == __builtin_thread_pointer() &&
        profiler->owner_context == context_of(state)) [[likely]] {
        return profiler->owner_lane;
    }
    return find_lane(profiler, state);
}

// The caller's lane; made on first use. Null with an exception set when the disk is full.
Lane* make_lane(ProfilerObject* profiler);
inline Lane* caller_lane(ProfilerObject* profiler, const PyThreadState* state = thread_state()) {
    Lane* lane = fast_lane(profiler, state);
    return lane ? lane : make_lane(profiler);
}
void stop_recording(ProfilerObject* profiler, const SpoolError& error);
void forget_lanes_after_fork();
uint32_t register_recorder(Recorder* recorder, ProfilerObject* profiler);
void unregister_recorder(uint32_t index);

// Raises brickline.errors.<name>.
PyObject* raise_error(const char* name, const char* format, ...);
PyObject* raise_spool_error(const SpoolError& error);
// The UTF-8 of a str; nullptr with an exception set, as where it holds half of a surrogate pair.
const char* utf8_of(PyObject* text, const char* what, Py_ssize_t* length);

uint32_t slot_for(ProfilerObject* profiler, const SlotDefinition& slot);
// Position in State::bricks of a BrickId or name; -1 with an exception set.
int64_t find_brick(ProfilerObject* profiler, PyObject* id_or_name);
HandleObject* handle_for(ProfilerObject* profiler, uint32_t brick, int32_t layer);
// A non-negative count that a record can hold; false with an exception set.
bool parse_count(PyObject* value, const char* what, uint64_t limit, uint64_t& count);
bool parse_layer(PyObject* value, int32_t& layer);
// A number from 0 to MAX_FLOPS; false with an exception set.
bool parse_flops(PyObject* value, double& flops);
// What the stack of a lane still holds and nobody can leave any more is dropped.
void forget_open(ProfilerObject* profiler, Lane& lane);
void drop_abandoned(ProfilerObject* profiler, Lane* lane, uint32_t first);

// Pushes an entry with every option considered. Returns false with an exception set.
bool enter_slow(ProfilerObject* profiler, uint32_t slot, int32_t layer, OpenKind kind, void* owner);
// Writes the record of an entry that has left the stack.
void finish_entry(ProfilerObject* profiler, Lane* lane, const OpenEntry& entry, uint32_t depth,
                  uint64_t end, uint64_t elements, const WorkRecord* work);
// Ends marks that stand on top: what encloses them is being left, or the next mark begins.
void end_marks(ProfilerObject* profiler, Lane* lane, uint64_t end);
// Ends the open mark, if any, and begins one of `handle`, unless that is null. False with an exception
// set.
bool mark(ProfilerObject* profiler, Lane* lane, HandleObject* handle, uint64_t now);
void leave(ProfilerObject* profiler, Lane* lane, uint32_t slot, OpenKind kind, void* owner,
           uint64_t end, uint64_t elements, const WorkRecord* work);

inline bool is_open(const ProfilerObject* profiler) {
    return profiler->state->recorder && profiler->state->recorder->is_open();
}
// False with an exception set for a profiler that has no run yet.
bool require_open(ProfilerObject* profiler);

// Runs a call that may throw and turns what it throws into a Python exception.
template <class Call>
bool guarded(Call&& call) {
    try {
        call();
        return true;
    } catch (const SpoolError& error) {
        raise_spool_error(error);
    } catch (const std::exception& error) {
        raise_error("InternalError", "%s", error.what());
    }
    return false;
}

// Runs what writes launches into the spool. A disk that refuses ends the recording and not the program:
// from then on nothing is run, as rows refer to those before them. False with an exception set.
template <class Call>
bool written(ProfilerObject* profiler, Call&& call) {
    if (!profiler->state->failure.empty()) return true;
    return guarded([&] {
        try {
            call();
        } catch (const SpoolError& error) {
            stop_recording(profiler, error);
        }
    }) && !PyErr_Occurred();
}

// The profiler's host clock; 0 while it has no run.
inline int64_t now_ns(const ProfilerObject* profiler) {
    if (!is_open(profiler)) return 0;
    return int64_t(profiler->state->recorder->scale().time_ns(ticks_now(profiler)));
}

// Counts time into one of the header's sums. Under the GIL, so one thread writes. What was begun before
// a fork or a close has no beginning on this clock, and is left out.
inline void spend(ProfilerObject* profiler, int64_t ns, uint64_t SpoolHeader::* sum = &SpoolHeader::observing_ns) {
    if (ns <= 0 || !is_open(profiler)) return;
    std::atomic_ref<uint64_t> total(profiler->state->recorder->spool().header().*sum);
    total.store(total.load(std::memory_order_relaxed) + uint64_t(ns), std::memory_order_relaxed);
}

// Counts the time that it lives.
class Spending {
  public:
    explicit Spending(ProfilerObject* profiler, uint64_t SpoolHeader::* sum = &SpoolHeader::observing_ns)
        : m_profiler(profiler), m_sum(sum), m_began_ns(now_ns(profiler)) {}
    ~Spending() {
        if (m_began_ns) spend(m_profiler, now_ns(m_profiler) - m_began_ns, m_sum);
    }
    Spending(const Spending&) = delete;
    Spending& operator=(const Spending&) = delete;

  private:
    ProfilerObject* m_profiler;
    uint64_t SpoolHeader::* m_sum;
    int64_t m_began_ns;
};

// One entry of a handle's brick. False with an exception set.
bool enter_handle(HandleObject* handle);
bool exit_handle(HandleObject* handle);

int ready_handle_type(PyObject* module);
int ready_forwards(PyObject* module);
int ready_fingerprints(PyObject* module);
int ready_timer_type(PyObject* module);
int ready_step_type(PyObject* module);
int ready_profiler_type(PyObject* module);
// The slot of tiles of a level in the brick that is open on the lane; -1 with an exception set.
int64_t tile_slot(ProfilerObject* profiler, Lane* lane, uint32_t level);

// Interned names of keyword arguments: at a call they are found by address.
struct ArgumentNames {
    PyObject *layer, *elements, *bytes, *flops, *row, *column, *tokens, *phase;
};
extern ArgumentNames names_of_arguments;
int intern_argument_names();

inline bool name_is(PyObject* name, PyObject* interned) {
    return name == interned || PyUnicode_Compare(name, interned) == 0;
}
PyObject* unexpected_keyword(const char* call, PyObject* name);

inline HandleObject* as_handle(PyObject* object) { return reinterpret_cast<HandleObject*>(object); }
inline ProfilerObject* as_profiler(PyObject* object) {
    return reinterpret_cast<ProfilerObject*>(object);
}
inline uint64_t handle_elements(const HandleObject* handle) {
    return uint64_t(handle->elements_high) << 32 | handle->elements_low;
}

// The last two words of a BrickRecord.
inline uint64_t elements_word(uint32_t slot, uint32_t elements_low) {
    return uint64_t(slot) | uint64_t(elements_low) << 32;
}
inline uint64_t place_word(const Lane* lane, uint32_t depth, uint8_t elements_high, uint8_t flags) {
    return lane->place | uint64_t(depth) | uint64_t(flags) << 16 | uint64_t(elements_high) << 24;
}
// An entry of a step that sampling leaves out: counted, not timed.
inline void count_entry(Lane* lane, const HandleObject* handle) {
    if (lane->count(handle->slot, handle_elements(handle))) [[likely]] return;
    const uint32_t depth = lane->depth < MAX_DEPTH ? lane->depth : MAX_DEPTH - 1;
    lane->append_words(0, 0, elements_word(handle->slot, handle->elements_low),
                       place_word(lane, depth, handle->elements_high, RECORD_UNTIMED));
}
inline BrickRecord make_record(const Lane* lane, const OpenEntry& entry, uint32_t depth, uint64_t end,
                               uint64_t elements, uint8_t flags) {
    return {entry.start, end, entry.slot, uint32_t(elements), uint8_t(depth), lane->step->phase, flags,
            uint8_t(elements >> 32), lane->step->step};
}

PyObject* profiler_brick(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_step(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_start(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_stop(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_stop_handle(PyObject* self, PyObject* const* args, Py_ssize_t count,
                               PyObject* names);
PyObject* profiler_mark(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* tile_start(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* tile_stop(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);

PyObject* profiler_record(PyObject* self, PyObject* args, PyObject* names);
PyObject* profiler_record_tile(PyObject* self, PyObject* args);
PyObject* profiler_fact(PyObject* self, PyObject* args);
PyObject* profiler_intern(PyObject* self, PyObject* text);
PyObject* profiler_append(PyObject* self, PyObject* args);

}  // namespace brickline::hot
