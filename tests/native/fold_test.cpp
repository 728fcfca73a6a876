// Folding: records become statistics exactly as a brute-force model of this file's own says, and a
// process that dies anywhere inside a fold leaves every finished record behind. Death is simulated
// by running the fold one instruction at a time and reading the file after every store to it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>
#include <cmath>
#include <cstring>
#include <tuple>

#include "histogram.h"
#include "native_test.h"
#include "recorder.h"

using namespace brickline;
using namespace native_test;

namespace {

Scratch g_scratch;

// ------------------------------------------------------------------------------- the model

struct Entry {
    BrickRecord record{};
    WorkRecord work{};
    const WorkRecord* work_or_null() const { return record.flags & RECORD_WORK ? &work : nullptr; }
};

struct ModelNode {
    std::vector<uint64_t> durations;
    std::map<int, uint64_t> bins;
    uint64_t count = 0, elements = 0, timed_elements = 0, exclusive_ns = 0, exclusive_count = 0;
    uint64_t zero = 0, bytes_in = 0, bytes_out = 0, cycles = 0, cycles_count = 0;
    uint64_t out_of_order = 0, approximate = 0, host_bound = 0;
    uint64_t first_ns = ~0ull, last_ns = 0;
    double flops = 0;
};

struct ModelCell {
    uint64_t count = 0, total_ns = 0, min_ns = ~0ull, max_ns = 0;
};

// 2^k >= ns^16 for the smallest k, in integers of any length; bucket k - 1 holds ns.
int exact_bucket(uint64_t ns) {
    std::vector<uint32_t> power = {1};
    for (int i = 0; i < 16; ++i) {
        std::vector<uint32_t> product(power.size() + 2);
        for (size_t a = 0; a < power.size(); ++a) {
            uint64_t carry = 0;
            const uint32_t halves[2] = {uint32_t(ns), uint32_t(ns >> 32)};
            for (size_t b = 0; b < 2; ++b) {
                carry += product[a + b] + uint64_t(power[a]) * halves[b];
                product[a + b] = uint32_t(carry);
                carry >>= 32;
            }
            for (size_t at = a + 2; carry; ++at) {
                carry += product[at];
                product[at] = uint32_t(carry);
                carry >>= 32;
            }
        }
        power = product;
    }
    while (power.back() == 0) power.pop_back();
    const int bits = int(power.size()) * 32 - __builtin_clz(power.back());
    const bool is_power_of_two = (ns & (ns - 1)) == 0;
    return bits - (is_power_of_two ? 1 : 0) - 1;
}

// What the statistics of a lane mean, written as plainly as possible. Times are in ns.
class Model {
  public:
    std::map<std::pair<uint32_t, uint32_t>, ModelNode> nodes;
    std::map<std::tuple<uint32_t, uint32_t, uint32_t>, ModelCell> cells;
    std::vector<BrickRecord> recent;

    void add(const Entry& entry) {
        const BrickRecord& record = entry.record;
        ModelNode& node = nodes[{record.slot, record.phase}];
        const uint64_t elements = uint64_t(record.elements_high) << 32 | record.elements_low;
        node.count += 1;
        node.elements += elements;
        if (record.flags & RECORD_UNTIMED) {
            pass_on(record.depth);
            return;
        }
        const uint64_t ns = record.flags & RECORD_EXACT     ? record.end
                            : record.end > record.start ? record.end - record.start
                                                        : 0;
        node.durations.push_back(ns);
        node.timed_elements += elements;
        node.first_ns = std::min(node.first_ns, record.start);
        node.last_ns = std::max(node.last_ns, record.start + ns);
        node.out_of_order += (record.flags & RECORD_OUT_OF_ORDER) != 0;
        node.approximate += (record.flags & RECORD_APPROXIMATE) != 0;
        node.host_bound += (record.flags & RECORD_HOST_BOUND) != 0;
        if (ns == 0) node.zero += 1;
        else node.bins[std::min(exact_bucket(ns), int(HIST_BINS) - 2)] += 1;
        if (!(record.flags & (RECORD_OUT_OF_ORDER | RECORD_APPROXIMATE | RECORD_TILE | RECORD_EXACT))) {
            node.exclusive_ns += exclusive(record.depth, ns);
            node.exclusive_count += 1;
        } else {
            pass_on(record.depth);
        }
        if (const WorkRecord* work = entry.work_or_null()) add_work(node, record, *work, ns);
        recent.push_back(record);
    }

