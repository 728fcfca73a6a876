// Programs on workers of the host, without Python: every run has the words of a serial one, whatever the
// workers, threads and delays; faults keep their dependents from running and nothing else; deadlines,
// stops and items that never return leave a true account, and all but the last an engine that runs again.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "mega_cpu.h"
#include "native_test.h"
#include "plan_rows.h"

using namespace brickline;
using namespace native_test;
using namespace plan_rows;

namespace {

struct Work {
    std::vector<uint32_t> reads;      // works that must be finished
    int64_t joined = -1;              // a work of which the same block must be
    std::vector<uint64_t> words;      // one for each block
    std::unique_ptr<std::atomic<uint32_t>[]> runs;  // of each block
    std::atomic<uint32_t> blocks_done{0};
    std::vector<uint32_t> fault_blocks;
    uint32_t code = 0;
    bool may_split = true;
    std::atomic<uint64_t> next{0};    // of one that may not be split
    struct Works* all = nullptr;
    std::atomic<bool>* gate = nullptr;  // an item at gate_block waits until it is open
    uint32_t gate_block = 0;
    uint64_t linger_ns = 0;
};

struct Works {
    std::vector<std::unique_ptr<Work>> works;
    std::atomic<uint64_t> complaints{0};

    void clear() {
        for (auto& work : works) {
            work->blocks_done = 0;
            work->next = 0;
            std::fill(work->words.begin(), work->words.end(), 0xcdcdcdcdcdcdcdcdull);
            for (size_t block = 0; block < work->words.size(); ++block) work->runs[block] = 0;
        }
    }
};

uint64_t mix(uint64_t a, uint64_t b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15ull;
    return a ^ (a >> 29);
}

void linger(uint64_t ns) {
    const uint64_t until_ns = monotonic_ns() + ns;
    while (monotonic_ns() < until_ns) {}
}

// Arguments: the Work and a seed.
void work_kernel(const brickline_launch* launch) {
    Work& work = **static_cast<Work* const*>(launch->arguments[0]);
    const uint64_t seed = *static_cast<const uint64_t*>(launch->arguments[1]);
    Works& all = *work.all;
    for (uint64_t block = launch->first; block < launch->last; ++block) {
        if (launch->shared_bytes) std::memset(launch->shared, int(block), launch->shared_bytes);
        if (!work.may_split && work.next.exchange(block + 1) != block) all.complaints.fetch_add(1);
        uint64_t word = mix(seed, block);
        for (const uint32_t each : work.reads) {
            const Work& other = *all.works[each];
            if (other.blocks_done.load(std::memory_order_relaxed) != other.words.size()) all.complaints.fetch_add(1);
            word = mix(word, other.words[block % other.words.size()]);
        }
        if (work.joined >= 0) word = mix(word, all.works[size_t(work.joined)]->words[block]);
        if (work.linger_ns) linger(work.linger_ns);
        if (work.gate && block == work.gate_block) {
            while (!work.gate->load(std::memory_order_acquire)) std::this_thread::yield();
        }
        work.words[block] = word;
        if (work.runs[block].fetch_add(1)) all.complaints.fetch_add(1);
        work.blocks_done.fetch_add(1, std::memory_order_relaxed);
        const auto& faults = work.fault_blocks;
        if (std::find(faults.begin(), faults.end(), uint32_t(block)) != faults.end()) *launch->fault = work.code;
    }
}

struct Case {
    Works all;
    std::vector<PlanRow> rows;
    std::vector<MegaRow> mega_rows;
    std::unique_ptr<PlanProgram> program;
    std::unique_ptr<MegaProgram> mega;
    std::unique_ptr<MegaCpu> cpu;

