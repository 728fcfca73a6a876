#include "snapshot.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <thread>

#include "fold.h"

namespace brickline {
namespace {

constexpr uint64_t MAX_TABLE_BYTES = 1ull << 34;
constexpr int LIVE_ATTEMPTS = 200;

struct File {
    int fd = -1;
    std::string path;

    explicit File(const std::string& name) : path(name) {
        fd = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) throw SpoolError(SpoolFault::Io, "cannot open " + name + ": " + std::strerror(errno));
    }
    ~File() { ::close(fd); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    uint64_t size() const {
        struct stat info;
        return ::fstat(fd, &info) == 0 ? uint64_t(info.st_size) : 0;
    }
    // How many bytes could be read.
    uint64_t read(uint64_t offset, void* into, uint64_t bytes) const {
        uint64_t done = 0;
        while (done < bytes) {
            const ssize_t got = ::pread(fd, static_cast<char*>(into) + done, bytes - done,
                                        off_t(offset + done));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) break;
            done += uint64_t(got);
        }
        return done;
    }
};

struct ExtentEntry {
    ExtentHeader header;
    uint64_t offset;
    uint64_t payload_offset() const { return offset + sizeof(ExtentHeader); }
};

std::string at(uint64_t offset) { return " at byte " + std::to_string(offset); }

SpoolHeader read_header(const File& file) {
    SpoolHeader header{};
    if (file.read(0, &header, sizeof header) < sizeof header ||
        std::memcmp(header.magic, SPOOL_MAGIC, sizeof SPOOL_MAGIC) != 0) {
        throw SpoolError(SpoolFault::NotASpool,
                         file.path + " is not a brickline spool: expected it to begin with BRKSPOOL");
    }
    if (header.version > SPOOL_VERSION) {
        throw SpoolError(SpoolFault::Version, file.path + " has spool version " +
                                                  std::to_string(header.version) +
                                                  "; this brickline reads up to version " +
                                                  std::to_string(SPOOL_VERSION) + ", so upgrade it");
    }
    if (header.version == 0 || header.header_bytes != PAGE_BYTES ||
        !(header.ns_per_tick > 0 && header.ns_per_tick < 1e6)) {
        throw SpoolError(SpoolFault::Damaged, file.path + " has a damaged header");
    }
    for (double* cost : {&header.overhead_ns, &header.counting_ns}) {
        if (!(*cost >= 0 && *cost < 1e9)) *cost = 0;
    }
    return header;
}

std::vector<ExtentEntry> list_extents(const File& file, const SpoolHeader& header,
                                      std::vector<std::string>& problems) {
    std::vector<ExtentEntry> extents;
    const uint64_t size = file.size();
    const uint64_t end = std::min(header.file_bytes, size);
    if (size < header.file_bytes) {
        problems.push_back("truncated: " + std::to_string(header.file_bytes) + " bytes were written, " +
                           std::to_string(size) + " are there");
    }
    for (uint64_t offset = PAGE_BYTES; offset + sizeof(ExtentHeader) <= end;) {
        ExtentEntry entry{{}, offset};
        file.read(offset, &entry.header, sizeof entry.header);
        const ExtentHeader& head = entry.header;
        if (head.magic != EXTENT_MAGIC || head.bytes < PAGE_BYTES || head.bytes % PAGE_BYTES != 0 ||
            head.bytes > header.file_bytes - offset || head.used > head.bytes - sizeof head) {
            problems.push_back("damaged extent" + at(offset) + "; what follows it is left out");
            break;
        }
        if (head.bytes > end - offset) {
            problems.push_back("cut off extent" + at(offset));
            break;
        }
        extents.push_back(entry);
        offset += head.bytes;
    }
    return extents;
}

// The extents of a file that may be growing.
class ExtentList {
  public:
    explicit ExtentList(const File& file) : m_file(file) {}

    // All that there are at this moment; walked again only when the file has grown.
    const std::vector<ExtentEntry>& now() {
        const SpoolHeader header = read_header(m_file);
        if (header.file_bytes != m_file_bytes) {
            std::vector<std::string> told_later;
            m_extents = list_extents(m_file, header, told_later);
            m_file_bytes = header.file_bytes;
        }
        return m_extents;
    }

