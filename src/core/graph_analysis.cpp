// The analyses declared in graph_analysis.h. All are linear in nodes and edges.
//
// A node v stands as two events, start (2v) and finish (2v + 1). Arcs: start -> finish of a node,
// start of a container -> start of its contents, finish of its contents -> finish of the container,
// finish of a node -> start of those that wait for it. An order of the events exists exactly when
// nothing waits for itself.
#include "graph_analysis.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace brickline {

namespace {

uint64_t saturating_add(uint64_t a, uint64_t b) {
    const uint64_t sum = a + b;
    return sum < a ? std::numeric_limits<uint64_t>::max() : sum;
}

class Schedule {
public:
    explicit Schedule(const GraphStore& store);
    CriticalPath path() const;
    std::vector<uint64_t> slack() const;

private:
    template <class Visit>
    void for_each_successor(uint32_t event, Visit visit) const;
    void link_contents();
    void order_events(const GraphStore& store);
    [[noreturn]] void report_cycle(const GraphStore& store,
                                   const std::vector<uint32_t>& waiting) const;
    void run_forward();
    uint32_t count() const { return static_cast<uint32_t>(m_view.container.size()); }
    uint64_t contents_ns(uint32_t node) const {
        return m_last_content[node] == NO_NODE ? m_start[node] : m_finish[m_last_content[node]];
    }