    Work& add(uint64_t blocks, std::vector<uint32_t> reads = {}, uint32_t flags = 3, int64_t joined = -1) {
        auto work = std::make_unique<Work>();
        work->words.resize(blocks);
        work->runs.reset(new std::atomic<uint32_t>[blocks]());
        work->reads = std::move(reads);
        work->joined = joined;
        work->may_split = (flags & PLAN_MAY_SPLIT) != 0;
        work->all = &all;
        PlanRow made = row(&work_kernel, flags, blocks);
        made.slots = {value(reinterpret_cast<uint64_t>(work.get())), value(rows.size() * 77 + 1)};
        made.dependencies = work->reads;
        if (joined >= 0) made.dependencies.push_back(uint32_t(joined));
        std::sort(made.dependencies.begin(), made.dependencies.end());
        made.dependencies.erase(std::unique(made.dependencies.begin(), made.dependencies.end()),
                                made.dependencies.end());
        rows.push_back(made);
        MegaRow extra;
        extra.arguments = 2;
        extra.is_joined = joined >= 0;
        mega_rows.push_back(extra);
        all.works.push_back(std::move(work));
        return *all.works.back();
    }
    void build(uint32_t workers) {
        program = make_program(PlanDevice::Cpu, rows);
        mega = std::make_unique<MegaProgram>(*program, mega_rows, workers);
        cpu = std::make_unique<MegaCpu>(*mega);
    }
    std::vector<uint64_t> words() const {
        std::vector<uint64_t> found;
        for (const auto& work : all.works) found.insert(found.end(), work->words.begin(), work->words.end());
        return found;
    }
    MegaOutcome run(const MegaOptions& options = {}) {
        all.clear();
        return cpu->run(options);
    }
};

void fill(Case& made, Random& random, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        const bool joins = i > 0 && random.one_in(3);
        const uint64_t blocks = joins ? made.all.works[i - 1]->words.size() : random.one_in(2) ? 1 + random.below(40) : 1;
        std::vector<uint32_t> reads;
        // What joins the region before it reads as a whole only what lies before that region.
        uint32_t before = i;
        if (joins) {
            for (before = i - 1; made.mega_rows[before].is_joined;) --before;
        }
        for (uint64_t k = random.below(4); k > 0 && before > 0; --k) reads.push_back(uint32_t(random.below(before)));
        const uint32_t flags = random.one_in(8) ? 0 : random.one_in(5) ? 1 : 3;
        made.add(blocks, reads, joins ? made.rows[i - 1].flags : flags, joins ? int64_t(i) - 1 : -1);
        made.rows.back().sizes[6].value = random.one_in(3) ? int64_t(random.below(300)) : 0;
    }
}

void check_whole(const Case& made, const MegaOutcome& outcome) {
    uint64_t items = 0;
    for (const auto& work : made.all.works) items += work->words.size();
    check(outcome.problem.empty(), "nothing is refused: " + outcome.problem);
    check(outcome.state == MegaState::Finished, "it finished");
    check_equal(outcome.items, items, "every item was executed");
    check_equal(outcome.remaining, 0u, "no item remains");
    check_equal(outcome.done, made.rows.size(), "every launch is finished");
    check_equal(outcome.where, -1, "no fault");
}

void test_random_programs() {
    Random random(1);
    const int cases = UNDER_TSAN ? 60 : 200;
    for (int k = 0; k < cases; ++k) {
        Case made;
        fill(made, random, 1 + uint32_t(random.below(30)));
        made.build(1 + uint32_t(random.below(9)));
        made.all.clear();
        made.program->run_serial(0, 0, made.program->size());
        const std::vector<uint64_t> expected = made.words();
        for (int run = 0; run < 4; ++run) {
            MegaOptions options;
            options.is_recorded = run == 1;
            options.delay_seed = run == 2 ? random.bits() | 1 : 0;
            options.deadline_ns = run == 3 ? 60'000'000'000 : 0;
            const MegaOutcome outcome = made.run(options);
            check_whole(made, outcome);
            check(made.words() == expected, "the words of a serial run");
            const std::vector<uint64_t> done = made.cpu->items_done();
            for (size_t i = 0; i < done.size(); ++i) {
                check_equal(done[i], made.all.works[i]->words.size(), "items done of each launch");
            }
            if (run != 1) continue;
            check_equal(made.cpu->records().size(), made.mega->lists().size(), "a record for each entry");
            for (size_t at = 0; at < made.cpu->records().size(); ++at) {
                const MegaRecord& record = made.cpu->records()[at];
                check(record.begin <= record.ready && record.ready <= record.end, "records are in order");
                check_equal(record.task, made.mega->lists()[at], "a record of its own task");
            }
        }
        check_equal(made.all.complaints.load(), 0u, "what is waited for is finished, every item runs once");
    }
}

// Launches that a fault keeps from being finished: those with one, and all that depend on these.
std::vector<bool> touched_by_faults(const Case& made) {
    std::vector<bool> touched(made.rows.size());
    for (uint32_t i = 0; i < made.rows.size(); ++i) {
        touched[i] = !made.all.works[i]->fault_blocks.empty();
        for (const uint32_t each : made.program->dependencies(i)) touched[i] = touched[i] || touched[each];
    }
    return touched;
}

