// GraphStore: additions. Reading is in graph_lookup.cpp, whole tables in and out in graph_load.cpp,
// the analyses in graph_analysis.cpp.
#include "graph.h"

#include <algorithm>

namespace brickline {

namespace {

GraphNodeRow plain_row(NodeKind kind, uint32_t name, std::optional<uint64_t> timing_ns,
                       uint64_t start_ns) {
    GraphNodeRow row;
    row.kind = kind;
    row.name = name;
    row.start_ns = start_ns;
    row.timing_ns = timing_ns.value_or(0);
    row.flags = timing_ns ? NODE_TIMED : 0;
    return row;
}

}  // namespace

GraphStore::GraphStore(uint32_t node_budget)
    : m_node_budget(std::min(node_budget, NO_NODE - 1)),
      m_edge_budget(std::min<uint64_t>(uint64_t{m_node_budget} * EDGES_PER_NODE, NO_NODE - 1)) {}

void GraphStore::attach_sink(GraphSink* sink) {
    std::lock_guard lock(m_mutex);
    m_sink = sink;
    if (!sink) return;
    for (uint32_t id = 0; id < m_strings.size(); ++id) sink->on_string(id, *m_strings[id]);
    for (size_t i = 0; i < m_details.size(); ++i) sink->on_detail(m_details[i]);
    for (size_t i = 0; i < m_nodes.size(); ++i) sink->on_node(m_nodes[i]);
    for (size_t i = 0; i < m_edges.size(); ++i) sink->on_edge(m_edges[i]);
}

void GraphStore::set_open(bool open) {
    std::lock_guard lock(m_mutex);
    m_open = open;
}

bool GraphStore::is_open() const {
    std::lock_guard lock(m_mutex);
    return m_open;
}

uint32_t GraphStore::intern(std::string_view text) {
    std::lock_guard lock(m_mutex);
    return intern_locked(text);
}

uint32_t GraphStore::intern_locked(std::string_view text) {
    if (auto found = find_string_locked(text)) return *found;
    const auto id = static_cast<uint32_t>(m_strings.size());
    m_strings.push_back(std::make_unique<std::string>(text));
    m_string_ids.emplace(*m_strings.back(), id);
    m_string_bytes += text.size();
    if (m_sink) m_sink->on_string(id, text);
    return id;
}

std::optional<uint32_t> GraphStore::find_string_locked(std::string_view text) const {
    const auto found = m_string_ids.find(text);
    if (found == m_string_ids.end()) return std::nullopt;
    return found->second;
}

std::string GraphStore::text_locked(uint32_t id) const {
    return id < m_strings.size() ? *m_strings[id] : std::string();
}

// Asked before names are interned, so that a full or closed graph does not grow by its names either.
bool GraphStore::admit_node_locked() {
    if (!m_open) return false;
    if (m_nodes.size() < m_node_budget) return true;
    ++m_dropped_nodes;
    return false;
}

uint32_t GraphStore::add_locked(GraphNodeRow row, const GraphDetailRow* detail) {
    const auto id = static_cast<uint32_t>(m_nodes.size());
    row.detail = NO_DETAIL;
    row.flags &= NODE_TIMED;
    if (detail) {
        GraphDetailRow owned = *detail;
        owned.owner = id;
        row.detail = static_cast<uint32_t>(m_details.size());
        m_details.push_back(owned);
        if (m_sink) m_sink->on_detail(owned);
    }
    m_nodes.push_back(row);
    if (m_sink) m_sink->on_node(row);
    return id;
}

void GraphStore::check_brick_locked(const GraphNodeRow& row) const {
    if (row.name >= m_strings.size())
        throw GraphFault("expected a brick name below string id " +
                         std::to_string(m_strings.size()) + ", got " + std::to_string(row.name) +
                         "; intern the name in this graph first");
}

uint32_t GraphStore::add_brick(GraphNodeRow row) { return add_brick_with_children(row, {}); }

uint32_t GraphStore::add_named_brick(std::string_view name, GraphNodeRow row) {
    std::lock_guard lock(m_mutex);
    if (!admit_node_locked()) return NO_NODE;
    row.kind = NodeKind::Brick;
    row.name = intern_locked(name);
    return add_locked(row, nullptr);
}

uint32_t GraphStore::add_brick_with_children(GraphNodeRow row,
                                             std::span<const GraphChild> children) {
    std::lock_guard lock(m_mutex);
    check_brick_locked(row);
    for (const GraphChild& child : children) check_endpoint_locked(child.node);
    row.kind = NodeKind::Brick;
    const uint32_t id = admit_node_locked() ? add_locked(row, nullptr) : NO_NODE;
    for (const GraphChild& child : children)
        add_edge_locked({id, child.node, 1.0f, child.kind, {}}, nullptr);
    uint32_t previous = NO_NODE;
    for (const GraphChild& child : children) {
        if (child.in_sequence) follow_locked(previous, child.node);
    }
    return id;
}

uint32_t GraphStore::add_kernel(std::string_view name, const KernelDetail& kernel,
                                std::optional<uint64_t> timing_ns, uint64_t start_ns) {
    std::lock_guard lock(m_mutex);
    if (!admit_node_locked()) return NO_NODE;
    GraphDetailRow detail;
    detail.kind = DetailKind::Kernel;
    detail.kernel = kernel;
    return add_locked(plain_row(NodeKind::Kernel, intern_locked(name), timing_ns, start_ns),
                      &detail);
}

uint32_t GraphStore::add_transfer(std::string_view source, std::string_view target, uint64_t bytes,
                                  TransferDirection direction, std::optional<uint64_t> timing_ns,
                                  uint64_t start_ns) {
    std::lock_guard lock(m_mutex);
    if (!admit_node_locked()) return NO_NODE;
    std::string name = direction_name(direction);
    name.append(":").append(source).append("->").append(target);
    GraphDetailRow detail;
    detail.kind = DetailKind::Transfer;
    detail.direction = direction;
    detail.transfer = {bytes, intern_locked(source), intern_locked(target)};
    return add_locked(plain_row(NodeKind::Transfer, intern_locked(name), timing_ns, start_ns),
                      &detail);
}

uint32_t GraphStore::add_function(std::string_view name, std::optional<std::string_view> file,
                                  uint32_t line, std::optional<uint64_t> timing_ns,
                                  uint64_t start_ns) {
    std::lock_guard lock(m_mutex);
    if (!admit_node_locked()) return NO_NODE;
    const GraphNodeRow row =
        plain_row(NodeKind::Function, intern_locked(name), timing_ns, start_ns);
    if (!file && line == 0) return add_locked(row, nullptr);
    GraphDetailRow detail;
    detail.kind = DetailKind::Function;
    detail.function = {file ? intern_locked(*file) : NO_STRING, line};
    return add_locked(row, &detail);
}

uint32_t GraphStore::add_layer(int32_t index, std::optional<uint64_t> timing_ns,
                               uint64_t start_ns) {
    std::lock_guard lock(m_mutex);
    if (!admit_node_locked()) return NO_NODE;
    const uint32_t name = intern_locked("Layer" + std::to_string(index));
    GraphNodeRow row = plain_row(NodeKind::Layer, name, timing_ns, start_ns);
    row.layer = index;
    return add_locked(row, nullptr);
}

uint32_t GraphStore::add_async_task(std::string_view name, const AsyncTaskDetail& task,
                                    uint64_t total_poll_ns, uint64_t start_ns) {
    std::lock_guard lock(m_mutex);
    if (!admit_node_locked()) return NO_NODE;
    GraphDetailRow detail;
    detail.kind = DetailKind::AsyncTask;
    detail.task = task;
    return add_locked(plain_row(NodeKind::AsyncTask, intern_locked(name), total_poll_ns, start_ns),
                      &detail);
}

bool GraphStore::add_edge(uint32_t source, uint32_t target, EdgeKind kind, float weight) {
    std::lock_guard lock(m_mutex);
    check_endpoint_locked(source);
    check_endpoint_locked(target);
    return add_edge_locked({source, target, weight, kind, {}}, nullptr);
}

bool GraphStore::add_transfer_edge(uint32_t source, uint32_t target, uint64_t bytes,
                                   TransferDirection direction, float weight) {
    std::lock_guard lock(m_mutex);
    check_endpoint_locked(source);
    check_endpoint_locked(target);
    GraphDetailRow detail;
    detail.kind = DetailKind::TransferEdge;
    detail.direction = direction;
    detail.transfer = {bytes, NO_STRING, NO_STRING};
    return add_edge_locked({source, target, weight, EdgeKind::Transfer, {}}, &detail);
}

void GraphStore::add_sequence(std::span<const uint32_t> nodes) {
    std::lock_guard lock(m_mutex);
    for (uint32_t node : nodes) check_endpoint_locked(node);
    uint32_t previous = NO_NODE;
    for (uint32_t node : nodes) follow_locked(previous, node);
}

// A dropped node between two stored ones must not break the order of its neighbours.
void GraphStore::follow_locked(uint32_t& previous, uint32_t node) {
    if (node == NO_NODE) return;
    if (previous != NO_NODE)
        add_edge_locked({previous, node, 1.0f, EdgeKind::Sequence, {}}, nullptr);
    previous = node;
}

bool GraphStore::add_edge_locked(const GraphEdgeRow& edge, const GraphDetailRow* detail) {
    if (!m_open) return false;
    if (edge.source == NO_NODE || edge.target == NO_NODE || m_edges.size() >= m_edge_budget) {
        ++m_dropped_edges;
        return false;
    }
    if (detail) {
        GraphDetailRow owned = *detail;
        owned.owner = static_cast<uint32_t>(m_edges.size());
        m_edge_details.emplace(owned.owner, static_cast<uint32_t>(m_details.size()));
        m_details.push_back(owned);
        if (m_sink) m_sink->on_detail(owned);
    }
    m_edges.push_back(edge);
    if (is_containment(edge.kind)) m_nodes[edge.target].flags |= NODE_CONTAINED;
    if (m_sink) m_sink->on_edge(edge);
    return true;
}

void GraphStore::clear() {
    std::lock_guard lock(m_mutex);
    clear_locked();
    if (m_sink) m_sink->on_clear();
}

void GraphStore::clear_locked() {
    m_nodes.clear();
    m_edges.clear();
    m_details.clear();
    m_edge_details.clear();
    m_string_ids.clear();
    m_strings.clear();
    m_index = {};
    m_string_bytes = m_dropped_nodes = m_dropped_edges = 0;
}

}  // namespace brickline
