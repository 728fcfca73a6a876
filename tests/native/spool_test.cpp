// The spool: creating, refusing, growing and interning, and a disk that is full at every place where
// one can be. Files are checked by a walk of their bytes that shares no code with the core.
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <set>

#include "native_test.h"
#include "recorder.h"

using namespace brickline;
using namespace native_test;

namespace {

Scratch g_scratch;

// While it lives, no file can grow past `bytes`; the disk is full for whoever tries.
class FullDisk {
  public:
    explicit FullDisk(uint64_t bytes) {
        ::getrlimit(RLIMIT_FSIZE, &m_before);
        const rlimit limit{bytes, m_before.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FullDisk() { ::setrlimit(RLIMIT_FSIZE, &m_before); }

  private:
    rlimit m_before{};
};

struct Walked {
    ExtentHeader header;
    uint64_t offset;
};

std::vector<Walked> walk(const std::string& bytes) {
    SpoolHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    std::vector<Walked> extents;
    for (uint64_t offset = PAGE_BYTES; offset < header.file_bytes;) {
        Walked extent{{}, offset};
        std::memcpy(&extent.header, bytes.data() + offset, sizeof extent.header);
        if (extent.header.magic != EXTENT_MAGIC || extent.header.bytes == 0) {
            check(false, "the walk meets an extent");
            break;
        }
        extents.push_back(extent);
        offset += extent.header.bytes;
    }
    return extents;
}

BrickRecord record_of(uint32_t slot, uint64_t start, uint64_t end) {
    BrickRecord record{};
    record.slot = slot;
    record.start = start;
    record.end = end;
    record.elements_low = 1;
    return record;
}

void test_creation() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    Spool spool(path, 5, source);
    struct stat info {};
    check(::stat(path.c_str(), &info) == 0 && (info.st_mode & 07777) == 0600, "mode is 0600");
    const Snapshot snapshot = read_spool(path);
    check_consistent(snapshot, "a new spool");
    check(snapshot.header.rank == 5 && snapshot.header.process == uint32_t(::getpid()) &&
              !snapshot.header.closed, "its header");
    check(snapshot.strings.size() == 1 && snapshot.strings[0].empty(), "string 0 is the empty one");
    spool.close();
    check(read_spool(path).header.closed == 1, "a closed spool says so");
    check_fault(SpoolFault::Io, [&] { spool.add_extent(ExtentKind::Node, 0, 0, 1); }, "a closed spool");
    check_fault(SpoolFault::Io, [&] { spool.intern("late"); }, "a closed spool takes no string");
    spool.close();
}

void test_existing_path() {
    const std::string path = g_scratch.fresh();
    write_file(path, "a person's file");
    const TickSource source(ClockKind::Manual);
    check_fault(SpoolFault::Io, [&] { Spool(path, 0, source); }, "an existing path is refused");
    check(read_file(path) == "a person's file", "and left as it was");
    check_fault(SpoolFault::Io, [&] { Spool(g_scratch.path("no/such/place"), 0, source); },
                "a directory that is not there");
}

void test_abandon() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    {
        Spool spool(path, 0, source);
        spool.intern("kept");
        spool.abandon();
    }
    const Snapshot snapshot = read_spool(path);
    check(!snapshot.header.closed && snapshot.strings.size() == 2, "abandoned, not closed");
}

void test_extents() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    Spool spool(path, 0, source);
    const uint64_t sizes[] = {1, PAGE_BYTES - sizeof(ExtentHeader), PAGE_BYTES, 100000, 3 << 20};
    std::vector<Extent> extents;
    for (uint32_t i = 0; i < 5; ++i) {
        extents.push_back(spool.add_extent(ExtentKind::Node, 7, i, sizes[i]));
        std::memset(extents[i].payload(), int(i + 1), sizes[i]);
        check(extents[i].capacity() >= sizes[i], "an extent has the room that was asked for");
    }
    const std::string bytes = read_file(path);
    check_equal(bytes.size(), spool.header().file_bytes, "the file ends where its header says");
    uint32_t found = 0;
    for (const Walked& walked : walk(bytes)) {
        check(walked.header.bytes % PAGE_BYTES == 0, "extents are whole pages");
        if (walked.header.kind != uint32_t(ExtentKind::Node)) continue;
        const uint64_t at = walked.offset + sizeof(ExtentHeader);
        check(walked.header.ordinal == found && walked.header.lane == 7, "in order, with their owner");
        check(uint8_t(bytes[at]) == found + 1 && uint8_t(bytes[at + sizes[found] - 1]) == found + 1,
              "what was written through the mapping is in the file");
        ++found;
    }
    check_equal(found, 5u, "every extent is found");
}