void test_faults() {
    Random random(2);
    const int cases = UNDER_TSAN ? 60 : 200;
    for (int k = 0; k < cases; ++k) {
        Case made;
        fill(made, random, 2 + uint32_t(random.below(20)));
        for (auto& work : made.all.works) {
            if (!random.one_in(6)) continue;
            work->code = 16 + uint32_t(random.below(100));
            for (uint64_t n = 1 + random.below(3); n > 0; --n) {
                const uint32_t block = uint32_t(random.below(work->words.size()));
                if (std::find(work->fault_blocks.begin(), work->fault_blocks.end(), block) == work->fault_blocks.end()) {
                    work->fault_blocks.push_back(block);
                }
            }
        }
        made.build(1 + uint32_t(random.below(6)));
        const std::vector<bool> touched = touched_by_faults(made);
        for (int run = 0; run < 3; ++run) {
            MegaOptions options;
            options.delay_seed = run == 1 ? 7 : 0;
            options.deadline_ns = run == 2 ? 60'000'000'000 : 0;
            made.all.clear();
            const MegaOutcome outcome = made.cpu->run(options);
            check(outcome.state == MegaState::Finished, "a fault does not stop a run");
            uint64_t ran = 0, total = 0;
            uint32_t done = 0;
            int32_t first = -1;
            const std::vector<uint64_t> items_done = made.cpu->items_done();
            for (uint32_t i = 0; i < made.rows.size(); ++i) {
                const Work& work = *made.all.works[i];
                const uint32_t blocks_done = work.blocks_done.load();
                ran += blocks_done;
                total += work.words.size();
                done += !touched[i];
                check(made.cpu->is_finished(i) == !touched[i], "finished is what no fault touches");
                if (!touched[i]) check_equal(blocks_done, work.words.size(), "what no fault touches is executed");
                const MegaFault fault = made.cpu->fault(i);
                // Of a region a worker skips what follows its own fault; others do not know of it.
                const bool ran_at_all = blocks_done > 0;
                if (touched[i] && work.joined < 0 && !work.fault_blocks.empty() && ran_at_all) {
                    check_equal(fault.code, work.code, "the code of a fault");
                    check_equal(fault.block, *std::min_element(work.fault_blocks.begin(), work.fault_blocks.end()),
                                "the first block that has one");
                    check_equal(blocks_done, work.words.size(), "its other items go on");
                    check_equal(items_done[i], work.words.size() - work.fault_blocks.size(), "done is without a fault");
                }
                if (touched[i] && work.joined < 0 && work.fault_blocks.empty()) {
                    check_equal(blocks_done, 0u, "what waits for a fault is not run");
                    check(made.cpu->is_skipped(i), "and it is told");
                }
                if (fault.code && first < 0) first = int32_t(i);
            }
            check_equal(outcome.items, ran, "items that were executed");
            check_equal(outcome.items + outcome.remaining, total, "executed and remaining are all");
            check_equal(outcome.items + outcome.skipped, total, "executed and skipped are all, where nothing stops");
            check_equal(outcome.done, done, "launches that are finished");
            check_equal(outcome.where, first, "the first launch with a fault");
        }
        check_equal(made.all.complaints.load(), 0u, "nothing runs before what it waits for");
        for (auto& work : made.all.works) work->fault_blocks.clear();
        check_whole(made, made.run());
    }
}

void test_a_region_has_no_hop() {
    Case made;
    made.add(64);
    made.add(64, {}, 3, 0);
    made.add(64, {}, 3, 1);
    made.add(1, {2});
    made.build(4);
    check_whole(made, made.run());
    check_equal(made.mega->tasks()[1].waits, 0u, "a member waits for nothing of its region");
    check_equal(made.mega->tasks()[3].waits, 1u, "what follows waits for the last of it");
    check(made.mega->tasks()[1].flags & MEGA_JOINED, "a member is joined");
}

// Launch 2 is what launch 0 computes; launch 3 waits for the latter, and launch 4 may not overlap others.
void add_an_alias(Case& made, uint32_t alias = 0) {
    made.add(40);
    made.add(40, {}, 3, 0);
    made.add(40);
    made.add(40, {0, 1}, 3);
    made.add(1, {3}, 0);
    made.add(7);
    made.rows[3].dependencies = {1, 2};
    made.mega_rows[2].alias = alias;
    made.mega_rows[1].waits = {0};
    made.mega_rows[3].waits = {0, 1};
    made.mega_rows[4].waits = {3};
}

