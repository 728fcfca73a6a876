// The recorder behind one profiler: its spool, the lanes of its threads and the graph that finished
// bricks are drawn into. Knows no Python. A profiler that was never enabled has none.
#pragma once

#include <atomic>
#include <functional>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "graph.h"
#include "lane.h"
#include "spool.h"

namespace brickline {

// What a slot id stands for; kept by the profiler, so that ids outlive one spool.
struct SlotDefinition {
    SlotKind kind = SlotKind::Brick;
    std::string name;
    int32_t brick = -1;
    int32_t layer = -1;
    uint32_t category = 3;
    uint32_t level = 0;
    uint32_t owner = 0xffffffffu;
};

// What slot ids stand for. One thread adds while others look; what was handed out stays in place.
class SlotList {
  public:
    void set(uint32_t id, const SlotDefinition& slot) {
        std::lock_guard guard(m_mutex);
        while (id >= m_slots.size()) m_slots.emplace_back();
        m_slots[id] = slot;
    }
    const SlotDefinition& operator[](uint32_t id) const {
        std::lock_guard guard(m_mutex);
        return m_slots[id];
    }

  private:
    mutable std::mutex m_mutex;
    std::deque<SlotDefinition> m_slots;
};

struct RecorderOptions {
    std::string path;
    uint32_t rank = 0;
    uint32_t recent_records = 0;
};

class Recorder {
  public:
    Recorder(const RecorderOptions& options, const TickSource& source,
             const std::vector<SlotDefinition>& slots);
    ~Recorder();

    Spool& spool() { return m_spool; }
    TickScale scale() {
        const SpoolHeader& header = m_spool.header();
        return {header.anchor_tick, header.anchor_ns, m_spool.ns_per_tick()};
    }
    void add_slot(uint32_t id, const SlotDefinition& slot);

    // A lane for a thread that has none yet: new, or left behind by a thread that has ended.
    Lane* acquire_lane(const LaneIdentity& identity);
    // Another lane for the thread of `home`, whose entries a suspended task holds open.
    Lane* acquire_task_lane(Lane& home, LaneIdentity identity);
    // A thread has ended: gives its lane back, and those of its tasks.
    void release_lane(Lane* lane);
    // A lane of (thread, stream) for device spans; never reused.
    Lane* device_lane(const LaneIdentity& identity);

    // Under the caller's guarantee that no thread records meanwhile.
    void for_each_host_lane(const std::function<void(Lane&)>& visit);
    // Folds every host lane. The caller keeps recording threads out.
    void flush();

    // Forgets the statistics of some slots on every lane, on the same condition; device lanes are held.
    void forget(const std::vector<bool>& slots);

    // Draw finished bricks into `graph`, which the caller keeps alive; nullptr stops.
    void set_graph(GraphStore* graph);
    void connect_graph_table(GraphStore* graph);
    // Puts a node into the entry of a lane that is open at a depth; that is drawn when it is left.
    void place_in_open(Lane& lane, uint32_t depth, const GraphChild& child);
    // The node that the entry which a lane's thread left last has become; NO_NODE where it is not
    // drawn, or was asked for before.
    uint32_t take_drawn(Lane& lane);

    void close();
    void abandon();  // in a forked child
    bool is_open() const { return m_open; }
    bool is_full_disk() const;
    uint32_t lane_count() const {
        std::lock_guard guard(m_mutex);
        return uint32_t(m_lanes.size());
    }

  private:
    class Painter;
    class GraphTable;

    Lane* acquire(std::vector<Lane*>& idle, const LaneIdentity& identity, LaneSize size);
    static void finish(Lane& lane);

    const TickSource& m_source;
    Spool m_spool;
    RecorderOptions m_options;
    mutable std::mutex m_mutex;
    std::vector<std::unique_ptr<Lane>> m_lanes;
    std::vector<Lane*> m_idle;
    std::vector<Lane*> m_idle_of_tasks;
    std::vector<std::unique_ptr<Painter>> m_painters;
    std::unique_ptr<GraphTable> m_graph_table;
    SlotList m_slots;
    GraphStore* m_graph = nullptr;
    GraphStore* m_connected = nullptr;
    bool m_open = true;
};

}  // namespace brickline
