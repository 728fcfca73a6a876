#include "recorder.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace brickline {

// Turns one lane's records, which arrive children first, into brick nodes with their contents.
class Recorder::Painter final : public FoldObserver {
  public:
    Painter(GraphStore& graph, const SlotList& slots)
        : m_graph(graph), m_slots(slots) {}

    void on_brick(const BrickRecord& record, uint64_t start_ns, uint64_t duration_ns,
                  uint64_t elements) override {
        m_last_drawn = NO_NODE;
        if (record.flags & RECORD_IS_WORK) {
            for (auto& open : m_open) open.clear();
            m_deepest = 0;
            return;
        }
        if (record.flags & NOT_DRAWN) {
            pass_on(record.depth);
            return;
        }
        const SlotDefinition& slot = m_slots[record.slot];
        const bool is_step = slot.kind == SlotKind::Step;
        std::vector<Child> children;
        for (uint32_t depth = record.depth + 1; depth <= m_deepest; ++depth) {
            children.insert(children.end(), m_open[depth].begin(), m_open[depth].end());
            m_open[depth].clear();
        }
        m_deepest = record.depth;
        const uint32_t name = m_graph.intern(is_step ? step_name(slot.name) : slot.name);
        const uint32_t node = m_graph.add_brick_with_children(
            brick_row(name, int16_t(slot.brick), slot.layer, duration_ns, elements, start_ns),
            is_step ? by_layer(children) : plain(children));
        m_last_drawn = node;
        if (record.depth > 0) {
            m_open[record.depth].push_back({{node}, slot.layer});
            return;
        }
        if (m_last_root != NO_NODE) {
            const uint32_t pair[2] = {m_last_root, node};
            m_graph.add_sequence(pair);
        }
        m_last_root = node;
    }

    // Puts a node into the entry that is open at a depth and will be drawn when it is left.
    void place(uint32_t depth, const GraphChild& child) {
        m_open[depth + 1].push_back({child, -1});
        m_deepest = std::max(m_deepest, depth + 1);
    }
    uint32_t take_drawn() { return std::exchange(m_last_drawn, NO_NODE); }

  private:
    static constexpr uint8_t NOT_DRAWN = RECORD_TILE | RECORD_OUT_OF_ORDER | RECORD_APPROXIMATE |
                                         RECORD_EXACT | RECORD_UNTIMED;

    // What stood inside an entry that is not drawn belongs to what encloses it.
    void pass_on(uint32_t depth) {
        for (uint32_t deeper = depth + 1; deeper <= m_deepest; ++deeper) {
            m_open[depth].insert(m_open[depth].end(), m_open[deeper].begin(), m_open[deeper].end());
            m_open[deeper].clear();
        }
        if (depth == 0) m_open[0].clear();
        m_deepest = depth;
    }

    struct Child {
        GraphChild place;
        int32_t layer;
    };

    static std::vector<GraphChild> plain(const std::vector<Child>& children) {
        std::vector<GraphChild> places;
        for (const Child& child : children) places.push_back(child.place);
        return places;
    }

    // What a step holds: neighbours of the same layer stand together in a layer's node.
    std::vector<GraphChild> by_layer(const std::vector<Child>& children) {
        std::vector<GraphChild> places;
        for (size_t first = 0; first < children.size();) {
            const int32_t layer = children[first].layer;
            size_t end = first + 1;
            while (end < children.size() && children[end].layer == layer) ++end;
            if (layer < 0) {
                for (size_t at = first; at < end; ++at) places.push_back(children[at].place);
            } else {
                places.push_back({m_graph.add_layer(layer, std::nullopt)});
                std::vector<uint32_t> inner;
                for (size_t at = first; at < end; ++at) {
                    const uint32_t node = children[at].place.node;
                    m_graph.add_edge(places.back().node, node, EdgeKind::Contains);
                    inner.push_back(node);
                }
                m_graph.add_sequence(inner);
            }
            first = end;
        }
        return places;
    }

