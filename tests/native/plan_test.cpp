// Prepared plans on CPU: values and refusals, and random plans on several threads against a serial run
// of the same launches, bit for bit, with and without faults, to the end and stopped on the way. Every
// kernel also checks for itself that what it waits for is finished, that it overlaps with nothing it must
// not, and that its shared memory is the thread's.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "clock.h"
#include "host_scratch.h"
#include "native_test.h"
#include "plan_rows.h"
#include "plan_threads.h"

using namespace brickline;
using namespace native_test;
using namespace plan_rows;

namespace {

// What a launch of a random plan does: block b mixes the words that it reads into its own word.
struct Work {
    std::vector<uint32_t> reads;         // launches
    uint32_t fault_block = ~0u, later_fault_block = ~0u, code = 0;  // the later one records code + 1
    std::atomic<uint32_t> blocks_done{0}, inside{0};
    std::vector<uint64_t> words;         // one for each block
    bool may_overlap = true;
    uint32_t index = 0;
    struct Plan* plan = nullptr;
};

struct Plan {
    std::vector<std::unique_ptr<Work>> works;
    std::atomic<uint32_t> running{0};
    std::atomic<uint64_t> complaints{0};
};

uint64_t mix(uint64_t a, uint64_t b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15ull;
    return a ^ (a >> 29);
}

void linger(uint64_t rounds) {
    volatile uint64_t sink = 0;
    for (uint64_t i = 0; i < rounds; ++i) sink = sink + i;
}

// Arguments: the Work, a seed and a number of rounds.
void work_kernel(const brickline_launch* launch) {
    Work& work = **static_cast<Work* const*>(launch->arguments[0]);
    const uint64_t seed = *static_cast<const uint64_t*>(launch->arguments[1]);
    const uint64_t rounds = *static_cast<const uint64_t*>(launch->arguments[2]);
    Plan& plan = *work.plan;
    if (!work.inside.fetch_add(1)) plan.running.fetch_add(1);
    if (!work.may_overlap && plan.running.load() != 1) plan.complaints.fetch_add(1);
    for (uint64_t block = launch->first; block < launch->last; ++block) {
        if (launch->shared_bytes) {  // memory of this thread alone
            std::memset(launch->shared, int(block + work.index), launch->shared_bytes);
            if (reinterpret_cast<uintptr_t>(launch->shared) % 64) plan.complaints.fetch_add(1);
            if (launch->shared != host_scratch().of(launch->shared_bytes)) plan.complaints.fetch_add(1);
        }
        uint64_t word = mix(seed, block);
        for (const uint32_t each : work.reads) {
            const Work& other = *plan.works[each];
            if (other.blocks_done.load(std::memory_order_relaxed) != other.words.size()) plan.complaints.fetch_add(1);
            word = mix(word, other.words[block % other.words.size()]);
        }
        linger(rounds);
        for (uint64_t k = 0; k < launch->shared_bytes; ++k) {
            if (static_cast<unsigned char*>(launch->shared)[k] != (unsigned char)(block + work.index)) {
                plan.complaints.fetch_add(1);
                break;
            }
        }
        work.words[block] = word;
        work.blocks_done.fetch_add(1, std::memory_order_relaxed);
        if (block == work.fault_block && !*launch->fault) *launch->fault = work.code;
        if (block == work.later_fault_block && !*launch->fault) *launch->fault = work.code + 1;
    }
    if (work.inside.fetch_sub(1) == 1) plan.running.fetch_sub(1);
}

struct RandomPlan {
    Plan plan;
    std::vector<PlanRow> rows;
    std::unique_ptr<PlanProgram> program;
    std::unique_ptr<PlanThreads> threads;

