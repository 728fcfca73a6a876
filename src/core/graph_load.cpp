// GraphStore: whole tables in and out. What comes in may be from a damaged file, so every id and
// kind is checked before a row is kept, and the store changes only when all of them are sound.
#include <cmath>

#include "graph.h"

namespace brickline {

namespace {

[[noreturn]] void refuse(const char* table, size_t row, const std::string& what) {
    throw GraphFault("graph table '" + std::string(table) + "', row " + std::to_string(row) +
                     ": " + what + "; the tables are damaged or not of one graph, record again");
}

void expect_below(const char* table, size_t row, const char* field, uint64_t value,
                  uint64_t limit) {
    if (value >= limit)
        refuse(table, row, "expected " + std::string(field) + " below " + std::to_string(limit) +
                               ", got " + std::to_string(value));
}

template <class Enum>
uint8_t code(Enum value) {
    return static_cast<uint8_t>(value);
}

void check_node(const GraphRows& rows, size_t id) {
    const GraphNodeRow& node = rows.nodes[id];
    expect_below("nodes", id, "kind", code(node.kind), NODE_KINDS);
    expect_below("nodes", id, "flags", node.flags, NODE_FLAGS + 1);
    expect_below("nodes", id, "name", node.name, rows.strings.size());
    if (node.layer < -1 || node.brick < -1) refuse("nodes", id, "expected layer and brick from -1");
    if (!(node.flags & NODE_TIMED) && node.timing_ns != 0)
        refuse("nodes", id, "expected no time on an untimed node");
}

void check_edge(const GraphRows& rows, size_t index) {
    const GraphEdgeRow& edge = rows.edges[index];
    expect_below("edges", index, "kind", code(edge.kind), EDGE_KINDS);
    expect_below("edges", index, "source", edge.source, rows.nodes.size());
    expect_below("edges", index, "target", edge.target, rows.nodes.size());
    if (!std::isfinite(edge.weight)) refuse("edges", index, "expected a finite weight");
}

void check_text(const GraphRows& rows, size_t index, const char* field, uint32_t text) {
    if (text != NO_STRING) expect_below("details", index, field, text, rows.strings.size());
}

NodeKind owner_kind(DetailKind kind) {
    switch (kind) {
        case DetailKind::Kernel: return NodeKind::Kernel;
        case DetailKind::Function: return NodeKind::Function;
        case DetailKind::AsyncTask: return NodeKind::AsyncTask;
        default: return NodeKind::Transfer;
    }
}

void check_detail(const GraphRows& rows, size_t index) {
    const GraphDetailRow& detail = rows.details[index];
    expect_below("details", index, "kind", code(detail.kind), DETAIL_KINDS);
    expect_below("details", index, "direction", code(detail.direction), TRANSFER_DIRECTIONS);
    const bool of_edge = detail.kind == DetailKind::TransferEdge;
    expect_below("details", index, "owner", detail.owner,
                 of_edge ? rows.edges.size() : rows.nodes.size());
    const bool fits = of_edge ? rows.edges[detail.owner].kind == EdgeKind::Transfer
                              : rows.nodes[detail.owner].kind == owner_kind(detail.kind);
    if (!fits) refuse("details", index, "its owner is of another kind");
    if (detail.kind == DetailKind::Transfer) {
        check_text(rows, index, "source", detail.transfer.source);
        check_text(rows, index, "target", detail.transfer.target);
    } else if (detail.kind == DetailKind::Function) {
        check_text(rows, index, "file", detail.function.file);
    }
}

// Row i of the answer is the detail of node i; edges are looked up through a map instead.
std::vector<uint32_t> details_by_node(const GraphRows& rows) {
    std::vector<uint32_t> by_node(rows.nodes.size(), NO_DETAIL);
    std::unordered_map<uint32_t, size_t> by_edge;
    for (size_t i = 0; i < rows.details.size(); ++i) {
        check_detail(rows, i);
        const GraphDetailRow& detail = rows.details[i];
        if (detail.kind == DetailKind::TransferEdge) {
            if (!by_edge.emplace(detail.owner, i).second)
                refuse("details", i, "its edge has a detail already");
        } else if (by_node[detail.owner] != NO_DETAIL) {
            refuse("details", i, "its node has a detail already");
        } else {
            by_node[detail.owner] = static_cast<uint32_t>(i);
        }
    }
    return by_node;
}

bool is_torn(const GraphDetailRow& detail, const GraphRows& rows) {
    return detail.owner >= (detail.kind == DetailKind::TransferEdge ? rows.edges.size()
                                                                    : rows.nodes.size());
}

}  // namespace

size_t GraphRows::drop_torn_tail() {
    const size_t before = nodes.size() + edges.size() + details.size();
    while (!nodes.empty() && nodes.back().name >= strings.size()) nodes.pop_back();
    const auto dangles = [&](const GraphEdgeRow& edge) {
        return edge.source >= nodes.size() || edge.target >= nodes.size();
    };
    // Edges name their details by position, so they go from the end only; one that dangles in the
    // middle is damage, which load() reports.
    while (!edges.empty() && dangles(edges.back())) edges.pop_back();
    std::erase_if(details, [&](const GraphDetailRow& detail) { return is_torn(detail, *this); });
    return before - nodes.size() - edges.size() - details.size();
}

void GraphStore::load(const GraphRows& rows) {
    std::lock_guard lock(m_mutex);
    if (m_sink) throw GraphFault("expected no sink while tables are loaded; detach it first");
    if (rows.nodes.size() > m_node_budget || rows.edges.size() > m_edge_budget)
        throw GraphFault("expected at most " + std::to_string(m_node_budget) + " nodes and " +
                         std::to_string(m_edge_budget) + " edges, got " +
                         std::to_string(rows.nodes.size()) + " and " +
                         std::to_string(rows.edges.size()) + "; give a larger node_budget");
    std::unordered_map<std::string_view, uint32_t> seen;
    for (size_t i = 0; i < rows.strings.size(); ++i)
        if (!seen.emplace(rows.strings[i], static_cast<uint32_t>(i)).second)
            refuse("strings", i, "expected each string once");
    for (size_t i = 0; i < rows.nodes.size(); ++i) check_node(rows, i);
    for (size_t i = 0; i < rows.edges.size(); ++i) check_edge(rows, i);
    const std::vector<uint32_t> by_node = details_by_node(rows);

    clear_locked();
    for (const std::string& text : rows.strings) intern_locked(text);
    for (size_t id = 0; id < rows.nodes.size(); ++id) {
        GraphNodeRow node = rows.nodes[id];
        node.flags &= NODE_TIMED;
        node.detail = by_node[id];
        m_nodes.push_back(node);
    }
    for (size_t i = 0; i < rows.details.size(); ++i) {
        m_details.push_back(rows.details[i]);
        if (rows.details[i].kind == DetailKind::TransferEdge)
            m_edge_details.emplace(rows.details[i].owner, static_cast<uint32_t>(i));
    }
    for (const GraphEdgeRow& edge : rows.edges) add_edge_locked(edge, nullptr);
}

void GraphStore::note_dropped(uint64_t nodes, uint64_t edges) {
    std::lock_guard lock(m_mutex);
    m_dropped_nodes += nodes;
    m_dropped_edges += edges;
}

GraphRows GraphStore::rows() const {
    std::lock_guard lock(m_mutex);
    GraphRows rows;
    rows.strings.reserve(m_strings.size());
    rows.nodes.reserve(m_nodes.size());
    rows.edges.reserve(m_edges.size());
    rows.details.reserve(m_details.size());
    for (const auto& text : m_strings) rows.strings.push_back(*text);
    for (size_t i = 0; i < m_nodes.size(); ++i) rows.nodes.push_back(m_nodes[i]);
    for (size_t i = 0; i < m_edges.size(); ++i) rows.edges.push_back(m_edges[i]);
    for (size_t i = 0; i < m_details.size(); ++i) rows.details.push_back(m_details[i]);
    return rows;
}

}  // namespace brickline