    DependencyView m_view;
    std::vector<uint32_t> m_first_content, m_next_content;
    std::vector<uint32_t> m_order;                // events
    std::vector<uint64_t> m_start, m_finish;
    std::vector<uint32_t> m_awaited;              // whose finish set the start; NO_NODE: container's
    std::vector<uint32_t> m_last_content;         // the content that finishes last
    uint32_t m_last = NO_NODE;                    // the node that finishes last
};

Schedule::Schedule(const GraphStore& store) : m_view(store.dependency_view()) {
    link_contents();
    order_events(store);
    run_forward();
}

void Schedule::link_contents() {
    m_first_content.assign(count(), NO_NODE);
    m_next_content.assign(count(), NO_NODE);
    for (uint32_t node = count(); node-- > 0;) {
        const uint32_t container = m_view.container[node];
        if (container == NO_NODE) continue;
        m_next_content[node] = m_first_content[container];
        m_first_content[container] = node;
    }
}

template <class Visit>
void Schedule::for_each_successor(uint32_t event, Visit visit) const {
    const uint32_t node = event / 2;
    if (event % 2 == 0) {
        visit(event + 1);
        for (uint32_t c = m_first_content[node]; c != NO_NODE; c = m_next_content[c]) visit(2 * c);
        return;
    }
    if (m_view.container[node] != NO_NODE) visit(2 * m_view.container[node] + 1);
    for (uint32_t i = m_view.waiter_begin[node]; i < m_view.waiter_begin[node + 1]; ++i)
        visit(2 * m_view.waiters[i]);
}

void Schedule::order_events(const GraphStore& store) {
    const uint32_t events = 2 * count();
    std::vector<uint32_t> waiting(events, 0);
    for (uint32_t event = 0; event < events; ++event)
        for_each_successor(event, [&](uint32_t next) { ++waiting[next]; });
    m_order.reserve(events);
    for (uint32_t event = 0; event < events; ++event)
        if (waiting[event] == 0) m_order.push_back(event);
    for (size_t i = 0; i < m_order.size(); ++i)
        for_each_successor(m_order[i], [&](uint32_t next) {
            if (--waiting[next] == 0) m_order.push_back(next);
        });
    if (m_order.size() != events) report_cycle(store, waiting);
}

void Schedule::report_cycle(const GraphStore& store, const std::vector<uint32_t>& waiting) const {
    // Every event left has a predecessor that is left too; walking back must come round.
    std::vector<uint32_t> previous(waiting.size(), NO_NODE);
    uint32_t event = NO_NODE;
    for (uint32_t left = 0; left < waiting.size(); ++left) {
        if (waiting[left] == 0) continue;
        event = left;
        for_each_successor(left, [&](uint32_t next) {
            if (waiting[next] != 0) previous[next] = left;
        });
    }
    std::vector<bool> seen(waiting.size(), false);
    while (!seen[event]) {
        seen[event] = true;
        event = previous[event];
    }
    std::vector<uint32_t> nodes;
    const uint32_t end = event;
    do {
        if (std::find(nodes.begin(), nodes.end(), event / 2) == nodes.end())
            nodes.push_back(event / 2);
        event = previous[event];
    } while (event != end && nodes.size() < 1000);
    std::reverse(nodes.begin(), nodes.end());
    constexpr size_t SHOWN = 12;
    std::string names;
    for (size_t i = 0; i < std::min(nodes.size(), SHOWN); ++i)
        names += store.describe(nodes[i]) + " -> ";
    if (nodes.size() > SHOWN) names += "… -> ";
    names += store.describe(nodes.front());
    throw GraphCycle("expected dependencies without a cycle, got " + names +
                         "; remove one of these Sequence, DependsOn or Transfer edges (a container "
                         "cannot be ordered against its own contents, nor lie inside itself)",
                     nodes);
}

void Schedule::run_forward() {
    m_start.assign(count(), 0);
    m_finish.assign(count(), 0);
    m_awaited.assign(count(), NO_NODE);
    m_last_content.assign(count(), NO_NODE);
    for (uint32_t event : m_order) {
        const uint32_t node = event / 2;
        const uint32_t container = m_view.container[node];
        if (event % 2 == 0) {
            // All that it waits for has been pushed here already; the container's start is pulled.
            if (container != NO_NODE && m_start[container] > m_start[node]) {
                m_start[node] = m_start[container];
                m_awaited[node] = NO_NODE;
            }
            continue;
        }
        const uint64_t finish = std::max(saturating_add(m_start[node], m_view.timing_ns[node]),
                                         contents_ns(node));
        m_finish[node] = finish;
        if (m_last == NO_NODE || finish > m_finish[m_last]) m_last = node;
        if (container != NO_NODE) {
            uint32_t& last = m_last_content[container];
            if (last == NO_NODE || finish > m_finish[last]) last = node;
        }
        for (uint32_t i = m_view.waiter_begin[node]; i < m_view.waiter_begin[node + 1]; ++i) {
            const uint32_t waiter = m_view.waiters[i];
            if (finish <= m_start[waiter]) continue;
            m_start[waiter] = finish;
            m_awaited[waiter] = node;
        }
    }
}

CriticalPath Schedule::path() const {
    CriticalPath path;
    if (m_last == NO_NODE) return path;
    path.total_ns = m_finish[m_last];
    uint32_t node = m_last;
    bool at_finish = true;
    while (node != NO_NODE) {
        if (at_finish) {
            const uint64_t contents = contents_ns(node);
            if (m_finish[node] > contents)
                path.steps.push_back({node, contents, m_finish[node] - contents});
            at_finish = m_last_content[node] != NO_NODE;
            if (at_finish) node = m_last_content[node];
        } else {
            at_finish = m_awaited[node] != NO_NODE;
            node = at_finish ? m_awaited[node] : m_view.container[node];
        }
    }
    std::reverse(path.steps.begin(), path.steps.end());
    return path;
}

std::vector<uint64_t> Schedule::slack() const {
    const uint64_t total = m_last == NO_NODE ? 0 : m_finish[m_last];
    std::vector<uint64_t> latest_start(count(), total), latest_finish(count(), total);
    for (size_t i = m_order.size(); i-- > 0;) {
        const uint32_t node = m_order[i] / 2;
        if (m_order[i] % 2 == 1) {
            uint64_t& latest = latest_finish[node];
            const uint32_t container = m_view.container[node];
            if (container != NO_NODE) {
                const uint64_t remainder = m_finish[container] - contents_ns(container);
                latest = std::min(latest, latest_finish[container] - remainder);
            }
            for (uint32_t w = m_view.waiter_begin[node]; w < m_view.waiter_begin[node + 1]; ++w)
                latest = std::min(latest, latest_start[m_view.waiters[w]]);
        } else if (m_first_content[node] == NO_NODE) {
            latest_start[node] = latest_finish[node] - (m_finish[node] - m_start[node]);
        } else {
            for (uint32_t c = m_first_content[node]; c != NO_NODE; c = m_next_content[c])
                latest_start[node] = std::min(latest_start[node], latest_start[c]);
        }
    }
    for (uint32_t node = 0; node < count(); ++node) latest_finish[node] -= m_finish[node];
    return latest_finish;
}

}  // namespace