  private:
    // Entries finish children first: whatever is deeper and not yet inside something is inside this.
    uint64_t claim_inner(uint32_t depth) {
        uint64_t inner = 0;
        while (!m_unclaimed.empty() && m_unclaimed.back().first > depth) {
            inner += m_unclaimed.back().second;
            m_unclaimed.pop_back();
        }
        return inner;
    }
    uint64_t exclusive(uint32_t depth, uint64_t ns) {
        const uint64_t inner = claim_inner(depth);
        m_unclaimed.push_back({depth, ns});
        return ns - std::min(inner, ns);
    }
    // An entry that takes no part leaves what is inside it to whatever encloses it.
    void pass_on(uint32_t depth) {
        const uint64_t inner = claim_inner(depth);
        m_unclaimed.push_back({depth, inner});
    }

    void add_work(ModelNode& node, const BrickRecord& record, const WorkRecord& work, uint64_t ns) {
        node.bytes_in += work.bytes_in;
        node.flops += work.flops;
        if (record.flags & RECORD_TILE) {
            ModelCell& cell = cells[{record.slot, uint32_t(work.detail >> 32), uint32_t(work.detail)}];
            cell.count += 1;
            cell.total_ns += ns;
            cell.min_ns = std::min(cell.min_ns, ns);
            cell.max_ns = std::max(cell.max_ns, ns);
            return;
        }
        node.bytes_out += work.detail;
        const uint64_t cycles =
            work.cycles_low | uint64_t(work.cycles_high) << 32 | uint64_t(work.cycles_top) << 40;
        node.cycles += cycles;
        node.cycles_count += cycles != 0;
    }