  private:
    const File& m_file;
    uint64_t m_file_bytes = 0;
    std::vector<ExtentEntry> m_extents;
};

// A copied piece of a lane: where it lay in the file, and its bytes.
struct Piece {
    uint64_t offset;
    std::vector<uint8_t> bytes;
};

struct RawLane {
    LaneHeader header;
    uint64_t header_offset;
    std::vector<BrickRecord> ring;
    std::vector<uint8_t> journal;
    std::vector<Piece> nodes, bins, cells, counts;
    std::vector<BrickRecord> recent;
};

// Whether a sum can have been written by us: 2^64 squares of 64-bit durations are the largest.
bool is_sum(double value) { return value >= 0 && value < 1e60; }

class LaneCopy final : public LaneStore {
  public:
    explicit LaneCopy(RawLane& raw, uint32_t slots) : m_raw(raw) {
        keeps_records = raw.header.recent_records != 0;
        for (Piece& piece : raw.nodes) add_nodes(piece, slots);
        for (Piece& piece : raw.bins) {
            for (uint64_t i = 0; i + HIST_CHUNK_BINS * 8 <= piece.bytes.size(); i += HIST_CHUNK_BINS * 8) {
                chunks.push_back({reinterpret_cast<uint64_t*>(piece.bytes.data() + i), 0, {0, 0}, 0});
            }
        }
        for (Piece& piece : raw.cells) add_cells(piece, slots);
        drop_bad_chunks();
    }

    // Entries that were counted beside the ring.
    void add_counts(uint32_t slots) {
        for (const Piece& piece : m_raw.counts) {
            for (uint64_t i = 0; i + sizeof(CountRow) <= piece.bytes.size(); i += sizeof(CountRow)) {
                CountRow row;
                std::memcpy(&row, piece.bytes.data() + i, sizeof row);
                if (row.count == 0) continue;
                if (row.slot >= slots || row.phase >= MAX_PHASES || row.elements > MAX_ELEMENTS ||
                    row.count > (~0ull >> 1) / std::max<uint64_t>(row.elements, 1)) {
                    m_damaged = true;
                    continue;
                }
                Node& counted = *node(row.slot, row.phase)->at;
                counted.count += row.count;
                counted.elements += row.count * row.elements;
            }
        }
    }

    bool is_damaged() const { return m_damaged; }

  private:
    void add_nodes(Piece& piece, uint32_t slots) {
        for (uint64_t i = 0; i + sizeof(Node) <= piece.bytes.size(); i += sizeof(Node)) {
            Node* node = reinterpret_cast<Node*>(piece.bytes.data() + i);
            if (node->count == 0) continue;
            if (node->slot >= slots || node->phase >= MAX_PHASES || !is_sum(node->flops) ||
                !is_sum(node->sum_squares)) {
                m_damaged = true;
                continue;
            }
            nodes.push_back({node, 0, 0, 0});
            index_node(uint32_t(nodes.size() - 1));
        }
    }
    void add_cells(Piece& piece, uint32_t slots) {
        for (uint64_t i = 0; i + sizeof(TileCell) <= piece.bytes.size(); i += sizeof(TileCell)) {
            TileCell* cell = reinterpret_cast<TileCell*>(piece.bytes.data() + i);
            if (cell->count == 0) continue;
            if (cell->slot >= slots || !is_sum(cell->flops)) {
                m_damaged = true;
                continue;
            }
            cells.push_back({cell, 0, 0, 0});
            index_cell(uint32_t(cells.size() - 1));
        }
    }
    void drop_bad_chunks() {
        for (auto& placed : nodes) {
            for (uint32_t& chunk : placed.at->chunk) {
                if (chunk != NO_CHUNK && chunk >= chunks.size()) {
                    chunk = NO_CHUNK;
                    m_damaged = true;
                }
            }
        }
    }
    void remember(const BrickRecord& record) override { m_raw.recent.push_back(record); }
    Placed<Node> new_node() override { return {&m_new_nodes.emplace_back(), 0, 0, 0}; }
    Placed<uint64_t> new_chunk() override {
        m_new_chunks.emplace_back(HIST_CHUNK_BINS, 0);
        return {m_new_chunks.back().data(), 0, 0, 0};
    }
    Placed<TileCell> new_cell() override { return {&m_new_cells.emplace_back(), 0, 0, 0}; }

