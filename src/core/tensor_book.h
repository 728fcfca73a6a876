// TensorBook: which tensor is which, and who takes its fingerprint. See tensor_book.cpp.
#pragma once

#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "dlpack.h"
#include "fingerprint_ring.h"
#include "hot.h"

namespace brickline::hot {

// Of an OperandRow: all but the trace, and what it says of a tensor's form.
constexpr Py_ssize_t LOOKED_BYTES = sizeof(OperandRow) - offsetof(OperandRow, tensor);
constexpr size_t FORM_BYTES = sizeof(OperandRow) - offsetof(OperandRow, version);
constexpr size_t MOST_KNOWN = 1 << 14;
constexpr uint64_t MOST_HELD_BYTES = 1 << 27;  // of a device's tensors that wait

// A tensor that was looked at, and its operand's row.
struct SeenTensor {
    PyObject* reference = nullptr;  // weak
    int64_t version = 0;
    uint64_t address = 0;
    OperandRow row{};
};

struct KnownDType {
    uint8_t code, bits;    // as DLPack says
    uint32_t dtype, name;  // our code, and the id of a string
};

// Where and how a tensor lies in memory.
struct TensorFacts {
    uint64_t address;
    uint8_t code, bits;
    int32_t kind, number;
    int32_t dimensions;
    int64_t shape[FINGERPRINT_DIMENSIONS], strides[FINGERPRINT_DIMENSIONS];
};

// Holds its tensor, whose memory must not be used again before the launch.
struct WaitingTensor {
    PyObject* tensor;
    int64_t version;
    uint64_t bytes;
    bool is_taken;  // it waits to see whether it could have
    RingTensor what;
};

// A device's tensors that wait for company, by dtype.
struct DeviceQueue {
    RingObject* ring = nullptr;
    uint64_t stream = 0;
    size_t count = 0;
    uint64_t bytes = 0;
    std::vector<WaitingTensor> waiting[16];
};

struct TensorBookState {
    std::unordered_map<PyObject*, SeenTensor> known;    // of this step
    std::unordered_map<PyObject*, SeenTensor> weights;  // beyond it
    std::unordered_map<uint64_t, SeenTensor> views;     // of this step, by a hash of address and form
    std::unordered_set<PyTypeObject*> types;            // classes whose tensors are their own memory
    std::vector<KnownDType> dtypes;
    std::unordered_map<int32_t, DeviceQueue> queues;
    bool shares = false;                                // tensors wait for company
    bool was_tried = false, was_written = false;        // in this step: whether they could, and could not
    uint64_t shared_bytes = 0, numbers = 0, taken = 0;
};

struct TensorBookObject {
    PyObject_HEAD
    TensorBookState* state;
    const DLPackExchangeAPI* exchange;  // null: `facts` is asked
    PyObject *look, *take, *lost, *reserve, *facts, *capsule;
};

extern PyTypeObject TensorBookType;

// How often a tensor was written to; -1 where torch does not count.
int64_t version_of(PyObject* tensor);
// False where it cannot be said: a tensor without memory, or of too many dimensions.
bool read_facts(TensorBookObject* book, PyObject* tensor, TensorFacts& facts);
// Fills a row but for its trace, role and index; false with an exception set.
bool tensor_row(TensorBookObject* book, PyObject* tensor, bool weight, int ahead, OperandRow& row);
// Has a tensor's fingerprint taken on a stream, now or in company; false with an exception set.
bool enqueue_tensor(TensorBookObject* book, DeviceQueue& queue, PyObject* tensor, int64_t version,
                    const RingTensor& what, uint64_t bytes, uint64_t stream);
// Takes the fingerprints that wait; false with an exception set.
bool flush_tensors(TensorBookObject* book);
// The same at the end of a step; tensors may wait from now on if none was written to while it did.
bool judge_trial(TensorBookObject* book);
int ready_tensor_book_type(PyObject* module);

}  // namespace brickline::hot
