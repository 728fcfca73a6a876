// Reading a spool: every picture of a live one is consistent, and no bytes whatsoever make the
// reader crash, hang or ask for much memory.
#include <fcntl.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <new>
#include <thread>

#include "native_test.h"
#include "recorder.h"

namespace {

constexpr size_t HUGE_BYTES = 64 << 20;  // far more than any spool of this test
std::atomic<uint64_t> g_huge_allocations{0};

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
    if (bytes > HUGE_BYTES) {
        g_huge_allocations += 1;
        throw std::bad_alloc();
    }
    void* memory = std::malloc(bytes ? bytes : 1);
    if (!memory) throw std::bad_alloc();
    return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

using namespace brickline;
using namespace native_test;

namespace {

Scratch g_scratch;

std::vector<SlotDefinition> slots(uint32_t count) {
    std::vector<SlotDefinition> made(count);
    for (uint32_t i = 0; i < count; ++i) made[i].name = "brick " + std::to_string(i);
    return made;
}

// ------------------------------------------------------------------------------- a live spool

constexpr uint32_t BRICKS = 5;

// The nth entry of the live test; its length says which it is.
BrickRecord nth_record(uint64_t n) {
    BrickRecord record{};
    record.slot = uint32_t(n % BRICKS);
    record.start = n * 100;
    record.end = record.start + (n * 7919) % 100;
    record.elements_low = 1;
    return record;
}

// Holds folds open for a while, now and then: as a writer does that loses its core.
class SlowObserver final : public FoldObserver {
  public:
    void on_brick(const BrickRecord& record, uint64_t, uint64_t, uint64_t) override {
        if (record.start / 100 % 3001 == 0) ::usleep(4000);
        if (record.start / 100 % 307 == 0) ::usleep(50);
    }
};

// The time of the first n entries; lengths repeat after a hundred of them.
uint64_t time_of_first(uint64_t n) {
    uint64_t total = 0, of_hundred = 0;
    for (uint64_t i = 0; i < 100; ++i) {
        const BrickRecord record = nth_record(i);
        of_hundred += record.end - record.start;
        if (i < n % 100) total += record.end - record.start;
    }
    return total + n / 100 * of_hundred;
}

void test_live_reader(bool slow_folds, std::chrono::milliseconds how_long) {
    const std::string where = slow_folds ? "live, slow folds" : "live";
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots(BRICKS));
    SlowObserver observer;
    std::atomic<uint64_t> finished{0};
    std::atomic<bool> stop{false};
    std::thread writer([&] {
        Lane* lane = recorder.acquire_lane({});
        if (slow_folds) lane->set_observer(&observer);
        for (uint64_t n = 0; !stop; ++n) {
            lane->append(nth_record(n), nullptr);
            finished.store(n + 1, std::memory_order_release);
            if (n % 64 == 0) {
                for (volatile int spin = 0; spin < 2000;) spin = spin + 1;
            }
        }
    });
    uint64_t looks = 0, last = 0, skipped = 0;
    const auto end = std::chrono::steady_clock::now() + how_long;
    while (std::chrono::steady_clock::now() < end) {
        const uint64_t before = finished.load(std::memory_order_acquire);
        const Snapshot snapshot = read_spool(path);
        const uint64_t after = finished.load(std::memory_order_acquire);
        ++looks;
        if (!snapshot.problems.empty() && snapshot.problems[0].find("too fast") != std::string::npos) {
            ++skipped;
            continue;
        }
        check_consistent(snapshot, where);
        uint64_t count = total_count(snapshot), total = 0;
        for (const Node& node : snapshot.nodes) total += node.total_ns;
        check(count >= last, where + ": counts never fall");
        check(count >= before && count <= after + 1, where + ": what was finished is there");
        check_equal(total, time_of_first(count), where + ": the time of exactly these entries");
        last = count;
    }
    stop = true;
    writer.join();
    recorder.close();
    check_equal(total_count(read_spool(path)), finished.load(), where + ": all of it in the end");
    std::printf("%s: %llu looks, %llu given up\n", where.c_str(), (unsigned long long)looks,
                (unsigned long long)skipped);
    // A writer that does nothing but append, slowed down by a sanitizer, folds most of the time.
    check(skipped < looks, where + ": a reader gets through");
}

// ------------------------------------------------------------------------------- hostile bytes

// Must return or throw a SpoolError, and take no more memory than the file explains.
bool read_hostile(const std::string& path) {
    try {
        const Snapshot snapshot = read_spool(path);
        for (const BinRow& bin : snapshot.bins) {
            if (bin.node >= snapshot.nodes.size()) check(false, "a bin belongs to a node");
        }
        for (const Node& node : snapshot.nodes) {
            if (!std::isfinite(node.flops + node.sum_squares)) check(false, "sums are numbers");
        }
        for (const TileCell& cell : snapshot.cells) {
            if (!std::isfinite(cell.flops)) check(false, "a cell's sum is a number");
        }
        for (const LaneHeader& lane : snapshot.lanes) {
            if (lane.clock_domain > uint32_t(ClockDomain::Manual)) check(false, "a lane has a known clock");
        }
        return snapshot.problems.empty();
    } catch (const SpoolError&) {
        return false;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

class Poked {  // one byte range of a file changed, and put back
  public:
    Poked(const std::string& path, uint64_t offset, const std::string& bytes)
        : m_fd(::open(path.c_str(), O_RDWR | O_CLOEXEC)), m_offset(offset), m_old(bytes.size(), 0) {
        done(::pread(m_fd, m_old.data(), m_old.size(), off_t(m_offset)));
        done(::pwrite(m_fd, bytes.data(), bytes.size(), off_t(m_offset)));
    }
    ~Poked() {
        done(::pwrite(m_fd, m_old.data(), m_old.size(), off_t(m_offset)));
        ::close(m_fd);
    }

  private:
    void done(ssize_t bytes) {
        if (bytes != ssize_t(m_old.size())) std::abort();
    }
    int m_fd;
    uint64_t m_offset;
    std::string m_old;
};

template <class T>
std::string bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Copies the spool from inside a fold, so that the copy holds a journal in force.
class CopyInFold final : public FoldObserver {
  public:
    CopyInFold(std::string from, std::string to) : m_from(std::move(from)), m_to(std::move(to)) {}
    void on_brick(const BrickRecord&, uint64_t, uint64_t, uint64_t) override {
        if (++m_seen == 30) write_file(m_to, read_file(m_from));
    }

  private:
    std::string m_from, m_to;
    int m_seen = 0;
};

struct Specimens {
    std::string whole = g_scratch.path("whole");       // two lanes, statistics, tiles, timeline, tables
    std::string cut_off = g_scratch.path("cut-off");   // the same, killed inside a fold
};

void count_untimed(Lane& lane) {
    lane.own_step.set(3, 1);
    lane.own_step.only_counts = true;
    lane.set_step(&lane.own_step);
    for (uint32_t n = 0; n < 40; ++n) check(lane.count(n % BRICKS, 7), "counted in place");
    check(!lane.count(0, 8), "other elements go through the ring");
}

Specimens make_specimens() {
    Specimens made;
    Random random(7);
    const TickSource source(ClockKind::Manual);
    Recorder recorder({made.whole, 0, 32}, source, slots(BRICKS));
    const double fact[2] = {0, 1.5};
    recorder.spool().append(ExtentKind::Fact, fact, sizeof fact);
    Lane* lanes[2] = {recorder.acquire_lane({}), recorder.acquire_lane({})};
    CopyInFold copy(made.whole, made.cut_off);
    for (int round = 0; round < 2; ++round) {
        for (uint64_t n = 0; n < 100; ++n) {
            BrickRecord record = nth_record(n);
            WorkRecord work{1, 2.0, random.below(3) << 32 | random.below(3), 0, 0, 0, RECORD_IS_WORK, 0};
            if (n % 3 == 0) record.flags = RECORD_WORK | RECORD_TILE;
            lanes[n % 2]->append(record, n % 3 == 0 ? &work : nullptr);
        }
        lanes[0]->set_observer(round ? &copy : nullptr);
        lanes[0]->fold();
        if (round == 0) lanes[1]->fold();
        if (round == 0) count_untimed(*lanes[0]);
    }
    recorder.abandon();
    return made;
}

void test_counts() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots(BRICKS));
    Lane* lane = recorder.acquire_lane({});
    lane->append(nth_record(0), nullptr);
    count_untimed(*lane);
    count_untimed(*lane);
    lane->fold();
    recorder.abandon();
    const Snapshot snapshot = read_spool(path);
    check_equal(total_count(snapshot), 81u, "entries beside the ring");
    uint64_t elements = 0;
    for (const Node& node : snapshot.nodes) elements += node.phase == 3 ? node.elements : 0;
    check_equal(elements, 80u * 7, "their elements");
    check_equal(snapshot.problems.size(), 0u, "sound");
}

struct Place {
    uint64_t offset;
    uint32_t kind;
};

std::vector<Place> extents_of(const std::string& path) {
    const std::string bytes = read_file(path);
    std::vector<Place> places;
    for (uint64_t offset = PAGE_BYTES; offset + sizeof(ExtentHeader) <= bytes.size();) {
        ExtentHeader header;
        std::memcpy(&header, bytes.data() + offset, sizeof header);
        places.push_back({offset, header.kind});
        offset += header.bytes;
    }
    return places;
}

void test_truncated(const Specimens& specimens) {
    const std::string path = g_scratch.path("truncated");
    const std::string bytes = read_file(specimens.whole);
    check(read_hostile(specimens.whole), "the whole file is sound");
    uint64_t sound = 0;
    write_file(path, bytes);
    for (uint64_t page = bytes.size() / PAGE_BYTES; page-- > 0;) {
        for (const int64_t off : {1, 0, -1}) {
            const int64_t size = int64_t(page * PAGE_BYTES) + off;
            if (size < 0) continue;
            // From the end on, so that every cut is of the same file.
            std::filesystem::resize_file(path, uint64_t(size));
            sound += read_hostile(path);
        }
    }
    check_equal(sound, 0u, "a truncated file is never called sound");
}

void test_flipped_bytes(const Specimens& specimens) {
    uint64_t reads = 0;
    auto flip = [&](const std::string& path, uint64_t offset, const std::string& bytes) {
        for (const char mask : {char(0x01), char(0x80), char(0xff)}) {
            const Poked poked(path, offset, std::string(1, char(bytes[offset] ^ mask)));
            read_hostile(path);
            ++reads;
        }
    };
    const std::string bytes = read_file(specimens.whole);
    for (uint64_t offset = 0; offset < sizeof(SpoolHeader); ++offset) flip(specimens.whole, offset, bytes);
    for (const Place& place : extents_of(specimens.whole)) {
        const bool is_lane = place.kind == uint32_t(ExtentKind::Lane);
        // Of the unclaimed times per depth a few bytes stand for all.
        const uint64_t length = sizeof(ExtentHeader) + (is_lane ? offsetof(LaneHeader, child_ns) + 16 : 40);
        for (uint64_t i = 0; i < length; ++i) flip(specimens.whole, place.offset + i, bytes);
    }
    check(reads > 2000, "bytes of every header are flipped");
}

// Values that a length, a count or an offset should never have, in every field of a lane.
void test_hostile_lanes(const Specimens& specimens) {
    const uint64_t values[] = {0, 1, 63, 64, 4095, 1ull << 24, 0xffffffff, 1ull << 32, 1ull << 62, ~0ull};
    for (const std::string& path : {specimens.whole, specimens.cut_off}) {
        for (const Place& place : extents_of(path)) {
            if (place.kind != uint32_t(ExtentKind::Lane)) continue;
            for (uint64_t field = 0; field <= offsetof(LaneHeader, child_ns); field += 8) {
                for (const uint64_t value : values) {
                    const Poked poked(path, place.offset + sizeof(ExtentHeader) + field, bytes_of(value));
                    read_hostile(path);
                }
            }
        }
    }
    check(true, "hostile lane headers");
}

// A journal that puts back whatever it likes.
void test_hostile_journal(const Specimens& specimens) {
    Random random(8);
    const std::string& path = specimens.cut_off;
    const std::string bytes = read_file(path);
    const std::vector<Place> places = extents_of(path);
    for (const Place& place : places) {
        if (place.kind != uint32_t(ExtentKind::Lane)) continue;
        const uint64_t header = place.offset + sizeof(ExtentHeader);
        LaneHeader lane;
        std::memcpy(&lane, bytes.data() + header, sizeof lane);
        const uint64_t journal = place.offset + PAGE_BYTES + lane.ring_records * sizeof(BrickRecord);
        for (int i = 0; i < 400; ++i) {
            const uint64_t target = places[random.below(places.size())].offset;
            const uint64_t fields[] = {offsetof(LaneHeader, ring_records), offsetof(LaneHeader, head),
                                       offsetof(LaneHeader, tail), offsetof(LaneHeader, deepest),
                                       offsetof(LaneHeader, recent_head)};
            const bool at_header = random.one_in(2);
            const JournalEntry entry{at_header ? header + fields[random.below(5)] : target + random.below(5000),
                                     random.one_in(3) ? random.bits() >> random.below(64) : 8};
            const uint64_t value = random.one_in(2) ? 1ull << random.below(64) : random.bits();
            const Poked in_force(path, header + offsetof(LaneHeader, journal_bytes), bytes_of(uint64_t(24)));
            const Poked poked(path, journal, bytes_of(entry) + bytes_of(value));
            read_hostile(path);
        }
    }
    check(true, "hostile journals");
}

void test_random_damage(const Specimens& specimens) {
    Random random(9);
    const std::string path = g_scratch.path("damaged");
    const std::string sources[2] = {read_file(specimens.whole), read_file(specimens.cut_off)};
    for (int i = 0; i < 400; ++i) {
        std::string bytes = sources[i % 2];
        for (uint64_t n = 1 + random.below(60); n > 0; --n) {
            // Records, journals and nodes fill most of the file; damage lands everywhere.
            const uint64_t at = random.below(bytes.size() - 8);
            const uint64_t value = random.one_in(2) ? random.bits() : random.below(64);
            std::memcpy(bytes.data() + at / 8 * 8, &value, 8);
        }
        write_file(path, bytes);
        read_hostile(path);
    }
    check(true, "random damage");
}

void test_garbage() {
    Random random(10);
    const std::string path = g_scratch.path("garbage");
    for (int i = 0; i < 300; ++i) {
        std::string bytes(random.below(40000), 0);
        for (char& byte : bytes) byte = char(random.bits());
        if (i % 2 && bytes.size() > PAGE_BYTES) {  // behind a header that looks right
            SpoolHeader header{};
            std::memcpy(header.magic, SPOOL_MAGIC, sizeof SPOOL_MAGIC);
            header.version = 1;
            header.header_bytes = PAGE_BYTES;
            header.ns_per_tick = 1;
            header.file_bytes = random.one_in(2) ? bytes.size() : random.bits();
            std::memcpy(bytes.data(), &header, sizeof header);
            ExtentHeader extent{EXTENT_MAGIC, uint32_t(random.below(30)), 0, 0, PAGE_BYTES,
                                random.below(PAGE_BYTES), {}};
            for (uint64_t at = PAGE_BYTES; at + PAGE_BYTES <= bytes.size(); at += PAGE_BYTES) {
                extent.kind = uint32_t(1 + random.below(26));
                std::memcpy(bytes.data() + at, &extent, sizeof extent);
            }
        }
        write_file(path, bytes);
        read_hostile(path);
    }
    check_fault(SpoolFault::NotASpool, [&] {
        write_file(path, "");
        read_spool(path);
    }, "an empty file");
    check_fault(SpoolFault::Io, [&] { read_spool(g_scratch.path("nothing")); }, "no file");
    check_fault(SpoolFault::NotASpool, [&] { read_spool(g_scratch.path("")); }, "a directory");
}

void test_newer_version(const Specimens& specimens) {
    const Poked poked(specimens.whole, offsetof(SpoolHeader, version), bytes_of(uint32_t(2)));
    check_fault(SpoolFault::Version, [&] { read_spool(specimens.whole); }, "a newer version");
}

// One number for every lane: each would copy all statistics of that number once more.
void test_lanes_of_one_number() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots(1));
    for (int i = 0; i < 20; ++i) recorder.acquire_lane({})->append(nth_record(0), nullptr);
    for (int i = 0; i < 20; ++i) recorder.spool().add_extent(ExtentKind::Node, 0, uint32_t(i), 1 << 20);
    recorder.abandon();
    std::vector<std::unique_ptr<Poked>> poked;
    for (const Place& place : extents_of(path)) {
        const std::string used = bytes_of(uint64_t(1 << 20));
        if (place.kind == uint32_t(ExtentKind::Node)) {
            poked.push_back(std::make_unique<Poked>(path, place.offset + offsetof(ExtentHeader, used), used));
        }
        if (place.kind == uint32_t(ExtentKind::Lane)) {
            poked.push_back(std::make_unique<Poked>(path, place.offset + offsetof(ExtentHeader, lane),
                                                    bytes_of(uint32_t(0))));
        }
    }
    const Snapshot snapshot = read_spool(path);
    check_equal(snapshot.lanes.size(), 1u, "a lane's number is its own");
    check_equal(snapshot.problems.size(), 19u, "the others are reported");
}