    RawLane& m_raw;
    std::deque<Node> m_new_nodes;
    std::deque<std::vector<uint64_t>> m_new_chunks;
    std::deque<TileCell> m_new_cells;
    bool m_damaged = false;
};

Piece read_piece(const File& file, const ExtentEntry& extent) {
    // `used` may have grown since the walk; the payload is read whole and trimmed to the newest.
    ExtentHeader now{};
    file.read(extent.offset, &now, sizeof now);
    const uint64_t used = std::min(now.used, extent.header.bytes - sizeof(ExtentHeader));
    Piece piece{extent.payload_offset(), std::vector<uint8_t>(used)};
    piece.bytes.resize(file.read(piece.offset, piece.bytes.data(), used));
    return piece;
}

bool is_sane(const LaneHeader& header, uint64_t extent_bytes) {
    const uint64_t ring = header.ring_records;
    return ring >= 2 && ring <= (1u << 24) && (ring & (ring - 1)) == 0 &&
           header.tail <= header.head && header.head - header.tail <= ring &&
           header.clock_domain <= uint32_t(ClockDomain::Manual) && header.deepest < MAX_DEPTH &&
           header.journal_bytes <= header.journal_capacity &&
           header.journal_capacity <= extent_bytes &&
           PAGE_BYTES + ring * sizeof(BrickRecord) + header.journal_capacity <= extent_bytes;
}

std::vector<BrickRecord> read_recent(const File& file, const ExtentEntry& extent,
                                     const LaneHeader& header) {
    const uint64_t capacity = header.recent_records;
    std::vector<BrickRecord> ordered;
    if (capacity == 0 || capacity * sizeof(BrickRecord) > extent.header.bytes) return ordered;
    std::vector<BrickRecord> all(capacity);
    if (file.read(extent.payload_offset(), all.data(), capacity * sizeof(BrickRecord)) !=
        capacity * sizeof(BrickRecord)) return ordered;
    const uint64_t begin = header.recent_head > capacity ? header.recent_head - capacity : 0;
    for (uint64_t i = begin; i < header.recent_head; ++i) ordered.push_back(all[i % capacity]);
    return ordered;
}

LaneHeader read_lane_header(const File& file, const RawLane& raw) {
    LaneHeader header{};
    file.read(raw.header_offset, &header, sizeof header);
    return header;
}

// Whether no fold began, ended or saved anything between two looks at a lane: what was read between
// them belongs together. Inside an open fold only what its journal holds already may have changed.
bool is_same_moment(const LaneHeader& one, const LaneHeader& other) {
    return one.sequence == other.sequence && one.batch == other.batch &&
           one.journal_bytes == other.journal_bytes;
}

// One attempt; false when the writer folded meanwhile.
bool copy_lane(const File& file, ExtentList& extents, const ExtentEntry& lane, RawLane& raw,
               ReadWhat what, bool accept_open_fold, std::vector<std::string>& problems) {
    raw = {};
    raw.header_offset = lane.payload_offset();
    const LaneHeader before = read_lane_header(file, raw);
    raw.header = read_lane_header(file, raw);
    if (!is_same_moment(before, raw.header)) return false;
    if (!accept_open_fold && raw.header.sequence % 2 != 0) return false;
    // A lane gets its ring last: without one it has recorded nothing.
    if (raw.header.ring_records == 0 && raw.header.head == 0) return true;
    if (!is_sane(raw.header, lane.header.bytes)) {
        if (!is_same_moment(raw.header, read_lane_header(file, raw))) return false;
        problems.push_back("damaged lane" + at(lane.offset));
        raw.header.ring_records = 0;
        return true;
    }
    const uint64_t ring_offset = lane.offset + PAGE_BYTES;
    const uint64_t ring_bytes = raw.header.ring_records * sizeof(BrickRecord);
    // A fold that is undone gives records back to the ring.
    if (raw.header.head != raw.header.tail || raw.header.journal_bytes != 0) {
        raw.ring.resize(raw.header.ring_records);
        file.read(ring_offset, raw.ring.data(), ring_bytes);
    }
    raw.journal.resize(raw.header.journal_bytes);
    file.read(ring_offset + ring_bytes, raw.journal.data(), raw.journal.size());
    // Listed after the first look at the lane: what earlier folds have added is there.
    for (const ExtentEntry& extent : extents.now()) {
        if (extent.header.lane != lane.header.lane) continue;
        switch (ExtentKind(extent.header.kind)) {
            case ExtentKind::Node: raw.nodes.push_back(read_piece(file, extent)); break;
            case ExtentKind::Bins: raw.bins.push_back(read_piece(file, extent)); break;
            case ExtentKind::Count: raw.counts.push_back(read_piece(file, extent)); break;
            case ExtentKind::Cell:
                if (what == ReadWhat::Everything) raw.cells.push_back(read_piece(file, extent));
                break;
            case ExtentKind::Recent:
                if (what == ReadWhat::Everything) raw.recent = read_recent(file, extent, raw.header);
                break;
            default: break;
        }
    }
    return is_same_moment(raw.header, read_lane_header(file, raw));
}

// Takes out what the fold had added, since it is added again, and an oldest entry that it may have
// been about to replace.
void roll_back_timeline(RawLane& raw, uint64_t old_head) {
    if (!raw.recent.empty() && raw.recent.size() == raw.header.recent_records) {
        raw.recent.erase(raw.recent.begin());
    }
    if (raw.header.recent_head < old_head) return;
    const uint64_t added = raw.header.recent_head - old_head;
    raw.recent.resize(raw.recent.size() - std::min<uint64_t>(added, raw.recent.size()));
}

// Undoes a fold that was under way, newest change first.
void roll_back(RawLane& raw) {
    std::vector<uint64_t> starts;
    for (uint64_t at = 0; at + sizeof(JournalEntry) <= raw.journal.size();) {
        JournalEntry entry;
        std::memcpy(&entry, raw.journal.data() + at, sizeof entry);
        if (entry.bytes > raw.journal.size() - at - sizeof entry) break;
        starts.push_back(at);
        at += sizeof entry + round_up(entry.bytes, 8);
    }
    LaneHeader old_header = raw.header;
    for (auto start = starts.rbegin(); start != starts.rend(); ++start) {
        JournalEntry entry;
        std::memcpy(&entry, raw.journal.data() + *start, sizeof entry);
        const uint8_t* old = raw.journal.data() + *start + sizeof entry;
        auto restore = [&](uint64_t base, uint8_t* bytes, uint64_t size) {
            if (entry.offset < base || entry.offset - base > size ||
                entry.bytes > size - (entry.offset - base)) return;
            std::memcpy(bytes + (entry.offset - base), old, entry.bytes);
        };
        restore(raw.header_offset, reinterpret_cast<uint8_t*>(&old_header), sizeof old_header);
        for (auto* pieces : {&raw.nodes, &raw.bins, &raw.cells}) {
            for (Piece& piece : *pieces) restore(piece.offset, piece.bytes.data(), piece.bytes.size());
        }
    }
    roll_back_timeline(raw, old_header.recent_head);
    // Of the header a fold changes these; the rest says how long the copied ring is.
    raw.header.tail = old_header.tail;
    raw.header.recent_head = old_header.recent_head;
    raw.header.deepest = old_header.deepest;
    std::copy(std::begin(old_header.child_ns), std::end(old_header.child_ns), raw.header.child_ns);
}

// Whether a record can have been written by us. Times must stay where TickScale can hold them.
bool is_sound(const BrickRecord& record, uint32_t slots, const TickScale& scale) {
    constexpr double LIMIT_NS = 9e18;
    const double start = double(int64_t(record.start - scale.anchor_tick)) * scale.ns_per_tick;
    const double length = double(int64_t(record.end - record.start)) * scale.ns_per_tick;
    return record.slot < slots && record.phase < MAX_PHASES && record.depth < MAX_DEPTH &&
           (!(record.flags & RECORD_IS_WORK) || record.flags == RECORD_IS_WORK) &&
           std::abs(start) < LIMIT_NS &&
           (record.flags & RECORD_EXACT || std::abs(length) < LIMIT_NS);
}

// How far the ring can be trusted.
uint64_t sound_head(const RawLane& raw, uint32_t slots, const TickScale& scale) {
    uint64_t at = raw.header.tail;
    while (at < raw.header.head) {
        const BrickRecord& record = raw.ring[at & (raw.header.ring_records - 1)];
        const uint64_t entries = record.flags & RECORD_WORK ? 2 : 1;
        if (!is_sound(record, slots, scale) || at + entries > raw.header.head) break;
        if (entries == 2) {
            const auto& work = reinterpret_cast<const WorkRecord&>(
                raw.ring[(at + 1) & (raw.header.ring_records - 1)]);
            if (!(work.flops >= 0 && work.flops <= MAX_FLOPS)) break;
        }
        at += entries;
    }
    return at;
}

void collect(Snapshot& snapshot, const LaneCopy& copy, const RawLane& raw, uint32_t slots,
             const TickScale& scale) {
    const uint32_t lane = raw.header.lane;
    for (const auto& placed : copy.nodes) {
        const Node& node = *placed.at;
        if (node.count == 0) continue;  // its brick was reset
        const uint32_t row = uint32_t(snapshot.nodes.size());
        snapshot.nodes.push_back(node);
        snapshot.node_lanes.push_back(lane);
        for (uint32_t chunk = 0; chunk < HIST_CHUNKS; ++chunk) {
            if (node.chunk[chunk] == NO_CHUNK) continue;
            const uint64_t* bins = copy.chunks[node.chunk[chunk]].at;
            for (uint32_t bin = 0; bin < HIST_CHUNK_BINS; ++bin) {
                if (!bins[bin]) continue;
                snapshot.bins.push_back({row, int32_t(chunk * HIST_CHUNK_BINS + bin) - 1, bins[bin]});
            }
        }
    }
    for (const auto& placed : copy.cells) {
        snapshot.cells.push_back(*placed.at);
        snapshot.cell_lanes.push_back(lane);
    }
    if (raw.header.recent_records) {
        for (BrickRecord record : raw.recent) {
            if (!is_sound(record, slots, scale)) continue;
            const uint64_t duration = scale.duration_ns(record);
            record.start = scale.time_ns(record.start);
            record.end = record.start + duration;
            snapshot.recent.push_back(record);
            snapshot.recent_lanes.push_back(lane);
        }
    }
}

bool stays_on_disk(uint32_t kind) {
    return kind == uint32_t(ExtentKind::Operand) || kind == uint32_t(ExtentKind::Fingerprint);
}

void read_rows(const File& file, const ExtentEntry& extent, Snapshot& snapshot) {
    std::string& rows = snapshot.tables[extent.header.kind];
    if (rows.size() + extent.header.used > MAX_TABLE_BYTES) return;
    const Piece piece = read_piece(file, extent);
    rows.append(reinterpret_cast<const char*>(piece.bytes.data()), piece.bytes.size());
}

// Written before the trace that it belongs to, so it is read after the traces.
bool goes_before_trace(uint32_t kind) { return kind == uint32_t(ExtentKind::TraceTime); }

bool is_wanted(uint32_t kind, ReadWhat what) {
    if (what == ReadWhat::Statistics) {
        return kind == uint32_t(ExtentKind::Slot) || kind == uint32_t(ExtentKind::Fact);
    }
    return kind > uint32_t(ExtentKind::String) && !stays_on_disk(kind) && !goes_before_trace(kind);
}

// Ids below this are named by the slots and facts that were read.
uint64_t strings_named(const Snapshot& snapshot) {
    uint64_t end = 0;
    auto look = [&](ExtentKind kind, uint64_t row_bytes, uint64_t name_offset) {
        const auto found = snapshot.tables.find(uint32_t(kind));
        if (found == snapshot.tables.end()) return;
        for (uint64_t at = 0; at + row_bytes <= found->second.size(); at += row_bytes) {
            uint32_t name;
            std::memcpy(&name, found->second.data() + at + name_offset, sizeof name);
            end = std::max(end, uint64_t(name) + 1);
        }
    };
    look(ExtentKind::Slot, sizeof(SlotRow), offsetof(SlotRow, name));
    look(ExtentKind::Fact, sizeof(FactRow), offsetof(FactRow, name));
    return end;
}

// Takes the whole rows out of `raw`; false where they are damaged.
bool take_strings(std::string& raw, std::vector<std::string>& strings) {
    uint64_t at = 0;
    bool sound = true;
    while (at + sizeof(StringRow) <= raw.size()) {
        StringRow row;
        std::memcpy(&row, raw.data() + at, sizeof row);
        if (row.id != strings.size() || row.bytes > raw.size() - at - sizeof row) {
            sound = false;
            break;
        }
        strings.emplace_back(raw.data() + at + sizeof row, row.bytes);
        at += sizeof row + round_up(row.bytes, 8);
    }
    raw.erase(0, std::min<uint64_t>(at, raw.size()));
    return sound;
}

void read_tables(const File& file, Snapshot& snapshot, ReadWhat what) {
    std::vector<std::string> seen_already;
    for (const ExtentEntry& extent : list_extents(file, snapshot.header, snapshot.problems)) {
        if (is_wanted(extent.header.kind, what)) read_rows(file, extent, snapshot);
    }
    uint64_t named = what == ReadWhat::Everything ? ~0ull : strings_named(snapshot);
    // These last: the name in a row, and the operands and the time of a trace, were written before it.
    for (const ExtentEntry& extent : list_extents(file, read_header(file), seen_already)) {
        const ExtentHeader& head = extent.header;
        if (head.kind == uint32_t(ExtentKind::String) && snapshot.strings.size() < named) {
            read_rows(file, extent, snapshot);
            if (!take_strings(snapshot.tables[head.kind], snapshot.strings)) {
                snapshot.problems.push_back("damaged string table");
                named = 0;
            }
        }
        if (goes_before_trace(head.kind) && what == ReadWhat::Everything) {
            read_rows(file, extent, snapshot);
        }
        if (stays_on_disk(head.kind) && what == ReadWhat::Everything) {
            snapshot.spans[head.kind].push_back({extent.payload_offset(), head.used});
        }
    }
    snapshot.tables.erase(uint32_t(ExtentKind::String));
}

}  // namespace

