// GraphStore and its analyses without Python, for ASan, UBSan and TSan builds. Links the core's
// graph sources alone; prints "N passed, 0 failed" and exits 0, or names what failed and exits 1.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "graph.h"
#include "graph_analysis.h"

using namespace brickline;

namespace {

int g_passed = 0;
int g_failed = 0;

void check(bool ok, const char* what) {
    if (ok) {
        ++g_passed;
    } else {
        ++g_failed;
        std::printf("FAILED: %s\n", what);
    }
}

template <class Fault>
void check_throws(const std::function<void()>& call, const char* what) {
    try {
        call();
        check(false, what);
    } catch (const Fault&) {
        check(true, what);
    }
}

KernelDetail kernel_detail(double intensity, double tflops) {
    KernelDetail detail{};
    detail.arithmetic_intensity = intensity;
    detail.achieved_tflops = tflops;
    return detail;
}

uint32_t add_brick(GraphStore& store, const char* name, uint64_t timing_ns) {
    return store.add_brick(brick_row(store.intern(name), -1, -1, timing_ns, 1));
}

void test_a_closed_store_takes_nothing() {
    GraphStore store;
    const uint32_t first = add_brick(store, "first", 5), second = add_brick(store, "second", 6);
    store.set_open(false);
    const uint64_t bytes = store.bytes();
    check(!store.is_open() && add_brick(store, "first", 7) == NO_NODE, "no node");
    check(store.add_layer(3, std::nullopt) == NO_NODE &&
              store.add_function("f", "f.py", 3, std::nullopt) == NO_NODE,
          "nor of another kind");
    check(!store.add_edge(first, second, EdgeKind::Sequence) &&
              !store.add_transfer_edge(first, second, 8, TransferDirection::HostToDevice) &&
              !store.add_edge(first, NO_NODE, EdgeKind::Calls),
          "no edge");
    store.add_sequence(std::vector<uint32_t>{first, second});
    const GraphCounts counts = store.counts();
    check(counts.nodes == 2 && counts.edges == 0 && store.bytes() == bytes, "names neither");
    check(counts.dropped_nodes == 0 && counts.dropped_edges == 0, "and nothing was dropped");
    check_throws<GraphFault>([&] { store.add_edge(first, 99, EdgeKind::Calls); }, "ids are checked");
    store.set_open(true);
    check(store.add_edge(first, second, EdgeKind::Sequence), "open again");
}

void test_bricks_in_post_order() {
    GraphStore store;
    std::vector<GraphChild> children;
    for (uint64_t t : {50, 200, 150, 300}) children.push_back({add_brick(store, "child", t)});
    const GraphNodeRow parent = brick_row(store.intern("parent"), -1, 0, 710, 1);
    const uint32_t id = store.add_brick_with_children(parent, children);
    check(store.counts().edges == 7, "four Contains and three Sequence edges");
    check(store.outgoing(id).size() == 4 && store.incoming(children[3].node).size() == 2,
          "edges are found from both ends");
    const CriticalPath path = critical_path(store);
    check(path.total_ns == 710, "a container's time is not added to its contents'");
    check(path.steps.size() == 5 && path.steps.back().node == id &&
              path.steps.back().contribution_ns == 10,
          "the container adds its remainder");
    for (uint64_t slack : slack_ns(store)) check(slack == 0, "nothing on the path has slack");
}

void test_dropped_nodes() {
    GraphStore store(2);
    const uint32_t a = add_brick(store, "a", 1);
    const uint32_t b = add_brick(store, "b", 2);
    const GraphChild children[] = {{a}, {}, {b}};
    const GraphNodeRow row = brick_row(store.intern("c"), -1, -1, 3, 1);
    check(store.add_brick_with_children(row, children) == NO_NODE, "budget refuses the third node");
    check(store.counts().edges == 1 && store.counts().dropped_nodes == 1,
          "the order of the children is kept without their parent");
    check(store.add_kernel("new name", kernel_detail(1, 1), {}) == NO_NODE, "kernel is refused");
    check(store.counts().strings == 3, "a refused node leaves no name behind");
    check(critical_path(store).total_ns == 3, "path over what is stored");
}

void test_cycle_and_faults() {
    GraphStore store;
    const uint32_t a = add_brick(store, "a", 1), b = add_brick(store, "b", 1);
    store.add_edge(a, b, EdgeKind::DependsOn);
    store.add_edge(b, a, EdgeKind::Sequence);
    try {
        critical_path(store);
        check(false, "cycle is reported");
    } catch (const GraphCycle& cycle) {
        check(cycle.nodes.size() == 2, "cycle names its nodes");
        check(std::strstr(cycle.what(), "'a'") && std::strstr(cycle.what(), "'b'"), "by name");
    }
    check_throws<GraphFault>([&] { store.add_edge(a, 2, EdgeKind::Calls); }, "unknown node");
    check_throws<GraphFault>([&] { store.add_brick(GraphNodeRow{}); }, "unknown name");
    check_throws<GraphFault>([&] { roofline_distance(store, 0, 1); }, "peak of 0");
}

void test_deep_and_wide() {
    constexpr uint32_t DEPTH = 200'000;  // recursion anywhere would overflow the stack
    GraphStore store;
    uint32_t inner = add_brick(store, "n", 1);
    for (uint32_t i = 1; i < DEPTH; ++i) {
        const GraphChild child[] = {{inner}};
        inner = store.add_brick_with_children(brick_row(store.intern("n"), -1, -1, i + 1, 1), child);
    }
    const CriticalPath path = critical_path(store);
    check(path.total_ns == DEPTH && path.steps.size() == DEPTH, "deep nesting");
    store.add_edge(inner, 0, EdgeKind::DependsOn);
    check_throws<GraphCycle>([&] { critical_path(store); }, "deep cycle");
}

void test_saturation() {
    GraphStore store;
    const uint32_t a = add_brick(store, "a", ~0ull), b = add_brick(store, "b", ~0ull);
    store.add_edge(a, b, EdgeKind::DependsOn);
    check(critical_path(store).total_ns == ~0ull, "times saturate instead of wrapping");
    check(slack_ns(store).size() == 2, "slack survives saturation");
}

class RowsSink : public GraphSink {
public:
    void on_string(uint32_t id, std::string_view text) noexcept override {
        m_in_order = m_in_order && id == rows.strings.size();
        rows.strings.emplace_back(text);
    }
    void on_node(const GraphNodeRow& row) noexcept override {
        m_in_order = m_in_order && row.name < rows.strings.size();
        rows.nodes.push_back(row);
    }
    void on_edge(const GraphEdgeRow& row) noexcept override {
        m_in_order = m_in_order && row.source < rows.nodes.size() && row.target < rows.nodes.size();
        rows.edges.push_back(row);
    }
    void on_detail(const GraphDetailRow& row) noexcept override { rows.details.push_back(row); }
    void on_clear() noexcept override { rows = {}; }
    bool in_order() const { return m_in_order; }
    GraphRows rows;

private:
    bool m_in_order = true;
};

bool same_graph(const GraphStore& a, const GraphStore& b) {
    const GraphRows left = a.rows(), right = b.rows();
    return left.strings == right.strings && left.nodes.size() == right.nodes.size() &&
           left.edges.size() == right.edges.size() &&
           left.details.size() == right.details.size() &&
           critical_path(a).total_ns == critical_path(b).total_ns;
}

void test_sink_and_load() {
    GraphStore store;
    const uint32_t early = add_brick(store, "before the sink", 5);
    RowsSink sink;
    store.attach_sink(&sink);
    const uint32_t kernel = store.add_kernel("k", kernel_detail(NAN, NAN), 7);
    const uint32_t copy =
        store.add_transfer("host", "gpu", 64, TransferDirection::HostToDevice, 3);
    store.add_function("f", "file.py", 3, {});
    store.add_async_task("t", {1, 2}, 9);
    store.add_transfer_edge(copy, kernel, 64, TransferDirection::HostToDevice);
    store.add_edge(early, copy, EdgeKind::Sequence);
    check(sink.in_order(), "rows arrive after what they name");
    check_throws<GraphFault>([&] { store.load(sink.rows); }, "no load under a sink");
    GraphStore again;
    again.load(sink.rows);
    check(same_graph(store, again), "a sink's rows rebuild the graph");
    check(again.node(copy).target == "gpu" && again.edge_detail(0)->transfer.bytes == 64,
          "details are found again");

    GraphRows torn = sink.rows;
    torn.nodes.resize(2);
    check_throws<GraphFault>([&] { again.load(torn); }, "a torn table is refused");
    check(same_graph(store, again), "and leaves the store as it was");
    check(torn.drop_torn_tail() > 0, "a torn tail is dropped");
    again.load(torn);
    check(again.counts().nodes == 2 && again.counts().edges == 0, "what is whole remains");

    store.clear();
    check(sink.rows.nodes.empty() && store.counts().strings == 0, "clear reaches the sink");
    store.attach_sink(nullptr);
}

// Every byte of every row set to every of a few values: an error or a graph, never a crash.
void test_damaged_rows() {
    GraphStore store;
    const uint32_t kernel = store.add_kernel("k", kernel_detail(1, 1), 7);
    const uint32_t copy = store.add_transfer("a", "b", 1, TransferDirection::DeviceToHost, 3);
    store.add_transfer_edge(copy, kernel, 64, TransferDirection::HostToDevice);
    const GraphRows sound = store.rows();
    size_t refused = 0;
    const auto attempt = [&](const GraphRows& rows) {
        GraphStore target;
        try {
            target.load(rows);
            for (uint32_t id = 0; id < target.counts().nodes; ++id) target.node(id);
            critical_path(target);
            ping_pong(target);
        } catch (const GraphFault&) {
            ++refused;
        }
    };
    const auto damage = [&](auto member) {
        GraphRows rows = sound;
        auto& table = rows.*member;
        auto* bytes = reinterpret_cast<uint8_t*>(table.data());
        for (size_t i = 0; i < table.size() * sizeof(table[0]); ++i)
            for (uint8_t value : {0x01, 0x7f, 0x80, 0xff}) {
                const uint8_t was = bytes[i];
                bytes[i] = value;
                attempt(rows);
                bytes[i] = was;
            }
    };
    damage(&GraphRows::nodes);
    damage(&GraphRows::edges);
    damage(&GraphRows::details);
    check(refused > 100, "damage is refused");
}

void test_threads() {
    constexpr int WORKERS = 4;
    constexpr int ROUNDS = 2000;
    GraphStore store;
    RowsSink sink;
    store.attach_sink(&sink);
    std::atomic<bool> stop{false};
    std::thread reader([&] {
        while (!stop) {
            critical_path(store);
            store.nodes_by_name("leaf");
            if (store.counts().nodes) store.outgoing(0);
        }
    });
    std::vector<std::thread> workers;
    for (int worker = 0; worker < WORKERS; ++worker)
        workers.emplace_back([&store] {
            for (int i = 0; i < ROUNDS; ++i) {
                const GraphChild children[] = {
                    {add_brick(store, "leaf", 10)},
                    {store.add_kernel("k", kernel_detail(1, 1), 5), EdgeKind::Launches}};
                store.add_brick_with_children(brick_row(store.intern("root"), 0, i, 15, 1),
                                              children);
            }
        });
    for (std::thread& worker : workers) worker.join();
    stop = true;
    reader.join();
    const GraphCounts counts = store.counts();
    check(counts.nodes == 3u * WORKERS * ROUNDS && counts.edges == counts.nodes,
          "threads lose nothing");
    check(sink.in_order() && sink.rows.nodes.size() == counts.nodes, "nor does their sink");
    check(critical_path(store).total_ns == 15, "roots of threads are independent");
    store.attach_sink(nullptr);
}

void test_small_analyses() {
    GraphStore store;
    check(!slowest_kernel(store) && critical_path(store).steps.empty(), "an empty graph");
    store.add_kernel("untimed", kernel_detail(0, 1), {});
    const uint32_t slow = store.add_kernel("slow", kernel_detail(10, 5), 9);
    check(slowest_kernel(store) == slow, "slowest kernel");
    const auto distances = roofline_distance(store, 100, 1000);
    check(distances.size() == 1 && distances[0].node == slow &&
              std::abs(distances[0].distance - 0.5) < 1e-12,
          "roofline leaves out an intensity of 0");
    check(fnv1a_64("foobar") == 0x85944171f73967e8ull, "FNV-1a");
}

}  // namespace

int main() {
    test_a_closed_store_takes_nothing();
    test_bricks_in_post_order();
    test_dropped_nodes();
    test_cycle_and_faults();
    test_deep_and_wide();
    test_saturation();
    test_sink_and_load();
    test_damaged_rows();
    test_threads();
    test_small_analyses();
    std::printf("%d passed, %d failed\n", g_passed, g_failed);
    return g_failed != 0;
}
