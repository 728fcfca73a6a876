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
constexpr uint64_t PREFETCH_DISTANCE = 12;
constexpr uint32_t SHARED_CELL = 0xffffffffu;

constexpr uint8_t NOT_IN_COVERAGE =
    RECORD_OUT_OF_ORDER | RECORD_APPROXIMATE | RECORD_TILE | RECORD_EXACT;

constexpr uint8_t COUNTED_FLAGS = RECORD_OUT_OF_ORDER | RECORD_APPROXIMATE | RECORD_HOST_BOUND;

// What was finished inside an entry without a time of its own counts for what encloses it.
void pass_on(LaneHeader& header, uint32_t depth) {
    uint64_t inner = 0;
    for (uint64_t deeper = depth + 1; deeper <= header.deepest; ++deeper) {
        inner += header.child_ns[deeper];
        header.child_ns[deeper] = 0;
    }
    header.child_ns[depth] += inner;
    header.deepest = depth;
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

// What one fold adds to one node. Summed here, in memory that stays in the first-level cache, and
// written to the node once.
struct Tally {
    Node* node;
    uint64_t timed;
    uint64_t total_ns;
    double sum_squares;
    uint64_t shift_ns;
    uint64_t elements;
    uint64_t exclusive_ns;
    uint64_t not_exclusive;
    uint64_t min_ns;
    uint64_t max_ns;
    uint64_t first_tick;
    uint64_t last_tick;
    uint64_t last_duration_ns;
    uint64_t bytes_in;
    double flops;
    uint32_t chunk;      // where the last entry fell, as a place in LaneStore::chunks…
    uint32_t octaves;    // …and which eighth of the histogram that is; HIST_CHUNKS for none

    explicit Tally(Node& target)
        : node(&target), timed(0), total_ns(0), sum_squares(0), shift_ns(target.shift_ns),
          elements(0), exclusive_ns(0), not_exclusive(0), min_ns(target.min_ns),
          max_ns(target.max_ns), first_tick(0), last_tick(0), last_duration_ns(0), bytes_in(0),
          flops(0), chunk(NO_CHUNK), octaves(HIST_CHUNKS) {}

    void add(const BrickRecord& record, uint64_t ns) {
        if (timed == 0) [[unlikely]] {
            first_tick = record.start;
            if (node->timed == 0) shift_ns = ns;
        }
        const double distance = double(int64_t(ns - shift_ns));
        sum_squares += distance * distance;
        timed += 1;
        total_ns += ns;
        elements += record_elements(record);
        if (ns < min_ns) [[unlikely]] min_ns = ns;
        if (ns > max_ns) [[unlikely]] max_ns = ns;
        last_tick = record.start;
        last_duration_ns = ns;
    }

    void flush(const TickScale& scale) const {
        if (timed == 0) return;
        node->count += timed;
        node->timed += timed;
        node->total_ns += total_ns;
        node->sum_squares += sum_squares;
        node->shift_ns = shift_ns;
        node->elements += elements;
        node->timed_elements += elements;
        node->exclusive_ns += exclusive_ns;
        node->exclusive_count += timed - not_exclusive;
        node->min_ns = min_ns;
        node->max_ns = max_ns;
        node->first_ns = std::min(node->first_ns, scale.time_ns(first_tick));
        node->last_ns = std::max(node->last_ns, scale.time_ns(last_tick) + last_duration_ns);
        node->bytes_in += bytes_in;
        node->flops += flops;
    }
};

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

void clear_node(Node& node) {
    Node fresh{};
    fresh.slot = node.slot;
    fresh.phase = node.phase;
    fresh.min_ns = fresh.min_cycles = fresh.first_ns = ~0ull;
    std::copy(std::begin(node.chunk), std::end(node.chunk), fresh.chunk);
    fresh.batch = node.batch;
    node = fresh;
}

LaneStore::Placed<Node>* LaneStore::add_node(uint32_t slot, uint32_t phase) {
    Placed<Node> fresh = new_node();
    if (!fresh.at) return nullptr;
    fresh.at->slot = slot;
    fresh.at->phase = uint16_t(phase);
    std::fill(std::begin(fresh.at->chunk), std::end(fresh.at->chunk), NO_CHUNK);
    clear_node(*fresh.at);
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

LaneStore::Chunk* LaneStore::add_chunk(Node& node, uint32_t bin) {
    const Placed<uint64_t> fresh = new_chunk();
    if (!fresh.at) return nullptr;
    chunks.push_back({fresh.at, fresh.offset, {0, 0}, 0});
    node.chunk[bin / HIST_CHUNK_BINS] = uint32_t(chunks.size() - 1);
    return &chunks.back();
}

void LaneStore::index_cell(uint32_t position) {
    const TileCell& cell = *cells[position].at;
    m_cell_index.emplace(CellKey{cell.slot, cell.row, cell.column}, position);
}

LaneStore::Placed<TileCell>* LaneStore::cell(uint32_t slot, uint32_t row, uint32_t column) {
    const auto found = m_cell_index.find({slot, row, column});
    if (found != m_cell_index.end()) return &cells[found->second];
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
        m_header.batch += 1;
        m_batch = ++m_store.batch;
        m_tallies.clear();
        if constexpr (JOURNALED) {
            save_field<sizeof m_header.tail>(&m_header.tail);
            save_field<sizeof m_header.recent_head>(&m_header.recent_head);
            save_field<sizeof m_header.deepest + sizeof m_header.child_ns>(&m_header.deepest);
        }
    }

    void commit(uint64_t tail) {
        for (const Tally& tally : m_tallies) tally.flush(m_scale);
        m_header.folded += tail - m_header.tail;
        m_header.tail = tail;
        if constexpr (JOURNALED) m_journal->clear();
    }

    // The record may be stale: the slot is only looked up, never trusted.
    void prefetch(const BrickRecord& record) const { m_store.prefetch(record.slot, record.phase); }

    bool has_room() const {
        if constexpr (JOURNALED) return m_journal->has_room(WORST_RECORD_BYTES);
        return true;
    }

    void add(const BrickRecord record, const WorkRecord* work) {
        if (record.flags & RECORD_IS_WORK) [[unlikely]] {
            fence(record);
            return;
        }
        LaneStore::Placed<Node>* placed = m_store.node(record.slot, record.phase);
        if (!placed) [[unlikely]] {
            m_header.lost += 1;
            return;
        }
        if (placed->batch != m_batch) [[unlikely]] touch(*placed);
        if (record.flags & RECORD_UNTIMED) {
            placed->at->count += 1;
            placed->at->elements += record_elements(record);
            if (record.depth < m_header.deepest) [[unlikely]] pass_on(m_header, record.depth);
            if (m_observer) m_observer->on_brick(record, 0, 0, 0);
            return;
        }
        Tally& tally = m_tallies[placed->tally];
        const uint64_t ns = m_scale.duration_ns(record);
        tally.add(record, ns);
        if (!(record.flags & NOT_IN_COVERAGE)) [[likely]] {
            tally.exclusive_ns += take_exclusive(m_header, record.depth, ns);
        } else {
            tally.not_exclusive += 1;
            if (record.depth < m_header.deepest) pass_on(m_header, record.depth);
        }
        count_bin(tally, ns);
        if (record.flags & COUNTED_FLAGS) [[unlikely]] count_flags(*placed->at, record.flags);
        if (work) add_work(tally, record, *work, ns);
        if (m_store.keeps_records) m_store.remember(record);
        if (m_observer) {
            m_observer->on_brick(record, m_scale.time_ns(record.start), ns, record_elements(record));
        }
    }

  private:
    void fence(const BrickRecord& record) {
        std::fill(std::begin(m_header.child_ns), std::end(m_header.child_ns), 0);
        m_header.deepest = 0;
        if (m_observer) m_observer->on_brick(record, 0, 0, 0);
    }

    // The first record of a node in this fold: its contents are saved, then summed aside.
    void touch(LaneStore::Placed<Node>& placed) {
        if constexpr (JOURNALED) m_journal->save<sizeof(Node)>(placed.offset, placed.at);
        placed.at->batch = m_header.batch;
        placed.batch = m_batch;
        placed.tally = uint32_t(m_tallies.size());
        m_tallies.emplace_back(*placed.at);
    }

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

    // Durations of one brick nearly always fall into the same eight octaves, and into bins that this
    // fold has met: both branches are well predicted, which a comparison of bins would not be.
    void count_bin(Tally& tally, uint64_t ns) {
        if (ns == 0) [[unlikely]] {
            tally.node->zero_count += 1;
            return;
        }
        const uint32_t bin = bin_of(ns);
        if (bin / HIST_CHUNK_BINS != tally.octaves) [[unlikely]] {
            const LaneStore::Chunk* found = m_store.chunk(*tally.node, bin);
            if (!found) return;
            tally.chunk = uint32_t(found - m_store.chunks.data());
            tally.octaves = bin / HIST_CHUNK_BINS;
            for (const int near : {-8, 0, 8}) __builtin_prefetch(found->at + bin % HIST_CHUNK_BINS + near, 1);
        }
        LaneStore::Chunk& chunk = m_store.chunks[tally.chunk];
        const uint32_t at = bin % HIST_CHUNK_BINS;
        if constexpr (JOURNALED) save_bin(chunk, at);
        chunk.at[at] += 1;
    }

    void save_bin(LaneStore::Chunk& chunk, uint32_t at) {
        if (chunk.batch != m_batch) {
            chunk.batch = m_batch;
            chunk.saved[0] = chunk.saved[1] = 0;
        }
        uint64_t& saved = chunk.saved[at / 64];
        const uint64_t bit = 1ull << at % 64;
        if (saved & bit) return;
        saved |= bit;
        m_journal->save<8>(chunk.offset + at * 8, chunk.at + at);
    }

    void add_work(Tally& tally, const BrickRecord& record, const WorkRecord& work, uint64_t ns) {
        if (work.flags & WORK_OF_STEP) {
            tally.node->host_ns += work.detail;
            return;
        }
        tally.bytes_in += work.bytes_in;
        tally.flops += work.flops;
        Node& node = *tally.node;
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
        if (placed->batch != m_batch) {
            if constexpr (JOURNALED) m_journal->save<sizeof(TileCell)>(placed->offset, &cell);
            placed->batch = m_batch;
            cell.batch = m_header.batch;
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
    std::vector<Tally> m_tallies;
};

template <bool JOURNALED>
void fold_range(LaneHeader& header, const BrickRecord* ring, uint64_t upto, Fold<JOURNALED>&& fold) {
    const uint64_t mask = header.ring_records - 1;
    fold.begin();
    uint64_t at = header.tail;
    while (at < upto) {
        if (!fold.has_room()) [[unlikely]] {
            fold.commit(at);
            fold.begin();
        }
        // Nodes have left the caches since the last fold; ask for them some records ahead.
        fold.prefetch(ring[(at + PREFETCH_DISTANCE) & mask]);
        const BrickRecord& record = ring[at & mask];
        const WorkRecord* work = nullptr;
        if (record.flags & RECORD_WORK) {
            work = reinterpret_cast<const WorkRecord*>(&ring[(at + 1) & mask]);
        }
        fold.add(record, work);
        at += work ? 2 : 1;
    }
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
