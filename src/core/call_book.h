// CallBook: module calls as rows of the spool. See call_book.cpp; forwards.cpp calls it.
#pragma once

#include <memory>
#include <vector>

#include "hot.h"
#include "tensor_book.h"

namespace brickline::hot {

constexpr uint32_t PARAMETER_INDEX = 1000;  // operands from here on are a module's own
constexpr uint32_t UNSEEN_INDEX = 999;      // stands for the tensors that could not be looked at

// One call of a root. It is let go of under the GIL: by the calls inside it and by `CallBook.end`.
struct CallPlace {
    uint32_t position = 0, step = 0, phase = 0, thread = 0, process = 0;
    bool fast = false;
    PyObject* ordinals = nullptr;  // dict: name -> how often it was called, shared with Python

    CallPlace() = default;
    CallPlace(const CallPlace&) = delete;
    CallPlace& operator=(const CallPlace&) = delete;
    ~CallPlace() { Py_XDECREF(ordinals); }
};

struct CallBookState {
    uint64_t taken = 0;
};

struct CallBookObject {
    PyObject_HEAD
    CallBookState* state;
    ProfilerObject* profiler;
    TensorBookObject* tensors;
    PyObject *ids, *spread, *failed;
    PyTypeObject *tensor_type, *parameter_type;
    uint32_t rank, cpu_backend, cuda_backend;
};

// A call that is under way in this thread.
struct OpenCall {
    const CallBookObject* book;
    std::shared_ptr<CallPlace> place;
    uint64_t trace;
    uint64_t parent;
};
extern thread_local std::vector<OpenCall> t_open_calls;

// What is written of the calls on one module.
struct FastSite {
    CallBookObject* book;
    PyObject* path;
    uint32_t name, params, raised, slot;
    int32_t layer;
    bool has_self;
    bool mutates;
    PyObject *parameters, *buffers;
};

// From (book, path, name, params, raised, slot, layer, parameters, buffers, mutates), ids of strings
// after the path; null with an exception set.
FastSite* make_fast_site(PyObject* given, bool has_self);
void free_fast_site(FastSite* site);
// Whether a call on the site is inside a root's call that the book writes.
bool may_go_fast(const FastSite* site);
PyObject* fast_call(FastSite* site, HandleObject* handle, vectorcallfunc plain, PyObject* callable,
                    PyObject* const* args, size_t flagged, PyObject* names);
int ready_call_book_type(PyObject* module);

}  // namespace brickline::hot