    RandomPlan(Random& random, uint32_t count, bool has_faults) {
        const uint64_t unsafe = 2 + random.below(12);
        for (uint32_t i = 0; i < count; ++i) {
            auto work = std::make_unique<Work>();
            const bool is_safe = !random.one_in(unsafe);
            const uint64_t blocks = random.one_in(3) ? 1 + random.below(40) : 1;
            work->words.resize(blocks);
            work->may_overlap = is_safe;
            work->index = i;
            work->plan = &plan;
            for (uint64_t k = random.below(4); k > 0 && i > 0; --k) work->reads.push_back(uint32_t(random.below(i)));
            if (has_faults && random.one_in(6)) {
                work->fault_block = uint32_t(random.below(blocks));
                work->later_fault_block = work->fault_block + 1 + uint32_t(random.below(8));
                work->code = 16 + uint32_t(random.below(100));
            }
            PlanRow made = row(&work_kernel, is_safe ? 1u | 2u * !random.one_in(3) : 0u, blocks);
            made.slots = {value(reinterpret_cast<uint64_t>(work.get())), value(random.bits()),
                          value(random.below(UNDER_TSAN ? 200 : 2000))};
            made.sizes[6].value = random.one_in(3) ? int64_t(random.below(300)) : 0;
            made.dependencies = work->reads;
            rows.push_back(made);
            plan.works.push_back(std::move(work));
        }
        program = make_program(PlanDevice::Cpu, rows);
        threads = std::make_unique<PlanThreads>(*program);
    }
    void clear() {
        for (auto& work : plan.works) {
            work->blocks_done = 0;
            std::fill(work->words.begin(), work->words.end(), 0);
        }
    }
    std::vector<uint64_t> words(uint32_t launches) const {
        std::vector<uint64_t> all;
        for (uint32_t i = 0; i < launches; ++i) {
            all.insert(all.end(), plan.works[i]->words.begin(), plan.works[i]->words.end());
        }
        return all;
    }
};

void test_random_plans() {
    Random random(1);
    const int plans = UNDER_TSAN ? 150 : 400;
    for (int k = 0; k < plans; ++k) {
        const bool has_faults = k % 3 == 2;
        RandomPlan one(random, 1 + uint32_t(random.below(k % 10 == 0 ? 120 : 25)), has_faults);
        const uint32_t count = one.program->size();
        one.clear();
        const PlanOutcome expected = one.program->run_serial(0, 0, count);
        const std::vector<uint64_t> words = one.words(expected.done);
        if (!has_faults) check(expected.done == count && !expected.code && expected.where == -1, "serial");
        for (int repeat = 0; repeat < 12; ++repeat) {
            one.clear();
            const PlanWay way = repeat < 9 ? PlanWay::Shared : PlanWay::Sensible;
            const PlanOutcome found = one.threads->run(2 + uint32_t(random.below(5)), way);
            check(found.done == expected.done && found.code == expected.code && found.where == expected.where,
                  "the outcome is the serial one");
            check(one.words(expected.done) == words, "so are the results");
            bool are_finished = true, has_known = true;
            for (uint32_t i = 0; i < count; ++i) {
                const bool is_finished = one.threads->is_finished(i);
                const Work& work = *one.plan.works[i];
                if (int32_t(i) == found.where) has_known &= !is_finished;
                else if (i < expected.done) are_finished &= is_finished;
                if (is_finished) has_known &= work.blocks_done == work.words.size();
                for (const uint32_t each : work.reads) has_known &= !is_finished || one.threads->is_finished(each);
            }
            check(are_finished, "everything before the fault is finished");
            check(has_known, "what is called finished is");
        }
        check_equal(one.plan.complaints.load(), 0u, "no kernel found anything amiss");
    }
}

// Says yes when it has been asked so often; asks for memory meanwhile, as a run within would.
class StopAt final : public PlanStop {
  public:
    explicit StopAt(uint64_t yes, uint64_t interval_ns = 0) : PlanStop(interval_ns), m_yes(yes) {}

    bool is_wanted() override {
        check(std::this_thread::get_id() == m_caller, "the thread that called is asked");
        check(m_asked < m_yes, "a yes is the last answer");
        static thread_local uint64_t bytes = 1 << 12;
        if (bytes < 1 << 20) bytes += 64;
        std::memset(host_scratch().of(bytes), 0x55, bytes);
        return ++m_asked == m_yes;
    }
    uint64_t asked() const { return m_asked; }

