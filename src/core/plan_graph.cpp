#include "plan_graph.h"

#include <algorithm>

namespace brickline {
namespace {

std::string lacks(const char* name) { return std::string("the CUDA driver has no ") + name; }

// "" or the first entry point that graphs need and this driver does not have.
std::string missing_for_graphs(const Driver& driver) {
    if (!driver.graph_destroy) return lacks("cuGraphDestroy");
    if (!driver.graph_instantiate) return lacks("cuGraphInstantiateWithFlags");
    if (!driver.graph_exec_destroy) return lacks("cuGraphExecDestroy");
    if (!driver.graph_set_kernel) return lacks("cuGraphExecKernelNodeSetParams");
    if (!driver.graph_launch) return lacks("cuGraphLaunch");
    return "";
}

// Dependencies without those that follow from others.
class Reduced {
  public:
    explicit Reduced(uint32_t count) : m_words((count + 63) / 64), m_before(count) {}

    // To be asked for each launch in order; `waits` come earlier.
    std::vector<uint32_t> of(uint32_t launch, std::vector<uint32_t> waits) {
        std::sort(waits.rbegin(), waits.rend());
        std::vector<uint64_t> before(m_words);
        std::vector<uint32_t> needed;
        for (const uint32_t each : waits) {
            if (before[each / 64] >> (each % 64) & 1) continue;
            needed.push_back(each);
            before[each / 64] |= uint64_t(1) << (each % 64);
            for (size_t word = 0; word < m_words; ++word) before[word] |= m_before[each][word];
        }
        m_before[launch] = std::move(before);
        return needed;
    }