CriticalPath critical_path(const GraphStore& store) { return Schedule(store).path(); }

std::vector<uint64_t> slack_ns(const GraphStore& store) { return Schedule(store).slack(); }

std::vector<RooflineDistance> roofline_distance(const GraphStore& store, double peak_tflops,
                                                double peak_gbps) {
    if (!(std::isfinite(peak_tflops) && peak_tflops > 0 && std::isfinite(peak_gbps) &&
          peak_gbps > 0))
        throw GraphFault("expected peaks above 0, got peak_tflops=" + std::to_string(peak_tflops) +
                         " and peak_gbps=" + std::to_string(peak_gbps) +
                         "; measure them with `brickline doctor --peaks`");
    std::vector<RooflineDistance> distances;
    for (const GraphDetailRow& detail : store.details_of_kind(DetailKind::Kernel)) {
        const KernelDetail& kernel = detail.kernel;
        if (!(kernel.arithmetic_intensity > 0) || !(kernel.achieved_tflops >= 0)) continue;
        const double memory_roof = kernel.arithmetic_intensity * peak_gbps / 1000.0;
        const double roof = std::min(peak_tflops, memory_roof);
        const double distance = 1.0 - std::min(1.0, kernel.achieved_tflops / roof);
        distances.push_back(
            {detail.owner, roof, kernel.achieved_tflops, distance, memory_roof < peak_tflops});
    }
    std::sort(distances.begin(), distances.end(),
              [](const auto& a, const auto& b) { return a.node < b.node; });
    return distances;
}

std::optional<uint32_t> slowest_kernel(const GraphStore& store) {
    std::optional<uint32_t> slowest;
    uint64_t longest = 0;
    for (const auto& [id, row] : store.nodes_of_kind(NodeKind::Kernel)) {
        if (!(row.flags & NODE_TIMED) || (slowest && row.timing_ns <= longest)) continue;
        slowest = id;
        longest = row.timing_ns;
    }
    return slowest;
}

std::vector<PingPong> ping_pong(const GraphStore& store) {
    std::vector<GraphDetailRow> transfers = store.details_of_kind(DetailKind::Transfer);
    std::sort(transfers.begin(), transfers.end(),
              [](const auto& a, const auto& b) { return a.owner < b.owner; });
    using Place = std::pair<uint32_t, uint64_t>;  // where on the device, and how many bytes
    std::map<Place, std::vector<uint32_t>> to_device, to_host;
    std::vector<PingPong> pairs;
    for (const GraphDetailRow& detail : transfers) {
        if (detail.direction == TransferDirection::DeviceToDevice) continue;
        const bool leaves_host = detail.direction == TransferDirection::HostToDevice;
        const Place place{leaves_host ? detail.transfer.target : detail.transfer.source,
                          detail.transfer.bytes};
        std::vector<uint32_t>& opposite = leaves_host ? to_host[place] : to_device[place];
        if (!opposite.empty()) {
            pairs.push_back({opposite.back(), detail.owner, detail.transfer.bytes});
            opposite.pop_back();
        }
        (leaves_host ? to_device : to_host)[place].push_back(detail.owner);
    }
    return pairs;
}

uint64_t fnv1a_64(std::string_view bytes) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const char byte : bytes) {
        hash ^= static_cast<uint8_t>(byte);
        hash *= 0x100000001b3ull;
    }
    return hash;
}

}  // namespace brickline
