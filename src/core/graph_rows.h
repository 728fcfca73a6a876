// The rows of an execution graph as they lie in memory, cross to Python and are written to a run.
// Plain standard-layout data: no behaviour, no Python, no allocation.
//
// NODE 40 bytes, EDGE 16 bytes; kernels, transfers, functions, async tasks and Transfer edges have
// one DETAIL of 64 bytes beside them, so that a brick with its two usual edges takes 72 bytes.
//
//     NODE   [timing_ns 8][elements 8][start_ns 8][name 4][detail 4][layer 4][brick 2][kind 1][flags 1]
//     EDGE   [source 4][target 4][weight 4][kind 1][zero 3]
//     DETAIL [owner 4][kind 1][direction 1][zero 2][56 bytes, read by kind]
//
// Worked example: the third brick of a graph, RmsNorm (brick 0, string 1) of layer 5, 12 µs over
// 4096 elements, is {12000, 4096, 0, 1, NO_DETAIL, 5, 0, Brick, NODE_TIMED}, and the edge that says
// it followed node 1 is {1, 2, 1.0f, Sequence, 0}.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace brickline {

enum class NodeKind : uint8_t { Brick, Kernel, Transfer, Function, Layer, AsyncTask };
constexpr uint8_t NODE_KINDS = 6;

// Contains, Launches and Calls say what lies inside what. Sequence, DependsOn and Transfer say that
// the target starts after the source has finished.
enum class EdgeKind : uint8_t { Calls, Contains, Launches, Sequence, DependsOn, Transfer };
constexpr uint8_t EDGE_KINDS = 6;

enum class TransferDirection : uint8_t { HostToDevice, DeviceToHost, DeviceToDevice };
constexpr uint8_t TRANSFER_DIRECTIONS = 3;

enum class DetailKind : uint8_t { Kernel, Transfer, Function, AsyncTask, TransferEdge };
constexpr uint8_t DETAIL_KINDS = 5;

constexpr uint32_t NO_NODE = 0xffffffffu;    // also: a node that the budget did not admit
constexpr uint32_t NO_DETAIL = 0xffffffffu;
constexpr uint32_t NO_STRING = 0xffffffffu;

enum NodeFlag : uint8_t {
    NODE_TIMED = 1,      // timing_ns was measured; without it timing_ns is 0
    NODE_CONTAINED = 2,  // some containment edge leads here; kept by the store, ignored on input
};
constexpr uint8_t NODE_FLAGS = NODE_TIMED | NODE_CONTAINED;

struct GraphNodeRow {
    uint64_t timing_ns = 0;         // inclusive; for async tasks the total time spent in polls
    uint64_t elements = 0;
    uint64_t start_ns = 0;          // 0: not known
    uint32_t name = NO_STRING;      // string id
    uint32_t detail = NO_DETAIL;    // kept by the store, ignored on input
    int32_t layer = -1;             // -1: none
    int16_t brick = -1;             // BrickId, -1: a dynamic brick or no brick
    NodeKind kind = NodeKind::Brick;
    uint8_t flags = 0;              // NodeFlag
};
static_assert(sizeof(GraphNodeRow) == 40 && std::is_standard_layout_v<GraphNodeRow>);

struct GraphEdgeRow {
    uint32_t source = NO_NODE;
    uint32_t target = NO_NODE;
    float weight = 1.0f;
    EdgeKind kind = EdgeKind::Calls;
    uint8_t reserved[3] = {0, 0, 0};
};
static_assert(sizeof(GraphEdgeRow) == 16 && std::is_standard_layout_v<GraphEdgeRow>);
static_assert(sizeof(GraphNodeRow) + 2 * sizeof(GraphEdgeRow) <= 100);

struct KernelDetail {
    uint64_t source_hash;           // fnv1a_64 of the source or PTX, 0: not known
    double arithmetic_intensity;    // FLOP per byte, NaN: not known
    double achieved_tflops;         // NaN: not known
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    uint32_t reserved;
};

struct TransferDetail {             // of a Transfer node or of a Transfer edge
    uint64_t bytes;
    uint32_t source;                // string ids, NO_STRING on edges
    uint32_t target;
};

struct FunctionDetail {
    uint32_t file;                  // string id, NO_STRING: not known
    uint32_t line;                  // 0: not known
};

struct AsyncTaskDetail {
    uint64_t poll_count;
    uint64_t yield_count;
};

struct GraphDetailRow {
    uint32_t owner = NO_NODE;       // node id; for TransferEdge the index of the edge
    DetailKind kind = DetailKind::Kernel;
    TransferDirection direction = TransferDirection::HostToDevice;
    uint16_t reserved = 0;
    union {
        KernelDetail kernel;
        TransferDetail transfer;
        FunctionDetail function;
        AsyncTaskDetail task;
    };
    GraphDetailRow() : kernel{} {}
};
static_assert(sizeof(GraphDetailRow) == 64 && std::is_standard_layout_v<GraphDetailRow>);
static_assert(std::is_trivially_copyable_v<GraphDetailRow>);

// A whole graph as tables: what a run stores and what a store is rebuilt from.
struct GraphRows {
    std::vector<std::string> strings;    // index is the string id
    std::vector<GraphNodeRow> nodes;     // index is the node id
    std::vector<GraphEdgeRow> edges;
    std::vector<GraphDetailRow> details;

    // Removes what a recording that was cut short left dangling at the ends of the tables: edges
    // and details whose node or edge never arrived, nodes whose name never arrived. Returns how
    // many rows went.
    size_t drop_torn_tail();
};

constexpr bool is_containment(EdgeKind kind) {
    return kind == EdgeKind::Calls || kind == EdgeKind::Contains || kind == EdgeKind::Launches;
}

constexpr const char* node_kind_name(NodeKind kind) {
    constexpr const char* NAMES[] = {"Brick", "Kernel", "Transfer", "Function", "Layer",
                                     "AsyncTask"};
    return NAMES[static_cast<uint8_t>(kind)];
}

constexpr const char* direction_name(TransferDirection direction) {
    constexpr const char* NAMES[] = {"H2D", "D2H", "D2D"};
    return NAMES[static_cast<uint8_t>(direction)];
}

}  // namespace brickline