  private:
    size_t m_words;
    std::vector<std::vector<uint64_t>> m_before;  // a bit for everything that a launch comes after
};

}  // namespace

PlanGraph::~PlanGraph() {
    abandon_capture();
    destroy();
}

void PlanGraph::destroy() {
    if (!m_graph && !m_exec) return;
    const PlanContext guard(m_program.driver(), m_program.context());
    if (m_exec) m_program.driver().graph_exec_destroy(m_exec);
    if (m_graph) m_program.driver().graph_destroy(m_graph);
    m_exec = nullptr;
    m_graph = nullptr;
}

CUkernelNode PlanGraph::kernel_node(uint32_t i) const {
    const PlanLaunch& launch = m_program.launch(i);
    CUkernelNode node;
    node.function = reinterpret_cast<CUfunction>(launch.function);
    std::copy(launch.host.grid, launch.host.grid + 3, node.grid);
    std::copy(launch.host.lanes, launch.host.lanes + 3, node.block);
    node.shared_bytes = unsigned(launch.host.shared_bytes);
    node.arguments = const_cast<void**>(launch.host.arguments);
    node.context = reinterpret_cast<CUcontext>(m_program.context());
    return node;
}

std::string PlanGraph::build(bool parallel) {
    const Driver& driver = m_program.driver();
    std::string problem = missing_for_graphs(driver);
    if (problem.empty() && !driver.graph_create) problem = lacks("cuGraphCreate");
    if (problem.empty() && !driver.graph_add_kernel) problem = lacks("cuGraphAddKernelNode");
    if (!problem.empty()) return problem;
    const PlanContext guard(driver, m_program.context());
    bool may_be_early = driver.graph_add_edges != nullptr;
    problem = build_with(parallel, may_be_early);
    if (problem.empty() || !may_be_early) return problem;
    may_be_early = false;  // a device that begins no launch early
    return build_with(parallel, may_be_early);
}

// `early` says whether launches may begin early, and afterwards whether some were to.
std::string PlanGraph::build_with(bool parallel, bool& early) {
    const Driver& driver = m_program.driver();
    const bool may_be_early = early;
    early = false;
    destroy();
    CUresult result = driver.graph_create(&m_graph, 0);
    if (result != CUDA_SUCCESS) return driver.check(result, "cuGraphCreate");
    const uint32_t count = m_program.size();
    m_nodes.assign(count, nullptr);
    m_versions.assign(count, 0);
    m_facts.nodes = count;
    m_facts.edges = m_facts.early = 0;
    Reduced reduced(count);
    std::vector<CUgraphNode> nodes;
    for (uint32_t i = 0; i < count; ++i) {
        std::vector<uint32_t> waits;
        if (parallel) waits = reduced.of(i, m_program.dependencies(i));
        else if (i > 0) waits.push_back(i - 1);
        const bool begins_early = may_be_early && !waits.empty() && m_program.launch(i).flags & PLAN_WAITS;
        early |= begins_early;
        nodes.clear();
        if (!begins_early) {
            for (const uint32_t each : waits) nodes.push_back(m_nodes[each]);
        }
        const CUkernelNode node = kernel_node(i);
        result = driver.graph_add_kernel(&m_nodes[i], m_graph, nodes.data(), nodes.size(), &node);
        std::string problem = driver.check(result, "cuGraphAddKernelNode");
        if (problem.empty() && begins_early) problem = add_edges(i, waits);
        if (!problem.empty()) {
            destroy();
            return "launch " + std::to_string(i) + ": " + problem;
        }
        m_facts.edges += waits.size();
        m_versions[i] = m_program.launch(i).version;
    }
    m_version = m_program.version();
    return instantiate();
}

std::string PlanGraph::add_edges(uint32_t launch, const std::vector<uint32_t>& waits) {
    const Driver& driver = m_program.driver();
    CUedge edge;
    edge.from_port = edge.type = 1;
    for (const uint32_t each : waits) {
        const CUresult result = driver.graph_add_edges(m_graph, &m_nodes[each], &m_nodes[launch], &edge, 1);
        if (result != CUDA_SUCCESS) return driver.check(result, "cuGraphAddDependencies");
        ++m_facts.early;
    }
    return "";
}

std::string PlanGraph::instantiate() {
    const Driver& driver = m_program.driver();
    const CUresult result = driver.graph_instantiate(&m_exec, m_graph, 0);
    if (result != CUDA_SUCCESS) {
        m_exec = nullptr;
        destroy();
        return driver.check(result, "cuGraphInstantiateWithFlags");
    }
    ++m_facts.instantiations;
    return "";
}

PlanOutcome PlanGraph::run(uint64_t stream) {
    const Driver& driver = m_program.driver();
    const PlanContext guard(driver, m_program.context());
    PlanOutcome outcome;
    if (m_version != m_program.version()) {
        for (uint32_t i = 0; i < m_program.size(); ++i) {
            if (m_versions[i] == m_program.launch(i).version || !m_nodes[i]) continue;
            const CUkernelNode node = kernel_node(i);
            const CUresult result = driver.graph_set_kernel(m_exec, m_nodes[i], &node);
            if (result != CUDA_SUCCESS) [[unlikely]] {
                outcome.code = uint32_t(result);
                outcome.where = int32_t(i);
                outcome.call = "cuGraphExecKernelNodeSetParams";
                return outcome;
            }
            m_versions[i] = m_program.launch(i).version;
            ++m_facts.patched;
        }
        m_version = m_program.version();
    }
    const CUresult result = driver.graph_launch(m_exec, reinterpret_cast<CUstream>(stream));
    if (result == CUDA_SUCCESS) [[likely]] {
        outcome.done = m_program.size();
        return outcome;
    }
    outcome.code = uint32_t(result);
    outcome.call = "cuGraphLaunch";
    return outcome;
}

// ------------------------------------------------------------------------------------------- capturing

std::string PlanGraph::begin_capture(uint64_t stream) {
    const Driver& driver = m_program.driver();
    std::string problem = missing_for_graphs(driver);
    if (problem.empty() && !driver.begin_capture) problem = lacks("cuStreamBeginCapture");
    if (problem.empty() && !driver.end_capture) problem = lacks("cuStreamEndCapture");
    if (problem.empty() && !driver.capture_info) problem = lacks("cuStreamGetCaptureInfo_v2");
    if (!problem.empty()) return problem;
    abandon_capture();
    const PlanContext guard(driver, m_program.context());
    destroy();
    const CUresult result = driver.begin_capture(reinterpret_cast<CUstream>(stream), CUDA_CAPTURE_RELAXED);
    if (result != CUDA_SUCCESS) return driver.check(result, "cuStreamBeginCapture");
    m_is_capturing = true;
    m_stream = stream;
    m_nodes.assign(m_program.size(), nullptr);
    m_versions.assign(m_program.size(), 0);
    return "";
}

std::string PlanGraph::fail_capture(CUresult result, const char* call) {
    const std::string problem = m_program.driver().check(result, call);
    abandon_capture();
    return problem;
}

// What the stream's next node would wait for is the kernel that was just enqueued.
std::string PlanGraph::capture_launch(uint32_t launch) {
    if (!m_is_capturing) return "no capture has begun";
    if (m_nodes[launch]) return "launch " + std::to_string(launch) + " is captured already";
    const Driver& driver = m_program.driver();
    const PlanContext guard(driver, m_program.context());
    CUresult result = m_program.enqueue(launch, m_stream);
    if (result != CUDA_SUCCESS) return fail_capture(result, "cuLaunchKernel");
    int status = 0;
    uint64_t id = 0;
    CUgraph graph = nullptr;
    const CUgraphNode* nodes = nullptr;
    size_t count = 0;
    result = driver.capture_info(reinterpret_cast<CUstream>(m_stream), &status, &id, &graph, &nodes, &count);
    if (result != CUDA_SUCCESS) return fail_capture(result, "cuStreamGetCaptureInfo_v2");
    if (count != 1 || !nodes) {
        abandon_capture();
        return "expected one node after launch " + std::to_string(launch) + ", got " + std::to_string(count) +
               "; leave the captured stream to the plan";
    }
    m_nodes[launch] = nodes[0];
    m_versions[launch] = m_program.launch(launch).version;
    return "";
}

std::string PlanGraph::end_capture() {
    if (!m_is_capturing) return "no capture has begun";
    const Driver& driver = m_program.driver();
    const PlanContext guard(driver, m_program.context());
    m_is_capturing = false;
    const CUresult result = driver.end_capture(reinterpret_cast<CUstream>(m_stream), &m_graph);
    if (result != CUDA_SUCCESS) {
        m_graph = nullptr;
        return driver.check(result, "cuStreamEndCapture");
    }
    size_t nodes = 0, edges = 0;
    if (driver.graph_nodes) driver.graph_nodes(m_graph, nullptr, &nodes);
    if (driver.graph_edges) driver.graph_edges(m_graph, nullptr, nullptr, &edges);
    m_facts.nodes = nodes;
    m_facts.edges = edges;
    m_version = 0;  // variables may have changed meanwhile: the first run compares each node
    return instantiate();
}

void PlanGraph::abandon_capture() {
    if (!m_is_capturing) return;
    m_is_capturing = false;
    const Driver& driver = m_program.driver();
    const PlanContext guard(driver, m_program.context());
    CUgraph graph = nullptr;
    if (driver.end_capture(reinterpret_cast<CUstream>(m_stream), &graph) == CUDA_SUCCESS && graph) {
        driver.graph_destroy(graph);
    }
}

}  // namespace brickline