    std::vector<std::pair<uint32_t, uint64_t>> m_unclaimed;  // depths ascend
};

void check_node(const Node& node, const ModelNode& expected, const std::map<int, uint64_t>& bins,
                const std::string& where) {
    check_equal(node.count, expected.count, where + ": count");
    check_equal(node.timed, expected.durations.size(), where + ": timed");
    uint64_t total = 0, smallest = ~0ull, largest = 0;
    long double squares = 0;
    for (const uint64_t ns : expected.durations) {
        total += ns;
        smallest = std::min(smallest, ns);
        largest = std::max(largest, ns);
        const long double distance = (long double)(ns) - (long double)(expected.durations[0]);
        squares += distance * distance;
    }
    check_equal(node.total_ns, total, where + ": total");
    check_equal(node.min_ns, smallest, where + ": min");
    check_equal(node.max_ns, largest, where + ": max");
    check(std::abs((long double)(node.sum_squares) - squares) <= squares * 1e-9L, where + ": squares");
    check_equal(node.exclusive_ns, expected.exclusive_ns, where + ": exclusive time");
    check_equal(node.exclusive_count, expected.exclusive_count, where + ": exclusive count");
    check_equal(node.elements, expected.elements, where + ": elements");
    check_equal(node.timed_elements, expected.timed_elements, where + ": timed elements");
    check_equal(node.bytes_in, expected.bytes_in, where + ": bytes in");
    check_equal(node.bytes_out, expected.bytes_out, where + ": bytes out");
    check_equal(node.flops, expected.flops, where + ": flops");
    check_equal(node.cycles, expected.cycles, where + ": cycles");
    check_equal(node.cycles_count, expected.cycles_count, where + ": cycles count");
    check_equal(node.zero_count, expected.zero, where + ": zeros");
    check_equal(node.out_of_order, expected.out_of_order, where + ": out of order");
    check_equal(node.approximate, expected.approximate, where + ": approximate");
    check_equal(node.host_bound, expected.host_bound, where + ": host-bound");
    // A fold keeps the first and the last entry that it met, which is exact for entries in order.
    check(node.first_ns >= expected.first_ns && node.last_ns <= expected.last_ns,
          where + ": within the first start and the last end");
    check(bins == expected.bins, where + ": histogram");
}

// The snapshot says of one lane what the model says of its entries.
void check_model(const Snapshot& snapshot, const Model& model, const std::string& where) {
    check_consistent(snapshot, where);
    std::vector<std::map<int, uint64_t>> bins(snapshot.nodes.size());
    for (const BinRow& bin : snapshot.bins) bins[bin.node][bin.index] += bin.count;
    check_equal(snapshot.nodes.size(), model.nodes.size(), where + ": nodes");
    for (size_t i = 0; i < snapshot.nodes.size(); ++i) {
        const auto found = model.nodes.find({snapshot.nodes[i].slot, snapshot.nodes[i].phase});
        if (!check(found != model.nodes.end(), where + ": a node of the model")) continue;
        check_node(snapshot.nodes[i], found->second, bins[i], where);
    }
    check_equal(snapshot.cells.size(), model.cells.size(), where + ": cells");
    for (const TileCell& cell : snapshot.cells) {
        const auto found = model.cells.find({cell.slot, cell.row, cell.column});
        if (!check(found != model.cells.end(), where + ": a cell of the model")) continue;
        const ModelCell& expected = found->second;
        check(cell.count == expected.count && cell.total_ns == expected.total_ns &&
                  cell.min_ns == expected.min_ns && cell.max_ns == expected.max_ns,
              where + ": a cell's statistics");
    }
}

void check_recent(const Snapshot& snapshot, const Model& model, const std::string& where) {
    if (!check_equal(snapshot.recent.size(), model.recent.size(), where + ": timeline")) return;
    for (size_t i = 0; i < model.recent.size(); ++i) {
        check(snapshot.recent[i].slot == model.recent[i].slot &&
                  snapshot.recent[i].start == model.recent[i].start,
              where + ": the timeline's order");
    }
}

// ------------------------------------------------------------------------------- entries

constexpr uint32_t SLOTS = 12;

std::vector<SlotDefinition> slots(uint32_t count = SLOTS) {
    std::vector<SlotDefinition> made(count);
    for (uint32_t i = 0; i < count; ++i) made[i].name = "brick " + std::to_string(i);
    return made;
}

uint64_t random_duration(Random& random) {
    if (random.one_in(20)) return 0;
    return random.bits() >> (16 + random.below(48));
}

Entry random_entry(Random& random, uint64_t start, uint64_t end, uint32_t depth) {
    Entry entry;
    entry.record.slot = uint32_t(random.below(SLOTS));
    entry.record.phase = uint8_t(random.below(3));
    entry.record.depth = uint8_t(depth);
    entry.record.start = start;
    entry.record.end = end;
    entry.record.elements_low = uint32_t(random.bits());
    entry.record.elements_high = uint8_t(random.below(3));
    const uint8_t kinds[] = {RECORD_UNTIMED, RECORD_OUT_OF_ORDER, RECORD_APPROXIMATE, RECORD_TILE,
                             RECORD_HOST_BOUND, RECORD_EXACT};
    if (random.one_in(4)) entry.record.flags = kinds[random.below(6)];
    if (entry.record.flags == RECORD_EXACT) entry.record.end = random_duration(random);
    if (random.one_in(3) || entry.record.flags == RECORD_TILE) {
        entry.record.flags |= RECORD_WORK;
        entry.work.bytes_in = random.below(1 << 20);
        entry.work.flops = double(random.below(1 << 20));
        entry.work.detail = random.below(4) << 32 | random.below(4);
        entry.work.cycles_low = random.one_in(2) ? uint32_t(random.bits()) : 0;
        entry.work.cycles_high = entry.work.cycles_low ? uint8_t(random.bits()) : 0;
        entry.work.cycles_top = entry.work.cycles_low ? uint8_t(random.below(2)) : 0;
        entry.work.flags = RECORD_IS_WORK;
    }
    return entry;
}

// A brick with bricks inside, in order of completion. Depths are skipped where the brick between
// ran on another stream; `clock` moves on.
void add_nesting(Random& random, std::vector<Entry>& entries, uint64_t& clock, uint32_t depth) {
    const uint64_t start = clock;
    clock += random.below(1000);
    for (uint64_t children = random.below(4); children > 0 && depth < 9; --children) {
        add_nesting(random, entries, clock, depth + (random.one_in(5) ? 2 : 1));
        clock += random.below(1000);
    }
    entries.push_back(random_entry(random, start, clock, depth));
}

std::vector<Entry> random_entries(Random& random, size_t count) {
    std::vector<Entry> entries;
    uint64_t clock = 1000;
    while (entries.size() < count) {
        if (random.one_in(6)) {
            // Anything at all: no tree, any length of time.
            const uint64_t start = random.below(1ull << 40);
            entries.push_back(random_entry(random, start, start + random_duration(random),
                                           uint32_t(random.below(MAX_DEPTH))));
        } else {
            add_nesting(random, entries, clock, uint32_t(random.below(3)));
        }
    }
    entries.resize(count);
    return entries;
}

void append(Lane& lane, Model& model, const std::vector<Entry>& entries) {
    for (const Entry& entry : entries) {
        lane.append(entry.record, entry.work_or_null());
        model.add(entry);
    }
}

// ------------------------------------------------------------------------------- tests

void test_buckets() {
    auto same = [](uint64_t ns) {
        return bucket_index(ns) == std::min(exact_bucket(ns), int(HIST_BINS) - 2);
    };
    bool all = true;
    for (uint64_t ns = 1; ns <= 20000; ++ns) all = all && same(ns);
    check(all, "buckets of small durations");
    all = true;
    for (int edge = 0; edge < 64 * 16; ++edge) {
        const auto ns = uint64_t(std::exp2(double(edge) / 16));
        const uint64_t grain = std::max<uint64_t>(1, ns >> 52);
        for (int64_t off = -3; off <= 3; ++off) {
            const uint64_t near = ns + uint64_t(off) * grain;
            if (near != 0) all = all && same(near);
        }
    }
    check(all, "buckets on both sides of every edge");
    Random random(2);
    all = true;
    for (int i = 0; i < 20000; ++i) all = all && same((random.bits() >> random.below(63)) | 1);
    check(all, "buckets of random durations");
    check(bucket_index(1) == -1 && bucket_index(2) == 15 && bucket_index(3) == 25, "known buckets");
    check(bin_of(~0ull) == HIST_BINS - 1, "the last bin takes the rest");
}

// Every field against the model, folded by the writer, by the reader, and by both.
void test_statistics() {
    for (uint64_t round = 0; round < 12; ++round) {
        Random random(100 + round);
        const TickSource source(ClockKind::Manual);
        const std::string path = g_scratch.fresh();
        Recorder recorder({path}, source, slots());
        Lane* lane = recorder.acquire_lane({});
        if (round % 2) lane = recorder.acquire_task_lane(*lane, {});
        Model model;
        append(*lane, model, random_entries(random, 1 + random.below(12000)));
        check_model(read_spool(path), model, "part folded by the reader");
        if (random.one_in(2)) {
            lane->fold();
            append(*lane, model, random_entries(random, 100));
        }
        recorder.close();
        check_model(read_spool(path), model, "folded by the writer");
    }
}

void test_lanes_of_tasks() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots());
    Lane* home = recorder.acquire_lane({});
    Lane* first = recorder.acquire_task_lane(*home, {});
    Lane* second = recorder.acquire_task_lane(*home, {});
    check(first->home == home && second->home == home, "a task's lane knows its thread's");
    check_equal(home->of_thread.size(), size_t(3), "which knows them all");
    check(first->ring_records() < home->ring_records(), "a task's lane is smaller");
    recorder.release_lane(home);
    check(first->header().closed && second->header().closed, "a thread's end closes its tasks' lanes");
    Lane* next = recorder.acquire_lane({});
    check(next == home && next->of_thread.size() == 1, "the next thread has no tasks yet");
    Lane* task = recorder.acquire_task_lane(*next, {});
    check(task == first || task == second, "lanes of tasks are used again by tasks");
    check_equal(recorder.lane_count(), 3u, "and by nobody else");
}

