// Spans on a device's clock, against a device that is simulated: streams run when the test says so,
// events can fail, and a graph's events are rewritten by each replay. Times are exact, so every
// statistic is known beforehand.
#include "device_spans.h"

#include <atomic>
#include <cstring>
#include <set>

#include "native_test.h"

using namespace brickline;
using namespace native_test;

namespace {

Scratch g_scratch;

// Streams are queues of kernels and events; run() executes them on the stream's own clock.
class Device {
  public:
    using State = EventDriver::State;

    void kernel(uint64_t stream, uint64_t ns) {
        const std::lock_guard guard(m_mutex);
        m_streams[stream].work.push_back({0, ns});
    }
    // Executes everything that is enqueued, or only so many entries.
    void run(uint64_t stream, size_t entries = ~size_t(0)) {
        const std::lock_guard guard(m_mutex);
        run_locked(stream, entries);
    }
    void idle(uint64_t stream, uint64_t ns) {
        const std::lock_guard guard(m_mutex);
        m_streams[stream].now_ns += ns;
    }
    // What stands in the stream never executes.
    void fail(uint64_t stream) {
        const std::lock_guard guard(m_mutex);
        for (const Work& work : m_streams[stream].work) {
            if (work.event) m_events[work.event].state = State::Failed;
        }
        m_streams[stream].work.clear();
    }
    void begin_capture(uint64_t stream) {
        const std::lock_guard guard(m_mutex);
        m_streams[stream].capturing = true;
        m_graph.clear();
    }
    std::vector<std::pair<uint64_t, uint64_t>> end_capture(uint64_t stream) {
        const std::lock_guard guard(m_mutex);
        m_streams[stream].capturing = false;
        return std::move(m_graph);
    }
    // As in CUDA, the events keep their old times until the replay reaches them.
    void replay(uint64_t stream, const std::vector<std::pair<uint64_t, uint64_t>>& graph,
                uint64_t kernel_ns) {
        const std::lock_guard guard(m_mutex);
        for (const auto& [event, ns] : graph) {
            if (event) m_events[event].state = State::Pending;
            m_streams[stream].work.push_back({event, event ? 0 : kernel_ns});
        }
    }
    void captured_kernel() {
        const std::lock_guard guard(m_mutex);
        m_graph.push_back({0, 0});
    }
    size_t alive() {
        const std::lock_guard guard(m_mutex);
        return m_events.size();
    }

    std::atomic<bool> refuse_create{false}, refuse_record{false}, refuse_elapsed{false};

  private:
    friend class SimulatedDriver;
    struct Work {
        uint64_t event;  // 0: a kernel
        uint64_t ns;
    };
    struct Stream {
        std::vector<Work> work;
        uint64_t now_ns = 5000000000ull;
        bool capturing = false;
    };
    struct Event {
        State state = State::Done;  // never recorded counts as done, as in CUDA
        bool recorded = false;
        uint64_t ns = 0;
    };

    void run_locked(uint64_t stream, size_t entries) {
        Stream& on = m_streams[stream];
        size_t done = 0;
        for (; done < on.work.size() && done < entries; ++done) {
            on.now_ns += on.work[done].ns;
            if (on.work[done].event) m_events[on.work[done].event] = {State::Done, true, on.now_ns};
        }
        on.work.erase(on.work.begin(), on.work.begin() + ptrdiff_t(done));
    }

    std::mutex m_mutex;
    std::map<uint64_t, Stream> m_streams;
    std::map<uint64_t, Event> m_events;
    std::vector<std::pair<uint64_t, uint64_t>> m_graph;
    uint64_t m_next = 1;
};

class SimulatedDriver final : public EventDriver {
  public:
    explicit SimulatedDriver(Device& device) : m_device(device) {}