Snapshot read_spool(const std::string& path, ReadWhat what) {
    const File file(path);
    Snapshot snapshot{};
    snapshot.header = read_header(file);
    std::vector<RawLane> lanes;
    std::set<uint32_t> lane_numbers;
    ExtentList extents(file);
    for (size_t position = 0; position < extents.now().size(); ++position) {
        const ExtentEntry extent = extents.now()[position];
        if (extent.header.kind != uint32_t(ExtentKind::Lane)) continue;
        // A second lane of one number would copy the first one's statistics again.
        if (!lane_numbers.insert(extent.header.lane).second) {
            snapshot.problems.push_back("damaged lane" + at(extent.offset));
            continue;
        }
        RawLane raw;
        std::vector<std::string> problems;
        for (int attempt = 0;; ++attempt) {
            // A fold takes microseconds: one that stays open belongs to a process that is gone.
            const bool last = attempt == LIVE_ATTEMPTS;
            problems.clear();
            const bool open_fold_too = last || attempt % 20 == 19;
            if (copy_lane(file, extents, extent, raw, what, open_fold_too, problems)) break;
            if (last) {
                problems.push_back("a lane" + at(extent.offset) +
                                   " changed too fast to be read; read it again");
                raw.header.ring_records = 0;
                break;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        snapshot.problems.insert(snapshot.problems.end(), problems.begin(), problems.end());
        if (raw.header.ring_records) lanes.push_back(std::move(raw));
    }
    // Tables last: every slot that a copied record names was written before it.
    snapshot.header = read_header(file);
    read_tables(file, snapshot, what);
    const uint32_t slots =
        uint32_t(snapshot.tables[uint32_t(ExtentKind::Slot)].size() / sizeof(SlotRow));
    for (RawLane& raw : lanes) {
        if (!raw.journal.empty()) roll_back(raw);
        if (!is_sane(raw.header, ~0ull >> 1)) continue;
        const bool is_device = raw.header.clock_domain == uint32_t(ClockDomain::Cuda);
        const TickScale scale = is_device
                                    ? TickScale{}
                                    : TickScale{snapshot.header.anchor_tick, snapshot.header.anchor_ns,
                                                snapshot.header.ns_per_tick};
        LaneCopy copy(raw, slots);
        if (!raw.ring.empty()) {
            const uint64_t head = sound_head(raw, slots, scale);
            if (head != raw.header.head) snapshot.problems.push_back("damaged records in a lane's ring");
            fold_records(raw.header, raw.ring.data(), copy, head, scale, nullptr, 0, nullptr);
        }
        copy.add_counts(slots);
        if (copy.is_damaged()) snapshot.problems.push_back("damaged statistics in a lane");
        collect(snapshot, copy, raw, slots, scale);
        snapshot.lanes.push_back(raw.header);
    }
    return snapshot;
}

}  // namespace brickline
