// Questions asked of a whole execution graph. Each takes a copy of what it needs from the store and
// then works without its lock. docs/graph.md says in words what is defined here.
//
// The schedule. Dependencies are Sequence, DependsOn and Transfer edges: the target starts after the
// source has finished. Contains, Launches and Calls edges only say what lies inside what; a node has
// at most one container (the first edge; Contains and Launches before Calls). For a node v that took
// t(v), 0 when untimed:
//
//     start(v)     = latest of: start(container of v), finish(u) for every u that v waits for
//     contents(v)  = latest finish(c) of the nodes c directly inside v; start(v) when there are none
//     finish(v)    = later of start(v) + t(v) and contents(v)
//     remainder(v) = finish(v) - contents(v)       the time of v that its contents do not cover
//
// The critical path is the chain of remainders that ends at the latest finish; they add up to it
// exactly, so no time is counted twice. The slack of v is how much later v may finish, remainders
// kept, without the whole finishing later; it is 0 for every node on the path.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "graph.h"

namespace brickline {

// Nodes that wait for each other, in order; `nodes` holds each once.
class GraphCycle : public GraphFault {
public:
    GraphCycle(const std::string& message, std::vector<uint32_t> cycle)
        : GraphFault(message), nodes(std::move(cycle)) {}
    std::vector<uint32_t> nodes;
};

struct PathStep {
    uint32_t node;
    uint64_t start_ns;         // in the schedule, from 0
    uint64_t contribution_ns;  // the node's remainder; never 0
};

struct CriticalPath {
    uint64_t total_ns = 0;
    std::vector<PathStep> steps;  // in order of time; contributions sum to total_ns
};

CriticalPath critical_path(const GraphStore& store);

// By node id.
std::vector<uint64_t> slack_ns(const GraphStore& store);

struct RooflineDistance {
    uint32_t node;
    double attainable_tflops;
    double achieved_tflops;
    double distance;           // 0 at the roof, towards 1 far below it
    bool is_memory_bound;
};

// For kernels with an achieved rate and an arithmetic intensity above 0, in id order; the others say
// nothing about a roof. Peaks must be finite and above 0.
std::vector<RooflineDistance> roofline_distance(const GraphStore& store, double peak_tflops,
                                                double peak_gbps);

std::optional<uint32_t> slowest_kernel(const GraphStore& store);

struct PingPong {
    uint32_t first;
    uint32_t second;
    uint64_t bytes;
};

// Pairs of transfers that undo each other: the same number of bytes to a device place and later back
// from it, or from it and later back. Each return is paired once, with the nearest unpaired transfer
// before it, in id order.
std::vector<PingPong> ping_pong(const GraphStore& store);

// FNV-1a over all bytes, 64 bits: names a kernel by its source.
uint64_t fnv1a_64(std::string_view bytes);

}  // namespace brickline