    int device() const override { return 0; }
    std::string create(EventHandle& event) override {
        const std::lock_guard guard(m_device.m_mutex);
        if (m_device.refuse_create) return "out of events";
        event = m_device.m_next++;
        m_device.m_events[event] = {};
        return "";
    }
    void destroy(EventHandle event) override {
        const std::lock_guard guard(m_device.m_mutex);
        if (m_device.m_events.erase(event) != 1) check(false, "an event is destroyed once");
    }
    std::string record(EventHandle event, uint64_t stream, bool captured) override {
        const std::lock_guard guard(m_device.m_mutex);
        if (m_device.refuse_record) return "record refused";
        if (!m_device.m_events.count(event)) check(false, "a live event is recorded");
        if (captured) {
            m_device.m_graph.push_back({event, 0});
            return "";
        }
        m_device.m_events[event].state = State::Pending;
        m_device.m_streams[stream].work.push_back({event, 0});
        return "";
    }
    State query(EventHandle event) override {
        const std::lock_guard guard(m_device.m_mutex);
        const auto found = m_device.m_events.find(event);
        if (found == m_device.m_events.end()) check(false, "a live event is asked after");
        return found == m_device.m_events.end() ? State::Failed : found->second.state;
    }
    std::string elapsed_ms(EventHandle from, EventHandle to, float& ms) override {
        const std::lock_guard guard(m_device.m_mutex);
        if (m_device.refuse_elapsed) return "elapsed refused";
        const Device::Event &a = m_device.m_events[from], &b = m_device.m_events[to];
        if (!a.recorded || !b.recorded || a.state != State::Done || b.state != State::Done) {
            return "not executed";
        }
        ms = float(double(int64_t(b.ns - a.ns)) * 1e-6);
        return "";
    }
    std::string synchronize(uint64_t stream) override {
        const std::lock_guard guard(m_device.m_mutex);
        m_device.run_locked(stream, ~size_t(0));
        return "";
    }
    bool is_capturing(uint64_t stream) override {
        const std::lock_guard guard(m_device.m_mutex);
        return m_device.m_streams[stream].capturing;
    }
    void enter_thread() override {}

  private:
    Device& m_device;
};

std::vector<SlotDefinition> slots() {
    std::vector<SlotDefinition> made(4);
    for (uint32_t i = 0; i < 4; ++i) made[i].name = "brick " + std::to_string(i);
    return made;
}

// A device, a recorder and the spans between them; on closing, no event may be left over.
struct Bench {
    Device device;
    TickSource source{ClockKind::Manual};
    std::string path = g_scratch.fresh();
    Recorder recorder{{path}, source, slots()};
    std::unique_ptr<DeviceSpans> spans =
        std::make_unique<DeviceSpans>(std::make_unique<SimulatedDriver>(device), recorder);