void test_first_and_last() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots());
    Lane* lane = recorder.acquire_lane({});
    for (uint64_t i = 0; i < 9000; ++i) {
        BrickRecord record{};
        record.slot = uint32_t(i % 2);
        record.start = 100 + 10 * i;
        record.end = record.start + 7;
        lane->append(record, nullptr);
    }
    const Snapshot snapshot = read_spool(path);
    check_equal(snapshot.nodes[0].first_ns, 100u, "the first start");
    check_equal(snapshot.nodes[0].last_ns, 100u + 10 * 8998 + 7, "the last end");
}

void test_timeline() {
    constexpr uint32_t CAPACITY = 500;
    Random random(3);
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path, 0, CAPACITY}, source, slots());
    Lane* lane = recorder.acquire_lane({});
    Model model;
    append(*lane, model, random_entries(random, 6000));
    recorder.close();
    model.recent.erase(model.recent.begin(), model.recent.end() - CAPACITY);
    check_recent(read_spool(path), model, "the last entries");
}

void test_folded_counter() {
    Random random(4);
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots(1000));
    Lane* lane = recorder.acquire_lane({});
    for (uint64_t i = 0; i < 4000; ++i) {
        BrickRecord record{};
        record.slot = uint32_t(i % 1000);
        record.start = i;
        record.end = i + 5;
        lane->append(record, nullptr);
    }
    lane->fold();
    check_equal(read_spool(path).lanes[0].folded, 4000u, "a fold in two batches counts all records");
}

