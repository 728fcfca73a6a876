// Spans on a device's clock: an event enqueued before a brick and one after it, resolved later by a
// thread of its own without any sync on the hot path. Knows events by integer and no Python; the
// driver behind them is an EventDriver.
//
// Only the resolver (under m_resolving) appends to device lanes. The hot path holds m_mutex for a
// push to a queue and never while it calls the driver.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "recorder.h"

namespace brickline {

using EventHandle = uint64_t;

// What a device offers. Calls may come from any thread; a failure comes back as text, "" is success.
class EventDriver {
  public:
    virtual ~EventDriver() = default;
    virtual int device() const = 0;
    virtual std::string create(EventHandle& event) = 0;
    virtual void destroy(EventHandle event) = 0;
    // Enqueues the event; with `captured`, as a node of the graph that the stream is captured into.
    virtual std::string record(EventHandle event, uint64_t stream, bool captured) = 0;
    enum class State { Done, Pending, Failed };
    virtual State query(EventHandle event) = 0;
    // Milliseconds from one executed event to another; negative when they ran the other way round.
    virtual std::string elapsed_ms(EventHandle from, EventHandle to, float& ms) = 0;
    virtual std::string synchronize(uint64_t stream) = 0;
    virtual bool is_capturing(uint64_t stream) = 0;
    // Called by each thread of ours before its first call: the device becomes current, and a capture
    // that some other thread has in progress stays undisturbed.
    virtual void enter_thread() = 0;
};

struct DeviceSpan {
    EventHandle start = 0;
    EventHandle end = 0;
    uint64_t stream = 0;
    uint64_t host_start_ns = 0;
    BrickRecord record{};   // start and end are filled in when the events have executed
    WorkRecord work{};
    uint32_t thread = 0;
};

class DeviceSpans {
  public:
    DeviceSpans(std::unique_ptr<EventDriver> driver, Recorder& recorder);
    ~DeviceSpans();

    // Enqueues a start event. 0: not timed (too much is pending, or a capture that nobody announced
    // is in progress), or the driver refused, and then `problem` is set.
    EventHandle begin(uint64_t stream, std::string& problem);
    std::string finish(DeviceSpan span);
    void cancel(EventHandle start);

    // Waits for the stream and resolves what has executed.
    std::string synchronize(uint64_t stream);
    // Resolves what has executed; the rest stays pending.
    void drain();
    bool is_capture_announced() const { return m_capturing != 0; }
    bool is_capturing(uint64_t stream) { return m_driver->is_capturing(stream); }

    // Spans recorded between these two become event nodes of one graph.
    uint64_t begin_capture();
    void end_capture();
    // Around each launch of that graph. A replay that is overtaken by the next before it was read
    // counts its bricks as untimed.
    std::string before_replay(uint64_t graph);
    void replayed(uint64_t graph, uint8_t phase, uint32_t step);

    // While it is held no span reaches a lane.
    std::unique_lock<std::mutex> hold_lanes() { return std::unique_lock(m_resolving); }

    uint64_t pending() const { return m_pending; }
    void stop();

  private:
    struct Base {              // where a stream's device times are measured from
        EventHandle event = 0;
        uint64_t ns = 0;
        bool owned = false;    // taken out of the pool for good
    };
    struct Graph {
        std::vector<DeviceSpan> spans;
        enum class State { Idle, Launching, Unread } state = State::Idle;
        std::vector<std::pair<uint8_t, uint32_t>> overtaken;  // phase and step of each
        uint8_t phase = 0;     // of the latest replay, as are step and host_ns
        uint32_t step = 0;
        uint64_t host_ns = 0;
    };

    EventHandle take_event(std::string& problem);
    void give_back(EventHandle event);
    void resolve(const DeviceSpan& span, bool keep_events);
    void resolve_graphs();
    void forget_base(Base& base);
    void lose_one();
    void append_untimed(const DeviceSpan& span, uint8_t phase, uint32_t step);
    Lane* lane_for(const DeviceSpan& span);
    void run();

    std::unique_ptr<EventDriver> m_driver;
    Recorder& m_recorder;
    std::mutex m_mutex;        // queues, pool, graphs
    std::mutex m_resolving;    // one resolver at a time
    std::condition_variable m_wake;
    std::vector<EventHandle> m_free;
    std::map<uint64_t, std::deque<DeviceSpan>> m_queues;  // by stream, in order of enqueueing
    std::map<uint64_t, Base> m_bases;
    std::map<std::pair<uint32_t, uint64_t>, Lane*> m_lanes;
    std::deque<Graph> m_graphs;
    std::atomic<uint64_t> m_capturing{0};  // number of the graph that is being captured, from 1
    std::atomic<uint64_t> m_pending{0};
    bool m_stopping = false;
    bool m_is_last_drain = false;
    std::thread m_thread;
};

}  // namespace brickline
