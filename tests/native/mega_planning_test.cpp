// Planning of a megakernel without Python: the tracker, the planner, the validator and lineage against
// memory that knows of every byte who touched it, on random tasks; and hostile columns.
#include <map>
#include <set>

#include "mega_lineage.h"
#include "mega_planning.h"
#include "mega_validation.h"
#include "native_test.h"

using namespace brickline;
using namespace native_test;

namespace {

using Numbers = std::set<uint32_t>;

struct Byte {
    int64_t writer = -1;
    std::vector<uint32_t> readers;
};
using Memory = std::map<std::pair<uint32_t, uint64_t>, Byte>;

// Those that a task has a hazard with, those who wrote what it reads; then notes what it does.
std::pair<Numbers, Numbers> touch(Memory& memory, uint32_t task, const std::vector<MegaAccess>& accesses) {
    Numbers hazards, sources;
    for (const MegaAccess& access : accesses) {
        for (uint64_t at = access.begin; at < access.end; ++at) {
            const Byte& byte = memory[{access.space, at}];
            if (byte.writer >= 0) hazards.insert(uint32_t(byte.writer));
            if (byte.writer >= 0 && (access.mode & MEGA_READ)) sources.insert(uint32_t(byte.writer));
            if (access.mode & MEGA_WRITE) hazards.insert(byte.readers.begin(), byte.readers.end());
        }
    }
    for (const uint32_t mode : {MEGA_READ, MEGA_WRITE}) {
        for (const MegaAccess& access : accesses) {
            for (uint64_t at = access.begin; (access.mode & mode) && at < access.end; ++at) {
                Byte& byte = memory[{access.space, at}];
                if (mode == MEGA_READ) byte.readers.push_back(task);
                else byte = {task, {}};
            }
        }
    }
    return {hazards, sources};
}

struct RandomTasks {
    std::vector<uint32_t> op, blocks, flags, param_begin{0}, access_begin{0};
    std::vector<uint64_t> params;
    std::vector<MegaAccess> accesses;