  private:
    const std::thread::id m_caller = std::this_thread::get_id();
    const uint64_t m_yes;
    std::atomic<uint64_t> m_asked{0};
};

// What a stopped run leaves: `done` launches, each whole and after those that it waits for.
void check_stopped(const RandomPlan& one, const PlanOutcome& found, const std::vector<bool>& finished) {
    uint32_t count = 0;
    bool is_sound = true;
    for (uint32_t i = 0; i < finished.size(); ++i) {
        if (!finished[i]) continue;
        const Work& work = *one.plan.works[i];
        ++count;
        is_sound &= work.blocks_done == work.words.size();
        for (const uint32_t each : one.program->dependencies(i)) is_sound &= finished[each];
    }
    check(is_sound, "what is finished when a run stops is whole, and so is what it needs");
    check_equal(found.done, count, "a stopped run counts what is finished");
    check(!found.code && found.where == -1, "and no launch has failed");
}

void test_stops() {
    Random random(3);
    uint64_t serial_stops = 0, shared_stops = 0;
    for (int k = 0; k < (UNDER_TSAN ? 60 : 150); ++k) {
        RandomPlan one(random, 2 + uint32_t(random.below(40)), k % 3 == 2);
        const uint32_t count = one.program->size();
        one.clear();
        const PlanOutcome expected = one.program->run_serial(0, 0, count);
        const std::vector<uint64_t> words = one.words(expected.done);
        for (int repeat = 0; repeat < 6; ++repeat) {
            StopAt stop(1 + random.below(1 + count / 6));
            one.clear();
            const bool is_shared = repeat % 2;
            const PlanOutcome found = is_shared ? one.threads->run(2 + uint32_t(random.below(4)), PlanWay::Shared, &stop)
                                                : one.program->run_serial(0, 0, count, &stop);
            if (found.is_stopped) {
                ++(is_shared ? shared_stops : serial_stops);
                std::vector<bool> finished(count);
                for (uint32_t i = 0; i < count; ++i) {
                    finished[i] = is_shared ? one.threads->is_finished(i) : i < found.done;
                }
                check_stopped(one, found, finished);
                if (!is_shared) check(!one.plan.works[found.done]->blocks_done.load(), "the next one has not begun");
            } else {
                check(found.done == expected.done && found.code == expected.code && found.where == expected.where &&
                          one.words(expected.done) == words, "a run that is asked and not stopped is like any other");
            }
            one.clear();
            check(one.threads->run(3, PlanWay::Shared).done == expected.done && one.words(expected.done) == words,
                  "nor does the next run notice");
        }
        check_equal(one.plan.complaints.load(), 0u, "no kernel found anything amiss");
    }
    check(serial_stops > 50 && shared_stops > 50, "runs were stopped");
}

void sleep_kernel(const brickline_launch* launch) {
    ::usleep(useconds_t(*static_cast<const uint64_t*>(launch->arguments[0])));
}

// Launches of a few milliseconds, and tiny ones: about as often as it says, and as soon.
void test_asking_takes_its_time() {
    constexpr uint64_t MS = 1000000;
    std::vector<PlanRow> rows;
    for (int i = 0; i < 400; ++i) {
        rows.push_back(row(&sleep_kernel, 1, 1));
        rows.back().slots = {value(i % 40 < 8 ? 3000 : 0)};  // microseconds
    }
    auto program = make_program(PlanDevice::Cpu, rows);
    PlanThreads threads(*program);
    for (const uint32_t workers : {1u, 2u}) {
        StopAt stop(3, 20 * MS);
        const uint64_t began_ns = monotonic_ns();
        const PlanOutcome found = threads.run(workers, PlanWay::Shared, &stop);
        const uint64_t took_ns = monotonic_ns() - began_ns;
        check(found.is_stopped && found.done > 0 && found.done < 400, "stopped on the way");
        check(took_ns >= 50 * MS, "three times an interval, by a clock of a few milliseconds");
    }
    StopAt never(~0ull, 20 * MS);
    const uint64_t began_ns = monotonic_ns();
    check(program->run_serial(0, 0, 400, &never).done == 400, "a run that is never stopped");
    const uint64_t took_ns = monotonic_ns() - began_ns;
    check(never.asked() >= 5 && never.asked() <= took_ns / (16 * MS), "is asked about once in an interval");
}

struct Meeting {
    std::atomic<int> arrived{0};
    std::atomic<uint64_t> asked{0};
    std::thread::id caller;
    bool is_met = false;
};

// Two launches wait for each other, so the calling thread has one of them and a worker the other. The
// worker's then lasts until the calling thread, which has nothing left to do, is asked.
void meet_kernel(const brickline_launch* launch) {
    Meeting& meeting = **static_cast<Meeting* const*>(launch->arguments[0]);
    const uint64_t until_ns = monotonic_ns() + 20000000000ull;
    meeting.arrived.fetch_add(1);
    while (meeting.arrived.load() < 2 && monotonic_ns() < until_ns) std::this_thread::yield();
    if (std::this_thread::get_id() == meeting.caller) return;
    while (!meeting.asked.load() && monotonic_ns() < until_ns) ::usleep(1000);
    meeting.is_met = meeting.asked.load() != 0;
}

class StopMeeting final : public PlanStop {
  public:
    explicit StopMeeting(Meeting& meeting) : m_meeting(meeting) {}
    bool is_wanted() override { return m_meeting.asked.fetch_add(1) == 0; }

