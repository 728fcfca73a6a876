// GraphStore: reading. Look-ups by id, name and edge through indexes that grow on demand, and the
// copy that the analyses work on. Changes nothing but those indexes.
#include <algorithm>

#include "graph.h"

namespace brickline {

namespace {

constexpr uint32_t NO_EDGE = 0xffffffffu;

// Calls edges may describe recursion. A loop of containers that passes through a Calls edge is
// opened at the latest one; a loop without is left for the analysis to report.
void open_recursive_calls(std::vector<uint32_t>& container, std::vector<uint32_t>& container_edge,
                          const BlockArray<GraphEdgeRow>& edges) {
    const auto count = static_cast<uint32_t>(container.size());
    std::vector<uint32_t> visit(count, NO_NODE);  // the walk that reached a node first
    for (uint32_t root = 0; root < count; ++root) {
        uint32_t node = root;
        while (node != NO_NODE && visit[node] == NO_NODE) {
            visit[node] = root;
            node = container[node];
        }
        if (node == NO_NODE || visit[node] != root) continue;
        uint32_t latest = NO_NODE;
        uint32_t member = node;
        do {
            const uint32_t edge = container_edge[member];
            if (edges[edge].kind == EdgeKind::Calls &&
                (latest == NO_NODE || edge > container_edge[latest]))
                latest = member;
            member = container[member];
        } while (member != node);
        if (latest != NO_NODE) container[latest] = NO_NODE;
    }
}

}  // namespace

GraphCounts GraphStore::counts() const {
    std::lock_guard lock(m_mutex);
    return {m_nodes.size(),   m_edges.size(),  m_details.size(),
            m_strings.size(), m_dropped_nodes, m_dropped_edges};
}

uint64_t GraphStore::bytes() const {
    std::lock_guard lock(m_mutex);
    // 64 bytes stand for a map entry's node and its share of the buckets.
    const uint64_t strings =
        m_string_bytes + m_strings.size() * (sizeof(std::string) + sizeof(void*) + 64);
    const uint64_t index = m_index.last_out.bytes() + m_index.last_in.bytes() +
                           m_index.previous_out.bytes() + m_index.previous_in.bytes() +
                           m_index.previous_same_name.bytes() +
                           m_index.last_of_name.capacity() * sizeof(uint32_t);
    return m_nodes.bytes() + m_edges.bytes() + m_details.bytes() + m_edge_details.size() * 64 +
           strings + index;
}

void GraphStore::check_node_locked(uint32_t id) const {
    if (id < m_nodes.size()) return;
    if (id == NO_NODE)
        throw GraphFault("expected a stored node, got one that the node budget of " +
                         std::to_string(m_node_budget) +
                         " did not admit; raise node_budget or call clear()");
    throw GraphFault("expected a node id below " + std::to_string(m_nodes.size()) + ", got " +
                     std::to_string(id) + "; use an id that this graph returned since its last "
                     "clear()");
}

void GraphStore::check_endpoint_locked(uint32_t id) const {
    if (id != NO_NODE) check_node_locked(id);
}

GraphNodeView GraphStore::node(uint32_t id) const {
    std::lock_guard lock(m_mutex);
    check_node_locked(id);
    GraphNodeView view;
    view.row = m_nodes[id];
    view.name = text_locked(view.row.name);
    if (view.row.detail == NO_DETAIL) return view;
    view.detail = m_details[view.row.detail];
    if (view.detail->kind == DetailKind::Transfer) {
        view.source = text_locked(view.detail->transfer.source);
        view.target = text_locked(view.detail->transfer.target);
    } else if (view.detail->kind == DetailKind::Function) {
        view.source = text_locked(view.detail->function.file);
    }
    return view;
}

GraphEdgeRow GraphStore::edge(uint32_t index) const {
    std::lock_guard lock(m_mutex);
    if (index >= m_edges.size())
        throw GraphFault("expected an edge index below " + std::to_string(m_edges.size()) +
                         ", got " + std::to_string(index) + "; see num_edges");
    return m_edges[index];
}

std::optional<GraphDetailRow> GraphStore::edge_detail(uint32_t index) const {
    std::lock_guard lock(m_mutex);
    const auto found = m_edge_details.find(index);
    if (found == m_edge_details.end()) return std::nullopt;
    return m_details[found->second];
}

bool GraphStore::is_contained(uint32_t id) const {
    std::lock_guard lock(m_mutex);
    check_node_locked(id);
    return m_nodes[id].flags & NODE_CONTAINED;
}

void GraphStore::extend_name_index_locked() const {
    m_index.last_of_name.resize(m_strings.size(), NO_NODE);
    for (size_t id = m_index.previous_same_name.size(); id < m_nodes.size(); ++id) {
        uint32_t& last = m_index.last_of_name[m_nodes[id].name];
        m_index.previous_same_name.push_back(last);
        last = static_cast<uint32_t>(id);
    }
}

void GraphStore::extend_edge_index_locked() const {
    for (size_t id = m_index.last_out.size(); id < m_nodes.size(); ++id) {
        m_index.last_out.push_back(NO_EDGE);
        m_index.last_in.push_back(NO_EDGE);
    }
    for (size_t i = m_index.previous_out.size(); i < m_edges.size(); ++i) {
        const GraphEdgeRow& edge = m_edges[i];
        m_index.previous_out.push_back(m_index.last_out[edge.source]);
        m_index.previous_in.push_back(m_index.last_in[edge.target]);
        m_index.last_out[edge.source] = m_index.last_in[edge.target] = static_cast<uint32_t>(i);
    }
}

std::vector<uint32_t> GraphStore::chain_locked(const BlockArray<uint32_t>& last,
                                               const BlockArray<uint32_t>& previous,
                                               uint32_t id) const {
    std::vector<uint32_t> edges;
    for (uint32_t edge = last[id]; edge != NO_EDGE; edge = previous[edge]) edges.push_back(edge);
    std::reverse(edges.begin(), edges.end());
    return edges;
}

std::vector<uint32_t> GraphStore::outgoing(uint32_t id) const {
    std::lock_guard lock(m_mutex);
    check_node_locked(id);
    extend_edge_index_locked();
    return chain_locked(m_index.last_out, m_index.previous_out, id);
}

std::vector<uint32_t> GraphStore::incoming(uint32_t id) const {
    std::lock_guard lock(m_mutex);
    check_node_locked(id);
    extend_edge_index_locked();
    return chain_locked(m_index.last_in, m_index.previous_in, id);
}

std::vector<uint32_t> GraphStore::nodes_by_name(std::string_view name) const {
    std::lock_guard lock(m_mutex);
    std::vector<uint32_t> nodes;
    const auto text = find_string_locked(name);
    if (!text) return nodes;
    extend_name_index_locked();
    for (uint32_t id = m_index.last_of_name[*text]; id != NO_NODE;
         id = m_index.previous_same_name[id])
        nodes.push_back(id);
    std::reverse(nodes.begin(), nodes.end());
    return nodes;
}

std::optional<uint32_t> GraphStore::last_node_by_name(std::string_view name) const {
    std::lock_guard lock(m_mutex);
    const auto text = find_string_locked(name);
    if (!text) return std::nullopt;
    extend_name_index_locked();
    const uint32_t id = m_index.last_of_name[*text];
    return id == NO_NODE ? std::nullopt : std::optional(id);
}

std::vector<std::pair<uint32_t, GraphNodeRow>> GraphStore::nodes_of_kind(NodeKind kind) const {
    std::lock_guard lock(m_mutex);
    std::vector<std::pair<uint32_t, GraphNodeRow>> nodes;
    for (size_t id = 0; id < m_nodes.size(); ++id)
        if (m_nodes[id].kind == kind) nodes.emplace_back(static_cast<uint32_t>(id), m_nodes[id]);
    return nodes;
}

std::vector<GraphDetailRow> GraphStore::details_of_kind(DetailKind kind) const {
    std::lock_guard lock(m_mutex);
    std::vector<GraphDetailRow> details;
    for (size_t i = 0; i < m_details.size(); ++i)
        if (m_details[i].kind == kind) details.push_back(m_details[i]);
    return details;
}

DependencyView GraphStore::dependency_view() const {
    std::lock_guard lock(m_mutex);
    const size_t count = m_nodes.size();
    DependencyView view;
    view.timing_ns.resize(count);
    for (size_t id = 0; id < count; ++id) view.timing_ns[id] = m_nodes[id].timing_ns;
    view.container.assign(count, NO_NODE);
    view.waiter_begin.assign(count + 1, 0);
    std::vector<uint32_t> container_edge(count, NO_EDGE);
    for (size_t i = 0; i < m_edges.size(); ++i) {
        const GraphEdgeRow& edge = m_edges[i];
        if (!is_containment(edge.kind)) {
            ++view.waiter_begin[edge.source + 1];
            continue;
        }
        const bool is_call = edge.kind == EdgeKind::Calls;
        if (is_call && edge.source == edge.target) continue;
        // The first container counts, and being contained or launched outranks being called.
        const uint32_t known = container_edge[edge.target];
        if (known != NO_EDGE && (is_call || m_edges[known].kind != EdgeKind::Calls)) continue;
        view.container[edge.target] = edge.source;
        container_edge[edge.target] = static_cast<uint32_t>(i);
    }
    open_recursive_calls(view.container, container_edge, m_edges);
    for (size_t id = 0; id < count; ++id) view.waiter_begin[id + 1] += view.waiter_begin[id];
    view.waiters.resize(view.waiter_begin[count]);
    std::vector<uint32_t> next(view.waiter_begin.begin(), view.waiter_begin.end() - 1);
    for (size_t i = 0; i < m_edges.size(); ++i)
        if (!is_containment(m_edges[i].kind))
            view.waiters[next[m_edges[i].source]++] = m_edges[i].target;
    return view;
}

std::string GraphStore::describe(uint32_t id) const {
    std::lock_guard lock(m_mutex);
    const std::string name = id < m_nodes.size() ? text_locked(m_nodes[id].name) : "?";
    return "'" + name + "' (node " + std::to_string(id) + ")";
}

}  // namespace brickline