    static std::string step_name(const std::string& phase) {
        return phase.empty() ? "Step" : "Step (" + phase + ")";
    }

    GraphStore& m_graph;
    const SlotList& m_slots;
    std::vector<Child> m_open[MAX_DEPTH + 1];  // what finished inside an entry stands one deeper
    uint32_t m_deepest = 0;
    uint32_t m_last_root = NO_NODE;
    uint32_t m_last_drawn = NO_NODE;
};

// Writes the graph's rows to the spool as they are added.
class Recorder::GraphTable final : public GraphSink {
  public:
    explicit GraphTable(Spool& spool) : m_spool(spool) {}

    void on_string(uint32_t id, std::string_view text) noexcept override {
        std::vector<char> row(sizeof(StringRow) + round_up(text.size(), 8));
        const StringRow head{id, uint32_t(text.size())};
        std::memcpy(row.data(), &head, sizeof head);
        std::memcpy(row.data() + sizeof head, text.data(), text.size());
        append(ExtentKind::GraphString, row.data(), row.size());
    }
    void on_node(const GraphNodeRow& row) noexcept override {
        append(ExtentKind::GraphNode, &row, sizeof row);
    }
    void on_edge(const GraphEdgeRow& row) noexcept override {
        append(ExtentKind::GraphEdge, &row, sizeof row);
    }
    void on_detail(const GraphDetailRow& row) noexcept override {
        append(ExtentKind::GraphDetail, &row, sizeof row);
    }
    void on_clear() noexcept override {
        // A row of ones in each table: what stands before it is gone.
        mark<GraphNodeRow>(ExtentKind::GraphNode);
        mark<GraphEdgeRow>(ExtentKind::GraphEdge);
        mark<GraphDetailRow>(ExtentKind::GraphDetail);
        mark<StringRow>(ExtentKind::GraphString);
    }

  private:
    template <class Row>
    void mark(ExtentKind table) noexcept {
        unsigned char row[sizeof(Row)];
        std::memset(row, 0xff, sizeof row);
        append(table, row, sizeof row);
    }
    void append(ExtentKind table, const void* row, uint64_t bytes) noexcept {
        if (m_failed) return;
        try {
            m_spool.append(table, row, bytes);
        } catch (const SpoolError&) {
            // A table with a hole would name wrong rows; the graph in memory stays whole.
            m_failed = true;
        }
    }

    Spool& m_spool;
    bool m_failed = false;
};

Recorder::Recorder(const RecorderOptions& options, const TickSource& source,
                   const std::vector<SlotDefinition>& slots)
    : m_source(source), m_spool(options.path, options.rank, source), m_options(options) {
    for (uint32_t id = 0; id < slots.size(); ++id) add_slot(id, slots[id]);
}

Recorder::~Recorder() {
    close();
}

void Recorder::add_slot(uint32_t id, const SlotDefinition& slot) {
    const SlotRow row{id, uint32_t(slot.kind), m_spool.intern(slot.name), slot.brick, slot.layer,
                      slot.category, slot.level, slot.owner};
    m_spool.append(ExtentKind::Slot, &row, sizeof row);
    m_slots.set(id, slot);
}

Lane* Recorder::acquire_lane(const LaneIdentity& identity) {
    std::lock_guard guard(m_mutex);
    return acquire(m_idle, identity, THREAD_LANE);
}

Lane* Recorder::acquire_task_lane(Lane& home, LaneIdentity identity) {
    std::lock_guard guard(m_mutex);
    identity.name += " task " + std::to_string(home.of_thread.size());
    Lane* lane = acquire(m_idle_of_tasks, identity, TASK_LANE);
    lane->home = &home;
    home.of_thread.push_back(lane);
    return lane;
}

