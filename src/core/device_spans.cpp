#include "device_spans.h"

#include <chrono>
#include <set>

namespace brickline {
namespace {

// Records reach the spool well within 100 ms, and the driver's lock is touched rarely.
constexpr auto DRAIN_INTERVAL = std::chrono::milliseconds(10);
constexpr uint64_t MAX_PENDING = 1 << 17;
// Elapsed times are floats in milliseconds: past half a second their grain exceeds 30 ns.
constexpr float REBASE_MS = 500.0f;

}  // namespace

DeviceSpans::DeviceSpans(std::unique_ptr<EventDriver> driver, Recorder& recorder)
    : m_driver(std::move(driver)), m_recorder(recorder), m_thread([this] { run(); }) {}

DeviceSpans::~DeviceSpans() {
    stop();
    for (auto& [stream, queue] : m_queues) {
        for (DeviceSpan& span : queue) {
            m_driver->destroy(span.start);
            m_driver->destroy(span.end);
        }
    }
    for (Graph& graph : m_graphs) {
        for (DeviceSpan& span : graph.spans) {
            m_driver->destroy(span.start);
            m_driver->destroy(span.end);
        }
    }
    for (auto& [stream, base] : m_bases) {
        if (base.owned) m_driver->destroy(base.event);
    }
    for (EventHandle event : m_free) m_driver->destroy(event);
}

void DeviceSpans::stop() {
    {
        std::lock_guard guard(m_mutex);
        if (m_stopping) return;
        m_stopping = true;
    }
    m_wake.notify_all();
    m_thread.join();
    std::set<uint64_t> streams;
    {
        std::lock_guard guard(m_mutex);
        for (auto& [stream, queue] : m_queues) {
            if (!queue.empty()) streams.insert(stream);
        }
        for (const Graph& graph : m_graphs) {
            if (graph.state != Graph::State::Unread) continue;
            for (const DeviceSpan& span : graph.spans) streams.insert(span.stream);
        }
    }
    // What was enqueued is waited for, so that a closed run holds it.
    for (uint64_t stream : streams) {
        if (!m_driver->is_capturing(stream)) (void)m_driver->synchronize(stream);
    }
    {
        std::lock_guard guard(m_mutex);
        m_is_last_drain = true;
    }
    drain();
}

void DeviceSpans::run() {
    m_driver->enter_thread();
    std::unique_lock lock(m_mutex);
    while (!m_stopping) {
        m_wake.wait_for(lock, DRAIN_INTERVAL);
        if (m_stopping) break;
        lock.unlock();
        drain();
        lock.lock();
    }
}

EventHandle DeviceSpans::take_event(std::string& problem) {
    {
        std::lock_guard guard(m_mutex);
        if (!m_free.empty()) {
            const EventHandle event = m_free.back();
            m_free.pop_back();
            return event;
        }
    }
    EventHandle event = 0;
    problem = m_driver->create(event);
    return problem.empty() ? event : 0;
}

void DeviceSpans::give_back(EventHandle event) {
    std::lock_guard guard(m_mutex);
    m_free.push_back(event);
}

EventHandle DeviceSpans::begin(uint64_t stream, std::string& problem) {
    const bool captured = m_driver->is_capturing(stream);
    if (captured && !m_capturing) return 0;
    if (m_pending > MAX_PENDING) return 0;
    const EventHandle event = take_event(problem);
    if (!event) return 0;
    problem = m_driver->record(event, stream, captured);
    if (problem.empty()) return event;
    give_back(event);
    return 0;
}

std::string DeviceSpans::finish(DeviceSpan span) {
    const uint64_t graph = m_capturing;
    const bool captured = graph && m_driver->is_capturing(span.stream);
    // Asking after an event would end a capture. Outside one, a start that has executed before its
    // stop is enqueued means that the device waited for the host.
    if (!captured && m_driver->query(span.start) == EventDriver::State::Done) {
        span.record.flags |= RECORD_HOST_BOUND;
    }
    std::string problem;
    span.end = take_event(problem);
    if (span.end) problem = m_driver->record(span.end, span.stream, captured);
    if (!problem.empty()) {
        give_back(span.start);
        if (span.end) give_back(span.end);
        return problem;
    }
    std::lock_guard guard(m_mutex);
    if (captured) {
        m_graphs[graph - 1].spans.push_back(span);
    } else {
        m_queues[span.stream].push_back(span);
        m_pending += 1;
    }
    return "";
}

void DeviceSpans::cancel(EventHandle start) {
    give_back(start);
}

std::string DeviceSpans::synchronize(uint64_t stream) {
    std::string problem = m_driver->synchronize(stream);
    drain();
    return problem;
}

Lane* DeviceSpans::lane_for(const DeviceSpan& span) {
    Lane*& lane = m_lanes[{span.thread, span.stream}];
    if (!lane) {
        LaneIdentity identity;
        identity.thread = span.thread;
        identity.domain = ClockDomain::Cuda;
        identity.device = m_driver->device();
        identity.stream = span.stream;
        identity.name = "stream " + std::to_string(span.stream);
        lane = m_recorder.device_lane(identity);
    }
    return lane;
}

void DeviceSpans::lose_one() {
    std::atomic_ref<uint64_t>(m_recorder.spool().header().lost_records)
        .fetch_add(1, std::memory_order_relaxed);
}

void DeviceSpans::append_untimed(const DeviceSpan& span, uint8_t phase, uint32_t step) {
    BrickRecord record = span.record;
    record.flags = RECORD_UNTIMED;
    record.phase = phase;
    record.step = step;
    try {
        lane_for(span)->append(record, nullptr);
    } catch (const SpoolError&) {
        lose_one();
    }
}

void DeviceSpans::resolve(const DeviceSpan& span, bool keep_events) {
    Base& base = m_bases[span.stream];
    if (!base.event) {
        base.event = span.start;
        base.ns = span.host_start_ns;
        // Other streams already have a place in time; follow the first that can be compared.
        for (auto& [stream, other] : m_bases) {
            float ms = 0;
            if (stream == span.stream || !other.event) continue;
            if (!m_driver->elapsed_ms(other.event, span.start, ms).empty()) continue;
            base.ns = other.ns + uint64_t(int64_t(double(ms) * 1e6));
            break;
        }
    }
    float offset_ms = 0, duration_ms = 0;
    std::string problem = m_driver->elapsed_ms(span.start, span.end, duration_ms);
    if (problem.empty()) problem = m_driver->elapsed_ms(base.event, span.start, offset_ms);
    if (!problem.empty()) {
        append_untimed(span, span.record.phase, span.record.step);
        forget_base(base);
    } else {
        BrickRecord record = span.record;
        record.start = base.ns + uint64_t(int64_t(double(offset_ms) * 1e6));
        record.end = record.start + uint64_t(double(duration_ms < 0 ? 0 : duration_ms) * 1e6 + 0.5);
        try {
            lane_for(span)->append(record, &span.work);
        } catch (const SpoolError&) {
            lose_one();
        }
    }
    if (keep_events) return;
    if (!problem.empty()) {
        m_driver->destroy(span.start);
        m_driver->destroy(span.end);
        return;
    }
    const bool is_base = base.event == span.start;
    if (offset_ms > REBASE_MS || is_base) {
        // This span's end becomes the new base and stays out of the pool.
        if (!is_base && base.owned) give_back(base.event);
        base.ns += uint64_t(int64_t(double(offset_ms + duration_ms) * 1e6));
        base.event = span.end;
        base.owned = true;
        give_back(span.start);
        return;
    }
    give_back(span.start);
    give_back(span.end);
}

// What cannot be compared with anything is no place to measure from; the next span begins anew.
void DeviceSpans::forget_base(Base& base) {
    if (base.owned) m_driver->destroy(base.event);
    base = {};
}

void DeviceSpans::drain() {
    std::lock_guard resolving(m_resolving);
    std::vector<uint64_t> streams;
    {
        std::lock_guard guard(m_mutex);
        for (auto& [stream, queue] : m_queues) streams.push_back(stream);
    }
    for (uint64_t stream : streams) {
        for (;;) {
            DeviceSpan span;
            {
                std::lock_guard guard(m_mutex);
                std::deque<DeviceSpan>& queue = m_queues[stream];
                if (queue.empty()) break;
                span = queue.front();
            }
            const EventDriver::State state = m_driver->query(span.end);
            if (state == EventDriver::State::Pending) break;
            if (state == EventDriver::State::Done) {
                resolve(span, false);
            } else {
                append_untimed(span, span.record.phase, span.record.step);
                m_driver->destroy(span.start);
                m_driver->destroy(span.end);
            }
            std::lock_guard guard(m_mutex);
            m_queues[stream].pop_front();
            m_pending -= 1;
        }
    }
    resolve_graphs();
    // Kept up to date, so that a process that is killed has said what it cut off.
    std::atomic_ref<uint64_t>(m_recorder.spool().header().pending_device_spans)
        .store(m_pending, std::memory_order_relaxed);
}

uint64_t DeviceSpans::begin_capture() {
    std::lock_guard guard(m_mutex);
    m_graphs.emplace_back();
    m_capturing = m_graphs.size();
    return m_capturing;
}

void DeviceSpans::end_capture() {
    std::lock_guard guard(m_mutex);
    m_capturing = 0;
}

std::string DeviceSpans::before_replay(uint64_t number) {
    std::lock_guard guard(m_mutex);
    if (number == 0 || number > m_graphs.size()) return "no graph was captured under this number";
    Graph& graph = m_graphs[number - 1];
    if (graph.state == Graph::State::Unread) graph.overtaken.emplace_back(graph.phase, graph.step);
    graph.state = Graph::State::Launching;
    return "";
}

void DeviceSpans::replayed(uint64_t number, uint8_t phase, uint32_t step) {
    std::lock_guard guard(m_mutex);
    if (number == 0 || number > m_graphs.size()) return;
    Graph& graph = m_graphs[number - 1];
    graph.state = Graph::State::Unread;
    graph.phase = phase;
    graph.step = step;
    graph.host_ns = monotonic_ns();
}

void DeviceSpans::resolve_graphs() {
    size_t count = 0;
    {
        std::lock_guard guard(m_mutex);
        count = m_graphs.size();
    }
    for (size_t position = 0; position < count; ++position) {
        // Held while the events are read, so that no replay can start to overwrite them.
        std::unique_lock lock(m_mutex);
        Graph& graph = m_graphs[position];
        std::vector<std::pair<uint8_t, uint32_t>> untimed;
        untimed.swap(graph.overtaken);
        const std::vector<DeviceSpan> spans = graph.spans;
        bool is_done = graph.state == Graph::State::Unread;
        for (const DeviceSpan& span : spans) {
            if (!is_done) break;
            is_done = m_driver->query(span.end) == EventDriver::State::Done;
        }
        if (is_done) {
            for (DeviceSpan span : spans) {
                span.record.phase = graph.phase;
                span.record.step = graph.step;
                span.host_start_ns = graph.host_ns;
                resolve(span, true);
            }
            // A graph's own events are rewritten by every replay and cannot serve as a base.
            for (const DeviceSpan& span : spans) {
                Base& base = m_bases[span.stream];
                if (!base.owned) base = {};
            }
        } else if (graph.state == Graph::State::Unread && m_is_last_drain) {
            untimed.emplace_back(graph.phase, graph.step);
        }
        if (is_done || m_is_last_drain) graph.state = Graph::State::Idle;
        lock.unlock();
        for (const auto& [phase, step] : untimed) {
            for (const DeviceSpan& span : spans) append_untimed(span, phase, step);
        }
    }
}

}  // namespace brickline
