// A CUDA driver that is simulated: kernels are not executed but kept, with their arguments as the
// device would see them and everything that they come after, on streams, in graphs and in captures.
// A test can have any call refused, and sees what was left over.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "native_test.h"

namespace simulated_cuda {

using namespace brickline;
using native_test::check;

constexpr uint64_t CONTEXT = 77;
constexpr CUresult REFUSED = 999;

struct Kernel {  // what a CUfunction points to
    uint32_t arguments = 0;
};

struct Launched {  // a kernel as the device sees it
    uint64_t function = 0;
    std::vector<unsigned> sizes;
    std::vector<uint64_t> arguments;

    bool operator==(const Launched&) const = default;
};

using Before = std::set<uint32_t>;

struct Node {
    Launched launched;
    std::vector<Node*> waits;
    bool is_kernel = true;
};

struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
};

struct Exec {
    std::map<Node*, Launched> kernels;
    std::vector<Node*> order;
};

struct Device {
    std::vector<uint64_t> contexts;
    std::vector<Launched> launches;        // everything that was launched, in the order of calls
    std::vector<Before> before;            // of each launch: launches that it comes after
    std::map<uint64_t, Before> streams;    // what the next launch comes after
    std::map<CUevent, Before> events;
    std::set<CUevent> live_events;
    std::set<Graph*> graphs;
    std::set<Exec*> execs;
    std::vector<Node*> patched;
    Graph* capture = nullptr;
    uint64_t captured_stream = 0;
    Node* last_captured = nullptr;
    std::vector<CUgraphNode> info;
    uint32_t records = 0, waits = 0, instantiations = 0;
    bool refuses_early = false;            // edges over which a launch begins early
    int refuse_after = -1;                 // calls until one is refused; -1: none
    uint32_t wrong_context = 0;

    bool refuses() { return refuse_after >= 0 && refuse_after-- == 0; }
    void need_context() { wrong_context += contexts.empty() || contexts.back() != CONTEXT; }
};

inline Device g_device;

inline Launched launched(CUfunction function, const unsigned* grid, const unsigned* block, unsigned shared, void** arguments) {
    Launched made;
    made.function = reinterpret_cast<uint64_t>(function);
    made.sizes = {grid[0], grid[1], grid[2], block[0], block[1], block[2], shared};
    for (uint32_t k = 0; k < static_cast<Kernel*>(function)->arguments; ++k) {
        made.arguments.push_back(*static_cast<uint64_t*>(arguments[k]));
    }
    return made;
}

inline void capture_node(Launched what, bool is_kernel) {
    g_device.capture->nodes.push_back(std::make_unique<Node>());
    Node* const node = g_device.capture->nodes.back().get();
    node->launched = std::move(what);
    node->is_kernel = is_kernel;
    if (g_device.last_captured) node->waits.push_back(g_device.last_captured);
    g_device.last_captured = node;
}

