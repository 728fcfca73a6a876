// PendingSignals: a run of a plan ends where Python's handler of a signal raises.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "plan_stop.h"

namespace brickline {

// Ends a run where a handler of a signal raises; the exception stays set. Python runs handlers in its
// main thread alone, so no other thread takes the GIL for them: it would wait for nothing, and could not
// come back from an interpreter that is being taken down.
class PendingSignals final : public PlanStop {
  public:
    // Whether this thread is the one.
    static bool can_come() { return ::syscall(SYS_gettid) == ::getpid(); }

    bool is_wanted() override {
        if (!can_come()) return false;
        const nanobind::gil_scoped_acquire held;
        return PyErr_CheckSignals() != 0;
    }
};

}  // namespace brickline