// A cell whose place in the index is that of another brick's shared cell.
void test_colliding_cells() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots(2));
    Lane* lane = recorder.acquire_lane({});
    const uint64_t collision = ~0ull ^ 0x9e3779b97f4a7c15ull;
    for (const auto& [slot, detail] : {std::pair<uint32_t, uint64_t>{1, collision}, {0, ~0ull}}) {
        BrickRecord record{};
        record.slot = slot;
        record.flags = RECORD_TILE | RECORD_WORK | RECORD_EXACT;
        const WorkRecord work{0, 0, detail, 0, 0, 0, RECORD_IS_WORK, 0};
        lane->append(record, &work);
    }
    recorder.abandon();
    const Snapshot snapshot = read_spool(path);
    check_equal(total_count(snapshot), 2u, "colliding cells");
}

// Sums that no record can have made, in statistics and in the ring alike.
void test_impossible_sums() {
    for (const double flops : {std::nan(""), double(INFINITY), -1.0, 1e308}) {
        for (const bool is_folded : {false, true}) {
            const TickSource source(ClockKind::Manual);
            const std::string path = g_scratch.fresh();
            Recorder recorder({path}, source, slots(1));
            Lane* lane = recorder.acquire_lane({});
            for (const bool is_tile : {false, true}) {
                BrickRecord record{};
                record.flags = uint8_t(RECORD_WORK | RECORD_EXACT | (is_tile ? RECORD_TILE : 0));
                const WorkRecord work{0, flops, 0, 0, 0, 0, RECORD_IS_WORK, 0};
                lane->append(record, &work);
            }
            if (is_folded) lane->fold();
            recorder.abandon();
            const Snapshot snapshot = read_spool(path);
            check_equal(snapshot.nodes.size() + snapshot.cells.size(), 0u, "impossible sums");
            check_equal(snapshot.problems.size(), 1u, "impossible sums are reported");
        }
    }
}

void test_damage() {
    const Specimens specimens = make_specimens();
    test_truncated(specimens);
    test_flipped_bytes(specimens);
    test_hostile_lanes(specimens);
    test_hostile_journal(specimens);
    test_random_damage(specimens);
    test_garbage();
    test_newer_version(specimens);
    test_lanes_of_one_number();
    test_colliding_cells();
    test_impossible_sums();
    test_counts();
}

}  // namespace

int main() {
    watchdog(240);
    test_live_reader(false, std::chrono::milliseconds(1500));
    test_live_reader(true, std::chrono::milliseconds(2500));
    // Damage has one thread: it is ASan that looks for what it does.
    if (!UNDER_TSAN) test_damage();
    check_equal(g_huge_allocations.load(), 0u, "no huge allocation");
    return finish();
}