void test_an_alias_is_not_run() {
    for (const uint32_t workers : {1u, 2u, 4u}) {
        Case made;
        add_an_alias(made);
        made.build(workers);
        for (int run = 0; run < 4; ++run) {
            MegaOptions options;
            options.is_recorded = run == 1;
            options.delay_seed = run == 2 ? 7 : 0;
            options.deadline_ns = run == 3 ? 60'000'000'000 : 0;
            const MegaOutcome outcome = made.run(options);
            check_equal(outcome.items, 128u, "the items of all others");
            check_equal(outcome.remaining, 0u, "none remains");
            check_equal(outcome.done, 6u, "it is finished with what computes it");
            check_equal(made.all.works[2]->blocks_done.load(), 0u, "it is not run");
            check_equal(made.cpu->items_done()[2], 40u, "its items are done");
        }
        check_equal(made.all.complaints.load(), 0u, "nothing runs before what it waits for");
        const MegaTask& last = made.mega->tasks()[5];
        check_equal(made.mega->tasks()[2].parts, 0u, "it has no parts");
        check_equal(last.waits, 1u, "one that may not overlap others is waited for");
        check_equal(made.mega->waits()[last.first_wait].task, 4u, "and is the last one that is run");
        made.all.works[0]->code = 20;
        made.all.works[0]->fault_blocks = {3};
        const MegaOutcome outcome = made.run();
        check_equal(outcome.done, 0u, "a fault of what computes it is its own");
        check_equal(made.cpu->items_done()[2], 39u, "of which one item is not done");
        check(!made.cpu->is_finished(2) && !made.cpu->is_finished(3), "and who reads it is not run");
    }
}