void test_many_cells() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots());
    Lane* lane = recorder.acquire_lane({});
    const uint32_t side = 80;
    for (uint32_t row = 0; row < side; ++row) {
        for (uint32_t column = 0; column < side; ++column) {
            BrickRecord record{};
            record.end = 3;
            record.flags = RECORD_TILE | RECORD_WORK | RECORD_EXACT;
            WorkRecord work{};
            work.detail = uint64_t(row) << 32 | column;
            work.flags = RECORD_IS_WORK;
            lane->append(record, &work);
        }
    }
    recorder.close();
    const Snapshot snapshot = read_spool(path);
    uint64_t count = 0;
    for (const TileCell& cell : snapshot.cells) count += cell.count;
    check(snapshot.cells.size() == MAX_CELLS + 1, "cells are bounded");
    check_equal(count, uint64_t(side) * side, "and the rest share one");
}

// ------------------------------------------------------------------------------- sudden death

// Compares two states of a file but for the rings of its lanes: records count by the header alone.
// Of the journals the beginning is enough, since the folds here are short.
bool is_same(const std::string& before, const char* now) {
    constexpr uint64_t JOURNAL_WATCHED = 16 * 1024;
    uint64_t from = 0;
    ExtentHeader extent{};
    for (uint64_t offset = PAGE_BYTES; offset + sizeof extent <= before.size(); offset += extent.bytes) {
        std::memcpy(&extent, before.data() + offset, sizeof extent);
        if (extent.magic != EXTENT_MAGIC || extent.bytes == 0) break;
        if (extent.kind != uint32_t(ExtentKind::Lane)) continue;
        LaneHeader lane;
        std::memcpy(&lane, before.data() + offset + sizeof extent, sizeof lane);
        const uint64_t ring = offset + PAGE_BYTES;
        const uint64_t journal = ring + lane.ring_records * sizeof(BrickRecord);
        if (std::memcmp(before.data() + from, now + from, ring - from) != 0 ||
            std::memcmp(before.data() + journal, now + journal, JOURNAL_WATCHED) != 0) return false;
        from = offset + extent.bytes;
    }
    return std::memcmp(before.data() + from, now + from, before.size() - from) == 0;
}

// Runs `work` in a child, one instruction at a time, and calls `on_store` after each that changed
// the file. Returns how often, or -1 where processes may not be traced.
int step_through(const std::string& path, const std::function<void()>& work,
                 const std::function<void()>& on_store) {
    std::fflush(stdout);
    const pid_t child = ::fork();
    if (child == 0) {
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
        ::raise(SIGSTOP);
        work();
        ::raise(SIGSTOP);
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) return -1;
    std::string before = read_file(path);
    int stores = 0;
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    uint64_t mapped = 0;
    void* now = MAP_FAILED;
    while (::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0 &&
           ::waitpid(child, &status, 0) == child && WIFSTOPPED(status) &&
           WSTOPSIG(status) == SIGTRAP) {
        struct stat info {};
        ::fstat(fd, &info);
        if (uint64_t(info.st_size) != mapped) {
            if (mapped) ::munmap(now, mapped);
            mapped = uint64_t(info.st_size);
            now = ::mmap(nullptr, mapped, PROT_READ, MAP_SHARED, fd, 0);
        }
        if (mapped == before.size() && is_same(before, static_cast<const char*>(now))) continue;
        before.assign(static_cast<const char*>(now), mapped);
        ++stores;
        on_store();
    }
    check(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP, "the child runs to its end");
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    if (mapped) ::munmap(now, mapped);
    ::close(fd);
    return stores;
}

bool can_step() {
#if defined(__x86_64__)
    const std::string path = g_scratch.fresh();
    write_file(path, "x");
    const bool can = step_through(path, [] {}, [] {}) >= 0;
#else
    const bool can = false;  // exclusive loads never succeed one instruction at a time
#endif
    if (!can) std::printf("no single steps here: death is simulated between records only\n");
    return can;
}

