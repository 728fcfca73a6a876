// Tensors of CUDA devices on their way to a launch: the largest at once, others in company.
//
// What waits is held, so that its memory is not used again, and is fingerprinted if it has not been
// written to meanwhile. In a first step each is taken at once and waits for nothing but to see that.
#include "tensor_book.h"

namespace brickline::hot {
namespace {

// A fingerprint that was promised and does not come. An exception that is set stays.
void report_lost(TensorBookObject* book, uint64_t label, bool stale) {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyObject* done = PyObject_CallFunction(book->lost, "KO", static_cast<unsigned long long>(label),
                                           stale ? Py_True : Py_False);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
}

bool launch(TensorBookObject* book, RingObject* ring, const RingTensor* tensors, int count, uint64_t stream) {
    if (ring_take(ring, tensors, count, stream)) return true;
    for (int k = 0; k < count; ++k) report_lost(book, tensors[k].label, false);
    return false;
}

bool flush_list(TensorBookObject* book, DeviceQueue& queue, uint32_t dtype) {
    std::vector<WaitingTensor> waiting;
    waiting.swap(queue.waiting[dtype]);
    queue.count -= waiting.size();
    for (const WaitingTensor& each : waiting) queue.bytes -= each.bytes;
    RingObject* ring = queue.ring;
    const uint64_t stream = queue.stream;  // Python may run from here on, and `queue` change
    RingTensor current[fingerprint::JOBS];
    int count = 0;
    bool sound = true;
    for (const WaitingTensor& each : waiting) {
        if (version_of(each.tensor) == each.version) {
            if (!each.is_taken) current[count++] = each.what;
            continue;
        }
        book->state->was_written = true;
        book->state->shares = false;
        if (!each.is_taken) report_lost(book, each.what.label, true);
    }
    if (count) sound = launch(book, ring, current, count, stream);
    for (const WaitingTensor& each : waiting) Py_DECREF(each.tensor);
    return sound;
}

bool flush_queue(TensorBookObject* book, DeviceQueue& queue) {
    bool sound = true;
    for (uint32_t dtype = 0; queue.count && dtype < 16; ++dtype) {
        if (!queue.waiting[dtype].empty()) sound = flush_list(book, queue, dtype) && sound;
    }
    return sound;
}

}  // namespace

bool enqueue_tensor(TensorBookObject* book, DeviceQueue& queue, PyObject* tensor, int64_t version,
                    const RingTensor& what, uint64_t bytes, uint64_t stream) {
    TensorBookState& state = *book->state;
    if (queue.count && queue.stream != stream && !flush_queue(book, queue)) return false;
    const bool is_taken = !state.shares || bytes > state.shared_bytes;
    if (is_taken && !launch(book, queue.ring, &what, 1, stream)) return false;
    if (bytes > state.shared_bytes) return true;
    state.was_tried = state.was_tried || is_taken;
    queue.stream = stream;
    queue.count += 1;
    queue.bytes += bytes;
    auto& waiting = queue.waiting[what.dtype];
    waiting.push_back({Py_NewRef(tensor), version, bytes, is_taken, what});
    if (waiting.size() == fingerprint::JOBS && !flush_list(book, queue, what.dtype)) return false;
    return queue.bytes < MOST_HELD_BYTES || flush_queue(book, queue);
}

bool flush_tensors(TensorBookObject* book) {
    bool sound = true;
    for (auto& [device, queue] : book->state->queues) {
        if (queue.count) sound = flush_queue(book, queue) && sound;
    }
    return sound;
}

bool judge_trial(TensorBookObject* book) {
    TensorBookState& state = *book->state;
    const bool sound = flush_tensors(book);
    if (state.was_tried) state.shares = !state.was_written;
    state.was_tried = state.was_written = false;
    return sound;
}

}  // namespace brickline::hot
