// The engine of queues, on threads and on a device that is simulated: random submissions with hazards
// against the same ones executed one after the other, with faults and retries, fed while they run; and how
// it ends: deadline, stop, an item that never returns, a fork. Every op also checks for itself that nobody
// else is at its memory.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <thread>

#include "clock.h"
#include "mega_queue.h"
#include "mega_queue_memory.h"
#include "mega_queue_proof.h"
#include "native_test.h"
#include "simulated_queue.h"

using namespace brickline;
using namespace native_test;

namespace {

constexpr uint64_t FOREVER = MegaQueueEngine::FOREVER;

uint64_t mix(uint64_t a, uint64_t b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15ull;
    return a ^ (a >> 29);
}

// Memory of cells. An op reads two and writes one; each cell has a word for each of its blocks.
struct World {
    static constexpr uint32_t BLOCKS = 4;
    explicit World(uint32_t count) : cells(count), users(count) {
        for (auto& each : cells) each.fill(0);
        for (auto& each : users) each = 0;
    }
    std::vector<std::array<uint64_t, BLOCKS>> cells;
    std::vector<std::atomic<int32_t>> users;  // readers, or -1: a writer
    std::atomic<uint64_t> complaints{0}, executions{0};
};

struct Task {
    uint32_t a, b, to, blocks;
    uint64_t salt;
    uint32_t fails = 0;             // so many executions of a block report a fault
    bool is_value_read = true;      // else it only overwrites
    bool is_blockwise = false;      // block k touches word k of each cell alone
    std::atomic<uint32_t> inside{0};
    std::atomic<uint32_t> tries[World::BLOCKS] = {};
};

void linger(uint64_t rounds) {
    volatile uint64_t sink = 0;
    for (uint64_t i = 0; i < rounds; ++i) sink = sink + i;
}

uint64_t value_of(const World& world, const Task& task, uint64_t block) {
    uint64_t value = task.salt + block;
    for (uint64_t k = 0; task.is_value_read && k < World::BLOCKS; ++k) {
        if (task.is_blockwise && k != block) continue;
        value = mix(value, world.cells[task.a][k]);
        value = mix(value, world.cells[task.b][k]);
    }
    return value;
}

// Arguments: the world, the task. A task's first block to come in marks its cells, the last to go frees
// them.
void work(const brickline_launch* launch) {
    World& world = **static_cast<World* const*>(launch->arguments[0]);
    Task& task = **static_cast<Task* const*>(launch->arguments[1]);
    const uint64_t block = launch->first;
    if (launch->last != block + 1 || block >= task.blocks) world.complaints.fetch_add(1);
    world.executions.fetch_add(1);
    linger(task.salt % 64);
    const uint32_t tried = task.tries[block].fetch_add(1);
    if (tried < task.fails) {
        *launch->fault = 17;
        return;
    }
    if (world.users[task.to].load(std::memory_order_relaxed) > 0) world.complaints.fetch_add(1);
    world.cells[task.to][block] = value_of(world, task, block);
}

MegaAccess access_of(const World& world, uint32_t cell, uint32_t mode, uint32_t blocks, bool is_blockwise) {
    const auto begin = reinterpret_cast<uint64_t>(&world.cells[cell]);
    return {begin, begin + blocks * 8, is_blockwise ? 8 : 0, 0, mode};
}

void add_job(MegaBatch& batch, World& world, Task& task, uint32_t priority = 2, uint32_t op = 0) {
    MegaJob job;
    job.op = op;
    job.priority = priority;
    job.grid[0] = task.blocks;
    batch.jobs.push_back(job);
    batch.items += task.blocks;
    batch.arguments.push_back(reinterpret_cast<uint64_t>(&world));
    batch.arguments.push_back(reinterpret_cast<uint64_t>(&task));
    if (task.is_value_read) {
        const uint32_t blocks = task.is_blockwise ? task.blocks : World::BLOCKS;
        batch.accesses.push_back(access_of(world, task.a, MEGA_READ, blocks, task.is_blockwise));
        batch.accesses.push_back(access_of(world, task.b, MEGA_READ, blocks, task.is_blockwise));
    }
    batch.accesses.push_back(access_of(world, task.to, MEGA_WRITE, task.blocks, task.is_blockwise));
    batch.access_end.push_back(uint32_t(batch.accesses.size()));
}

std::vector<MegaQueueOp> ops() { return {{&work, 2, 0}, {nullptr, 2, 0}}; }

MegaQueueOptions options(uint32_t workers, uint32_t slots) {
    MegaQueueOptions chosen;
    chosen.workers = workers;
    chosen.slots = slots;
    return chosen;
}

uint64_t g_joined = 0;  // submissions that followed another one
bool g_is_on_device = false;
uint32_t g_ring_bits = 0;

std::unique_ptr<MegaQueueEngine> make_engine(const MegaQueueOptions& chosen, const std::vector<MegaQueueOp>& functions) {
    if (!g_is_on_device || chosen.slots == 0 || chosen.slots > MEGA_MAX_SLOTS_OF_QUEUE || chosen.workers == 0)
        return std::make_unique<MegaQueueEngine>(chosen, functions);
    const uint64_t rest_ns = UNDER_TSAN ? 300'000 : 100'000;
    return std::make_unique<MegaQueueEngine>(chosen, functions,
                                             simulated_queue::workers(chosen, functions, g_ring_bits, rest_ns));
}

// ------------------------------------------------------------------------------------- against a serial run

struct Case {
    World world{12}, expected{12};
    std::vector<std::unique_ptr<Task>> tasks;
    std::vector<MegaSubmissionState> states;  // as they must be
};

std::unique_ptr<Case> random_case(Random& random, uint32_t count, uint32_t retry_limit, bool has_faults) {
    auto made = std::make_unique<Case>();
    std::vector<std::array<bool, World::BLOCKS>> is_missing(12);  // words that a task should have written
    for (auto& each : is_missing) each.fill(false);
    for (uint32_t k = 0; k < count; ++k) {
        auto task = std::make_unique<Task>();
        task->a = uint32_t(random.below(12));
        task->b = uint32_t(random.below(12));
        do task->to = uint32_t(random.below(12));
        while (task->to == task->a || task->to == task->b);
        task->blocks = uint32_t(1 + random.below(World::BLOCKS));
        task->is_blockwise = !random.one_in(4);
        if (k > 0 && random.one_in(2)) {  // often it goes on with what was written last
            task->a = made->tasks.back()->to;
            task->blocks = made->tasks.back()->blocks;
            while (task->to == task->a || task->to == task->b) task->to = uint32_t(random.below(12));
        }
        task->salt = random.bits();
        task->is_value_read = !random.one_in(5);
        if (has_faults && random.one_in(8)) task->fails = uint32_t(1 + random.below(4));
        bool reads_missing = false;
        for (uint32_t word = 0; task->is_value_read && word < World::BLOCKS; ++word) {
            if (task->is_blockwise && word >= task->blocks) break;
            reads_missing |= is_missing[task->a][word] || is_missing[task->b][word];
        }
        const bool fails = task->fails > retry_limit;
        const auto state = reads_missing ? MegaSubmissionState::Skipped
                           : fails       ? MegaSubmissionState::Faulted : MegaSubmissionState::Done;
        made->states.push_back(state);
        for (uint32_t block = 0; block < task->blocks; ++block)
            is_missing[task->to][block] = state != MegaSubmissionState::Done;
        if (state == MegaSubmissionState::Done) {
            for (uint64_t block = 0; block < task->blocks; ++block)
                made->expected.cells[task->to][block] = value_of(made->expected, *task, block);
        }
        made->tasks.push_back(std::move(task));
    }
    return made;
}

void check_random(Random& random, uint32_t workers, uint32_t slots, uint32_t count, bool has_faults, uint64_t seed) {
    MegaQueueOptions chosen = options(workers, slots);
    chosen.delay_seed = seed;
    chosen.retry_limit = has_faults ? 2 : 0;
    if (has_faults) chosen.retry_codes = {17};
    chosen.has_lineage = random.one_in(2);
    chosen.is_recorded = random.one_in(2);
    chosen.is_proved = slots <= 16;  // it takes time with what is open
    const auto made_engine = make_engine(chosen, ops());
    MegaQueueEngine& engine = *made_engine;
    for (int period = 0; period < 2; ++period) {
        const auto made = random_case(random, count, chosen.retry_limit, has_faults);
        uint64_t items = 0;
        for (uint32_t k = 0; k < count;) {
            MegaBatch batch;
            const bool is_alike = random.one_in(2);
            uint32_t priority = uint32_t(random.below(MEGA_PRIORITIES));
            for (uint64_t n = 1 + random.below(is_alike ? 20 : 6); n > 0 && k < count; --n) {
                if (batch.items + made->tasks[k]->blocks > slots) break;
                if (!is_alike) priority = uint32_t(random.below(MEGA_PRIORITIES));
                add_job(batch, made->world, *made->tasks[k], priority);
                ++k;
            }
            items += batch.items;
            const MegaPublished published = engine.publish(batch, FOREVER, nullptr);
            check(published.refused == MegaRefused::None, "a batch is published");
        }
        check(engine.drain(FOREVER, nullptr) == MegaQueueWait::Done, "all is done");
        const MegaQueueTotals totals = engine.totals();
        check_equal(totals.published, items, "items published");
        g_joined += totals.joined;
        check_equal(totals.done + totals.faulted + totals.skipped, items, "no item is lost");
        bool is_same = true, are_states = true;
        for (uint32_t cell = 0; cell < 12; ++cell)
            is_same &= made->world.cells[cell] == made->expected.cells[cell] || has_faults;
        if (has_faults) {  // words of a submission that faulted are any
            for (uint32_t k = 0; k < count; ++k)
                are_states &= engine.rows()[k].state == made->states[k];
        }
        check(is_same, "the memory is that of a serial run");
        check(are_states, "submissions end as in a serial run");
        check_equal(made->world.complaints.load(), 0u, "complaints of items");
        check(engine.problem().empty(), "the queue is sound: " + engine.problem());
        check_equal(engine.free_slots(), slots, "all slots are free again");
        uint64_t executed = 0;
        for (uint32_t k = 0; k < workers; ++k) executed += engine.hands()[k].items;
        check_equal(executed, made->world.executions.load(), "executions counted by workers");
        uint64_t skipped = 0;
        for (uint32_t k = 0; k < workers; ++k) skipped += engine.hands()[k].skipped;
        if (g_is_on_device) check(skipped <= totals.skipped, "what is over before it begins is skipped by the intake");
        else check_equal(skipped, totals.skipped, "skipped items counted by workers");
        check_equal(executed, totals.done + totals.faulted + totals.requeued, "items put back are executed again");
        if (chosen.is_recorded) check_equal(engine.records().size(), executed, "items recorded");
        if (chosen.has_lineage) check_equal(engine.accesses().ends.size(), count, "what each submission touches");
        if (chosen.is_recorded) check_equal(engine.waits().ends.size(), count, "whom each submission waits for");
        const uint64_t allocations = engine.traffic().allocations;
        if (g_is_on_device && period == 0) check(allocations >= 4, "memory that is allocated for a queue is counted");
        if (!g_is_on_device) check_equal(allocations, 0u, "memory of a device");
        engine.begin_again();
        check_equal(engine.totals().published, 0u, "a new period is empty");
        check_equal(engine.traffic().allocations, 0u, "what was allocated belongs to the period before");
    }
}

// --------------------------------------------------------------------------------------------- priorities

struct Order {
    std::atomic<uint32_t> next{0};
    std::atomic<uint32_t> when[4096];
    std::atomic<bool> is_held{true};
};

void hold(const brickline_launch* launch) {
    Order& order = **static_cast<Order* const*>(launch->arguments[0]);
    while (order.is_held.load()) ::usleep(100);
}
void note(const brickline_launch* launch) {
    Order& order = **static_cast<Order* const*>(launch->arguments[0]);
    const uint64_t number = *static_cast<const uint64_t*>(launch->arguments[1]);
    order.when[number].store(order.next.fetch_add(1));
}

void add_note(MegaBatch& batch, Order& order, uint32_t op, uint64_t number, uint32_t priority, uint32_t blocks = 1) {
    MegaJob job;
    job.op = op;
    job.priority = priority;
    job.grid[0] = blocks;
    batch.jobs.push_back(job);
    batch.items += blocks;
    batch.arguments.push_back(reinterpret_cast<uint64_t>(&order));
    batch.arguments.push_back(number);
    batch.access_end.push_back(uint32_t(batch.accesses.size()));
}

// One worker is held while all priorities fill up; then urgent ones go first, and idle ones go on, too.
void check_priorities() {
    constexpr uint32_t EACH = 200;
    auto order = std::make_unique<Order>();
    const auto made_engine = make_engine(options(1, 4096), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
    MegaBatch first;
    add_note(first, *order, 0, 0, 0);
    engine.publish(first, FOREVER, nullptr);
    while (!engine.hands()[0].is_inside) ::usleep(100);
    MegaBatch batch;
    for (uint32_t k = 0; k < 5 * EACH; ++k) add_note(batch, *order, 1, k, 4 - k / EACH);  // idle ones are older
    engine.publish(batch, FOREVER, nullptr);
    while (g_is_on_device && simulated_queue::ready_items() < 5 * EACH + 1) ::usleep(100);
    order->is_held.store(false);
    check(engine.drain(FOREVER, nullptr) == MegaQueueWait::Done, "priorities: all is done");
    uint32_t last_critical = 0, last_idle = 0, first_idle = ~0u;
    for (uint32_t k = 4 * EACH; k < 5 * EACH; ++k) last_critical = std::max(last_critical, order->when[k].load());
    for (uint32_t k = 0; k < EACH; ++k) {
        last_idle = std::max(last_idle, order->when[k].load());
        first_idle = std::min(first_idle, order->when[k].load());
    }
    // Of eight picks seven take the most urgent item, and one the oldest.
    check(last_critical <= EACH * 8 / 7 + 2, "urgent work is not kept waiting by what is older");
    check(first_idle <= MEGA_OLDEST_EVERY, "the oldest item has its turn");
    check(last_idle > 4 * EACH, "idle work does not go before urgent work");
}

// The guard of another system took lower priorities alone after 16 urgent items, and then for ever.
void check_only_urgent() {
    auto order = std::make_unique<Order>();
    order->is_held.store(false);
    const auto made_engine = make_engine(options(2, 4096), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
    for (const uint32_t priority : {0u, 4u}) {
        MegaBatch batch;
        for (uint32_t k = 0; k < 1000; ++k) add_note(batch, *order, 1, k, priority);
        engine.publish(batch, FOREVER, nullptr);
        check(engine.drain(monotonic_ns() + 30'000'000'000, nullptr) == MegaQueueWait::Done, "one priority alone");
    }
}

struct Sum {
    double value = 0;
    std::atomic<uint32_t> inside{0};
    uint32_t last = 0;
    bool is_mixed = false;
};
void add_up(const brickline_launch* launch) {
    Sum& sum = **static_cast<Sum* const*>(launch->arguments[0]);
    if (sum.inside.fetch_add(1)) sum.is_mixed = true;
    if (launch->first != 0 && launch->first != sum.last + 1) sum.is_mixed = true;
    sum.last = uint32_t(launch->first);
    sum.value += 1.0 / double(launch->first + 1);
    linger(50);
    sum.inside.fetch_sub(1);
}

void check_in_order() {
    Sum sum;
    const auto made_engine = make_engine(options(3, 1024), {{&add_up, 1, MEGA_IN_ORDER}});
    MegaQueueEngine& engine = *made_engine;
    MegaBatch batch;
    MegaJob job;
    job.grid[0] = 500;
    batch.jobs = {job};
    batch.items = 500;
    batch.arguments = {reinterpret_cast<uint64_t>(&sum)};
    batch.access_end = {0};
    engine.publish(batch, FOREVER, nullptr);
    engine.drain(FOREVER, nullptr);
    double expected = 0;
    for (int k = 1; k <= 500; ++k) expected += 1.0 / k;
    check(!sum.is_mixed && sum.value == expected, "items that add up run one after the other, in order");
}

// ------------------------------------------------------------------------------------------- refusals

void check_refusals() {
    World world(4);
    Task task;
    task.a = 0, task.b = 1, task.to = 2, task.blocks = 2, task.salt = 1;
    const auto made_engine = make_engine(options(1, 8), ops());
    MegaQueueEngine& engine = *made_engine;
    const auto refused = [&](auto change) {
        MegaBatch batch;
        add_job(batch, world, task);
        change(batch);
        return engine.publish(batch, FOREVER, nullptr).refused;
    };
    check(refused([](MegaBatch& b) { b.clear(); }) == MegaRefused::NoJobs, "an empty batch");
    check(refused([](MegaBatch& b) { b.jobs[0].op = 2; }) == MegaRefused::Op, "an op that there is not");
    check(refused([](MegaBatch& b) { b.jobs[0].priority = 5; }) == MegaRefused::Priority, "a sixth priority");
    check(refused([](MegaBatch& b) { b.jobs[0].grid[1] = 0; }) == MegaRefused::Grid, "no block");
    check(refused([](MegaBatch& b) { b.jobs[0].grid[0] = 9; }) == MegaRefused::Grid, "more blocks than slots");
    check(refused([](MegaBatch& b) { std::fill_n(b.jobs[0].grid, 3, 0x7fffffffu); }) == MegaRefused::Grid, "huge grids");
    check(refused([](MegaBatch& b) { b.arguments.pop_back(); }) == MegaRefused::Op, "an argument too few");
    check(refused([](MegaBatch& b) { b.access_end[0] = 99; }) == MegaRefused::Accesses, "accesses that are not there");
    check(refused([](MegaBatch& b) { std::swap(b.accesses[0].begin, b.accesses[0].end); }) == MegaRefused::Accesses,
          "a range that ends before it begins");
    check(refused([](MegaBatch& b) { b.accesses[0].mode = 4; }) == MegaRefused::Accesses, "an unknown access");
    check_equal(world.executions.load(), 0u, "nothing that was refused ran");
    check_equal(engine.free_slots(), 8u, "nor took a slot");
    MegaBatch many;
    for (int k = 0; k < 5; ++k) add_job(many, world, task);
    check(engine.publish(many, FOREVER, nullptr).refused == MegaRefused::Items, "a batch larger than the queue");
    for (const auto& [workers, slots] : {std::pair(0u, 1u), {g_is_on_device ? 4096u : 256u, 1u}, {1u, 0u}, {1u, ~0u}}) {
        try {
            make_engine(options(workers, slots), ops());
            check(false, "an engine of an impossible size");
        } catch (const std::invalid_argument&) {
            check(true, "an engine of an impossible size is refused before it is allocated");
        }
    }
}

// An op without a function is a fault of its items, not of the queue.
void check_unknown_op() {
    World world(4);
    Task task;
    task.a = 0, task.b = 1, task.to = 2, task.blocks = 2, task.salt = 1;
    const auto made_engine = make_engine(options(2, 8), ops());
    MegaQueueEngine& engine = *made_engine;
    MegaBatch batch;
    add_job(batch, world, task, 2, 1);
    engine.publish(batch, FOREVER, nullptr);
    check(engine.drain(FOREVER, nullptr) == MegaQueueWait::Done, "an unknown op ends");
    check_equal(engine.faults().size(), 2u, "its items are faults");
    check(!engine.faults().empty() && engine.faults()[0].code == MEGA_FAULT_UNKNOWN_OP, "with a code");
}

// ------------------------------------------------------------------------------------------- the end

void check_deadline() {
    auto order = std::make_unique<Order>();
    const auto made_engine = make_engine(options(2, 4096), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
    MegaBatch held;
    add_note(held, *order, 0, 0, 0, 2);  // both workers are held for longer than the deadline
    engine.publish(held, FOREVER, nullptr);
    while (!engine.hands()[0].is_inside || !engine.hands()[1].is_inside) ::usleep(100);
    MegaBatch batch;
    for (uint32_t k = 0; k < 100; ++k) add_note(batch, *order, 1, k, 3);
    engine.publish(batch, FOREVER, nullptr);
    std::thread later([&] {
        ::usleep(1'000'000);  // within the grace of items, however late the deadline is set
        order->is_held.store(false);
    });
    const MegaQueueWait ended = engine.drain(monotonic_ns() + 50'000'000, nullptr);
    check(ended == MegaQueueWait::Expired, "a deadline ends it");
    later.join();
    check_equal(order->next.load(), 0u, "nobody begins an item after the deadline");
    uint64_t done = 0;
    for (const MegaSubmissionRow& row : engine.rows_now()) done += row.done;
    check_equal(done, 2u, "items that were under way are done");
    check_equal(engine.open(), 100u, "the others are open");
    check(engine.drain(FOREVER, nullptr) == MegaQueueWait::Done, "it goes on");
    check_equal(engine.totals().done, 102u, "to the end");
    // A deadline that comes while everybody sleeps.
    check(engine.drain(monotonic_ns() + 20'000'000, nullptr) == MegaQueueWait::Done, "nothing to do");
}

void check_clear() {
    auto order = std::make_unique<Order>();
    const auto made_engine = make_engine(options(1, 256), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
    MegaBatch held;
    add_note(held, *order, 0, 0, 0);
    engine.publish(held, FOREVER, nullptr);
    while (!engine.hands()[0].is_inside) ::usleep(100);
    MegaBatch batch;
    for (uint32_t k = 0; k < 100; ++k) add_note(batch, *order, 1, k, 3);
    engine.publish(batch, FOREVER, nullptr);
    std::thread later([&] {
        ::usleep(50'000);
        order->is_held.store(false);
    });
    check(engine.drain(monotonic_ns() + 1, nullptr) == MegaQueueWait::Expired, "what remains");
    later.join();
    engine.clear();
    check_equal(engine.totals().cancelled, 100u, "is cancelled");
    check_equal(engine.free_slots(), 256u, "slots are free");
    check_equal(engine.open(), 0u, "nothing is open");
    check(engine.state() == MegaQueueState::Running, "workers are there again");
    engine.begin_again();
    MegaBatch more;
    add_note(more, *order, 1, 7, 2);
    engine.publish(more, FOREVER, nullptr);
    check(engine.drain(FOREVER, nullptr) == MegaQueueWait::Done && order->next == 1, "a cleared queue works");
}

void check_stop_while_fed() {
    for (int round = 0; round < 20; ++round) {
        auto order = std::make_unique<Order>();
        const auto made_engine = make_engine(options(2, 64), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
        std::thread stopper([&] {
            ::usleep(uint32_t(500 * round));
            engine.stop();
        });
        uint64_t items = 0;
        for (;;) {
            MegaBatch batch;
            for (uint32_t k = 0; k < 16; ++k) add_note(batch, *order, 1, k, 2);
            const MegaPublished published = engine.publish(batch, FOREVER, nullptr);
            if (published.refused != MegaRefused::None) {
                check(published.refused == MegaRefused::State, "a stopped queue takes nothing");
                break;
            }
            items += 16;
        }
        stopper.join();
        check(engine.join() == MegaQueueWait::Stopped, "workers leave");
        uint64_t done = 0;
        for (const MegaSubmissionRow& row : engine.rows_now()) done += row.done;
        check_equal(done, order->next.load(), "what was done is what is reported");
        check_equal(engine.totals().published, items, "and what was published, too");
    }
}

void check_hang() {
    auto order = std::make_unique<Order>();
    auto engine = make_engine([] {
        MegaQueueOptions chosen = options(2, 64);
        chosen.grace_ns = 200'000'000;
        chosen.is_recorded = true;
        return chosen;
    }(), std::vector<MegaQueueOp>{{&hold, 2, 0}, {&note, 2, 0}});
    uint64_t memory = 0;
    const MegaAccess writes = {reinterpret_cast<uint64_t>(&memory), reinterpret_cast<uint64_t>(&memory + 1), 0, 0, 2};
    const MegaAccess reads = {writes.begin, writes.end, 0, 0, 1};
    MegaBatch batch;
    add_note(batch, *order, 0, 0, 2);
    batch.accesses.push_back(writes);
    batch.access_end.back() = 1;
    add_note(batch, *order, 1, 1, 2);
    batch.accesses.push_back(reads);
    batch.access_end.back() = 2;
    add_note(batch, *order, 1, 2, 2);
    engine->publish(batch, FOREVER, nullptr);
    const uint64_t begin_ns = monotonic_ns();
    check(engine->drain(begin_ns + 100'000'000, nullptr) == MegaQueueWait::Hung, "an item that never returns");
    check(monotonic_ns() - begin_ns < 2'000'000'000, "is noticed in time");
    check(engine->state() == MegaQueueState::Dead, "the engine is dead");
    const std::vector<MegaHung> hung = engine->hung();
    check_equal(hung.size(), 1u, "one worker hangs");
    if (!hung.empty()) {
        check(hung[0].submission == 0 && hung[0].block == 0 && hung[0].op == 0, "at that item");
        check(hung[0].waiter == 1 && hung[0].waiters == 1, "and the second submission waits for it");
    }
    MegaBatch more;
    add_note(more, *order, 1, 3, 2);
    check(engine->publish(more, FOREVER, nullptr).refused == MegaRefused::State, "a dead engine takes nothing");
    const std::vector<MegaSubmissionRow> rows = engine->rows_now();
    check(rows.size() == 3 && rows[0].done == 0 && rows[0].state == MegaSubmissionState::Open &&
              rows[1].state == MegaSubmissionState::Open && rows[2].state == MegaSubmissionState::Done,
          "what was done is known, and what was not");
    check_equal(engine->totals().done, 1u, "and how much");
    const size_t recorded = engine->records().size();
    order->is_held.store(false);
    if (g_is_on_device) {
        ::usleep(100'000);
    } else {
        check(recorded <= 1, "the worker that hangs may write to its records");
        const uint64_t until_ns = monotonic_ns() + 20'000'000'000;
        while (engine->records().size() < 2 && monotonic_ns() < until_ns) engine->collect();
        check_equal(engine->records().size(), 2u, "and has written them when it is back");
    }
    engine.reset();
    check(true, "a dead engine can be closed");
}

void check_hang_that_is_closed() {
    auto order = std::make_unique<Order>();
    auto engine = make_engine([] {
        MegaQueueOptions chosen = options(1, 64);
        chosen.grace_ns = 100'000'000;
        return chosen;
    }(), std::vector<MegaQueueOp>{{&hold, 2, 0}, {&note, 2, 0}});
    MegaBatch batch;
    add_note(batch, *order, 0, 0, 2);
    engine->publish(batch, FOREVER, nullptr);
    check(engine->drain(monotonic_ns() + 100'000'000, nullptr) == MegaQueueWait::Hung, "it hangs");
    engine.reset();  // does not wait for it
    order->is_held.store(false);
    ::usleep(100'000);  // it returns into memory that is still there
}

void check_fork() {
    auto order = std::make_unique<Order>();
    auto engine = make_engine(options(2, 64), std::vector<MegaQueueOp>{{&hold, 2, 0}, {&note, 2, 0}});
    const pid_t child = ::fork();
    if (child == 0) {
        const bool is_foreign = engine->is_foreign();
        engine.reset();
        ::_exit(is_foreign ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child knows that the queue is its parent's");
    check(!engine->is_foreign(), "the parent goes on");
    MegaBatch batch;
    add_note(batch, *order, 1, 7, 2);
    engine->publish(batch, FOREVER, nullptr);
    check(engine->drain(FOREVER, nullptr) == MegaQueueWait::Done, "as before");
}

// Sleeping workers are woken, again and again.
void check_waking() {
    auto order = std::make_unique<Order>();
    order->is_held.store(false);
    const auto made_engine = make_engine(options(3, 64), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
    for (uint32_t round = 0; round < (UNDER_TSAN ? 100u : 300u); ++round) {
        if (round % 10 == 0) ::usleep(500);
        MegaBatch batch;
        for (uint32_t k = 0; k <= round % 4; ++k) add_note(batch, *order, 1, k, 2);
        engine.publish(batch, FOREVER, nullptr);
        if (engine.drain(monotonic_ns() + 20'000'000'000, nullptr) != MegaQueueWait::Done) {
            check(false, "a sleeping worker is woken");
            return;
        }
    }
    check(true, "sleeping workers are woken");
}

// A host that waits until few are open is woken by who makes them so few, however many are opened meanwhile.
void check_open_of_a_round() {
    using Atomics = platform::Atomics;
    MegaThreadMemory memory(options(1, 16), ops());
    const MegaQueue& queue = memory.queue;
    const auto submit = [&](uint32_t first, uint32_t count) {
        for (uint32_t k = first; k < first + count; ++k) {
            mega_publish_item<Atomics>(queue, k, k, 0, MEGA_NOTHING);
            mega_begin<Atomics>(queue, k, k, 1, 0, k, 2);
            if (k > first) queue.submissions[k - 1].link = k;
        }
    };
    submit(0, 2);
    queue.submissions[0].outcome = MEGA_FAULT_SKIPPED;  // over as soon as it is admitted
    check(mega_commit<Atomics>(queue, 0, 2), "two are committed");
    MegaWorker<Atomics> worker(queue, 0, 0);
    const auto feed = [&](uint32_t, const MegaSlot&) {
        submit(2, 6);
        return mega_commit<Atomics>(queue, 2, 6) ? 0u : 1u;
    };
    const auto is_retried = [](uint32_t) { return false; };
    check(worker.round(feed, is_retried, [] {}) == MegaRound::Executed, "one is executed");
    check_equal(worker.open().fewest, 1u, "one was left before more came");
    check_equal(worker.open().most, 7u, "and seven were there when it ended");
}

// What a publisher must not decide is found, one by one.
void check_proof() {
    World world(4);
    const auto task = [&](uint32_t a, uint32_t to, uint32_t blocks, bool is_blockwise) {
        auto made = std::make_unique<Task>();
        made->a = made->b = a, made->to = to, made->blocks = blocks, made->is_blockwise = is_blockwise;
        return made;
    };
    const std::vector<MegaQueueOp> pure = {{&work, 2, MEGA_PURE}};
    const auto one = task(0, 1, 2, true), two = task(1, 2, 2, true), whole = task(1, 2, 2, false), apart = task(3, 2, 2, true);
    const auto proved = [&](const std::vector<const Task*>& tasks, const std::vector<MegaDecision>& decisions) {
        MegaQueueProof proof(pure);
        MegaBatch batch;
        for (const Task* each : tasks) add_job(batch, world, const_cast<Task&>(*each));
        return proof.prove(batch, 0, decisions);
    };
    const auto begins = [](const std::string& text, const char* with) { return text.rfind(with, 0) == 0; };
    check(proved({one.get(), two.get()}, {{}, {{0}}}).empty(), "it waits for what it reads");
    check(proved({one.get(), two.get()}, {{}, {{}, 0}}).empty(), "or follows it block by block");
    check(begins(proved({one.get(), two.get()}, {{}, {}}), "MK406: submission 1 touches"), "a race");
    check(begins(proved({one.get(), whole.get()}, {{}, {{}, 0}}), "MK406"), "joined, and not blockwise");
    check(begins(proved({one.get(), two.get()}, {{{1}}, {{0}}}), "MK4"), "it waits for a later one");
    check(begins(proved({one.get(), two.get()}, {{}, {{7}}}), "MK402"), "it waits for nobody");
    check(proved({one.get(), one.get()}, {{}, {{}, MEGA_NOTHING, 0}}).empty(), "the same again is left out");
    check(begins(proved({one.get(), two.get()}, {{}, {{}, MEGA_NOTHING, 0}}), "MK409"), "what is not the same is not");
    const auto other = task(3, 2, 1, true);
    check(begins(proved({one.get(), other.get()}, {{}, {{}, 0}}), "MK410"), "a region has one number of blocks");
    // What is open of an earlier batch counts, and what has finished does not.
    MegaQueueProof proof(pure);
    MegaBatch first, second;
    add_job(first, world, *one);
    add_job(second, world, *two);
    check(proof.prove(first, 0, std::vector<MegaDecision>(1)).empty(), "one alone");
    MegaQueueProof later = proof;
    check(begins(proof.prove(second, 1, std::vector<MegaDecision>(1)), "MK406"), "a race with an earlier batch");
    later.finish(0);
    check(later.prove(second, 1, std::vector<MegaDecision>(1)).empty(), "none with what is over");
    // A chain ends before its first submissions are known to have ended: they are over, too.
    const auto last = task(2, 3, 2, true), again = task(3, 0, 2, true);
    MegaBatch chain, after;
    for (Task* each : {one.get(), two.get(), last.get()}) add_job(chain, world, *each);
    add_job(after, world, *again);
    for (const bool is_joined : {false, true}) {
        MegaQueueProof ended(pure);
        const MegaDecision follows = is_joined ? MegaDecision{{}, 1} : MegaDecision{{1}};
        check(ended.prove(chain, 0, std::vector<MegaDecision>{{}, {{0}}, follows}).empty(), "a chain");
        MegaQueueProof open = ended;
        check(begins(open.prove(after, 3, std::vector<MegaDecision>(1)), "MK406"), "it is open");
        ended.finish(2);
        check(ended.prove(after, 3, std::vector<MegaDecision>(1)).empty(), "what the last one waited for is over");
    }
}

// A batch of more bytes than a ring of commands holds, and one with more ties than there are edges.
void check_large_batches() {
    auto order = std::make_unique<Order>();
    order->is_held.store(false);
    constexpr uint32_t COUNT = 60'000;
    const auto made_engine = make_engine(options(2, COUNT), {{&hold, 2, 0}, {&note, 2, 0}});
    MegaQueueEngine& engine = *made_engine;
    for (uint32_t round = 0; round < 2; ++round) {
        MegaBatch batch;
        for (uint32_t k = 0; k < COUNT; ++k) add_note(batch, *order, 1, k % 1000, k % 5);
        check(engine.publish(batch, FOREVER, nullptr).refused == MegaRefused::None, "a large batch is taken");
        check(engine.drain(FOREVER, nullptr) == MegaQueueWait::Done, "and done");
        check_equal(engine.totals().done, uint64_t{COUNT}, "as a whole");
        engine.begin_again();
    }
    const auto made_small = make_engine(options(2, 64), {{&hold, 2, 0}, {&note, 2, 0}});
    uint64_t memory[32] = {};
    MegaBatch batch;
    for (uint32_t k = 0; k < 64; ++k) {  // 32 that write, then 32 that each read all of it
        add_note(batch, *order, 1, k, 2);
        const auto begin = reinterpret_cast<uint64_t>(memory + (k < 32 ? k : 0));
        const auto end = k < 32 ? begin + 8 : reinterpret_cast<uint64_t>(memory + 32);
        batch.accesses.push_back({begin, end, 0, 0, uint32_t(k < 32 ? MEGA_WRITE : MEGA_READ)});
        batch.access_end.back() = k + 1;
    }
    check(made_small->publish(batch, FOREVER, nullptr).refused == MegaRefused::None, "edges grow");
    check(made_small->drain(FOREVER, nullptr) == MegaQueueWait::Done, "and all is done");
    check_equal(made_small->totals().edges, 32u * 32, "each waits for all");
    check(made_small->problem().empty(), "the queue is sound");
}

void check_all(uint32_t rounds) {
    Random random(7);
    for (uint32_t round = 0; round < rounds; ++round) {
        for (const uint32_t workers : {1u, 2u, 4u}) {
            const uint32_t slots = round % 2 ? 16 : 512;
            check_random(random, workers, slots, UNDER_TSAN ? 300 : 1000, round % 3 == 1, round % 3 ? 0 : round + 1);
        }
    }
    check_priorities();
    check_only_urgent();
    check_in_order();
    check_refusals();
    check_unknown_op();
    check_deadline();
    check_clear();
    check_stop_while_fed();
    check_waking();
    check_large_batches();
    check_fork();
    check_hang();
    check_hang_that_is_closed();
}

}  // namespace

int main() {
    watchdog(280);
    check_proof();
    check_open_of_a_round();
    check_all(has_time() ? 20 : UNDER_TSAN ? 4 : 6);
    g_is_on_device = true;
    for (g_ring_bits = 0; g_ring_bits <= 2; g_ring_bits += 2) {
        simulated_queue::g_intake_threads = g_ring_bits ? 4 : 1;
        check_all(has_time() ? 6 : UNDER_TSAN ? 2 : 3);
    }
    check(g_joined > 200, "submissions are joined: " + std::to_string(g_joined));
    check(simulated_queue::g_launches > 20, "workers of a device leave when nothing is open, and come back");
    return finish();
}
