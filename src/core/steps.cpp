// StepObject: one pass of the model, `with profiler.step(tokens=1, phase="decode"):`.
//
// A step is an entry like a brick, on the thread that began it. Threads that are in no step of their
// own count for the step that began last, so that the workers of a pass belong to it.
#include "hot.h"

#include <algorithm>
#include <utility>

namespace brickline::hot {

PyTypeObject StepType = {PyVarObject_HEAD_INIT(nullptr, 0)};

namespace {

constexpr int STEP_POOL = 16;
StepObject* g_steps[STEP_POOL];
int g_step_count = 0;

StepObject* as_step(PyObject* object) { return reinterpret_cast<StepObject*>(object); }

// The id of a phase; -1 with an exception set.
int find_phase(ProfilerObject* profiler, PyObject* name) {
    State& state = *profiler->state;
    if (name == state.last_phase) [[likely]] return state.last_phase_id;
    if (!PyUnicode_Check(name)) {
        raise_error("UsageError", "phase: expected a str such as 'decode', got %.200s", Py_TYPE(name)->tp_name);
        return -1;
    }
    Py_ssize_t length = 0;
    const char* text = utf8_of(name, "phase", &length);
    if (!text) return -1;
    auto found = state.phases.find(text);
    if (found == state.phases.end()) {
        if (state.phases.size() >= MAX_PHASES) {
            raise_error("UsageError", "phase %R: a profiler keeps at most %d phases apart; use a few "
                        "fixed names such as \"prefill\" and \"decode\"", name, int(MAX_PHASES) - 1);
            return -1;
        }
        SlotDefinition slot;
        slot.kind = SlotKind::Step;
        slot.name = text;
        slot.level = uint32_t(state.phases.size());
        found = state.phases.emplace(text, uint8_t(slot.level)).first;
        state.phase_slots.push_back(slot_for(profiler, slot));
        if (PyErr_Occurred()) return -1;
    }
    Py_XSETREF(state.last_phase, Py_NewRef(name));
    state.last_phase_id = found->second;
    return found->second;
}

// What threads without a step of their own count for: the step that began last and is still open.
void share_last(State& state) {
    state.shared_step = state.open_steps.empty() ? StepState{} : *state.open_steps.back();
    if (state.recorder->lane_count() < 2) return;
    state.recorder->for_each_host_lane([&state](Lane& lane) {
        if (lane.step == &state.shared_step) lane.set_step(&state.shared_step);
    });
}

void open_phase(PhaseClock& clock, uint64_t now) {
    if (clock.open++ == 0) clock.counted_to = now;
}

// The time since a pass of the phase began or ended: what each pass adds is counted once.
uint64_t close_phase(PhaseClock& clock, uint64_t now) {
    clock.open -= 1;
    return now - std::exchange(clock.counted_to, now);
}

bool begin(StepObject* step) {
    ProfilerObject* profiler = step->profiler;
    if (step->lane) {
        raise_error("UsageError", "this step is already open; make a new one for each pass");
        return false;
    }
    if (profiler->mode == Mode::Off) return true;
    Lane* lane = caller_lane(profiler);
    if (!lane) return !PyErr_Occurred();
    State& state = *profiler->state;
    step->lane = lane;
    step->generation = profiler->index;
    step->before = lane->own_step;
    step->had_own = lane->step == &lane->own_step;
    lane->own_step.set(step->phase, ++state.step_counter);
    lane->own_step.is_open = true;
    // Counted per phase, so that the first prefill and the first decode are both timed.
    lane->own_step.timed = state.phase_steps[step->phase]++ % state.sample_steps == 0;
    lane->own_step.only_counts = !lane->own_step.timed && profiler->mode != Mode::Host;
    lane->set_step(&lane->own_step);
    if (!step->had_own) state.open_steps.push_back(&lane->own_step);
    share_last(state);
    lane->last_layer = -2;
    if (lane->depth == MAX_DEPTH) drop_abandoned(profiler, lane, 0);
    if (lane->depth == MAX_DEPTH) {
        open_phase(state.phase_clocks[step->phase], ticks_now(profiler));
        lane->too_deep += 1;
        return true;
    }
    // The step itself is timed by the host in every mode: it is what coverage is held against.
    OpenEntry& entry = lane->stack[lane->depth++];
    entry.word = open_word(state.phase_slots[step->phase], OpenKind::Step);
    entry.owner = step;
    entry.frame = frame_of(thread_state());
    entry.start_event = 0;
    lane->counting_depth = uint8_t(lane->depth);
    entry.start = ticks_now(profiler);
    open_phase(state.phase_clocks[step->phase], entry.start);
    return true;
}

bool end(StepObject* step) {
    ProfilerObject* profiler = step->profiler;
    const uint64_t now = ticks_now(profiler);
    Lane* lane = step->lane;
    step->lane = nullptr;
    if (!lane || step->generation != profiler->index) return true;  // disabled, or reset meanwhile
    State& state = *profiler->state;
    const uint64_t elapsed = close_phase(state.phase_clocks[step->phase], now);
    if (profiler->mode != Mode::Off && home_lane(profiler) == lane->home) {
        WorkRecord work{};
        work.detail = uint64_t(double(elapsed) * state.recorder->spool().ns_per_tick() + 0.5);
        work.flags = RECORD_IS_WORK | WORK_OF_STEP;
        leave(profiler, lane, state.phase_slots[step->phase], OpenKind::Step, step, now, step->tokens,
              &work);
    }
    lane->own_step = step->before;
    if (!step->had_own) std::erase(state.open_steps, &lane->own_step);
    lane->set_step(step->had_own ? &lane->own_step : &state.shared_step);
    share_last(state);
    if (!step->had_own) lane->set_step(&state.shared_step);
    return !PyErr_Occurred();
}

PyObject* step_call(PyObject* self, PyObject* const*, size_t flagged, PyObject*) {
    switch (PyVectorcall_NARGS(flagged)) {
        case 0: return begin(as_step(self)) ? Py_NewRef(self) : nullptr;
        case 3:
            if (!end(as_step(self))) return nullptr;
            Py_RETURN_NONE;
        default: return raise_error("UsageError", "a step is used in `with`");
    }
}

PyObject* itself(PyObject* method, PyObject* instance, PyObject*) {
    return Py_NewRef(instance ? instance : method);
}

void step_dealloc(PyObject* self) {
    StepObject* step = as_step(self);
    Py_CLEAR(step->profiler);
    if (g_step_count < STEP_POOL) {
        g_steps[g_step_count++] = step;
    } else {
        PyObject_Free(self);
    }
}

PyObject* get_tokens(PyObject* self, void*) {
    return PyLong_FromUnsignedLongLong(as_step(self)->tokens);
}

int set_tokens(PyObject* self, PyObject* value, void*) {
    uint64_t tokens = 0;
    if (!value) {
        raise_error("UsageError", "tokens cannot be deleted; set it to 0");
        return -1;
    }
    if (!parse_count(value, "tokens", MAX_ELEMENTS, tokens)) return -1;
    as_step(self)->tokens = tokens;
    return 0;
}

PyGetSetDef step_fields[] = {
    {"tokens", get_tokens, set_tokens, "Tokens that the pass handles; may be set until it ends.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyObject* profiler_step(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    ProfilerObject* profiler = as_profiler(self);
    if (count > 2) return raise_error("UsageError", "step() takes tokens and phase");
    PyObject* given[2] = {count > 0 ? args[0] : nullptr, count > 1 ? args[1] : nullptr};
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        const int which = name_is(name, names_of_arguments.tokens)  ? 0
                          : name_is(name, names_of_arguments.phase) ? 1 : -1;
        if (which < 0) return unexpected_keyword("step", name);
        given[which] = args[count + i];
    }
    uint64_t tokens = 1;
    if (given[0] && !parse_count(given[0], "tokens", MAX_ELEMENTS, tokens)) return nullptr;
    const int phase = given[1] ? find_phase(profiler, given[1]) : 0;
    if (phase < 0) return nullptr;
    StepObject* step = nullptr;
    if (g_step_count) {
        step = g_steps[--g_step_count];
        PyObject_Init(reinterpret_cast<PyObject*>(step), &StepType);
    } else {
        step = PyObject_New(StepObject, &StepType);
        if (!step) return nullptr;
    }
    step->call = step_call;
    step->profiler = as_profiler(Py_NewRef(self));
    step->lane = nullptr;
    step->tokens = tokens;
    step->phase = uint8_t(phase);
    return reinterpret_cast<PyObject*>(step);
}

int ready_step_type(PyObject* module) {
    StepType.tp_name = "brickline._core.Step";
    StepType.tp_doc = "One pass of the model: use it in `with`.";
    StepType.tp_basicsize = sizeof(StepObject);
    StepType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    StepType.tp_vectorcall_offset = offsetof(StepObject, call);
    StepType.tp_call = PyVectorcall_Call;
    StepType.tp_getset = step_fields;
    StepType.tp_dealloc = step_dealloc;
    if (PyType_Ready(&StepType) || add_with_methods(&StepType, itself)) return -1;
    return PyModule_AddObjectRef(module, "Step", reinterpret_cast<PyObject*>(&StepType));
}

}  // namespace brickline::hot