    RandomTasks(Random& random, uint32_t count) {
        const uint64_t size = 1 + random.below(random.one_in(4) ? 300 : 40);
        const uint64_t grain = 1 + random.below(4), spaces = 1 + random.below(3);
        for (uint32_t task = 0; task < count; ++task) {
            if (task && random.one_in(4)) {
                repeat(uint32_t(random.below(task)));
                continue;
            }
            op.push_back(uint32_t(random.below(2)));
            blocks.push_back(random.one_in(2) ? 1 : 4);
            flags.push_back(random.one_in(8) ? uint32_t(MEGA_TASK_ATOMIC) : uint32_t(random.below(2)));
            for (uint64_t k = random.below(3); k > 0; --k) params.push_back(random.below(2));
            for (uint64_t k = 1 + random.below(3); k > 0; --k) {
                uint64_t begin = random.below(size) / grain * grain;
                uint64_t end = std::min(size, begin + random.below(size) / grain * grain);
                if (random.one_in(4)) begin = 0, end = size;
                const uint32_t mode = random.one_in(2) ? 1 : 1 + uint32_t(random.below(3));
                accesses.push_back({begin, end, random.one_in(2) ? 0 : int64_t((size + 3) / 4),
                                    uint32_t(random.below(spaces)), mode});
            }
            close();
        }
    }
    // Spaces of many pieces alike: read as wholes, written piece after piece, again and again.
    struct Pieces {};
    RandomTasks(Pieces, Random& random, uint32_t count) {
        const uint64_t pieces = 1 + random.below(70), bytes = 1 + random.below(2);
        const uint64_t spaces = 1 + random.below(random.one_in(4) ? 100 : 3);
        std::vector<uint64_t> next(spaces);  // where each space is written next
        while (op.size() < count) {
            const auto space = [&] { return uint32_t(random.below(spaces)); };
            const auto touch = [&](uint32_t mode, uint32_t where, uint64_t first, uint64_t last) {
                accesses.push_back({first * bytes, std::min(last, pieces) * bytes, 0, where * 64, mode});
            };
            const uint32_t from = space(), to = space();
            const uint64_t first = random.below(pieces), few = 1 + random.below(12);
            switch (random.below(5)) {
                case 0: touch(MEGA_READ, from, 0, pieces); break;
                case 1: touch(MEGA_READ, from, first, first + few); break;
                case 2: touch(MEGA_WRITE, to, first, first + few); break;
                default: break;
            }
            const bool is_level = random.one_in(8);
            for (uint64_t k = is_level ? 1 + random.below(2 * pieces) : 1; k > 0; --k) {
                if (is_level) touch(MEGA_READ, from, 0, pieces);
                touch(MEGA_WRITE, to, next[to], next[to] + 1);
                next[to] = (next[to] + 1) % pieces;
                op.push_back(0), blocks.push_back(1), flags.push_back(0);
                close();
            }
        }
    }
    void repeat(uint32_t task) {
        op.push_back(op[task]), blocks.push_back(blocks[task]), flags.push_back(flags[task]);
        for (uint32_t k = param_begin[task]; k < param_begin[task + 1]; ++k) params.push_back(uint64_t(params[k]));
        for (uint32_t k = access_begin[task]; k < access_begin[task + 1]; ++k) {
            accesses.push_back(MegaAccess(accesses[k]));
        }
        close();
    }
    void close() {
        param_begin.push_back(uint32_t(params.size()));
        access_begin.push_back(uint32_t(accesses.size()));
    }
    std::vector<MegaAccess> of(uint32_t task) const {
        return {accesses.begin() + access_begin[task], accesses.begin() + access_begin[task + 1]};
    }
    MegaTaskTable table() const { return {op, blocks, flags, param_begin, params, access_begin, accesses}; }
};

// Numbers below `first` are forgotten half-way.
void test_tracker(Random& random, const RandomTasks& tasks) {
    const uint32_t count = uint32_t(tasks.op.size());
    const uint32_t first = random.one_in(2) ? uint32_t(random.below(count)) : ~0u;
    HazardTracker tracker;
    Memory memory;
    std::vector<Numbers> before(count);
    for (uint32_t task = 0; task < count; ++task) {
        if (task == first) tracker.forget(first);
        const std::vector<MegaAccess> accesses = tasks.of(task);
        for (const MegaAccess& access : accesses) {
            int64_t newest = -1;
            for (uint64_t at = access.begin; at < access.end; ++at) {
                newest = std::max(newest, memory[{access.space, at}].writer);
            }
            const MegaVersion version = tracker.version(access.space, access.begin, access.end);
            check(newest < 0 ? version.newest < 2 : version.newest == newest + 2, "the version of a range");
        }
        const auto [hazards, sources] = touch(memory, task, accesses);
        const uint32_t floor = task >= first ? first : 0;
        for (const uint32_t each : tracker.add(task, accesses)) {
            check(hazards.contains(each) && each >= floor, "a producer has a hazard, and is not forgotten");
            before[task].insert(each);
            before[task].insert(before[each].begin(), before[each].end());
        }
        for (const uint32_t each : hazards) {
            check(each < floor || before[task].contains(each), "every hazard is waited for");
        }
    }
}

void test_plan(Random& random, const RandomTasks& tasks) {
    const MegaTaskTable table = tasks.table();
    MegaPlanOptions options;
    options.dedupes = !random.one_in(3);
    options.joins = !random.one_in(3);
    const MegaPlanned planned = mega_plan(table, options);
    const uint32_t count = table.size(), workers = 1 + uint32_t(random.below(5));
    const MegaVector<uint32_t> first = mega_assign(planned.order, planned.region, tasks.blocks, {}, workers);
    const MegaLists lists = mega_lists(planned.order, tasks.blocks, first, workers);
    MegaSchedule schedule;
    schedule.tasks = table;
    schedule.alias = planned.alias;
    schedule.entry_begin = planned.entry_begin;
    schedule.entries = planned.entries;
    schedule.set_begin = planned.sets.begins();
    schedule.set_members = planned.sets.members();
    schedule.order = planned.order;
    schedule.region = planned.region;
    check_equal(uint32_t(mega_validate(schedule).breach), 0u, "a plan for any worker is valid");
    schedule.workers = workers;
    schedule.first_worker = first;
    schedule.list_begin = lists.begin;
    schedule.list_tasks = lists.tasks;
    check_equal(uint32_t(mega_validate(schedule).breach), 0u, "a plan for lists is valid");
    // Whatever is written over a column, the answer is a verdict or a refusal.
    MegaVector<uint32_t> entries = planned.entries, listed = lists.tasks, begins = planned.entry_begin;
    for (MegaVector<uint32_t>* column : {&entries, &listed, &begins}) {
        if (column->empty()) continue;
        (*column)[random.below(column->size())] = random.one_in(2) ? uint32_t(random.bits()) : uint32_t(random.below(count));
        MegaSchedule damaged = schedule;
        damaged.entries = entries;
        damaged.list_tasks = listed;
        damaged.entry_begin = begins;
        try {
            mega_validate(damaged);
        } catch (const MegaFaulty&) {
        }
    }
    const MegaLineage lineage(table, planned.alias);
    Memory memory;
    std::vector<Numbers> closures(count);
    for (uint32_t task = 0; task < count; ++task) {
        if (planned.alias[task] >= 0) {
            closures[task] = closures[size_t(planned.alias[task])];
        } else {
            closures[task] = touch(memory, task, tasks.of(task)).second;
            for (const uint32_t each : Numbers(closures[task])) {
                closures[task].insert(closures[each].begin(), closures[each].end());
            }
        }
        Numbers found;
        for (const MegaRun& run : lineage.of(task)) {
            for (uint32_t each = run.first; each < run.last; ++each) found.insert(each);
        }
        check(found == closures[task], "lineage is the closure of who wrote what was read");
    }
}

// Waits that were damaged are found out exactly where a hazard is left that they do not order.
void test_damage(Random& random, const RandomTasks& tasks) {
    MegaPlanOptions options;
    options.dedupes = options.joins = false;
    MegaPlanned planned = mega_plan(tasks.table(), options);
    auto [set_begin, set_members] = planned.sets.take();
    const uint32_t count = uint32_t(tasks.op.size());
    // A producer is exchanged for one that the task does not need, itself included: an earlier one.
    if (!planned.entries.empty() && random.one_in(2)) {
        const size_t entry = random.below(planned.entries.size());
        uint32_t task = 0;
        while (planned.entry_begin[task + 1] <= entry) ++task;
        planned.entries[entry] = uint32_t(random.below(task));
    } else if (!set_members.empty()) {  // or left out of a set, which others share
        const size_t member = random.below(set_members.size());
        set_members.erase(set_members.begin() + std::ptrdiff_t(member));
        for (uint64_t& begin : set_begin) begin -= begin > member;
    }
    MegaSchedule schedule;
    schedule.tasks = tasks.table();
    schedule.entry_begin = planned.entry_begin;
    schedule.entries = planned.entries;
    schedule.set_begin = set_begin;
    schedule.set_members = set_members;
    Memory memory;
    std::vector<Numbers> before(count);
    bool has_race = false;
    for (uint32_t task = 0; task < count; ++task) {
        const auto wait = [&](uint32_t each) {
            before[task].insert(each);
            before[task].insert(before[each].begin(), before[each].end());
        };
        for (uint32_t k = planned.entry_begin[task]; k < planned.entry_begin[task + 1]; ++k) {
            const uint32_t entry = planned.entries[k];
            if (!(entry & MEGA_SET)) {
                wait(entry);
                continue;
            }
            const uint32_t set = entry & ~MEGA_SET;
            for (uint64_t j = set_begin[set]; j < set_begin[set + 1]; ++j) wait(set_members[j]);
        }
        for (const uint32_t each : touch(memory, task, tasks.of(task)).first) has_race |= !before[task].contains(each);
    }
    const MegaVerdict verdict = mega_validate(schedule);
    check_equal(uint32_t(verdict.breach), has_race ? uint32_t(MegaBreach::Race) : 0u, "a race is found, and no other");
}

struct Table {
    std::vector<uint32_t> op, blocks, flags, param_begin{0}, access_begin{0};
    std::vector<MegaAccess> accesses;

