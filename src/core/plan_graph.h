// PlanGraph: the launches of a program as one CUDA graph, made once and launched as often as wanted.
// Before a launch, the kernels whose arguments or sizes have changed are patched in place; the graph is
// never instantiated again. It comes from explicit nodes with the plan's dependencies (`build`), or
// from a stream that is captured, so that others can put nodes of their own between (`begin_capture`).
#pragma once

#include <vector>

#include "plan_program.h"

namespace brickline {

struct PlanGraphFacts {
    uint64_t nodes = 0, edges = 0;
    uint64_t patched = 0;  // kernels, in all launches so far
    uint64_t instantiations = 0;
    uint64_t early = 0;  // edges over which a launch may begin before the one that it waits for has ended
};

class PlanGraph {
  public:
    explicit PlanGraph(const PlanProgram& program) : m_program(program) {}
    ~PlanGraph();
    PlanGraph(const PlanGraph&) = delete;
    PlanGraph& operator=(const PlanGraph&) = delete;

    // "" or what the driver said. `parallel`: with the plan's dependencies; else one after the other.
    std::string build(bool parallel);

    // Between begin and end, launches are enqueued one at a time into the captured stream. Each of
    // these returns "" or what the driver said; after a failure the capture is over.
    std::string begin_capture(uint64_t stream);
    std::string capture_launch(uint32_t launch);
    std::string end_capture();
    // Ends a capture without a graph.
    void abandon_capture();
    bool is_capturing() const { return m_is_capturing; }

    // Whether there is a graph to launch.
    bool is_ready() const { return m_exec != nullptr; }
    // Patches what has changed and launches. Only when ready.
    PlanOutcome run(uint64_t stream);

    PlanGraphFacts facts() const { return m_facts; }

  private:
    void destroy();
    std::string build_with(bool parallel, bool& early);
    std::string add_edges(uint32_t launch, const std::vector<uint32_t>& waits);
    std::string instantiate();
    std::string fail_capture(CUresult result, const char* call);
    CUkernelNode kernel_node(uint32_t launch) const;

    const PlanProgram& m_program;
    CUgraph m_graph = nullptr;
    CUgraphExec m_exec = nullptr;
    std::vector<CUgraphNode> m_nodes;   // by launch; null: not part of the graph
    std::vector<uint64_t> m_versions;   // of what the nodes hold
    uint64_t m_version = 0;             // of the program, when all nodes agreed with it
    bool m_is_capturing = false;
    uint64_t m_stream = 0;              // that is captured
    PlanGraphFacts m_facts;
};

}  // namespace brickline
