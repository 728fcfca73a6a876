// Folding: finished brick records become statistics. Owns the arithmetic of nodes, histograms, tile
// cells and exclusive time. Does not know where nodes live: a writer keeps them in the spool, a
// reader on its heap, and both run this one code.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "brickline/abi.h"

namespace brickline {

// Saves old contents before they change, so that a fold cut short can be undone. See abi.h.
class Journal {
  public:
    Journal(LaneHeader& header, uint8_t* area) : m_header(header), m_area(area) {}
    void save(uint64_t offset, const void* old, uint64_t bytes);
    bool has_room(uint64_t bytes) const { return m_header.journal_bytes + bytes <= m_header.journal_capacity; }
    void clear();

  private:
    LaneHeader& m_header;
    uint8_t* m_area;
};

// Told of every timed record as it is folded, in the order of completion.
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
    };

    virtual ~LaneStore() = default;

    // Null when no space is left; the record is then counted as lost.
    Placed<Node>* node(uint32_t slot, uint32_t phase);
    uint64_t* bin(Placed<Node>& node, uint32_t bin, uint64_t* offset);
    Placed<TileCell>* cell(uint32_t slot, uint32_t row, uint32_t column);
    virtual void remember(const BrickRecord&) {}

    std::vector<Placed<Node>> nodes;
    std::vector<Placed<uint64_t>> chunks;
    std::vector<Placed<TileCell>> cells;

  protected:
    virtual Placed<Node> new_node() = 0;
    virtual Placed<uint64_t> new_chunk() = 0;
    virtual Placed<TileCell> new_cell() = 0;
    void index_node(uint32_t position);
    void index_cell(uint32_t position);

  private:
    std::vector<uint32_t> m_node_index;  // slot * MAX_PHASES + phase -> position + 1
    std::unordered_map<uint64_t, uint32_t> m_cell_index;
};

constexpr uint32_t MAX_CELLS = 4096;  // distinct tile positions of a lane; the rest share one cell

// Lane times to nanoseconds.
struct TickScale {
    uint64_t anchor_tick = 0;
    uint64_t anchor_ns = 0;
    double ns_per_tick = 1.0;

    uint64_t duration_ns(const BrickRecord& record) const {
        if (record.flags & RECORD_EXACT) return record.end;
        return record.end <= record.start
                   ? 0
                   : uint64_t(double(record.end - record.start) * ns_per_tick + 0.5);
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