    void add(std::vector<MegaAccess> touched, uint32_t of_blocks = 1, uint32_t with_flags = 0) {
        op.push_back(0), blocks.push_back(of_blocks), flags.push_back(with_flags), param_begin.push_back(0);
        accesses.insert(accesses.end(), touched.begin(), touched.end());
        access_begin.push_back(uint32_t(accesses.size()));
    }
    MegaTaskTable table() const { return {op, blocks, flags, param_begin, {}, access_begin, accesses}; }
};

// Tasks that wait for the same, one after the other, are refused for the reasons that each has by itself.
void test_siblings() {
    Table tasks;
    for (uint64_t k = 0; k < 9; ++k) tasks.add({{k, k + 1, 0, 0, MEGA_WRITE}});  // enough for a set
    const MegaAccess all{0, 9, 0, 0, MEGA_READ};
    for (int k = 0; k < 3; ++k) tasks.add({all});
    tasks.add({all}, 2);
    tasks.add({all}, 1, MEGA_TASK_ATOMIC);
    tasks.add({all});
    tasks.add({{0, 1, 0, 1, MEGA_WRITE}});  // 15, which 16 joins
    for (int k = 0; k < 3; ++k) tasks.add({{0, 1, 0, 1, MEGA_READ}});
    const MegaPlanned planned = mega_plan(tasks.table(), {});
    const std::vector<MegaRefusal> wanted{
        {8, 9, MegaCode::WaitsForOther, 0},     {8, 10, MegaCode::WaitsForOther, 0},
        {8, 11, MegaCode::WaitsForOther, 0},    {8, 12, MegaCode::DifferentBlocks, ~0u},
        {8, 13, MegaCode::JoinAccumulates, ~0u}, {8, 14, MegaCode::WaitsForOther, 0},
        {15, 17, MegaCode::HasFollower, 16},    {15, 18, MegaCode::HasFollower, 16},
    };
    check_equal(planned.refusals.size(), wanted.size(), "one refusal for each that waits and is not joined");
    for (size_t k = 0; k < std::min(planned.refusals.size(), wanted.size()); ++k) {
        const MegaRefusal &found = planned.refusals[k], &right = wanted[k];
        check(found.earlier == right.earlier && found.later == right.later && found.code == right.code &&
              found.other == right.other, "refusal " + std::to_string(k));
    }
    for (const uint32_t task : {9u, 11u, 14u}) check_equal(planned.level[task], 1u, "the level of a sibling");
    check_equal(planned.region[16], planned.region[15], "the first one joins");
}

// A task comes again behind one that wrote over it, of whom nobody has asked what was there before: a part of
// what a read has joined, or several pieces.
void test_looking_back() {
    Table tasks;
    const auto add = [&](uint32_t op, uint64_t begin, uint64_t end, uint32_t mode) {
        tasks.add({{begin, end, 0, 0, mode}}, 1, MEGA_TASK_PURE);
        tasks.op.back() = op;
    };
    for (uint32_t k = 0; k < 9; ++k) add(k, k, k + 1, MEGA_WRITE);
    add(9, 0, 9, MEGA_READ);
    add(10, 4, 5, MEGA_WRITE);
    add(4, 4, 5, MEGA_WRITE);  // 11
    add(12, 6, 7, MEGA_WRITE);
    add(13, 4, 7, MEGA_WRITE);
    add(12, 6, 7, MEGA_WRITE);  // 14
    MegaPlanOptions options;
    options.joins = false;
    const MegaPlanned planned = mega_plan(tasks.table(), options);
    const std::vector<MegaRefusal> wanted{{4, 11, MegaCode::OutputChanged, 10}, {12, 14, MegaCode::OutputChanged, 13}};
    check_equal(planned.refusals.size(), wanted.size(), "one refusal for each that comes again");
    for (size_t k = 0; k < std::min(planned.refusals.size(), wanted.size()); ++k) {
        const MegaRefusal &found = planned.refusals[k], &right = wanted[k];
        check(found.earlier == right.earlier && found.later == right.later && found.code == right.code &&
              found.other == right.other, "what came again, " + std::to_string(k));
    }
}

// Thousands of ranges in no order: tables grow, and every wait counts.
void test_many_ranges() {
    constexpr uint32_t COUNT = 3000;
    Table tasks;
    const auto piece = [](uint64_t k, uint32_t mode) { return MegaAccess{k * 8, k * 8 + 8, 0, uint32_t(k % 3), mode}; };
    for (uint32_t k = 0; k < COUNT; ++k) tasks.add({piece(k * 7 % COUNT, MEGA_WRITE)});
    for (uint32_t k = 0; k < COUNT; ++k) tasks.add({piece(k * 11 % COUNT, MEGA_READ)});
    MegaPlanOptions options;
    options.joins = false;
    MegaPlanned planned = mega_plan(tasks.table(), options);
    check_equal(planned.entries.size(), size_t(COUNT), "each reader waits for one writer");
    MegaSchedule schedule;
    schedule.tasks = tasks.table();
    schedule.entry_begin = planned.entry_begin;
    schedule.entries = planned.entries;
    schedule.set_begin = planned.sets.begins();
    check_equal(uint32_t(mega_validate(schedule).breach), 0u, "and that is enough");
    for (const uint32_t k : {0u, 1234u, COUNT - 1}) {
        const uint32_t right = planned.entries[k];
        planned.entries[k] = (right + 1) % COUNT;
        const MegaVerdict verdict = mega_validate(schedule);
        check(verdict.breach == MegaBreach::Race && verdict.task == COUNT + k && verdict.other == right,
              "another writer is not enough");
        planned.entries[k] = right;
    }
}

void test_hostile() {
    Random random(7);
    const RandomTasks right(random, 6);
    const auto is_refused = [](const RandomTasks& tasks, const char* what) {
        try {
            mega_plan(tasks.table(), {});
            check(false, std::string(what) + " is refused");
        } catch (const MegaFaulty&) {
            check(true, what);
        }
    };
    RandomTasks wrong = right;
    wrong.access_begin[3] = 1u << 30;
    is_refused(wrong, "a begin far behind the end");
    wrong = right;
    wrong.access_begin.pop_back();
    is_refused(wrong, "a column cut short");
    wrong = right;
    wrong.accesses.back().mode = 9;
    is_refused(wrong, "an unknown mode");
    wrong = right;
    wrong.accesses[0].begin = 5, wrong.accesses[0].end = 4;
    is_refused(wrong, "a range that ends before it begins");
    HazardTracker tracker;
    const MegaAccess all{0, ~0ull, 0, ~0u, 3};
    check(tracker.add(3, {&all, 1}).empty(), "the largest range");
    check_equal(tracker.add(4, {&all, 1}).size(), size_t(1), "the largest range again");
    for (const uint32_t task : {4u, 0u, MEGA_MAX_TASKS}) {
        try {
            tracker.add(task, {&all, 1});
            check(false, "a task out of order is refused");
        } catch (const MegaFaulty&) {
            check(true, "a task out of order is refused");
        }
    }
}

// A queue that runs for long: what is forgotten takes no memory.
void test_forgetting() {
    HazardTracker tracker;
    size_t most = 0;
    for (uint32_t task = 0; task < 200'000; ++task) {
        const uint64_t k = task % 128, level = task / 128;
        const MegaAccess accesses[] = {{0, 128, 0, uint32_t(level % 2), MEGA_READ},
                                       {k, k + 1, 0, uint32_t((level + 1) % 2), MEGA_WRITE},
                                       {0, 8, 0, 7, MEGA_READ}};
        const std::span<const uint32_t> found = tracker.add_shared(task, accesses);
        if (task >= 256) check_equal(found.size(), size_t(1), "one set for a level");
        if (task % 4096 == 4095) {
            tracker.forget(task - 300);
            most = std::max(most, tracker.bytes());
        }
    }
    check(most < 4'000'000, "memory stays small: " + std::to_string(most));
}

}  // namespace

int main() {
    watchdog(280);
    Random random;
    for (int round = 0; round < (has_time() ? 1200 : 300); ++round) {
        const RandomTasks tasks(random, 1 + uint32_t(random.below(60)));
        test_tracker(random, tasks);
        test_plan(random, tasks);
        test_damage(random, tasks);
        if (round % 10) continue;
        const RandomTasks pieces(RandomTasks::Pieces(), random, 1 + uint32_t(random.below(200)));
        test_tracker(random, pieces);
        test_plan(random, pieces);
        test_damage(random, pieces);
    }
    test_siblings();
    test_looking_back();
    test_many_ranges();
    test_hostile();
    test_forgetting();
    return finish();
}
