// Eight threads record into one recorder, each through its own lane, while others read snapshots and
// add slots, strings and graph rows. Meant for TSan; readers use pread, so it sees the writing side.
#include <atomic>
#include <cstring>
#include <thread>

#include "native_test.h"
#include "recorder.h"

using namespace brickline;
using namespace native_test;

namespace {

Scratch g_scratch;

constexpr uint32_t THREADS = 8;
constexpr uint32_t GENERATIONS = 3;       // threads that end and hand their lane on
constexpr uint64_t RECORDS = 12000;       // of each; a few folds
constexpr uint32_t SLOTS = 40;

std::vector<SlotDefinition> slots() {
    std::vector<SlotDefinition> made(SLOTS);
    for (uint32_t i = 0; i < SLOTS; ++i) made[i].name = "brick " + std::to_string(i);
    return made;
}

// A thread's life: take a lane, record nested bricks, give the lane back.
void record_bricks(Recorder& recorder, const TickSource& source, uint32_t thread) {
    LaneIdentity identity;
    identity.thread = thread;
    identity.name = "worker " + std::to_string(thread);
    Lane* lane = recorder.acquire_lane(identity);
    for (uint64_t i = 0; i < RECORDS; ++i) {
        BrickRecord record{};
        record.start = source.now();
        record.end = record.start + 1000;
        record.slot = uint32_t((i + thread) % SLOTS);
        record.elements_low = thread;
        record.depth = uint8_t(1 - i % 2);
        record.phase = uint8_t(i % 3);
        WorkRecord work{64, 2.0, 0, 0, 0, 0, RECORD_IS_WORK, 0};
        if (i % 10 == 0) record.flags = RECORD_WORK;
        lane->append(record, i % 10 == 0 ? &work : nullptr);
    }
    recorder.release_lane(lane);
}

void test_recording_threads(bool with_graph) {
    const std::string where = with_graph ? "threads with a graph" : "threads";
    const TickSource source;
    const std::string path = g_scratch.fresh();
    Recorder recorder({path, 0, 100}, source, slots());
    GraphStore graph(100000);
    recorder.connect_graph_table(&graph);
    if (with_graph) recorder.set_graph(&graph);
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> looks{0}, rows{0};

    std::thread reader([&] {
        uint64_t last = 0;
        while (!stop) {
            const Snapshot snapshot = read_spool(path);
            const uint64_t count = total_count(snapshot);
            check(count >= last || !snapshot.problems.empty(), where + ": counts never fall");
            for (const std::string& problem : snapshot.problems) {
                // With more threads than cores a writer may be stopped and started at every attempt.
                check(problem.find("too fast") != std::string::npos, where + ": " + problem);
            }
            last = std::max(last, count);
            looks += 1;
        }
    });
    std::thread adder([&] {
        uint32_t next = SLOTS;
        while (!stop) {
            SlotDefinition slot;
            slot.name = "late " + std::to_string(next);
            if (next < 3000) recorder.add_slot(next++, slot);
            const FactRow fact{recorder.spool().intern("fact " + std::to_string(rows % 50)), 0, 1.0};
            recorder.spool().append(ExtentKind::Fact, &fact, sizeof fact);
            graph.add_kernel("kernel", KernelDetail{}, 5);
            (void)recorder.scale();
            (void)recorder.is_full_disk();
            (void)recorder.lane_count();
            rows += 1;
        }
    });
    std::vector<std::thread> workers;
    for (uint32_t worker = 0; worker < THREADS; ++worker) {
        workers.emplace_back([&, worker] {
            for (uint32_t life = 0; life < GENERATIONS; ++life) {
                std::thread thread([&] { record_bricks(recorder, source, worker + 1); });
                thread.join();
            }
        });
    }
    for (std::thread& worker : workers) worker.join();
    stop = true;
    reader.join();
    adder.join();
    recorder.close();

    Snapshot snapshot = read_spool(path);
    check_consistent(snapshot, where);
    uint64_t timed = 0, bytes = 0, elements = 0;
    for (const Node& node : snapshot.nodes) {
        timed += node.timed;
        bytes += node.bytes_in;
        elements += node.elements;
    }
    const uint64_t expected = THREADS * GENERATIONS * RECORDS;
    check_equal(timed, expected, where + ": no sample is lost");
    check_equal(bytes, expected / 10 * 64, where + ": nor any work");
    check_equal(elements, GENERATIONS * RECORDS * (THREADS * (THREADS + 1) / 2), where + ": nor elements");
    check(snapshot.lanes.size() <= THREADS, where + ": lanes are handed on");
    check_equal(snapshot.tables[uint32_t(ExtentKind::Fact)].size(), rows * sizeof(FactRow),
                where + ": nor any row");
    check_equal(snapshot.header.lost_records, 0u, where + ": nothing lost");
    check(looks > 0 && rows > 0, where + ": the others had their turns");
}

}  // namespace

int main() {
    watchdog(240);
    test_recording_threads(false);
    test_recording_threads(true);
    return finish();
}