  private:
    Meeting& m_meeting;
};

void test_who_waits_is_asked() {
    Meeting meeting;
    meeting.caller = std::this_thread::get_id();
    std::vector<PlanRow> rows(3, row(&meet_kernel, 1, 1));
    for (PlanRow& each : rows) each.slots = {value(reinterpret_cast<uint64_t>(&meeting))};
    rows[2].dependencies = {0, 1};
    auto program = make_program(PlanDevice::Cpu, rows);
    PlanThreads threads(*program);
    StopMeeting stop(meeting);
    const PlanOutcome found = threads.run(2, PlanWay::Shared, &stop);
    check(meeting.is_met, "a thread that waits for others is asked meanwhile");
    check(found.is_stopped && found.done == 2 && !threads.is_finished(2), "and what follows does not begin");
    check_equal(meeting.arrived.load(), 2, "the last launch did not run");
}

void test_two_plans_at_once() {
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([caller] {
            Random random(100 + uint64_t(caller));
            RandomPlan one(random, 30, false);
            one.clear();
            one.program->run_serial(0, 0, 30);
            const std::vector<uint64_t> words = one.words(30);
            bool is_alike = true;
            for (int k = 0; k < 60; ++k) {
                one.clear();
                is_alike &= one.threads->run(3, PlanWay::Shared).done == 30 && one.words(30) == words;
            }
            check(is_alike && !one.plan.complaints.load(), "plans that run at once do not meet");
        });
    }
    for (std::thread& caller : callers) caller.join();
}

void set_word(const brickline_launch* launch) {
    int64_t* const to = *static_cast<int64_t* const*>(launch->arguments[0]);
    int32_t narrow = 0;
    float f32 = 0;
    double f64 = 0;
    std::memcpy(&narrow, launch->arguments[2], 4);
    std::memcpy(&f32, launch->arguments[3], 4);
    std::memcpy(&f64, launch->arguments[4], 8);
    to[0] = *static_cast<int64_t*>(launch->arguments[1]);
    to[1] = narrow;
    to[2] = int64_t(f32 * 2);
    to[3] = int64_t(f64 * 4);
    to[4] = int64_t(launch->last);
    to[5] = int64_t(launch->shared_bytes);
}

PlanValue integer(int64_t value) { return {.integer = value}; }
PlanValue real(double value) { return {.real = value}; }

void check_refused(const PlanRefusal& refused, PlanRefusal::Where where, PlanRefusal::Why why, int launch,
                   uint32_t place, int64_t value, const std::string& what) {
    check(refused && refused.where == where && refused.why == why && refused.launch == launch &&
              refused.place == place && (refused.is_float || refused.value.integer == value), what);
}

