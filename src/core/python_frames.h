// What Python runs at this moment: the frame that made a call, and the context, of which every task of
// an event loop has its own. Both are compared and never followed, except for the way from a frame to
// its caller, whose place CPython does not publish.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

#if PY_VERSION_HEX >= 0x030F0000
#error "Look up where _PyInterpreterFrame keeps `previous` in this version of CPython, see calling_frame"
#endif

namespace brickline::hot {

inline const PyThreadState* thread_state() {
#if PY_VERSION_HEX >= 0x030D0000
    return PyThreadState_GetUnchecked();
#else
    return _PyThreadState_UncheckedGet();
#endif
}

inline const void* context_of(const PyThreadState* state) { return state->context; }

// The frame of the Python function that is running. A generator or coroutine keeps its frame, and with
// it this address, while it is suspended.
inline const void* frame_of(const PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
    return state->current_frame;
#else
    return state->cframe->current_frame;
#endif
}

inline const void* calling_frame(const void* frame) {
#if PY_VERSION_HEX >= 0x030C0000
    constexpr size_t PREVIOUS = 1;  // behind f_code or f_executable
#else
    constexpr size_t PREVIOUS = 6;  // behind f_func, three dictionaries, f_code and frame_obj
#endif
    return static_cast<void* const*>(frame)[PREVIOUS];
}

}  // namespace brickline::hot