inline Driver simulated_driver() {
    Driver driver{Driver::Nothing{}};
    driver.context_current = [](CUcontext* current) -> CUresult {
        *current = g_device.contexts.empty() ? nullptr : reinterpret_cast<CUcontext>(g_device.contexts.back());
        return CUDA_SUCCESS;
    };
    driver.context_push = [](CUcontext context) -> CUresult {
        g_device.contexts.push_back(reinterpret_cast<uint64_t>(context));
        return CUDA_SUCCESS;
    };
    driver.context_pop = [](CUcontext* context) -> CUresult {
        *context = reinterpret_cast<CUcontext>(g_device.contexts.back());
        g_device.contexts.pop_back();
        return CUDA_SUCCESS;
    };
    driver.event_create = [](CUevent* event, unsigned flags) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        check(flags == CUDA_EVENT_DISABLE_TIMING, "events of a plan take no time");
        g_device.need_context();
        *event = new char;
        g_device.live_events.insert(*event);
        return CUDA_SUCCESS;
    };
    driver.event_destroy = [](CUevent event) -> CUresult {
        check(g_device.live_events.erase(event) == 1, "an event is destroyed once");
        delete static_cast<char*>(event);
        return CUDA_SUCCESS;
    };
    driver.event_record = [](CUevent event, CUstream stream, unsigned) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        g_device.events[event] = g_device.streams[reinterpret_cast<uint64_t>(stream)];
        ++g_device.records;
        return CUDA_SUCCESS;
    };
    driver.stream_wait = [](CUstream stream, CUevent event, unsigned) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        check(g_device.events.count(event), "an event is recorded before it is waited for");
        const Before& known = g_device.events[event];
        g_device.streams[reinterpret_cast<uint64_t>(stream)].insert(known.begin(), known.end());
        ++g_device.waits;
        return CUDA_SUCCESS;
    };
    driver.launch = [](CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared, CUstream stream, void** arguments, void**) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        g_device.need_context();
        const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
        Launched what = launched(function, grid, block, shared, arguments);
        const uint64_t on = reinterpret_cast<uint64_t>(stream);
        if (g_device.capture && on == g_device.captured_stream) {
            capture_node(std::move(what), true);
            return CUDA_SUCCESS;
        }
        g_device.before.push_back(g_device.streams[on]);
        g_device.streams[on].insert(uint32_t(g_device.launches.size()));
        g_device.launches.push_back(std::move(what));
        return CUDA_SUCCESS;
    };
    driver.graph_create = [](CUgraph* graph, unsigned) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        *graph = *g_device.graphs.insert(new Graph).first;
        return CUDA_SUCCESS;
    };
    driver.graph_destroy = [](CUgraph graph) -> CUresult {
        check(g_device.graphs.erase(static_cast<Graph*>(graph)) == 1, "a graph is destroyed once");
        delete static_cast<Graph*>(graph);
        return CUDA_SUCCESS;
    };
    driver.graph_add_kernel = [](CUgraphNode* node, CUgraph graph, const CUgraphNode* waits, size_t count,
                                 const CUkernelNode* given) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        auto made = std::make_unique<Node>();
        made->launched = launched(given->function, given->grid, given->block, given->shared_bytes, given->arguments);
        for (size_t k = 0; k < count; ++k) made->waits.push_back(static_cast<Node*>(waits[k]));
        *node = made.get();
        static_cast<Graph*>(graph)->nodes.push_back(std::move(made));
        return CUDA_SUCCESS;
    };
    driver.graph_add_edges = [](CUgraph, const CUgraphNode* from, const CUgraphNode* to, const CUedge* edge,
                                size_t count) -> CUresult {
        if (g_device.refuses() || g_device.refuses_early) return REFUSED;
        check(count == 1 && edge->from_port == 1 && edge->to_port == 0 && edge->type == 1, "an early edge");
        static_cast<Node*>(*to)->waits.push_back(static_cast<Node*>(*from));
        return CUDA_SUCCESS;
    };
    driver.graph_instantiate = [](CUgraphExec* exec, CUgraph graph, unsigned long long) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        Exec* const made = *g_device.execs.insert(new Exec).first;
        for (auto& node : static_cast<Graph*>(graph)->nodes) {
            made->order.push_back(node.get());
            if (node->is_kernel) made->kernels[node.get()] = node->launched;
        }
        ++g_device.instantiations;
        *exec = made;
        return CUDA_SUCCESS;
    };
    driver.graph_exec_destroy = [](CUgraphExec exec) -> CUresult {
        check(g_device.execs.erase(static_cast<Exec*>(exec)) == 1, "an executable graph is destroyed once");
        delete static_cast<Exec*>(exec);
        return CUDA_SUCCESS;
    };
    driver.graph_set_kernel = [](CUgraphExec exec, CUgraphNode node, const CUkernelNode* given) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        auto& kernels = static_cast<Exec*>(exec)->kernels;
        check(kernels.count(static_cast<Node*>(node)), "a kernel of this graph is patched");
        kernels[static_cast<Node*>(node)] =
            launched(given->function, given->grid, given->block, given->shared_bytes, given->arguments);
        g_device.patched.push_back(static_cast<Node*>(node));
        return CUDA_SUCCESS;
    };
    driver.graph_launch = [](CUgraphExec exec, CUstream) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        g_device.need_context();
        const Exec& launching = *static_cast<Exec*>(exec);
        std::map<Node*, Before> done;
        for (Node* node : launching.order) {
            Before& mine = done[node];
            for (Node* wait : node->waits) mine.insert(done[wait].begin(), done[wait].end());
            if (!node->is_kernel) continue;
            g_device.before.push_back(mine);
            mine.insert(uint32_t(g_device.launches.size()));
            g_device.launches.push_back(launching.kernels.at(node));
        }
        return CUDA_SUCCESS;
    };
    driver.begin_capture = [](CUstream stream, int) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        g_device.capture = *g_device.graphs.insert(new Graph).first;
        g_device.captured_stream = reinterpret_cast<uint64_t>(stream);
        g_device.last_captured = nullptr;
        return CUDA_SUCCESS;
    };
    driver.end_capture = [](CUstream, CUgraph* graph) -> CUresult {
        *graph = std::exchange(g_device.capture, nullptr);
        return *graph ? CUDA_SUCCESS : REFUSED;
    };
    driver.capture_info = [](CUstream, int* status, uint64_t* id, CUgraph* graph, const CUgraphNode** nodes,
                             size_t* count) -> CUresult {
        if (g_device.refuses()) return REFUSED;
        *status = 1;
        *id = 1;
        *graph = g_device.capture;
        g_device.info.assign(1, g_device.last_captured);
        *nodes = g_device.info.data();
        *count = 1;
        return CUDA_SUCCESS;
    };
    driver.graph_nodes = [](CUgraph graph, CUgraphNode*, size_t* count) -> CUresult {
        *count = static_cast<Graph*>(graph)->nodes.size();
        return CUDA_SUCCESS;
    };
    return driver;
}

}  // namespace simulated_cuda
