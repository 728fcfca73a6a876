// Folding: finished brick records become statistics. Owns the arithmetic of nodes, histograms, tile
// cells and exclusive time. Does not know where nodes live: a writer keeps them in the spool, a
// reader on its heap, and both run this one code.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "brickline/abi.h"

namespace brickline {

// Saves old contents before they change, so that a fold cut short can be undone. See abi.h.
class Journal {
  public:
    Journal(LaneHeader& header, uint8_t* area) : m_header(header), m_area(area) {}

    template <uint64_t BYTES>
    void save(uint64_t offset, const void* old) {
        static_assert(BYTES % 8 == 0);
        const JournalEntry entry{offset, BYTES};
        std::memcpy(m_area + m_bytes, &entry, sizeof entry);
        std::memcpy(m_area + m_bytes + sizeof entry, old, BYTES);
        m_bytes += sizeof entry + BYTES;
        // The entry counts before the change that it guards: this order is what a kill leaves behind.
        std::atomic_ref<uint64_t>(m_header.journal_bytes).store(m_bytes, std::memory_order_release);
        std::atomic_signal_fence(std::memory_order_seq_cst);
    }
    bool has_room(uint64_t bytes) const { return m_bytes + bytes <= m_header.journal_capacity; }
    void clear() {
        std::atomic_signal_fence(std::memory_order_seq_cst);
        m_bytes = 0;
        std::atomic_ref<uint64_t>(m_header.journal_bytes).store(0, std::memory_order_release);
    }

  private:
    LaneHeader& m_header;
    uint8_t* m_area;
    uint64_t m_bytes = 0;
};

// Told of every record as it is folded, in the order of completion; times are 0 for a record without
// one (RECORD_UNTIMED) and for a fence (RECORD_IS_WORK).
class FoldObserver {
  public:
    virtual ~FoldObserver() = default;
    virtual void on_brick(const BrickRecord& record, uint64_t start_ns, uint64_t duration_ns,
                          uint64_t elements) = 0;
};

// Nodes, bins and cells of one lane. `Placed` carries the file offset that the journal needs.
class LaneStore {
  public:
    template <class T>
    struct Placed {
        T* at;
        uint64_t offset;
        uint32_t tally = 0;      // nodes: place among the tallies of the batch in progress…
        uint64_t batch = 0;      // …which is this one, by LaneStore::batch
    };
    // Eight octaves of a histogram. Bins are saved once in a fold, whatever falls into them.
    struct Chunk {
        uint64_t* at;
        uint64_t offset;
        uint64_t saved[2];       // bins that the batch in progress has saved…
        uint64_t batch;          // …which is this one
    };

    virtual ~LaneStore() = default;

    // Null when no space is left; the record is then counted as lost.
    Placed<Node>* node(uint32_t slot, uint32_t phase) {
        const uint64_t key = uint64_t(slot) * MAX_PHASES + phase;
        if (key < m_node_index.size() && m_node_index[key]) [[likely]] {
            return &nodes[m_node_index[key] - 1];
        }
        return add_node(slot, phase);
    }
    void prefetch(uint32_t slot, uint32_t phase) const {
        const uint64_t key = uint64_t(slot) * MAX_PHASES + phase % MAX_PHASES;
        if (key >= m_node_index.size() || !m_node_index[key]) return;
        const Placed<Node>& placed = nodes[m_node_index[key] - 1];
        if (placed.batch == batch) return;  // this fold sums it aside
        const char* node = reinterpret_cast<const char*>(placed.at);
        for (uint64_t line = 0; line < sizeof(Node); line += 64) __builtin_prefetch(node + line, 1);
    }
    // The chunk that holds a bin; null when no space is left.
    Chunk* chunk(Node& node, uint32_t bin) {
        const uint32_t number = node.chunk[bin / HIST_CHUNK_BINS];
        return number == NO_CHUNK ? add_chunk(node, bin) : &chunks[number];
    }
    Placed<TileCell>* cell(uint32_t slot, uint32_t row, uint32_t column);
    // Keeps a record for the timeline; called only where `keeps_records`.
    virtual void remember(const BrickRecord&) {}
    bool keeps_records = false;
    // Number of the batch in progress. Counted here and not in the lane's header, whose contents may
    // come from a damaged file.
    uint64_t batch = 0;

    std::vector<Placed<Node>> nodes;
    std::vector<Chunk> chunks;
    std::vector<Placed<TileCell>> cells;

  protected:
    virtual Placed<Node> new_node() = 0;
    virtual Placed<uint64_t> new_chunk() = 0;
    virtual Placed<TileCell> new_cell() = 0;
    void index_node(uint32_t position);
    void index_cell(uint32_t position);

  private:
    Placed<Node>* add_node(uint32_t slot, uint32_t phase);
    Chunk* add_chunk(Node& node, uint32_t bin);

    std::vector<uint32_t> m_node_index;  // slot * MAX_PHASES + phase -> position + 1
    struct CellKey {
        uint32_t slot, row, column;
        bool operator==(const CellKey&) const = default;
    };
    struct CellHash {
        size_t operator()(const CellKey& key) const {
            return key.slot * 0x9e3779b97f4a7c15ull ^ (uint64_t(key.row) << 32 | key.column) * 0xc2b2ae3d27d4eb4full;
        }
    };
    std::unordered_map<CellKey, uint32_t, CellHash> m_cell_index;
};

// Back to what a node is before its first entry; its histogram's chunks stay its own.
void clear_node(Node& node);

constexpr uint32_t MAX_CELLS = 4096;  // distinct tile positions of a lane; the rest share one cell

// Lane times to nanoseconds.
struct TickScale {
    uint64_t anchor_tick = 0;
    uint64_t anchor_ns = 0;
    double ns_per_tick = 1.0;

    // Signed conversions: one instruction each, and no time here reaches 2^63.
    uint64_t duration_ns(const BrickRecord& record) const {
        if (record.flags & RECORD_EXACT) return record.end;
        const int64_t ticks = int64_t(record.end - record.start);
        return ticks <= 0 ? 0 : uint64_t(int64_t(double(ticks) * ns_per_tick + 0.5));
    }
    uint64_t time_ns(uint64_t tick) const {
        return anchor_ns + uint64_t(int64_t(double(int64_t(tick - anchor_tick)) * ns_per_tick));
    }
};

// Folds ring entries [header.tail, upto) and moves the tail. `journal` is null on a private copy.
void fold_records(LaneHeader& header, const BrickRecord* ring, LaneStore& store, uint64_t upto,
                  const TickScale& scale, Journal* journal, uint64_t header_offset,
                  FoldObserver* observer);

inline uint64_t record_elements(const BrickRecord& record) {
    return uint64_t(record.elements_high) << 32 | record.elements_low;
}

}  // namespace brickline