Lane* Recorder::acquire(std::vector<Lane*>& idle, const LaneIdentity& identity, LaneSize size) {
    if (!idle.empty()) {
        Lane* lane = idle.back();
        idle.pop_back();
        lane->adopt(identity);
        return lane;
    }
    m_lanes.push_back(std::make_unique<Lane>(m_spool, m_source, uint32_t(m_lanes.size()), identity,
                                             m_options.recent_records, size));
    Lane* lane = m_lanes.back().get();
    if (m_graph) {
        m_painters.push_back(std::make_unique<Painter>(*m_graph, m_slots));
        lane->set_observer(m_painters.back().get());
    }
    return lane;
}

void Recorder::release_lane(Lane* lane) {
    std::lock_guard guard(m_mutex);
    if (!m_open) return;
    for (Lane* used : lane->of_thread) {
        finish(*used);
        (used == lane ? m_idle : m_idle_of_tasks).push_back(used);
    }
    lane->of_thread.resize(1);
}

void Recorder::finish(Lane& lane) {
    lane.fence();  // what the thread left open belongs to nobody
    lane.fold();
    lane.header().closed = 1;
}

Lane* Recorder::device_lane(const LaneIdentity& identity) {
    std::lock_guard guard(m_mutex);
    m_lanes.push_back(std::make_unique<Lane>(m_spool, m_source, uint32_t(m_lanes.size()), identity,
                                             m_options.recent_records));
    return m_lanes.back().get();
}

void Recorder::for_each_host_lane(const std::function<void(Lane&)>& visit) {
    std::lock_guard guard(m_mutex);
    if (!m_open) return;
    for (auto& lane : m_lanes) {
        if (lane->header().device < 0) visit(*lane);
    }
}

void Recorder::flush() {
    std::lock_guard guard(m_mutex);
    if (!m_open) return;
    for (auto& lane : m_lanes) {
        if (lane->header().device < 0) lane->fold();
    }
}

void Recorder::forget(const std::vector<bool>& slots) {
    std::lock_guard guard(m_mutex);
    if (!m_open) return;
    for (auto& lane : m_lanes) lane->forget(slots);
}

// Lanes are observed by painters alone.
void Recorder::place_in_open(Lane& lane, uint32_t depth, const GraphChild& child) {
    std::lock_guard guard(m_mutex);
    if (!m_open || !lane.observer()) return;
    lane.fold();  // what finished before stands before it
    static_cast<Painter*>(lane.observer())->place(depth, child);
}

uint32_t Recorder::take_drawn(Lane& lane) {
    std::lock_guard guard(m_mutex);
    if (!m_open || !lane.observer()) return NO_NODE;
    lane.fold();
    return static_cast<Painter*>(lane.observer())->take_drawn();
}

void Recorder::set_graph(GraphStore* graph) {
    std::lock_guard guard(m_mutex);
    m_graph = graph;
    for (auto& lane : m_lanes) {
        if (lane->header().device >= 0) continue;
        lane->fold();  // what was recorded before belongs to the old setting
        lane->set_observer(nullptr);
        if (!graph) continue;
        m_painters.push_back(std::make_unique<Painter>(*graph, m_slots));
        lane->set_observer(m_painters.back().get());
    }
}

void Recorder::connect_graph_table(GraphStore* graph) {
    if (graph == m_connected) return;  // attaching again would write every row again
    if (m_connected) m_connected->attach_sink(nullptr);
    m_connected = graph;
    if (!graph) return;
    m_graph_table = std::make_unique<GraphTable>(m_spool);
    graph->attach_sink(m_graph_table.get());
}

void Recorder::close() {
    if (!m_open) return;
    flush();
    connect_graph_table(nullptr);
    std::lock_guard guard(m_mutex);
    m_open = false;
    for (auto& lane : m_lanes) {
        if (lane->header().device >= 0) lane->fold();
        lane->header().closed = 1;
    }
    m_spool.close();
}

void Recorder::abandon() {
    if (m_connected) m_connected->attach_sink(nullptr);
    m_connected = nullptr;
    m_open = false;
    m_spool.abandon();
}

bool Recorder::is_full_disk() const {
    std::lock_guard guard(m_mutex);
    for (const auto& lane : m_lanes) {
        if (lane->is_full_disk()) return true;
    }
    return false;
}

}  // namespace brickline
