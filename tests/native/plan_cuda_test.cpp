// Prepared plans on CUDA, against a driver that is simulated: what is enqueued is kept with everything
// that it comes after, so the order of launches on streams and in graphs is checked exactly, and so is
// which kernels of a graph are patched. Nothing may be left over, and every context is put back.
#include <memory>

#include "native_test.h"
#include "plan_graph.h"
#include "plan_rows.h"
#include "plan_streams.h"
#include "simulated_cuda.h"

using namespace brickline;
using namespace native_test;
using namespace plan_rows;
using namespace simulated_cuda;

namespace {

Kernel g_kernels[64];
Kernel g_plain;  // without arguments

// Variables a and b; launch i has a buffer, perhaps one of the variables, and perhaps its blocks.
std::vector<PlanRow> random_rows(Random& random, uint32_t count) {
    std::vector<PlanRow> rows;
    for (uint32_t i = 0; i < count; ++i) {
        g_kernels[i].arguments = 3;
        PlanRow made = row(&g_kernels[i], random.one_in(9) ? 0 : 1, 1 + i);
        made.fault = 4000 + i;
        made.slots = {buffer(uint32_t(random.below(3)), 16 * i),
                      random.one_in(2) ? expression(code({{1, int64_t(random.below(2))}}), true) : value(i)};
        if (random.one_in(4)) made.sizes[0].code = code({{1, 0}, {0, 1}, {2, 0}});
        for (uint64_t k = random.below(3); k > 0 && i > 0; --k) made.dependencies.push_back(uint32_t(random.below(i)));
        rows.push_back(made);
    }
    return rows;
}

struct Bench {
    Driver driver = simulated_driver();
    std::vector<PlanRow> rows;
    std::unique_ptr<PlanProgram> program;
    PlanValue values[2] = {{.integer = 3}, {.integer = 4}};

    explicit Bench(Random& random, uint32_t count, uint32_t more_flags = 0)
        : rows(random_rows(random, count)) {
        g_device = {};
        for (PlanRow& each : rows) each.flags |= more_flags;
        program = make_program(PlanDevice::Cuda, rows, {{0, 1000, false}, {0, 1000, false}}, 3, &driver, CONTEXT);
        check(!program->set(values), "values");
        for (uint32_t k = 0; k < 3; ++k) program->bind(k, 0x10000 * (k + 1));
    }
    ~Bench() {
        check(g_device.live_events.empty() && g_device.graphs.empty() && g_device.execs.empty(),
              "nothing is left over");
        check(g_device.contexts.empty() && !g_device.wrong_context, "the context is pushed and popped");
    }
    Launched expected(uint32_t i) const {
        const brickline_launch& host = program->launch(i).host;
        return launched(reinterpret_cast<CUfunction>(program->launch(i).function), host.grid, host.lanes,
                        unsigned(host.shared_bytes), const_cast<void**>(host.arguments));
    }
    // The last launches are those of the plan, each once, and come after what they wait for.
    void check_run(const PlanOutcome& outcome, const std::string& what) const {
        const uint32_t count = program->size();
        check(outcome.done == count && !outcome.code && outcome.where == -1, what + ": all are enqueued");
        if (!check(g_device.launches.size() >= count, what + ": and arrive")) return;
        const size_t first = g_device.launches.size() - count;
        bool is_alike = true, is_ordered = true;
        for (uint32_t i = 0; i < count; ++i) {
            is_alike &= g_device.launches[first + i] == expected(i);
            is_alike &= g_device.launches[first + i].arguments.back() == 4000 + i;
            for (const uint32_t each : program->dependencies(i)) {
                is_ordered &= g_device.before[first + i].count(uint32_t(first + each)) == 1;
            }
        }
        check(is_alike, what + ": with their arguments and sizes");
        check(is_ordered, what + ": in the plan's order");
    }
};

void test_serial() {
    Random random(1);
    Bench bench(random, 12);
    bench.check_run(bench.program->run_serial(5, 0, 12), "serial");
    g_device.refuse_after = 4;
    const PlanOutcome outcome = bench.program->run_serial(5, 0, 12);
    check(outcome.done == 4 && outcome.code == REFUSED && outcome.where == 4 &&
              std::string(outcome.call) == "cuLaunchKernel", "a launch that is refused");
}

class StopSecond final : public PlanStop {
  public:
    StopSecond() : PlanStop(0) {}
    bool is_wanted() override { return ++m_asked == 2; }