// Variables n (1 to 100), m (any) and the float f.
void test_values() {
    using Where = PlanRefusal::Where;
    using Why = PlanRefusal::Why;
    const std::string n = code({{1, 0}}), m = code({{1, 1}});
    PlanRow first = row(&set_word, 1, 1);
    first.slots = {buffer(0, 8), expression(m, false), expression(code({{1, 1}, {0, 7}, {3, 0}}), true),
                   real_slot(2, true), real_slot(2, false)};
    first.sizes[0].code = n;
    first.sizes[6].code = code({{0, 600}, {1, 0}, {4, 0}});  // 600 // n
    PlanRow second = row(&set_word, 1, 1);  // depends on n alone
    second.slots = {buffer(1, 0), expression(n, true), value(5), value(0), value(0)};
    second.sizes[3].code = n;
    second.sizes[4].value = 20;
    const std::vector<PlanVariable> variables = {{1, 100, false}, {}, {0, 0, true}};
    auto program = make_program(PlanDevice::Cpu, {first, second}, variables, 2);
    check(!program->missing().empty(), "nothing is set yet");
    PlanValue values[] = {integer(10), integer(3), real(2.5)};
    check(!program->set(values), "good values");
    check(program->missing().find("storage 0") != std::string::npos, "nothing is bound yet");
    int64_t memory[16] = {};
    program->bind(0, reinterpret_cast<uint64_t>(memory));
    program->bind(1, reinterpret_cast<uint64_t>(memory + 8));
    check(program->missing().empty(), "all is there");
    const auto run = [&] { return program->run_serial(0, 0, 2); };
    check(run().done == 2 && memory[1] == 3 && memory[2] == 21 && memory[3] == 5 && memory[4] == 10 &&
              memory[5] == 10 && memory[6] == 60 && memory[8] == 10 && memory[9] == 5, "values arrive");
    const auto refuse = [&](PlanValue a, PlanValue b, PlanValue c) {
        const PlanValue given[] = {a, b, c};
        return program->set(given);
    };
    const uint64_t version = program->version();
    check_refused(refuse(integer(0), integer(3), real(0)), Where::Variable, Why::Range, -1, 0, 0, "below its bound");
    check_refused(refuse(integer(101), integer(3), real(0)), Where::Variable, Why::Range, -1, 0, 101, "above it");
    check_refused(refuse(integer(10), integer(1ll << 40), real(0)), Where::Argument, Why::Range, 0, 2,
                  7 * (1ll << 40), "does not fit int32");
    check_refused(refuse(integer(10), integer(INT64_MAX), real(0)), Where::Argument, Why::Overflow, 0, 2, 0,
                  "leaves int64");
    check_refused(refuse(integer(60), integer(3), real(0)), Where::Size, Why::Lanes, 1, 3, 1200, "too many lanes");
    check_refused(refuse(integer(10), integer(3), real(1e300)), Where::Argument, Why::Range, 0, 3, 0, "no f32");
    check(program->version() == version, "a refusal changes nothing");
    std::memset(memory, 0, sizeof memory);
    check(run().done == 2 && memory[1] == 3 && memory[8] == 10, "the old values stand");
    const uint64_t untouched = program->launch(1).version;
    check(!refuse(integer(10), integer(4), real(2.5)) && program->launch(1).version == untouched &&
              program->launch(0).version > version, "only what depends on a changed variable changes");
    const uint64_t same = program->version();
    check(!refuse(integer(10), integer(4), real(2.5)) && program->version() == same, "the same values change nothing");
    program->bind(1, reinterpret_cast<uint64_t>(memory + 8));
    check(program->version() == same, "nor does the same address");
    check(run().done == 2 && memory[1] == 4 && memory[2] == 28, "new values arrive");
    auto constant = row(&set_word, 1, 0);  // no blocks
    auto empty = make_program(PlanDevice::Cpu, {constant});
    check(!empty->missing().empty(), "a size that is refused leaves the plan unset");
    check_refused(empty->set(nullptr), Where::Size, Why::Range, 0, 0, 0, "and is named");
    auto divides = row(&set_word, 1, 1);
    divides.sizes[1].code = code({{0, 5}, {1, 0}, {4, 0}});
    auto divided = make_program(PlanDevice::Null, {divides}, {{0, 9, false}});
    const PlanValue zero = integer(0), five = integer(5), six = integer(6);
    check_refused(divided->set(&zero), Where::Size, Why::DivisionByZero, 0, 1, 0, "a division by zero");
    check(!divided->set(&five), "another divisor");
    check_refused(divided->set(&six), Where::Size, Why::Range, 0, 1, 0, "a size of nothing");
}