// Old nodes and cells change, new ones and new chunks appear, with a timeline.
void test_death_in_fold() {
    for (uint64_t round = 0; round < 2; ++round) {
        Random random(200 + round);
        const TickSource source(ClockKind::Manual);
        const std::string path = g_scratch.fresh();
        Recorder recorder({path, 0, 64}, source, slots());
        Lane* lane = recorder.acquire_lane({});
        Model model;
        append(*lane, model, random_entries(random, 9));
        if (round) lane->fold();
        append(*lane, model, random_entries(random, 9));
        const int stores = step_through(path, [&] { lane->fold(); }, [&] {
            const Snapshot snapshot = read_spool(path);
            check_model(snapshot, model, "death inside a fold");
            check_recent(snapshot, model, "death inside a fold");
        });
        check(stores > 100, "a fold is seen store by store");
        check_model(read_spool(path), model, "after the fold");
        recorder.abandon();
    }
}

void test_death_in_append() {
    Random random(5);
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots());
    Lane* lane = recorder.acquire_lane({});
    const std::vector<Entry> entries = random_entries(random, 8);
    uint64_t seen = 0;
    step_through(path, [&] {
        for (const Entry& entry : entries) lane->append(entry.record, entry.work_or_null());
    }, [&] {
        const Snapshot snapshot = read_spool(path);
        const uint64_t count = total_count(snapshot);
        check(count == seen || count == seen + 1, "an entry is there whole or not at all");
        seen = count;
        Model model;
        for (uint64_t i = 0; i < count; ++i) model.add(entries[i]);
        check_model(snapshot, model, "death inside an append");
    });
    check_equal(seen, entries.size(), "every append is seen");
    recorder.abandon();
}

void test_death_in_growth() {
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path, 0, 8}, source, slots(1));
    size_t strings = 0, lanes = 0;
    step_through(path, [&] {
        recorder.add_slot(1, slots(2)[1]);
        recorder.spool().append(ExtentKind::Trace, std::string(160, 't').data(), 160);
        recorder.acquire_lane({});
    }, [&] {
        Snapshot snapshot = read_spool(path);
        check_consistent(snapshot, "death while the spool grows");
        check(snapshot.strings.size() >= strings && snapshot.lanes.size() >= lanes, "nothing goes away");
        check(snapshot.tables[uint32_t(ExtentKind::Trace)].size() % 160 == 0, "rows are whole");
        check(snapshot.tables[uint32_t(ExtentKind::Slot)].size() / sizeof(SlotRow) <=
                  snapshot.strings.size(), "a slot's name comes before it");
        strings = snapshot.strings.size();
        lanes = snapshot.lanes.size();
    });
    check(strings == 3 && lanes == 1, "the growth is seen");
    recorder.abandon();
}

// A fold of many bricks fills the journal and commits half-way; the file is read between records.
class DeathBetweenRecords final : public FoldObserver {
  public:
    DeathBetweenRecords(const std::string& path, const Model& model) : m_path(path), m_model(model) {}
    void on_brick(const BrickRecord&, uint64_t, uint64_t, uint64_t) override {
        if (m_seen++ % 37 != 0) return;
        const Snapshot snapshot = read_spool(m_path);
        check_model(snapshot, m_model, "death between records");
        tails[snapshot.lanes[0].batch] += 1;
    }
    std::map<uint64_t, int> tails;  // by batch

  private:
    std::string m_path;
    const Model& m_model;
    uint64_t m_seen = 0;
};

void test_death_in_long_fold() {
    Random random(6);
    const TickSource source(ClockKind::Manual);
    const std::string path = g_scratch.fresh();
    Recorder recorder({path}, source, slots(700));
    Lane* lane = recorder.acquire_lane({});
    Model model;
    std::vector<Entry> entries = random_entries(random, 2000);
    for (Entry& entry : entries) entry.record.slot = uint32_t(random.below(700));
    append(*lane, model, entries);
    DeathBetweenRecords observer(path, model);
    lane->set_observer(&observer);
    lane->fold();
    lane->set_observer(nullptr);
    check(observer.tails.size() > 1, "the journal was filled");
    check_model(read_spool(path), model, "after a long fold");
}

}  // namespace

int main() {
    watchdog(240);
    test_buckets();
    test_statistics();
    test_lanes_of_tasks();
    test_first_and_last();
    test_timeline();
    test_folded_counter();
    test_many_cells();
    test_death_in_long_fold();
    if (can_step()) {
        test_death_in_append();
        test_death_in_growth();
        test_death_in_fold();
    }
    return finish();
}
