#include "lane.h"

#include <algorithm>
#include <cstring>

namespace brickline {
namespace {

constexpr uint64_t FIRST_EXTENT_BYTES = 32 * 1024;
constexpr uint64_t LARGEST_EXTENT_BYTES = 1024 * 1024;

}  // namespace

Lane::Lane(Spool& spool, const TickSource& source, uint32_t id, const LaneIdentity& identity,
           uint32_t recent_records, LaneSize size)
    : m_ring_bits(size.ring_bits), m_spool(spool), m_source(source) {
    if (recent_records) {
        const Extent recent = spool.add_extent(ExtentKind::Recent, id, 0,
                                               uint64_t(recent_records) * sizeof(BrickRecord));
        m_recent = reinterpret_cast<BrickRecord*>(recent.payload());
        keeps_records = true;
    }
    // The header takes what the extent's own header leaves of its page, so the ring is aligned.
    const uint64_t head_bytes = PAGE_BYTES - sizeof(ExtentHeader);
    const uint64_t ring_bytes = ring_records() * sizeof(BrickRecord);
    const Extent extent =
        spool.add_extent(ExtentKind::Lane, id, 0, head_bytes + ring_bytes + size.journal_bytes);
    m_header = reinterpret_cast<LaneHeader*>(extent.payload());
    m_header_offset = extent.payload_offset();
    m_ring = reinterpret_cast<BrickRecord*>(extent.payload() + head_bytes);
    m_journal_area = reinterpret_cast<uint8_t*>(m_ring + ring_records());
    m_header->lane = id;
    m_header->clock_domain = uint32_t(identity.domain);
    m_header->device = identity.device;
    m_header->stream = identity.stream;
    m_header->recent_records = recent_records;
    m_header->journal_capacity = size.journal_bytes;
    adopt(identity);
    // Readers skip a lane without a ring, so this makes it visible.
    std::atomic_ref<uint32_t>(m_header->ring_records)
        .store(uint32_t(ring_records()), std::memory_order_release);
}

void Lane::adopt(const LaneIdentity& identity) {
    m_header->thread = identity.thread;
    m_header->threads += 1;
    m_header->closed = 0;
    const uint64_t length = std::min(identity.name.size(), sizeof m_header->name - 1);
    std::memset(m_header->name, 0, sizeof m_header->name);
    std::memcpy(m_header->name, identity.name.data(), length);
    depth = 0;
    too_deep = 0;
    home = this;
    segments.clear();
    own_step = {};
    set_step(&own_step);
}

// Statistics change between these two; a reader that sees the number move looks again.
void Lane::begin_change() {
    std::atomic_ref<uint64_t>(m_header->sequence)
        .store(m_header->sequence + 1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Lane::end_change() {
    std::atomic_ref<uint64_t>(m_header->sequence)
        .store(m_header->sequence + 1, std::memory_order_release);
}

void Lane::fold() {
    const uint64_t began = monotonic_ns();
    begin_change();
    TickScale scale;
    if (m_header->clock_domain != uint32_t(ClockDomain::Cuda)) {
        m_spool.refine_clock(m_source);
        const SpoolHeader& spool = m_spool.header();
        scale = {spool.anchor_tick, spool.anchor_ns, m_spool.ns_per_tick()};
    }
    Journal journal(*m_header, m_journal_area);
    const uint64_t lost = m_header->lost;
    fold_records(*m_header, m_ring, *this, m_head, scale, &journal, m_header_offset, m_observer);
    m_tail = m_head;
    // A clock that moves only when told to knows of no cost.
    if (m_source.kind() != ClockKind::Manual) m_header->fold_ns += monotonic_ns() - began;
    if (m_header->lost != lost) {
        std::atomic_ref<uint64_t>(m_spool.header().lost_records)
            .fetch_add(m_header->lost - lost, std::memory_order_relaxed);
    }
    end_change();
}

void Lane::forget(const std::vector<bool>& slots) {
    fold();
    begin_change();
    Journal journal(*m_header, m_journal_area);
    for (Placed<Node>& placed : nodes) {
        Node& node = *placed.at;
        if (node.slot >= slots.size() || !slots[node.slot]) continue;
        journal.save<sizeof(Node)>(placed.offset, &node);
        for (const uint32_t number : node.chunk) {
            if (number == NO_CHUNK) continue;
            const Chunk& chunk = chunks[number];
            journal.save<HIST_CHUNK_BINS * 8>(chunk.offset, chunk.at);
            std::fill_n(chunk.at, HIST_CHUNK_BINS, 0);
        }
        clear_node(node);
        journal.clear();
    }
    for (Placed<TileCell>& placed : cells) {
        TileCell& cell = *placed.at;
        if (cell.slot >= slots.size() || !slots[cell.slot]) continue;
        journal.save<sizeof(TileCell)>(placed.offset, &cell);
        cell = {cell.slot, cell.row, cell.column, 0, 0, 0, ~0ull, 0, 0, cell.batch};
        journal.clear();
    }
    for (const std::vector<CountRow*>& counters : m_phase_counters) {
        for (CountRow* row : counters) {
            if (!row || row->slot >= slots.size() || !slots[row->slot]) continue;
            std::atomic_ref<uint64_t>(row->count).store(0, std::memory_order_relaxed);
        }
    }
    end_change();
}

void Lane::remember(const BrickRecord& record) {
    m_recent[m_header->recent_head % m_header->recent_records] = record;
    m_header->recent_head += 1;
}

template <class T>
LaneStore::Placed<T> Lane::take(ExtentKind kind, Extent& extent, uint32_t& ordinal, uint64_t bytes) {
    if (!extent.header || extent.capacity() - extent.header->used < bytes) {
        if (m_out_of_space) return {nullptr, 0, 0, 0};
        const uint64_t grown =
            std::min(FIRST_EXTENT_BYTES << std::min(ordinal, 5u), LARGEST_EXTENT_BYTES);
        try {
            extent = m_spool.add_extent(kind, m_header->lane, ordinal, grown - sizeof(ExtentHeader));
        } catch (const SpoolError&) {
            m_out_of_space = true;
            return {nullptr, 0, 0, 0};
        }
        ordinal += 1;
    }
    const uint64_t at = extent.header->used;
    T* place = reinterpret_cast<T*>(extent.payload() + at);
    std::atomic_ref<uint64_t>(extent.header->used).store(at + bytes, std::memory_order_release);
    return {place, extent.payload_offset() + at, 0, 0};
}

LaneStore::Placed<Node> Lane::new_node() {
    return take<Node>(ExtentKind::Node, m_node_extent, m_node_ordinal, sizeof(Node));
}

LaneStore::Placed<uint64_t> Lane::new_chunk() {
    return take<uint64_t>(ExtentKind::Bins, m_bins_extent, m_bins_ordinal, HIST_CHUNK_BINS * 8);
}

CountRow* Lane::add_counter(uint32_t slot, uint64_t elements) {
    std::vector<CountRow*>& counters = m_phase_counters[step->phase];
    CountRow* row =
        take<CountRow>(ExtentKind::Count, m_count_extent, m_count_ordinal, sizeof(CountRow)).at;
    if (!row) return nullptr;
    if (slot >= counters.size()) counters.resize(slot + 1);
    counters[slot] = row;
    use_counters(step->phase);
    // Readers pass over a row that counts nothing yet.
    row->slot = slot;
    row->phase = step->phase;
    row->elements = elements;
    return row;
}

LaneStore::Placed<TileCell> Lane::new_cell() {
    return take<TileCell>(ExtentKind::Cell, m_cell_extent, m_cell_ordinal, sizeof(TileCell));
}

}  // namespace brickline