void test_wrong_aliases_are_refused() {
    const auto is_refused = [](const auto& change) {
        Case made;
        add_an_alias(made);
        change(made.mega_rows);
        try {
            made.build(2);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    check(!is_refused([](auto&) {}), "a right one is not");
    check(is_refused([](auto& rows) { rows[2].alias = 2; }), "itself");
    check(is_refused([](auto& rows) { rows[2].alias = 5; }), "a later one");
    check(is_refused([](auto& rows) { rows[5].alias = 2; }), "one that is not run");
    check(is_refused([](auto& rows) { rows[2].is_joined = true; }), "joined to a region");
    check(is_refused([](auto& rows) { rows[3].waits = {2}; }), "waited for");
}

void test_what_may_not_be_split_stays_whole() {
    Case made;
    made.add(50, {}, PLAN_MAY_OVERLAP);
    made.add(50, {}, PLAN_MAY_OVERLAP | PLAN_MAY_SPLIT, 0);
    made.build(4);
    for (int run = 0; run < 20; ++run) check_whole(made, made.run());
    check_equal(made.mega->tasks()[0].parts, 1u, "one part");
    check(!(made.mega->tasks()[1].flags & MEGA_JOINED), "parts of another kind are not joined");
    check_equal(made.all.complaints.load(), 0u, "in order, and before what reads it");
}

void test_sizes_change() {
    Case made;
    made.add(40);
    made.add(40, {0});
    made.rows[0].sizes[0].code = code({{1, 0}});
    made.program = make_program(PlanDevice::Cpu, made.rows, {PlanVariable{1, 40, false}});
    made.mega = std::make_unique<MegaProgram>(*made.program, made.mega_rows, 3);
    made.cpu = std::make_unique<MegaCpu>(*made.mega);
    made.all.works[1]->reads.clear();
    for (const int64_t blocks : {7, 40, 1, 2, 40}) {
        PlanValue given;
        given.integer = blocks;
        check(!made.program->set(&given), "the variable is taken");
        const MegaOutcome outcome = made.run();
        check_equal(outcome.items, uint64_t(blocks) + 40, "as many items as the variable says");
        check_equal(made.all.works[0]->blocks_done.load(), uint32_t(blocks), "of the launch that it is of");
    }
}

void test_deadline() {
    for (const uint32_t workers : {1u, 3u}) {
        Case made;
        for (uint32_t i = 0; i < 20; ++i) {
            made.add(i % 3 ? 4 : 1, i ? std::vector<uint32_t>{i - 1} : std::vector<uint32_t>{}).linger_ns = 10'000'000;
        }
        made.build(workers);
        MegaOptions options;
        options.deadline_ns = 100'000'000;
        options.is_recorded = true;
        const MegaOutcome outcome = made.run(options);
        uint64_t ran = 0, total = 0;
        for (const auto& work : made.all.works) {
            ran += work->blocks_done.load();
            total += work->words.size();
        }
        check(outcome.state == MegaState::Stopped && outcome.reason == MegaReason::Deadline, "the deadline came");
        check(ran > 0 && ran < total, "part of it ran");
        check_equal(outcome.items, ran, "what ran is counted");
        check_equal(outcome.items + outcome.remaining, total, "and what remains");
        check(outcome.end_ns - outcome.begin_ns < 1'000'000'000, "workers leave by themselves");
        const std::vector<uint64_t> done = made.cpu->items_done();
        for (size_t i = 0; i < done.size(); ++i) {
            check_equal(done[i], made.all.works[i]->blocks_done.load(), "items done of each launch");
            check(made.cpu->is_finished(uint32_t(i)) == (done[i] == made.all.works[i]->words.size()), "finished");
        }
        check(made.cpu->items_executed() == done, "without a fault what is executed is done");
        uint64_t recorded = 0, work = 0, measured = 0;
        for (const MegaRecord& record : made.cpu->records()) {
            recorded += record.blocks;
            work += record.end - record.ready;
        }
        for (uint32_t w = 0; w < workers; ++w) measured += made.cpu->progress(w).work;
        check_equal(recorded, ran, "items of a part that was left are recorded, too");
        check_equal(work, measured, "with their time");
        for (auto& work : made.all.works) work->linger_ns = 0;
        options.deadline_ns = 60'000'000'000;
        for (int run = 0; run < 5; ++run) check_whole(made, made.run(options));
        check_whole(made, made.run());
        check_equal(made.all.complaints.load(), 0u, "no item ran twice or early");
    }
}

void test_a_deadline_holds_to_the_length_of_one_item() {
    Case made;
    made.add(100).linger_ns = 10'000'000;
    made.build(1);
    MegaOptions options;
    options.deadline_ns = 150'000'000;
    const MegaOutcome outcome = made.run(options);
    check(outcome.items > 0 && outcome.items < 60, "a part is left between two of its items");
    check_equal(made.cpu->progress(0).blocks, outcome.items, "and its worker says where it stands");
    check_equal(made.cpu->progress(0).task, 0u, "in which task");
    check_equal(outcome.done, 0u, "which is not finished");
}

void test_stop_from_another_thread() {
    for (const uint64_t deadline_ns : {uint64_t{0}, uint64_t{60'000'000'000}}) {
        Case made;
        std::atomic<bool> gate{false};
        Work& held = made.add(4);
        held.gate = &gate;
        held.gate_block = 3;
        made.add(1, {0});
        made.build(2);
        std::thread other([&] {
            while (held.blocks_done.load() < 2) std::this_thread::yield();
            made.cpu->stop();
            gate = true;
        });
        MegaOptions options;
        options.deadline_ns = deadline_ns;
        const MegaOutcome outcome = made.run(options);
        other.join();
        check(outcome.state == MegaState::Stopped && outcome.reason == MegaReason::Asked, "it was stopped");
        check_equal(made.all.works[1]->blocks_done.load(), 0u, "nothing begins after a stop");
        check_equal(outcome.items + outcome.remaining, 5u, "all items are accounted for");
        check_whole(made, made.run(options));
    }
}

struct Asked final : PlanStop {
    int left;
    std::thread::id thread;
    explicit Asked(int times) : PlanStop(1'000'000), left(times) {}
    bool is_wanted() override {
        check(thread == std::thread::id() || thread == std::this_thread::get_id(), "one thread is asked");
        thread = std::this_thread::get_id();
        return --left == 0;
    }
};

void test_a_watched_run_gives_up_an_item_that_hangs() {
    Case made;
    std::atomic<bool> gate{false};
    made.add(2).gate = &gate;
    made.build(2);
    Asked stop(10);
    MegaOptions options;
    options.is_watched = options.is_recorded = true;
    options.stop = &stop;
    const MegaOutcome outcome = made.run(options);
    check(outcome.reason == MegaReason::Signal && outcome.state == MegaState::Hung, "the caller goes on");
    check(made.cpu->is_dead(), "without the engine");
    bool has_worked = false;
    for (uint32_t w = 0; w < 2; ++w) {
        const MegaProgress progress = made.cpu->progress(w);
        const bool is_hung = progress.state == uint32_t(MegaState::Hung);
        has_worked |= is_hung && progress.work > 0 && progress.work <= progress.end - progress.begin;
    }
    check(has_worked, "the time in the item counts until then");
    gate = true;
}

void test_stop_that_is_asked_for() {
    for (const uint64_t deadline_ns : {uint64_t{0}, uint64_t{60'000'000'000}}) {
        Case made;
        for (uint32_t i = 0; i < 50; ++i) {
            made.add(4, i ? std::vector<uint32_t>{i - 1} : std::vector<uint32_t>{}).linger_ns = 2'000'000;
        }
        made.build(2);
        Asked stop(10);
        MegaOptions options;
        options.stop = &stop;
        options.deadline_ns = deadline_ns;
        const MegaOutcome outcome = made.run(options);
        check(outcome.reason == MegaReason::Signal && outcome.state == MegaState::Stopped, "it was stopped");
        check(stop.thread == std::this_thread::get_id(), "the calling thread is asked");
        check(outcome.items > 0 && outcome.remaining > 0, "in between");
        for (auto& work : made.all.works) work->linger_ns = 0;
        check_whole(made, made.run());
    }
}

void test_an_item_that_never_returns() {
    Case made;
    std::atomic<bool> gate{false};
    made.add(1);
    Work& hangs = made.add(4, {0});
    hangs.gate = &gate;
    hangs.gate_block = 1;
    made.add(1, {1});
    made.build(2);
    MegaOptions options;
    options.deadline_ns = 1'000'000'000;  // both workers get as far as they can on a busy machine, too
    options.is_recorded = true;
    const uint64_t begin_ns = monotonic_ns();
    const MegaOutcome outcome = made.run(options);
    const uint64_t took_ns = monotonic_ns() - begin_ns;
    check(outcome.state == MegaState::Hung, "it hangs");
    check(took_ns < options.deadline_ns + 2'000'000'000, "the caller is back within two seconds");
    check(made.cpu->is_dead(), "the engine is dead");
    check_equal(outcome.items + outcome.remaining, 6u, "all items are accounted for");
    int hung = 0, waiting = 0;
    for (uint32_t worker = 0; worker < 2; ++worker) {
        const MegaProgress progress = made.cpu->progress(worker);
        if (progress.state == uint32_t(MegaState::Hung)) {
            ++hung;
            const MegaTask& task = made.mega->tasks()[1];
            const MegaShare share = mega_share(task.blocks, task.first_worker, task.parts, worker, 2);
            check_equal(progress.task, 1u, "the task that hangs");
            check_equal(share.first + progress.blocks, 1u, "the item that hangs");
        } else if (progress.missing != MEGA_NONE) {
            ++waiting;
            check_equal(progress.missing, 1u, "who waits says for what");
            check_equal(progress.arrived, 1u, "and how much of it has come");
        }
    }
    check_equal(hung, 1, "one worker hangs");
    check_equal(waiting, 1, "and one waits for it");
    check(!made.cpu->run({}).problem.empty(), "a dead engine refuses to run");
    gate = true;  // the engine's end waits for it
    made.cpu.reset();
}

void test_more_workers_than_threads() {
    Case made;
    Random random(5);
    fill(made, random, 12);
    made.build(300);
    for (int run = 0; run < 5; ++run) check_whole(made, made.run());
    check_equal(made.all.complaints.load(), 0u, "nothing early, nothing twice");
}

void test_engines_at_the_same_time() {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
        threads.emplace_back([t] {
            Case made;
            Random random(uint64_t(100 + t));
            fill(made, random, 15);
            made.build(3);
            for (int run = 0; run < 30; ++run) {
                MegaOptions options;
                options.deadline_ns = run % 2 ? 60'000'000'000 : 0;
                check_whole(made, made.run(options));
            }
            check_equal(made.all.complaints.load(), 0u, "engines do not disturb each other");
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
    watchdog(280);
    test_random_programs();
    test_faults();
    test_a_region_has_no_hop();
    test_an_alias_is_not_run();
    test_wrong_aliases_are_refused();
    test_what_may_not_be_split_stays_whole();
    test_sizes_change();
    test_deadline();
    test_a_deadline_holds_to_the_length_of_one_item();
    test_stop_from_another_thread();
    test_stop_that_is_asked_for();
    test_a_watched_run_gives_up_an_item_that_hangs();
    test_an_item_that_never_returns();
    test_more_workers_than_threads();
    test_engines_at_the_same_time();
    return finish();
}
