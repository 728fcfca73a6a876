// The execution graph in memory: rows, interned names, and the lock that guards them.
// Knows nothing of Python, of files (a GraphSink is handed to it) or of profilers.
//
// Thread safety: every public call may be made from any thread. A call holds the store's mutex while
// it changes or copies rows, never while it analyses them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "graph_rows.h"

namespace brickline {

// A call or a table that breaks the graph. Derives from invalid_argument so that it reaches Python
// as ValueError, which brickline.graph_arguments turns into GraphError.
class GraphFault : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

// Receives every addition, in order, while the store's mutex is held: it must be quick, must not
// throw and must not call the store. The nth node since the start, or since on_clear, has id n, and
// the nth edge has index n. A detail comes before the node or edge that owns it, and a
// string before the first row that names it.
class GraphSink {
public:
    virtual ~GraphSink() = default;
    virtual void on_string(uint32_t id, std::string_view text) noexcept = 0;
    virtual void on_node(const GraphNodeRow& row) noexcept = 0;
    virtual void on_edge(const GraphEdgeRow& row) noexcept = 0;
    virtual void on_detail(const GraphDetailRow& row) noexcept = 0;
    // The graph was emptied; ids start at 0 again.
    virtual void on_clear() noexcept = 0;
};

// Append-only array in blocks: growing never copies rows, and at most one block is spare.
template <class T>
class BlockArray {
public:
    size_t size() const { return m_size; }
    T& operator[](size_t index) { return m_blocks[index / BLOCK][index % BLOCK]; }
    const T& operator[](size_t index) const { return m_blocks[index / BLOCK][index % BLOCK]; }
    void push_back(const T& value) {
        if (m_size == m_blocks.size() * BLOCK)
            m_blocks.push_back(std::make_unique_for_overwrite<T[]>(BLOCK));
        m_blocks[m_size / BLOCK][m_size % BLOCK] = value;
        ++m_size;
    }
    void clear() {
        m_blocks.clear();
        m_blocks.shrink_to_fit();
        m_size = 0;
    }
    size_t bytes() const {
        return m_blocks.size() * BLOCK * sizeof(T) + m_blocks.capacity() * sizeof(void*);
    }

private:
    static constexpr size_t BLOCK = 4096;
    std::vector<std::unique_ptr<T[]>> m_blocks;
    size_t m_size = 0;
};

// What the analyses read: a copy without names or details, so that they run without the lock.
struct DependencyView {
    std::vector<uint64_t> timing_ns;        // 0 where a node was not timed
    std::vector<uint32_t> container;        // NO_NODE at roots; a forest
    std::vector<uint32_t> waiter_begin;     // waiters of v: waiters[waiter_begin[v], waiter_begin[v+1])
    std::vector<uint32_t> waiters;
};

struct GraphCounts {
    uint64_t nodes = 0;
    uint64_t edges = 0;
    uint64_t details = 0;
    uint64_t strings = 0;
    uint64_t dropped_nodes = 0;             // past the node budget
    uint64_t dropped_edges = 0;             // past the edge budget, or at a dropped node
};

// A timed brick, ready for add_brick.
inline GraphNodeRow brick_row(uint32_t name, int16_t brick, int32_t layer, uint64_t timing_ns,
                              uint64_t elements, uint64_t start_ns = 0) {
    GraphNodeRow row;
    row.timing_ns = timing_ns;
    row.elements = elements;
    row.start_ns = start_ns;
    row.name = name;
    row.layer = layer;
    row.brick = brick;
    row.flags = NODE_TIMED;
    return row;
}

// What stands inside a brick: how, and whether it follows what stood there before it.
struct GraphChild {
    uint32_t node = NO_NODE;
    EdgeKind kind = EdgeKind::Contains;
    bool in_sequence = true;
};

struct GraphNodeView {
    GraphNodeRow row;
    std::string name;
    std::optional<GraphDetailRow> detail;
    std::string source;                     // transfers: source; functions: file
    std::string target;                     // transfers: target
};

class GraphStore {
public:
    static constexpr uint32_t DEFAULT_NODE_BUDGET = 1'000'000;
    static constexpr uint32_t EDGES_PER_NODE = 4;  // edge budget, in units of the node budget

    explicit GraphStore(uint32_t node_budget = DEFAULT_NODE_BUDGET);
    GraphStore(const GraphStore&) = delete;
    GraphStore& operator=(const GraphStore&) = delete;

    // Hands what is already stored to `sink` and then every addition; nullptr detaches. The sink is
    // borrowed and must outlive its attachment.
    void attach_sink(GraphSink* sink);

    // A closed store takes no additions, and counts none of them as dropped; what it has stays.
    void set_open(bool open);
    bool is_open() const;

    uint32_t intern(std::string_view text);