    Snapshot look() {
        spans->drain();
        return read_spool(path);
    }
    Snapshot close() {
        spans.reset();
        check_equal(device.alive(), 0u, "every event is destroyed in the end");
        recorder.close();
        return read_spool(path);
    }
};

DeviceSpan span_of(EventHandle start, uint64_t stream, uint32_t slot, uint8_t depth, uint32_t thread = 1) {
    DeviceSpan span;
    span.start = start;
    span.stream = stream;
    span.host_start_ns = 1000;
    span.thread = thread;
    span.record.slot = slot;
    span.record.depth = depth;
    span.record.elements_low = 1;
    span.record.flags = RECORD_WORK;
    span.work.flags = RECORD_IS_WORK;
    span.work.detail = 50;
    return span;
}

// One brick with one kernel.
void brick(Bench& bench, uint64_t stream, uint32_t slot, uint64_t ns, uint32_t thread = 1) {
    std::string problem;
    const EventHandle start = bench.spans->begin(stream, problem);
    bench.device.kernel(stream, ns);
    if (start) bench.spans->finish(span_of(start, stream, slot, 0, thread));
}

Node sum(const Snapshot& snapshot, uint32_t slot) {
    Node total{};
    total.first_ns = ~0ull;
    for (const Node& node : snapshot.nodes) {
        if (node.slot != slot) continue;
        total.count += node.count;
        total.timed += node.timed;
        total.total_ns += node.total_ns;
        total.exclusive_ns += node.exclusive_ns;
        total.host_ns += node.host_ns;
        total.host_bound += node.host_bound;
        total.first_ns = std::min(total.first_ns, node.first_ns);
        total.last_ns = std::max(total.last_ns, node.last_ns);
    }
    return total;
}

void test_nested() {
    Bench bench;
    std::string problem;
    for (int i = 0; i < 50; ++i) {
        const EventHandle outer = bench.spans->begin(7, problem);
        bench.device.kernel(7, 1000);
        const EventHandle inner = bench.spans->begin(7, problem);
        bench.device.kernel(7, 23456);
        bench.spans->finish(span_of(inner, 7, 1, 2));  // the brick between is on another stream
        bench.device.kernel(7, 2000);
        bench.spans->finish(span_of(outer, 7, 0, 0));
        bench.device.run(7);
    }
    const Snapshot snapshot = bench.look();
    check_consistent(snapshot, "nested");
    const Node outer = sum(snapshot, 0), inner = sum(snapshot, 1);
    check(outer.timed == 50 && inner.timed == 50, "all are timed");
    check_equal(outer.total_ns, 50u * 26456, "inclusive time in the stream");
    check_equal(outer.exclusive_ns, 50u * 3000, "exclusive time in the stream");
    check_equal(inner.total_ns, 50u * 23456, "inner time");
    check_equal(inner.host_ns, 50u * 50, "host time between the enqueues");
    check_equal(outer.host_bound + inner.host_bound, 0u, "the host was ahead");
    check(snapshot.lanes.size() == 1 && snapshot.lanes[0].stream == 7 && snapshot.lanes[0].device == 0,
          "a lane of the stream");
    check_equal(bench.spans->pending(), 0u, "nothing waits");
    bench.close();
}

void test_host_bound() {
    Bench bench;
    std::string problem;
    for (int i = 0; i < 10; ++i) {
        const EventHandle start = bench.spans->begin(0, problem);
        if (i < 4) bench.device.run(0);
        bench.device.kernel(0, 100);
        bench.spans->finish(span_of(start, 0, 0, 0));
    }
    check_equal(sum(bench.close(), 0).host_bound, 4u, "bricks that waited for the host");
}

void test_streams_out_of_order() {
    Bench bench;
    for (int i = 0; i < 5; ++i) brick(bench, 1, 0, 10000);
    for (int i = 0; i < 7; ++i) brick(bench, 2, 1, 3000);
    Snapshot snapshot = bench.look();
    check_equal(total_count(snapshot), 0u, "nothing has executed");
    check_equal(bench.spans->pending(), 12u, "all wait");
    bench.device.run(2);
    snapshot = bench.look();
    check(sum(snapshot, 1).timed == 7 && sum(snapshot, 0).count == 0, "the later stream is done first");
    check_equal(read_spool(bench.path).header.pending_device_spans, 5u, "a kill now would be reported");
    bench.device.run(1, 6);  // start, kernel, end, twice
    snapshot = bench.look();
    check(sum(snapshot, 0).timed == 2 && bench.spans->pending() == 3, "as far as the stream has come");
    snapshot = bench.close();  // waits for the rest
    check_consistent(snapshot, "out of order");
    check_equal(sum(snapshot, 0).total_ns, 50000u, "all in the end");
    check_equal(snapshot.header.pending_device_spans, 0u, "nothing is cut off");
}

void test_failed_events() {
    Bench bench;
    brick(bench, 1, 0, 500);
    bench.device.run(1);
    bench.spans->drain();
    for (int i = 0; i < 3; ++i) brick(bench, 1, 0, 500);
    bench.device.fail(1);
    Snapshot snapshot = bench.look();
    check(sum(snapshot, 0).count == 4 && sum(snapshot, 0).timed == 1, "failed events are counted, untimed");
    for (int i = 0; i < 2; ++i) brick(bench, 1, 0, 500);
    bench.device.run(1);
    snapshot = bench.close();
    check(sum(snapshot, 0).count == 6 && sum(snapshot, 0).timed == 3, "and timing goes on");
}

// The driver has no time for the very first span, or for one in the middle.
void test_refused_times() {
    for (const int healthy : {0, 3}) {
        Bench bench;
        for (int i = 0; i < healthy; ++i) brick(bench, 1, 0, 500);
        bench.device.run(1);
        bench.spans->drain();
        bench.device.refuse_elapsed = true;
        brick(bench, 1, 0, 500);
        bench.device.run(1);
        bench.spans->drain();
        bench.device.refuse_elapsed = false;
        for (int i = 0; i < 5; ++i) brick(bench, 1, 0, 500);
        bench.device.run(1);
        const Node node = sum(bench.close(), 0);
        check(node.count == uint64_t(healthy) + 6 && node.timed == uint64_t(healthy) + 5,
              "one span without a time does not spoil the stream");
        check_equal(node.total_ns, node.timed * 500, "nor its times");
    }
}

void test_refusing_driver() {
    Bench bench;
    std::string problem;
    bench.device.refuse_create = true;
    check(bench.spans->begin(1, problem) == 0 && problem == "out of events", "no event, in its own words");
    bench.device.refuse_create = false;
    problem.clear();
    bench.device.refuse_record = true;
    check(bench.spans->begin(1, problem) == 0 && problem == "record refused", "no start");
    bench.device.refuse_record = false;
    const EventHandle start = bench.spans->begin(1, problem);
    check(start != 0, "the driver recovers");
    bench.device.refuse_record = true;
    check(bench.spans->finish(span_of(start, 1, 0, 0)) == "record refused", "no end");
    bench.device.refuse_record = false;
    const EventHandle again = bench.spans->begin(1, problem);
    bench.device.refuse_create = true;
    bench.spans->cancel(again);
    bench.device.refuse_create = false;
    brick(bench, 1, 0, 100);
    check_equal(sum(bench.close(), 0).timed, 1u, "what could be timed is");
}

// Hours on one stream: elapsed times are floats, and the place in time must not drift away.
void test_long_stream() {
    Bench bench;
    uint64_t elapsed = 0;
    for (int i = 0; i < 400; ++i) {
        brick(bench, 1, 0, 40000);
        bench.device.run(1);
        bench.spans->drain();
        bench.device.idle(1, 200000000);
        elapsed += 40000 + 200000000;
    }
    const Node node = sum(bench.close(), 0);
    check_equal(node.total_ns, 400u * 40000, "lengths are exact");
    const uint64_t span = node.last_ns - node.first_ns, expected = elapsed - 200000000;
    check(span + 100000 > expected && span < expected + 100000, "80 s later within 0.1 ms");
}

std::vector<std::pair<uint64_t, uint64_t>> capture(Bench& bench, uint64_t stream, uint64_t& number) {
    std::string problem;
    number = bench.spans->begin_capture();
    bench.device.begin_capture(stream);
    for (uint32_t slot = 0; slot < 2; ++slot) {
        const EventHandle start = bench.spans->begin(stream, problem);
        bench.device.captured_kernel();
        check(start != 0, "a start is captured");
        bench.spans->finish(span_of(start, stream, slot, 0));
    }
    auto graph = bench.device.end_capture(stream);
    bench.spans->end_capture();
    return graph;
}

void replay(Bench& bench, uint64_t stream, uint64_t number,
            const std::vector<std::pair<uint64_t, uint64_t>>& graph, uint64_t ns, uint8_t phase = 0) {
    check(bench.spans->before_replay(number).empty(), "a known graph");
    bench.device.replay(stream, graph, ns);
    bench.spans->replayed(number, phase, 1);
}

void test_graph_replays() {
    Bench bench;
    uint64_t number = 0;
    const auto graph = capture(bench, 3, number);
    check_equal(total_count(bench.look()), 0u, "capturing measures nothing");
    for (int i = 0; i < 20; ++i) {
        replay(bench, 3, number, graph, 1000u + uint64_t(i));
        bench.device.run(3);
        bench.spans->drain();
    }
    Snapshot snapshot = bench.look();
    check_consistent(snapshot, "replays");
    check(sum(snapshot, 0).timed == 20 && sum(snapshot, 1).timed == 20, "every replay is read");
    check_equal(sum(snapshot, 0).total_ns, 20u * 1000 + 190, "with its own times");
    check(bench.spans->before_replay(99).find("no graph") == 0 &&
              bench.spans->before_replay(0).find("no graph") == 0, "an unknown graph");
    bench.close();
}

void test_overtaken_replays() {
    Bench bench;
    uint64_t number = 0;
    const auto graph = capture(bench, 3, number);
    // The first two are overtaken: their times were never read. They have their own phases.
    for (uint8_t phase = 1; phase <= 3; ++phase) replay(bench, 3, number, graph, 1000, phase);
    bench.spans->drain();
    bench.device.run(3);
    const Snapshot snapshot = bench.look();
    const Node node = sum(snapshot, 0);
    check(node.count == 3 && node.timed == 1, "an overtaken replay counts as untimed");
    std::set<uint16_t> phases;
    for (const Node& each : snapshot.nodes) phases.insert(each.phase);
    check(phases == std::set<uint16_t>{1, 2, 3}, "each in the phase in which it was launched");
    replay(bench, 3, number, graph, 1000, 1);
    const Snapshot closed = bench.close();
    check_equal(sum(closed, 0).count, 4u, "a replay that is unread at the end is counted");
    check_equal(sum(closed, 0).timed, 2u, "and timed, since the end waits for it");
}

// A graph on two streams; neither may measure eager bricks against events that replays rewrite.
void test_graph_on_two_streams() {
    Bench bench;
    std::string problem;
    const uint64_t number = bench.spans->begin_capture();
    std::vector<std::pair<uint64_t, uint64_t>> graphs[2];
    for (uint64_t stream = 0; stream < 2; ++stream) {
        bench.device.begin_capture(stream);
        const EventHandle start = bench.spans->begin(stream, problem);
        bench.device.captured_kernel();
        bench.spans->finish(span_of(start, stream, uint32_t(stream), 0));
        graphs[stream] = bench.device.end_capture(stream);
    }
    bench.spans->end_capture();
    for (int i = 0; i < 3; ++i) {
        bench.spans->before_replay(number);
        for (uint64_t stream = 0; stream < 2; ++stream) {
            bench.device.replay(stream, graphs[stream], 1000);
            bench.device.run(stream);
            bench.device.idle(stream, 10000000);
        }
        bench.spans->replayed(number, 0, 0);
        bench.spans->drain();
        for (uint64_t stream = 0; stream < 2; ++stream) brick(bench, stream, 2 + uint32_t(stream), 700);
        for (uint64_t stream = 0; stream < 2; ++stream) bench.device.run(stream);
        bench.spans->drain();
    }
    const Snapshot snapshot = bench.close();
    check_consistent(snapshot, "two streams of a graph");
    for (uint32_t slot = 0; slot < 4; ++slot) check_equal(sum(snapshot, slot).timed, 3u, "all are timed");
    for (uint32_t slot = 2; slot < 4; ++slot) {
        const Node node = sum(snapshot, slot);
        check_equal(node.total_ns, 2100u, "eager bricks beside a graph");
        check(node.last_ns - node.first_ns > 20000000 && node.last_ns - node.first_ns < 21000000,
              "stand where they were");
    }
}

// Nobody announced this capture: bricks inside are not timed, and nothing is recorded into it.
void test_unannounced_capture() {
    Bench bench;
    std::string problem;
    bench.device.begin_capture(5);
    check(bench.spans->begin(5, problem) == 0 && problem.empty(), "left alone");
    check(bench.device.end_capture(5).empty(), "no event in the graph");
    bench.close();
}

void test_many_threads() {
    constexpr uint32_t THREADS = 8;
    constexpr int ROUNDS = 400;
    Bench bench;
    std::atomic<bool> stop{false};
    std::thread device([&] {  // executes everything, a little late
        while (!stop) {
            for (uint64_t stream = 0; stream <= THREADS; ++stream) bench.device.run(stream, 5);
        }
    });
    std::thread resolver([&] {
        while (!stop) {
            bench.spans->drain();
            (void)bench.spans->pending();
        }
    });
    std::vector<std::thread> threads;
    for (uint32_t thread = 1; thread <= THREADS; ++thread) {
        threads.emplace_back([&, thread] {
            for (int i = 0; i < ROUNDS; ++i) {
                brick(bench, thread, 0, 100, thread);  // a stream of its own
                brick(bench, 0, 1, 100, thread);       // and one that all share
            }
        });
    }
    std::thread capturing([&] {  // captures come and go meanwhile
        for (int i = 0; i < 50; ++i) {
            bench.spans->begin_capture();
            bench.spans->end_capture();
        }
    });
    for (std::thread& thread : threads) thread.join();
    capturing.join();
    stop = true;
    device.join();
    resolver.join();
    const Snapshot snapshot = bench.close();
    check_consistent(snapshot, "threads");
    check_equal(sum(snapshot, 0).timed, uint64_t(THREADS) * ROUNDS, "own streams lose nothing");
    check_equal(sum(snapshot, 0).total_ns, uint64_t(THREADS) * ROUNDS * 100, "nor time");
    check_equal(sum(snapshot, 1).timed, uint64_t(THREADS) * ROUNDS, "nor does a shared one");
    check_equal(snapshot.lanes.size(), 2u * THREADS, "a lane for each thread and stream");
}

}  // namespace

int main() {
    watchdog(120);
    test_nested();
    test_host_bound();
    test_streams_out_of_order();
    test_failed_events();
    test_refused_times();
    test_refusing_driver();
    test_long_stream();
    test_graph_replays();
    test_overtaken_replays();
    test_graph_on_two_streams();
    test_unannounced_capture();
    test_many_threads();
    return finish();
}
