#include "fold.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "histogram.h"

namespace brickline {
namespace {

// Enough for everything one record can change: node, bin, cell, and their entry headers.
constexpr uint64_t WORST_RECORD_BYTES = sizeof(Node) + sizeof(TileCell) + 8 + 4 * sizeof(JournalEntry);
constexpr uint32_t SHARED_CELL = 0xffffffffu;

constexpr uint8_t NOT_IN_COVERAGE =
    RECORD_OUT_OF_ORDER | RECORD_APPROXIMATE | RECORD_TILE | RECORD_EXACT;

constexpr uint8_t COUNTED_FLAGS = RECORD_OUT_OF_ORDER | RECORD_APPROXIMATE | RECORD_HOST_BOUND;

void init_node(Node& node, uint32_t slot, uint32_t phase) {
    node.slot = slot;
    node.phase = uint16_t(phase);
    node.min_ns = ~0ull;
    node.min_cycles = ~0ull;
    node.first_ns = ~0ull;
    std::fill(std::begin(node.chunk), std::end(node.chunk), NO_CHUNK);
}

// Time of an entry that no inner entry claimed. Depths may be skipped on a device lane, where the
// brick between two others ran on another stream, so everything deeper counts as inner.
uint64_t take_exclusive(LaneHeader& header, uint32_t depth, uint64_t duration_ns) {
    uint64_t inner = 0;
    for (uint64_t deeper = depth + 1; deeper <= header.deepest; ++deeper) {
        inner += header.child_ns[deeper];
        header.child_ns[deeper] = 0;
    }
    header.deepest = depth;
    header.child_ns[depth] += duration_ns;
    return duration_ns - std::min(inner, duration_ns);
}

void add_duration(Node& node, uint64_t ns) {
    if (node.timed == 0) node.shift_ns = ns;
    const double distance = double(int64_t(ns - node.shift_ns));
    node.sum_squares += distance * distance;
    node.timed += 1;
    node.total_ns += ns;
    node.min_ns = std::min(node.min_ns, ns);
    node.max_ns = std::max(node.max_ns, ns);
}

void add_cycles(Node& node, const WorkRecord& work) {
    const uint64_t cycles =
        uint64_t(work.cycles_top) << 40 | uint64_t(work.cycles_high) << 32 | work.cycles_low;
    if (cycles == 0) return;
    node.cycles += cycles;
    node.cycles_count += 1;
    node.min_cycles = std::min(node.min_cycles, cycles);
    node.max_cycles = std::max(node.max_cycles, cycles);
}

}  // namespace

LaneStore::Placed<Node>* LaneStore::add_node(uint32_t slot, uint32_t phase) {
    Placed<Node> fresh = new_node();
    if (!fresh.at) return nullptr;
    init_node(*fresh.at, slot, phase);
    nodes.push_back(fresh);
    index_node(uint32_t(nodes.size() - 1));
    return &nodes.back();
}

void LaneStore::index_node(uint32_t position) {
    const Node& node = *nodes[position].at;
    const uint64_t key = uint64_t(node.slot) * MAX_PHASES + node.phase;
    if (key >= m_node_index.size()) m_node_index.resize((uint64_t(node.slot) + 1) * MAX_PHASES);
    m_node_index[key] = position + 1;
}

LaneStore::Placed<uint64_t> LaneStore::add_chunk(Node& node, uint32_t bin_number) {
    const Placed<uint64_t> fresh = new_chunk();
    if (!fresh.at) return {nullptr, 0};
    chunks.push_back(fresh);
    node.chunk[bin_number / HIST_CHUNK_BINS] = uint32_t(chunks.size() - 1);
    return bin(node, bin_number);
}

namespace {
uint64_t cell_key(uint32_t slot, uint32_t row, uint32_t column) {
    // Collisions are told apart by the caller comparing the cell itself.
    return (uint64_t(slot) * 0x9e3779b97f4a7c15ull) ^ (uint64_t(row) << 32 | column);
}
}  // namespace

void LaneStore::index_cell(uint32_t position) {
    const TileCell& cell = *cells[position].at;
    m_cell_index.emplace(cell_key(cell.slot, cell.row, cell.column), position);
}

LaneStore::Placed<TileCell>* LaneStore::cell(uint32_t slot, uint32_t row, uint32_t column) {
    const auto found = m_cell_index.find(cell_key(slot, row, column));
    if (found != m_cell_index.end()) {
        Placed<TileCell>& placed = cells[found->second];
        if (placed.at->slot == slot && placed.at->row == row && placed.at->column == column) {
            return &placed;
        }
        return cell(slot, SHARED_CELL, SHARED_CELL);
    }
    if (cells.size() >= MAX_CELLS && row != SHARED_CELL) return cell(slot, SHARED_CELL, SHARED_CELL);
    Placed<TileCell> fresh = new_cell();
    if (!fresh.at) return nullptr;
    fresh.at->slot = slot;
    fresh.at->row = row;
    fresh.at->column = column;
    fresh.at->min_ns = ~0ull;
    cells.push_back(fresh);
    index_cell(uint32_t(cells.size() - 1));
    return &cells.back();
}

namespace {

// One fold of one lane; JOURNALED for the mapped file, not for a private copy.
template <bool JOURNALED>
class Fold {
  public:
    Fold(LaneHeader& header, LaneStore& store, const TickScale& scale, Journal* journal,
         uint64_t header_offset, FoldObserver* observer)
        : m_header(header), m_store(store), m_scale(scale), m_journal(journal),
          m_header_offset(header_offset), m_observer(observer) {}