    // Additions. Each returns the node's id, or NO_NODE when the budget is spent or the store is
    // closed; NO_NODE is accepted wherever a node is expected and means "nothing", so callers need
    // not check.
    uint32_t add_brick(GraphNodeRow row);
    // Interns the name itself, and only when the brick is stored; row.name is ignored.
    uint32_t add_named_brick(std::string_view name, GraphNodeRow row);
    // A brick that has finished after its contents: adds it, an edge to each of `children`, and
    // Sequence edges between consecutive ones of those that follow each other.
    uint32_t add_brick_with_children(GraphNodeRow row, std::span<const GraphChild> children);
    uint32_t add_kernel(std::string_view name, const KernelDetail& kernel,
                        std::optional<uint64_t> timing_ns, uint64_t start_ns = 0);
    uint32_t add_transfer(std::string_view source, std::string_view target, uint64_t bytes,
                          TransferDirection direction, std::optional<uint64_t> timing_ns,
                          uint64_t start_ns = 0);
    uint32_t add_function(std::string_view name, std::optional<std::string_view> file,
                          uint32_t line, std::optional<uint64_t> timing_ns, uint64_t start_ns = 0);
    uint32_t add_layer(int32_t index, std::optional<uint64_t> timing_ns, uint64_t start_ns = 0);
    uint32_t add_async_task(std::string_view name, const AsyncTaskDetail& task,
                            uint64_t total_poll_ns, uint64_t start_ns = 0);

    // Returns false when the edge was not stored (budget, closed, or an end that is NO_NODE).
    bool add_edge(uint32_t source, uint32_t target, EdgeKind kind, float weight = 1.0f);
    bool add_transfer_edge(uint32_t source, uint32_t target, uint64_t bytes,
                           TransferDirection direction, float weight = 1.0f);

    // Adds Sequence edges between consecutive nodes, as for the outermost bricks of one thread.
    void add_sequence(std::span<const uint32_t> nodes);

    // Replaces the contents by tables read back from elsewhere. Throws GraphFault, leaving the
    // store as it was, when an id is out of range, a kind is unknown or a row is inconsistent.
    void load(const GraphRows& rows);
    GraphRows rows() const;
    // Adds to what counts() calls dropped: what the recording behind loaded tables had left out.
    void note_dropped(uint64_t nodes, uint64_t edges);
    void clear();

    GraphCounts counts() const;
    uint64_t bytes() const;                 // memory held, indexes included
    uint32_t node_budget() const { return m_node_budget; }
    GraphNodeView node(uint32_t id) const;
    GraphEdgeRow edge(uint32_t index) const;
    std::optional<GraphDetailRow> edge_detail(uint32_t index) const;
    bool is_contained(uint32_t id) const;
    std::vector<uint32_t> nodes_by_name(std::string_view name) const;   // in order of addition
    std::optional<uint32_t> last_node_by_name(std::string_view name) const;
    std::vector<std::pair<uint32_t, GraphNodeRow>> nodes_of_kind(NodeKind kind) const;
    std::vector<GraphDetailRow> details_of_kind(DetailKind kind) const;
    std::vector<uint32_t> outgoing(uint32_t id) const;                  // edge indexes, in order
    std::vector<uint32_t> incoming(uint32_t id) const;

    // The schedule of graph_analysis.h is computed from this.
    DependencyView dependency_view() const;
    // "'RmsNorm' (node 3)", for messages.
    std::string describe(uint32_t id) const;

private:
    // Chains through edges by source and by target, and through nodes by name. Extended on demand
    // over what was added since, so that a graph which is never asked pays nothing.
    struct Index {
        BlockArray<uint32_t> last_out, last_in;      // by node: its latest edge
        BlockArray<uint32_t> previous_out, previous_in;  // by edge
        BlockArray<uint32_t> previous_same_name;     // by node
        std::vector<uint32_t> last_of_name;          // by string
    };

    uint32_t intern_locked(std::string_view text);
    uint32_t add_locked(GraphNodeRow row, const GraphDetailRow* detail);
    bool add_edge_locked(const GraphEdgeRow& edge, const GraphDetailRow* detail);
    void follow_locked(uint32_t& previous, uint32_t node);
    bool admit_node_locked();
    void check_brick_locked(const GraphNodeRow& row) const;
    void check_node_locked(uint32_t id) const;
    void check_endpoint_locked(uint32_t id) const;
    void clear_locked();
    std::vector<uint32_t> chain_locked(const BlockArray<uint32_t>& last,
                                       const BlockArray<uint32_t>& previous, uint32_t id) const;
    void extend_edge_index_locked() const;
    void extend_name_index_locked() const;
    std::optional<uint32_t> find_string_locked(std::string_view text) const;
    std::string text_locked(uint32_t id) const;

    mutable std::mutex m_mutex;
    const uint32_t m_node_budget;
    const uint64_t m_edge_budget;
    bool m_open = true;
    GraphSink* m_sink = nullptr;
    BlockArray<GraphNodeRow> m_nodes;
    BlockArray<GraphEdgeRow> m_edges;
    BlockArray<GraphDetailRow> m_details;
    std::unordered_map<uint32_t, uint32_t> m_edge_details;
    // Views into strings owned by m_strings; unique_ptr keeps their addresses.
    std::vector<std::unique_ptr<std::string>> m_strings;
    std::unordered_map<std::string_view, uint32_t> m_string_ids;
    uint64_t m_string_bytes = 0;
    uint64_t m_dropped_nodes = 0;
    uint64_t m_dropped_edges = 0;
    mutable Index m_index;
};

}  // namespace brickline
