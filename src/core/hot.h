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

// A callable that stands for handle.__enter__ or handle.__exit__, made once per handle. A `with`
// then allocates no bound method.
struct BoundObject {
    PyObject_HEAD
    vectorcallfunc call;
    struct HandleObject* handle;
};

struct HandleObject {
    PyObject_HEAD
    ProfilerObject* profiler;
    BoundObject* enter;
    BoundObject* exit;
    uint32_t slot;
    int32_t layer;
    uint32_t brick;        // position in State::bricks
    uint32_t elements_low;
    uint8_t elements_high;
    bool has_work;
    WorkRecord work;
    PyObject* weakrefs;
};

struct TimerObject {
    PyObject_HEAD
    ProfilerObject* profiler;  // null once stopped, or when started while disabled
    HandleObject* handle;
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

struct State {
    std::vector<Brick> bricks;
    PyObject* brick_of_name = nullptr;  // dict: name or alias -> position in bricks
    std::vector<SlotDefinition> slots;
    std::map<std::tuple<uint32_t, std::string, int32_t, uint32_t, uint32_t>, uint32_t> slot_ids;
    std::vector<CachedHandle> handles_with_work;  // direct-mapped
    std::map<std::string, uint8_t> phases;
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
    uint32_t sample_steps = 1;
    uint32_t sample_layers = 1;
    uint64_t entry_counter = 0;
    bool tiles_enabled = true;
};

struct ProfilerObject {
    PyObject_HEAD
    Mode mode;
    Mode enabled_mode;   // what `mode` becomes when enabled
    Sync sync;
    uint8_t phase;
    bool step_timed;
    bool in_step;
    bool only_counts;    // inside a step that sampling leaves out: entries are counted, not timed
    uint32_t step;
    uint32_t index;      // place of this profiler's lane in a thread's table
    TickSource* source;
    State* state;
    PyObject* weakrefs;
};

extern PyTypeObject ProfilerType, HandleType, TimerType, BoundType;

// The lanes of one thread, by profiler index. One pointer lives in thread-local storage.
struct ThreadLanes {
    uint32_t size;
    Lane* lanes[];
};
extern constinit thread_local ThreadLanes* t_lanes;

inline Lane* fast_lane(const ProfilerObject* profiler) {
    const ThreadLanes* mine = t_lanes;
    if (mine && profiler->index < mine->size) [[likely]] {
        return mine->lanes[profiler->index];
    }
    return nullptr;
}

// The lane of the calling thread; made on first use. Null with an exception set when the disk is
// full.
Lane* lane_of_thread(ProfilerObject* profiler);
Lane* make_lane(ProfilerObject* profiler);
void forget_lanes_after_fork();
uint32_t register_recorder(Recorder* recorder);
void unregister_recorder(uint32_t index);

// Raises brickline.errors.<name>.
PyObject* raise_error(const char* name, const char* format, ...);
PyObject* raise_spool_error(const SpoolError& error);

uint32_t slot_for(ProfilerObject* profiler, const SlotDefinition& slot);
// Position in State::bricks of a BrickId or name; -1 with an exception set.
int64_t find_brick(ProfilerObject* profiler, PyObject* id_or_name);
HandleObject* handle_for(ProfilerObject* profiler, uint32_t brick, int32_t layer);
// A non-negative count that a record can hold; false with an exception set.
bool parse_count(PyObject* value, const char* what, uint64_t limit, uint64_t& count);
bool parse_layer(PyObject* value, int32_t& layer);

// Pushes an entry with every option considered. Returns false with an exception set.
bool enter_slow(ProfilerObject* profiler, uint32_t slot, int32_t layer, OpenKind kind, void* owner);
// Writes the record of an entry that has left the stack.
void finish_entry(ProfilerObject* profiler, Lane* lane, const OpenEntry& entry, uint32_t depth,
                  uint64_t end, uint64_t elements, const WorkRecord* work);
// Ends marks that stand on top: what encloses them is being left.
void end_marks(ProfilerObject* profiler, Lane* lane, uint64_t end);
void step_begin(ProfilerObject* profiler, Lane* lane, uint32_t slot, bool timed);
void leave(ProfilerObject* profiler, Lane* lane, uint32_t slot, OpenKind kind, void* owner,
           uint64_t end, uint64_t elements, const WorkRecord* work);

int ready_handle_type(PyObject* module);
int ready_timer_type(PyObject* module);
int ready_profiler_type(PyObject* module);
// The slot of tiles of a level in the brick that is open on the lane; -1 with an exception set.
int64_t tile_slot(ProfilerObject* profiler, Lane* lane, uint32_t level);

// Interned names of keyword arguments: at a call they are found by address.
struct ArgumentNames {
    PyObject *layer, *elements, *bytes, *flops, *row, *column;
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

PyObject* profiler_brick(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_start(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_stop(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* profiler_mark(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* tile_start(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* tile_stop(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);

}  // namespace brickline::hot