    void begin() {
        m_batch = ++m_header.batch;
        if constexpr (JOURNALED) {
            save_field<sizeof m_header.tail>(&m_header.tail);
            save_field<sizeof m_header.recent_head>(&m_header.recent_head);
            save_field<sizeof m_header.deepest + sizeof m_header.child_ns>(&m_header.deepest);
        }
    }

    void commit(uint64_t tail) {
        m_header.tail = tail;
        if constexpr (JOURNALED) m_journal->clear();
    }

    bool has_room() const {
        if constexpr (JOURNALED) return m_journal->has_room(WORST_RECORD_BYTES);
        return true;
    }

    void add(const BrickRecord& record, const WorkRecord* work) {
        LaneStore::Placed<Node>* placed = m_store.node(record.slot, record.phase);
        if (!placed) [[unlikely]] {
            m_header.lost += 1;
            return;
        }
        Node& node = *placed->at;
        if (node.batch != m_batch) {
            if constexpr (JOURNALED) m_journal->save<sizeof(Node)>(placed->offset, &node);
            node.batch = m_batch;
        }
        const uint64_t elements = record_elements(record);
        node.count += 1;
        node.elements += elements;
        if (record.flags & RECORD_UNTIMED) return;
        const uint64_t ns = m_scale.duration_ns(record);
        const uint64_t start_ns = m_scale.time_ns(record.start);
        add_duration(node, ns);
        node.timed_elements += elements;
        node.first_ns = std::min(node.first_ns, start_ns);
        node.last_ns = std::max(node.last_ns, start_ns + ns);
        if (record.flags & COUNTED_FLAGS) count_flags(node, record.flags);
        if (!(record.flags & NOT_IN_COVERAGE)) {
            node.exclusive_ns += take_exclusive(m_header, record.depth, ns);
            node.exclusive_count += 1;
        }
        count_bin(node, ns);
        if (work) add_work(node, record, *work, ns);
        if (m_store.keeps_records) m_store.remember(record);
        if (m_observer) m_observer->on_brick(record, start_ns, ns, elements);
    }

  private:
    template <uint64_t BYTES>
    void save_field(const void* field) {
        const auto* base = reinterpret_cast<const uint8_t*>(&m_header);
        m_journal->save<BYTES>(m_header_offset + uint64_t(static_cast<const uint8_t*>(field) - base),
                               field);
    }

    static void count_flags(Node& node, uint8_t flags) {
        node.out_of_order += (flags & RECORD_OUT_OF_ORDER) != 0;
        node.approximate += (flags & RECORD_APPROXIMATE) != 0;
        node.host_bound += (flags & RECORD_HOST_BOUND) != 0;
    }

    void count_bin(Node& node, uint64_t ns) {
        if (ns == 0) [[unlikely]] {
            node.zero_count += 1;
            return;
        }
        const LaneStore::Placed<uint64_t> bin = m_store.bin(node, bin_of(ns));
        if (!bin.at) [[unlikely]] return;
        if constexpr (JOURNALED) m_journal->save<8>(bin.offset, bin.at);
        *bin.at += 1;
    }

    void add_work(Node& node, const BrickRecord& record, const WorkRecord& work, uint64_t ns) {
        node.bytes_in += work.bytes_in;
        node.flops += work.flops;
        if (record.flags & RECORD_TILE) {
            add_cell(record.slot, work, ns);
        } else if (m_header.device >= 0) {
            node.host_ns += work.detail;
        } else {
            node.bytes_out += work.detail;
            add_cycles(node, work);
        }
    }

    void add_cell(uint32_t slot, const WorkRecord& work, uint64_t ns) {
        auto* placed = m_store.cell(slot, uint32_t(work.detail >> 32), uint32_t(work.detail));
        if (!placed) return;
        TileCell& cell = *placed->at;
        if (cell.batch != m_batch) {
            if constexpr (JOURNALED) m_journal->save<sizeof(TileCell)>(placed->offset, &cell);
            cell.batch = m_batch;
        }
        cell.count += 1;
        cell.total_ns += ns;
        cell.min_ns = std::min(cell.min_ns, ns);
        cell.max_ns = std::max(cell.max_ns, ns);
        cell.flops += work.flops;
    }

    LaneHeader& m_header;
    LaneStore& m_store;
    const TickScale m_scale;
    Journal* m_journal;
    uint64_t m_header_offset;
    FoldObserver* m_observer;
    uint64_t m_batch = 0;
};

template <bool JOURNALED>
void fold_range(LaneHeader& header, const BrickRecord* ring, uint64_t upto, Fold<JOURNALED> fold) {
    const uint64_t mask = header.ring_records - 1;
    fold.begin();
    uint64_t at = header.tail;
    while (at < upto) {
        if (!fold.has_room()) [[unlikely]] {
            fold.commit(at);
            fold.begin();
        }
        const BrickRecord& record = ring[at & mask];
        const WorkRecord* work = nullptr;
        if (record.flags & RECORD_WORK) {
            work = reinterpret_cast<const WorkRecord*>(&ring[(at + 1) & mask]);
        }
        fold.add(record, work);
        at += work ? 2 : 1;
    }
    header.folded += upto - header.tail;
    fold.commit(upto);
}

}  // namespace

void fold_records(LaneHeader& header, const BrickRecord* ring, LaneStore& store, uint64_t upto,
                  const TickScale& scale, Journal* journal, uint64_t header_offset,
                  FoldObserver* observer) {
    if (header.tail >= upto) return;
    if (journal) {
        fold_range(header, ring, upto,
                   Fold<true>(header, store, scale, journal, header_offset, observer));
    } else {
        fold_range(header, ring, upto,
                   Fold<false>(header, store, scale, nullptr, header_offset, observer));
    }
}

}  // namespace brickline