void test_tables() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    Spool spool(path, 0, source);
    Random random(1);
    std::map<ExtentKind, std::string> expected;
    const ExtentKind tables[] = {ExtentKind::Trace, ExtentKind::Operand, ExtentKind::Fact};
    for (int i = 0; i < 4000; ++i) {
        const ExtentKind table = tables[random.below(3)];
        std::string row(8 * (1 + random.below(random.one_in(500) ? 200000 : 20)), char('a' + i % 26));
        spool.append(table, row.data(), row.size());
        expected[table] += row;
    }
    Snapshot snapshot = read_spool(path);
    check_consistent(snapshot, "tables");
    const std::string bytes = read_file(path);
    for (const ExtentKind table : tables) {
        std::string rows = snapshot.tables[uint32_t(table)];
        // What may be larger than memory is told by its places alone.
        for (const auto& span : snapshot.spans[uint32_t(table)]) {
            rows += bytes.substr(span.offset, span.bytes);
        }
        check(rows == expected[table], "rows come back as they went in");
    }
    std::map<uint32_t, uint32_t> ordinals;
    for (const Walked& walked : walk(read_file(path))) {
        check_equal(walked.header.ordinal, ordinals[walked.header.kind]++, "ordinals ascend by table");
    }
    check(ordinals[uint32_t(ExtentKind::Trace)] < 40, "tables grow by doubling");
}

void test_strings() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    Spool spool(path, 0, source);
    std::vector<std::string> texts = {"", "a", "seven77", "eight888", "µs per token", std::string(3, '\0'),
                                      std::string(5 << 20, 'x')};
    for (int i = 0; i < 2000; ++i) texts.push_back("brick " + std::to_string(i));
    for (int round = 0; round < 2; ++round) {
        for (uint32_t i = 0; i < texts.size(); ++i) check(spool.intern(texts[i]) == i, "one id each");
    }
    check(read_spool(path).strings == texts, "strings come back");
}

void test_full_disk_at_creation() {
    const TickSource source(ClockKind::Manual);
    for (const uint64_t limit : {uint64_t(0), PAGE_BYTES - 1, PAGE_BYTES, 2 * PAGE_BYTES}) {
        const std::string path = g_scratch.fresh();
        {
            const FullDisk full(limit);
            check_fault(SpoolFault::NoSpace, [&] { Spool(path, 0, source); }, "no room for a spool");
        }
        check(!std::filesystem::exists(path), "and nothing is left behind");
        Spool again(path, 0, source);
        check(again.intern("x") == 1, "once there is room the same path serves");
    }
}

void test_full_disk_in_tables() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    Spool spool(path, 0, source);
    std::string expected;
    uint64_t refused = 0;
    auto append = [&](int i) {
        const std::string row(160, char('a' + i % 26));
        spool.append(ExtentKind::Trace, row.data(), row.size());
        expected += row;
    };
    for (int i = 0; i < 200; ++i) append(i);
    {
        const FullDisk full(spool.header().file_bytes);
        for (int i = 0; i < 1000; ++i) {
            try {
                append(i);
            } catch (const SpoolError& error) {
                refused += error.fault() == SpoolFault::NoSpace;
            }
        }
        check(refused > 0, "a full disk is an error");
        check_fault(SpoolFault::NoSpace, [&] { spool.intern(std::string(1 << 20, 's')); },
                    "for a string as well");
        Snapshot snapshot = read_spool(path);
        check_consistent(snapshot, "full disk");
        check(snapshot.tables[uint32_t(ExtentKind::Trace)] == expected, "nothing before it is lost");
    }
    for (int i = 0; i < 1000; ++i) append(i);
    check(spool.intern(std::string(1 << 20, 's')) == 1, "the string that was refused has no id");
    Snapshot snapshot = read_spool(path);
    check(snapshot.tables[uint32_t(ExtentKind::Trace)] == expected && snapshot.strings.size() == 2,
          "recording goes on when there is room again");
}

void test_full_disk_in_lanes() {
    const std::string path = g_scratch.fresh();
    const TickSource source(ClockKind::Manual);
    std::vector<SlotDefinition> slots(4000);
    for (uint32_t i = 0; i < slots.size(); ++i) slots[i].name = "brick " + std::to_string(i);
    Recorder recorder({path}, source, slots);
    Lane* lane = recorder.acquire_lane({});
    for (uint64_t i = 0; i < 1000; ++i) lane->append(record_of(0, i, i + 10), nullptr);
    lane->fold();
    const FullDisk full(recorder.spool().header().file_bytes);
    check_fault(SpoolFault::NoSpace, [&] { recorder.acquire_lane({}); }, "no room for a lane");
    // New bricks find no room at some point; known ones are still counted.
    for (uint32_t slot = 0; slot < 4000; ++slot) {
        lane->append(record_of(slot, slot, slot + 7), nullptr);
        lane->append(record_of(0, slot, slot + 10), nullptr);
    }
    lane->fold();
    check(recorder.is_full_disk(), "the recorder knows");
    const Snapshot snapshot = read_spool(path);
    check(snapshot.header.lost_records > 0, "and counts what it lost");
    check_equal(total_count(snapshot) + snapshot.header.lost_records, 9000u, "and nothing besides");
    check_equal(snapshot.nodes[0].count, 5001u, "a known brick loses nothing");
    check_equal(snapshot.nodes[0].total_ns, 1000u * 10 + 4000 * 10 + 7, "nor its time");
}

}  // namespace

int main() {
    watchdog(120);
    std::signal(SIGXFSZ, SIG_IGN);
    test_creation();
    test_existing_path();
    test_abandon();
    test_extents();
    test_tables();
    test_strings();
    test_full_disk_at_creation();
    test_full_disk_in_tables();
    test_full_disk_in_lanes();
    return finish();
}