  private:
    int m_asked = 0;
};

void test_a_stop() {
    Random random(8);
    Bench bench(random, 12);
    StopSecond stop;
    const PlanOutcome outcome = bench.program->run_serial(5, 0, 12, &stop);
    check(outcome.is_stopped && outcome.done == 2 && !outcome.code && outcome.where == -1 &&
              g_device.launches.size() == 2, "before the second launch and before the third it is asked");
    bench.check_run(bench.program->run_serial(5, 0, 12), "after a stop");
}

void test_streams() {
    Random random(2);
    for (int k = 0; k < 200; ++k) {
        const uint32_t count = 1 + uint32_t(random.below(40));
        Bench bench(random, count);
        PlanStreams streams(*bench.program);
        std::vector<uint64_t> handles;
        for (uint64_t n = random.below(5); n > 0; --n) handles.push_back(100 + n);
        check(streams.set_streams(handles).empty(), "streams");
        for (int repeat = 0; repeat < 3; ++repeat) {
            const uint64_t stream = 7 + uint64_t(repeat);
            bench.program->enqueue(0, stream);  // something before,
            --g_device.wrong_context;           // from a thread without the context
            const uint32_t earlier = uint32_t(g_device.launches.size() - 1);
            bench.check_run(streams.run(stream), "streams");
            bool is_after = true, is_joined = true;
            for (uint32_t i = 0; i < count; ++i) {
                is_after &= g_device.before[earlier + 1 + i].count(earlier) == 1;
                is_joined &= g_device.streams[stream].count(earlier + 1 + i) == 1;
            }
            check(is_after, "all come after what was there");
            check(is_joined, "what follows comes after all of them");
        }
        if (handles.empty()) {
            check(!g_device.records && !g_device.waits && !streams.events(), "one stream needs no events");
        }
        g_device.refuse_after = int(random.below(count));
        const PlanOutcome failed = streams.run(7);
        check(failed.code == REFUSED && failed.done < count, "a call that is refused");
        g_device.refuse_after = -1;
        bench.check_run(streams.run(8), "after a failure");
    }
}

void test_stream_choice() {
    Random random(3);
    Bench bench(random, 1);
    std::vector<PlanRow> rows(6, row(&g_plain, 1, 1));  // two chains: 0 2 4 and 1 3 5
    for (uint32_t i = 2; i < 6; ++i) rows[i].dependencies = {i - 2};
    auto program = make_program(PlanDevice::Cuda, rows, {}, 0, &bench.driver, CONTEXT);
    PlanStreams streams(*program);
    check(streams.set_streams({100}).empty() && streams.run(7).done == 6, "two chains");
    check(streams.lane(0) == 0 && streams.lane(2) == 0 && streams.lane(4) == 0, "one chain stays on its stream");
    check(streams.lane(1) == 1 && streams.lane(3) == 1 && streams.lane(5) == 1, "the other on another");
    check(g_device.records == 2 && g_device.waits == 2, "one event to fork and one to join");
    Driver old = bench.driver;
    old.stream_wait = nullptr;
    auto without = make_program(PlanDevice::Cuda, rows, {}, 0, &old, CONTEXT);
    check(PlanStreams(*without).set_streams({1}).find("cuStreamWaitEvent") != std::string::npos,
          "an old driver is named");
}

// Changes variables and addresses at random and sees that exactly the changed kernels are patched.
void check_patching(Bench& bench, PlanGraph& graph, Random& random, const std::string& what) {
    const uint32_t count = bench.program->size();
    uint64_t patched = graph.facts().patched;
    for (int repeat = 0; repeat < 12; ++repeat) {
        std::vector<Launched> before;
        for (uint32_t i = 0; i < count; ++i) before.push_back(bench.expected(i));
        if (random.one_in(2)) bench.values[random.below(2)].integer = int64_t(random.below(5));
        check(!bench.program->set(bench.values), "values");
        if (random.one_in(3)) bench.program->bind(uint32_t(random.below(3)), 0x1000 * (1 + random.below(3)));
        uint64_t changed = 0;
        for (uint32_t i = 0; i < count; ++i) changed += !(before[i] == bench.expected(i));
        const size_t earlier = g_device.patched.size();
        bench.check_run(graph.run(3), what);
        check_equal(g_device.patched.size() - earlier, changed, what + ": the changed kernels are patched");
        patched += changed;
    }
    check(graph.facts().patched == patched, what + ": patches are counted");
    check(graph.facts().instantiations == 1 && g_device.instantiations == 1, what + ": instantiated once");
}

// Dependencies that do not follow from two others, by looking for a launch between each pair.
uint64_t needed_edges(const PlanProgram& program) {
    const uint32_t count = program.size();
    std::vector<std::vector<bool>> comes_after(count, std::vector<bool>(count));
    for (uint32_t i = 0; i < count; ++i) {
        for (const uint32_t each : program.dependencies(i)) {
            comes_after[i][each] = true;
            for (uint32_t k = 0; k < each; ++k) comes_after[i][k] = comes_after[i][k] || comes_after[each][k];
        }
    }
    uint64_t needed = 0;
    for (uint32_t i = 0; i < count; ++i) {
        for (uint32_t first = 0; first < i; ++first) {
            bool is_between = false;
            for (uint32_t k = first + 1; k < i; ++k) is_between |= comes_after[i][k] && comes_after[k][first];
            needed += comes_after[i][first] && !is_between;
        }
    }
    return needed;
}

void test_built_graphs() {
    Random random(4);
    for (int k = 0; k < 60; ++k) {
        const uint32_t count = 1 + uint32_t(random.below(30));
        const bool is_parallel = k % 2 == 0;
        Bench bench(random, count);
        PlanGraph graph(*bench.program);
        check(graph.build(is_parallel).empty() && graph.is_ready(), "built");
        bench.check_run(graph.run(3), "graph");
        check(g_device.patched.empty(), "nothing has changed");
        check(graph.facts().nodes == count, "a node for each launch");
        check_equal(graph.facts().edges, is_parallel ? needed_edges(*bench.program) : count - 1, "edges");
        check_equal(graph.facts().early, 0, "nobody begins early who does not wait");
        if (!is_parallel) check_equal(g_device.before.back().size(), count - 1, "a chain");
        check_patching(bench, graph, random, "graph");
    }
}

// Launches that wait by themselves begin early, where the driver can have that.
void test_early_edges() {
    Random random(11);
    for (int k = 0; k < 40; ++k) {
        const uint32_t count = 2 + uint32_t(random.below(30));
        Bench bench(random, count, PLAN_WAITS);
        const bool refuses = k % 4 == 0;
        g_device.refuses_early = refuses;
        PlanGraph graph(*bench.program);
        check(graph.build(k % 2 == 0).empty() && graph.is_ready(), "built");
        const PlanGraphFacts facts = graph.facts();
        check_equal(facts.early, refuses ? 0 : facts.edges, "every edge is early, or none");
        check_equal(facts.instantiations, 1, "instantiated once");
        bench.check_run(graph.run(3), "early edges keep the order");
        check_patching(bench, graph, random, "early");
        g_device.refuses_early = false;
    }
}

void test_captured_graphs() {
    Random random(5);
    for (int k = 0; k < 40; ++k) {
        const uint32_t count = 1 + uint32_t(random.below(20));
        Bench bench(random, count);
        PlanGraph graph(*bench.program);
        check(graph.begin_capture(9).empty() && graph.is_capturing(), "a capture begins");
        uint32_t others = 0;
        for (uint32_t i = 0; i < count; ++i) {
            if (random.one_in(2)) capture_node({}, false), ++others;  // a profiler's event
            check(graph.capture_launch(i).empty(), "a launch is captured");
        }
        check(!graph.capture_launch(0).empty(), "but not twice");
        check(graph.end_capture().empty() && graph.is_ready() && !graph.is_capturing(), "and it ends");
        check_equal(graph.facts().nodes, count + others, "with all nodes");
        bench.check_run(graph.run(3), "captured");
        check_patching(bench, graph, random, "captured");
        check(graph.begin_capture(9).empty() && graph.capture_launch(0).empty(), "a second capture");
    }  // which the end of the graph abandons
}

void test_graph_failures() {
    Random random(6);
    for (int after = 0; after < 10; ++after) {
        Bench bench(random, 6);
        PlanGraph graph(*bench.program);
        g_device.refuse_after = after;
        const std::string problem = graph.build(true);
        check(problem.empty() == (after >= 8) && graph.is_ready() == problem.empty(), "a build that is refused");
        check(problem.empty() || problem.find("failed") != std::string::npos, "in the driver's words");
        g_device.refuse_after = -1;
        check(graph.build(false).empty(), "and another that is not");
        bench.values[0].integer = 9;
        bench.values[1].integer = 8;
        check(!bench.program->set(bench.values), "values");
        g_device.refuse_after = after;
        const PlanOutcome outcome = graph.run(3);
        g_device.refuse_after = -1;
        check(outcome.code == 0 || outcome.done == 0, "a run that is refused");
        bench.check_run(graph.run(3), "a run after it");
        g_device.refuse_after = after;
        std::string said = graph.begin_capture(9);
        for (uint32_t i = 0; i < 6 && said.empty(); ++i) said = graph.capture_launch(i);
        if (said.empty()) said = graph.end_capture();
        g_device.refuse_after = -1;
        check(!said.empty() && !graph.is_capturing() && !g_device.capture, "a capture that is refused is over");
    }
    Bench bench(random, 2);
    Driver old = bench.driver;
    old.graph_launch = nullptr;
    auto without = make_program(PlanDevice::Cuda, {row(&g_plain, 1, 1)}, {}, 0, &old, CONTEXT);
    check(PlanGraph(*without).build(true).find("cuGraphLaunch") != std::string::npos, "an old driver is named");
    old = bench.driver;
    old.capture_info = nullptr;
    check(PlanGraph(*without).begin_capture(1).find("cuStreamGetCaptureInfo") != std::string::npos, "for each way");
}

}  // namespace

int main() {
    watchdog(120);
    test_serial();
    test_a_stop();
    test_streams();
    test_stream_choice();
    test_built_graphs();
    test_early_edges();
    test_captured_graphs();
    test_graph_failures();
    return finish();
}
