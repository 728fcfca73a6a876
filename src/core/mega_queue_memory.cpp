// The tables of a queue on threads of the host, and the life of its workers.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdio>

#include "host_scratch.h"
#include "mega_queue_memory.h"
#include "plan_program.h"  // PLAN_NO_MEMORY

namespace brickline {
namespace {

using Atomics = platform::Atomics;

constexpr uint64_t WATCH_NS = 2000;   // without giving way
constexpr uint64_t YIELD_NS = 50000;  // until then others go first; later it sleeps

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool has_any(const MegaRing& ring) {
    return __atomic_load_n(ring.tail, __ATOMIC_SEQ_CST) != __atomic_load_n(ring.head, __ATOMIC_SEQ_CST);
}

template <class T>
void add(std::atomic<T>& counter, T value) {  // of one writer
    counter.store(counter.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

uint32_t power_of_two(uint32_t least) { return std::bit_ceil(std::max(least, 2u)); }

}  // namespace

// --------------------------------------------------------------------------------------------- sleeping

void MegaBell::wait(uint32_t seen, uint64_t until_ns) {
    const bool is_forever = until_ns == MEGA_FOREVER;
    timespec until;
    until.tv_sec = time_t(until_ns / 1000000000);
    until.tv_nsec = long(until_ns % 1000000000);
    ::syscall(SYS_futex, &m_count, FUTEX_WAIT_BITSET_PRIVATE, seen, is_forever ? nullptr : &until, nullptr,
              FUTEX_BITSET_MATCH_ANY);
}

void MegaBell::ring_one() {
    if (!has_sleepers() || m_is_ringing.exchange(true, std::memory_order_seq_cst)) return;
    platform::hold_up();
    m_count.fetch_add(1, std::memory_order_seq_cst);
    platform::hold_up();
    // Who was not asleep yet sees the count, and looks again.
    if (::syscall(SYS_futex, &m_count, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0) < 1)
        m_is_ringing.store(false, std::memory_order_seq_cst);
}

void MegaBell::ring_all() {
    m_count.fetch_add(1, std::memory_order_seq_cst);
    if (has_sleepers()) ::syscall(SYS_futex, &m_count, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// ---------------------------------------------------------------------------------------------- tables

MegaThreadMemory::MegaThreadMemory(const MegaQueueOptions& given, std::vector<MegaQueueOp> functions)
    : options(given), ops(std::move(functions)), ns_per_tick(measure_ns_per_tick(clock)) {
    for (const MegaQueueOp& op : ops) stride = std::max(stride, op.arguments);
    const uint32_t ring_cells = power_of_two(options.slots);
    slots.resize(options.slots);
    submissions.resize(options.slots);
    edges.resize(size_t{4} * options.slots);
    cells.resize(size_t{ring_cells} * (MEGA_PRIORITIES + 1));
    // Each head and each tail on a line of its own.
    words.resize(size_t{MEGA_FINISHED_STEP} * (2 * (MEGA_PRIORITIES + 1) + options.workers) + MEGA_FINISHED_STEP);
    argument_words.resize(size_t{stride} * options.slots);
    hands = std::make_unique<MegaHand[]>(options.workers);
    for (uint32_t k = 0; k < options.workers; ++k) {
        hands[k].op_items = std::make_unique<std::atomic<uint64_t>[]>(ops.size());
        hands[k].op_work = std::make_unique<std::atomic<uint64_t>[]>(ops.size());
    }
    reset_tables();
}

void MegaThreadMemory::reset_tables() {
    const uint32_t mode = control.mode;
    control = {};
    control.mode = mode;
    std::fill(slots.begin(), slots.end(), MegaSlot{});
    std::fill(submissions.begin(), submissions.end(), MegaSubmission{});
    std::fill(cells.begin(), cells.end(), MegaCell{});
    std::vector<uint32_t> counts;  // are of all time
    if (queue.finished) counts.assign(queue.finished, queue.finished + options.workers * MEGA_FINISHED_STEP);
    std::fill(words.begin(), words.end(), 0);
    uint32_t* line = words.data();
    while (reinterpret_cast<uintptr_t>(line) % 64) ++line;
    const uint32_t ring_cells = uint32_t(cells.size() / (MEGA_PRIORITIES + 1));
    const auto next_ring = [&](uint32_t number) {
        MegaRing ring = {line, line + MEGA_FINISHED_STEP, &cells[size_t{number} * ring_cells], ring_cells - 1};
        line += 2 * MEGA_FINISHED_STEP;
        return ring;
    };
    queue.inbox = next_ring(MEGA_PRIORITIES);
    for (uint32_t level = 0; level < MEGA_PRIORITIES; ++level) queue.ready[level] = next_ring(level);
    queue.finished = line;
    std::copy(counts.begin(), counts.end(), line);
    for (uint32_t k = 0; k < options.workers; ++k) queue.finished[k * MEGA_FINISHED_STEP] = MEGA_NOTHING;
    queue.control = &control;
    queue.slots = slots.data();
    queue.submissions = submissions.data();
    queue.edges = edges.data();
    queue.slots_count = queue.submissions_count = options.slots;
    queue.edges_count = uint32_t(edges.size());
    queue.workers = options.workers;
}

void MegaThreadMemory::grow_edges(uint32_t count) {
    edges.resize(count);
    queue.edges = edges.data();
    queue.edges_count = count;
}

bool MegaThreadMemory::has_work() const {
    if (__atomic_load_n(&control.mode, __ATOMIC_SEQ_CST) != uint32_t(MegaQueueMode::Running)) return true;
    if (has_any(queue.inbox)) return true;
    for (uint32_t ring = 0; ring < mega_rings(queue); ++ring) {
        if (has_any(queue.ready[ring])) return true;
    }
    return false;
}

// --------------------------------------------------------------------------------------------- working

struct MegaThreadMemory::Turn {
    Turn(const MegaThreadMemory& memory, uint32_t own_number)
        : worker(memory.queue, own_number, memory.options.retry_limit), pointers(memory.stride), number(own_number),
          random(uint32_t(memory.options.delay_seed * 7919 + own_number + 1)), dawdles(memory.options.delay_seed != 0) {
        launch.lanes[1] = launch.lanes[2] = 1;
    }

    MegaWorker<Atomics> worker;
    brickline_launch launch = {};
    std::vector<void*> pointers;
    uint32_t submission = MEGA_NOTHING, order = 0;  // that `launch` is of
    uint64_t now = 0, free_since = 0;
    uint32_t number;
    std::minstd_rand random;
    bool dawdles;

    void dawdle() {
        if (!dawdles) return;
        const uint32_t draw = uint32_t(random());
        if (draw % 4 == 0) ::sched_yield();
        for (uint32_t k = draw / 4 % 512; k > 0; --k) relax();
    }
};

void MegaThreadMemory::work(std::shared_ptr<MegaThreadMemory> memory, uint32_t number) {
    char name[16];
    std::snprintf(name, sizeof name, "brickline-q%u", number);
    ::pthread_setname_np(::pthread_self(), name);
    MegaThreadMemory& self = *memory;
    Turn turn(self, number);
    for (uint32_t run = 0;;) {
        const auto is_told = [&] { return self.runs.load(std::memory_order_seq_cst) != run; };
        while (!is_told()) self.gate.sleep(is_told, MEGA_FOREVER);
        run = self.runs.load(std::memory_order_acquire);
        if (self.is_closing.load(std::memory_order_acquire)) return;
        self.execute_until_told(number, turn);
        self.left.fetch_add(1, std::memory_order_seq_cst);
        self.host_bell.ring_all();
    }
}

void MegaThreadMemory::execute_until_told(uint32_t number, Turn& turn) {
    MegaHand& hand = hands[number];
    turn.now = turn.free_since = clock.now();
    turn.submission = MEGA_NOTHING;  // its place may be another's since
    const uint32_t expired = uint32_t(MegaQueueMode::Expired), running = uint32_t(MegaQueueMode::Running);
    for (;;) {
        if (turn.now >= deadline_tick.load(std::memory_order_relaxed)) [[unlikely]]
            Atomics::replace(&control.mode, running, expired);
        turn.dawdle();
        const MegaRound round = turn.worker.round(
            [&](uint32_t slot, const MegaSlot& item) { return execute(turn, hand, slot, item); },
            [&](uint32_t code) { return is_retried(code); },
            [&] {
                turn.dawdle();
                if (bell.has_sleepers() && has_work()) bell.ring_one();
            });
        tell_host(turn.worker.open());
        if (round == MegaRound::Left) break;
        if (round != MegaRound::Idle) [[likely]] continue;
        rest(turn, hand);
    }
}

uint32_t MegaThreadMemory::execute(Turn& turn, MegaHand& hand, uint32_t slot, const MegaSlot& item) {
    const MegaSubmission& submission = queue.submissions[item.submission];
    if (submission.op >= ops.size() || !ops[submission.op].function) [[unlikely]] return MEGA_FAULT_UNKNOWN_OP;
    brickline_launch& launch = turn.launch;
    if (turn.submission != item.submission || turn.order != submission.order) {
        turn.submission = item.submission;
        turn.order = submission.order;
        uint64_t* const values = &argument_words[size_t{item.submission} * stride];
        for (uint32_t k = 0; k < ops[submission.op].arguments; ++k) turn.pointers[k] = values + k;
        launch.arguments = turn.pointers.data();
        std::copy_n(submission.grid, 3, launch.grid);
        launch.lanes[0] = submission.lanes;
        launch.shared_bytes = submission.shared_bytes;
        launch.shared = submission.shared_bytes ? host_scratch().of(submission.shared_bytes) : nullptr;
    }
    if (launch.shared_bytes && !launch.shared) [[unlikely]] return PLAN_NO_MEMORY;
    uint32_t code = 0;
    launch.first = item.block;
    launch.last = uint64_t{item.block} + 1;
    launch.fault = &code;
    const uint64_t begin = clock.now();
    hand.slot.store(slot, std::memory_order_relaxed);
    hand.since.store(begin, std::memory_order_relaxed);
    hand.inside.store(1, std::memory_order_release);
    ops[submission.op].function(&launch);
    turn.now = clock.now();
    const uint64_t ticks = turn.now - begin;
    add(hand.items, uint64_t{1});
    add(hand.work, ticks);
    add(hand.op_items[submission.op], uint64_t{1});
    add(hand.op_work[submission.op], ticks);
    if (options.is_recorded) {
        if (hand.records.size() < MAX_RECORDS) {
            hand.records.push_back({turn.free_since, begin, turn.now, submission.order, item.block, turn.number});
        } else {
            ++hand.dropped_records;
        }
    }
    hand.inside.store(0, std::memory_order_release);  // who hung and is back has written its record
    turn.free_since = turn.now;
    return code;
}

// Nothing to do: watches a while, gives way to others, sleeps.
void MegaThreadMemory::rest(Turn& turn, MegaHand& hand) {
    const bool is_waiting = __atomic_load_n(&control.open, __ATOMIC_RELAXED) != 0;
    const uint64_t watch = uint64_t(WATCH_NS / ns_per_tick), yield = uint64_t(YIELD_NS / ns_per_tick);
    const uint64_t from = clock.now();
    for (;;) {
        for (int k = 0; k < 8 && !has_work(); ++k) relax();
        turn.now = clock.now();
        if (has_work() || turn.now >= deadline_tick.load(std::memory_order_relaxed)) break;
        if (turn.now - from < watch) continue;
        if (turn.now - from < yield) {
            ::sched_yield();
            continue;
        }
        bell.sleep([&] { return has_work() || is_closing.load(std::memory_order_relaxed); },
                   deadline_ns.load(std::memory_order_relaxed));
        turn.now = clock.now();
        break;
    }
    add(is_waiting ? hand.wait : hand.idle, turn.now - from);
    if (!is_waiting) turn.free_since = turn.now;
}

void MegaThreadMemory::tell_host(MegaOpen open) {
    if (open.most == 0) return;
    platform::hold_up();
    const uint32_t wanted = wake_at.load(std::memory_order_seq_cst);
    if (wanted != MEGA_NOTHING && open.most > wanted && open.fewest <= wanted) host_bell.ring_all();
}

bool MegaThreadMemory::is_retried(uint32_t code) const {
    const std::vector<uint32_t>& codes = options.retry_codes;
    return std::find(codes.begin(), codes.end(), code) != codes.end();
}

}  // namespace brickline