void expect_invalid(const std::vector<PlanRow>& rows, const std::string& what) {
    try {
        make_program(PlanDevice::Cpu, rows, {{0, 9, false}, {0, 0, true}}, 1);
        check(false, what);
    } catch (const std::invalid_argument&) {
        check(true, what);
    }
}

void test_rows_that_are_none() {
    PlanRow one = row(&set_word, 1, 1);
    one.slots = {buffer(1, 0)};
    expect_invalid({one}, "a storage that is not there");
    one.slots = {expression("short", false)};
    expect_invalid({one}, "no code");
    one.slots = {expression(code({{1, 2}}), false)};
    expect_invalid({one}, "a variable that is not there");
    one.slots = {expression(code({{1, 1}}), false)};
    expect_invalid({one}, "an expression over a float");
    one.slots = {real_slot(0, true)};
    expect_invalid({one}, "a float that is an integer");
    one.slots = {};
    one.dependencies = {0};
    expect_invalid({one}, "a launch that waits for itself");
    one.dependencies = {};
    one.function = 0;
    expect_invalid({one}, "no function");
}

void test_order() {
    std::vector<PlanRow> rows;
    for (const uint32_t flags : {1u, 1u, 0u, 1u, 1u, 0u, 0u, 1u}) rows.push_back(row(&set_word, flags, 1));
    rows[4].dependencies = {1, 3};
    auto program = make_program(PlanDevice::Null, rows);
    const std::vector<std::vector<uint32_t>> expected = {{}, {}, {0, 1}, {2}, {2, 3}, {2, 3, 4}, {5}, {6}};
    for (uint32_t i = 0; i < rows.size(); ++i) check(program->dependencies(i) == expected[i], "order around barriers");
    std::vector<PlanRow> chain(3, row(&set_word, 1, 1));
    chain[1].dependencies = {0};
    chain[2].dependencies = {0, 1};
    auto ordered = make_program(PlanDevice::Cpu, chain);
    check(!PlanThreads(*ordered).can_overlap(), "a chain has nothing to share");
    chain[2].dependencies = {0};
    check(PlanThreads(*make_program(PlanDevice::Cpu, chain)).can_overlap(), "a fork has");
}

void test_times_and_ranges() {
    Random random(7);
    RandomPlan one(random, 20, false);
    one.program->set_timed(true);
    for (const uint32_t threads : {1u, 3u}) {
        one.clear();
        one.threads->run(threads, PlanWay::Shared);
        bool is_sound = true;
        for (uint32_t i = 0; i < 20; ++i) {
            const PlanTime& time = one.program->times()[i];
            is_sound &= time.start_ns > 0 && time.start_ns <= time.end_ns && time.worker <= WorkerPool::MAX_WORKERS;
            for (const uint32_t each : one.program->dependencies(i)) {
                is_sound &= one.program->times()[each].end_ns <= time.end_ns;
            }
        }
        check(is_sound, "times of a run");
    }
    one.clear();
    check(one.program->run_serial(0, 0, 8).done == 8 && one.program->run_serial(0, 8, 20).done == 12 &&
              !one.plan.complaints.load(), "a part at a time");
}

void test_fork() {
    if (UNDER_TSAN) return;  // it knows no threads in a forked child
    Random random(9);
    RandomPlan one(random, 25, false);
    one.clear();
    one.threads->run(3, PlanWay::Shared);
    const std::vector<uint64_t> words = one.words(25);
    const pid_t child = ::fork();
    if (child == 0) {
        bool is_alike = true;
        for (int k = 0; k < 20; ++k) {
            one.clear();
            is_alike &= one.threads->run(3, PlanWay::Shared).done == 25 && one.words(25) == words;
        }
        ::_exit(is_alike && !one.plan.complaints.load() ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child has workers of its own");
    one.clear();
    check(one.threads->run(3, PlanWay::Shared).done == 25 && one.words(25) == words, "and the parent keeps its own");
}

}  // namespace

int main() {
    watchdog(250);
    test_values();
    test_rows_that_are_none();
    test_order();
    test_random_plans();
    test_stops();
    test_asking_takes_its_time();
    test_who_waits_is_asked();
    test_two_plans_at_once();
    test_times_and_ranges();
    test_fork();
    return finish();
}
