#include "mega_cpu.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "host_scratch.h"

namespace brickline {
namespace {

using HostFunction = void (*)(const brickline_launch*);

constexpr uint64_t NO_FAULT = ~0ull;
constexpr uint64_t WATCH_ROUNDS = 64;     // without giving way
constexpr uint64_t YIELD_NS = 100000;     // until then others go first; later it sleeps
constexpr long SLEEP_NS = 10'000'000;     // at most, to look at the clock again

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// What a worker writes and the host may read at any moment.
template <class T>
void put(T& field, T value) {
    std::atomic_ref<T>(field).store(value, std::memory_order_relaxed);
}
template <class T>
T get(T& field) {
    return std::atomic_ref<T>(field).load(std::memory_order_relaxed);
}

void lower(std::atomic<uint64_t>& value, uint64_t to) {
    uint64_t found = value.load(std::memory_order_relaxed);
    while (to < found && !value.compare_exchange_weak(found, to, std::memory_order_relaxed)) {}
}

}  // namespace

// A worker's list, and how far it is.
struct alignas(64) MegaCpu::Cursor {
    std::atomic<bool> is_held{false};   // by the thread that works on it
    std::atomic<bool> has_left{false};
    alignas(64) bool has_begun = false;  // from here on nobody else looks
    bool has_entered = false;           // the entry at `at`
    bool has_fault = false;             // in this region
    uint32_t worker = 0;
    uint32_t at = 0, end = 0;           // in the program's lists
    uint32_t task = 0;
    uint32_t first = 0, last = 0;       // blocks of its part
    uint32_t next = 0;                  // the next block
    uint32_t wait = 0;                  // the next wait that is looked at
    uint64_t begin = 0, ready = 0;      // ticks; the second is 0 outside of items, and read by the host
    uint64_t random = 0;
    MegaProgress progress = {};

    bool hold() {
        return !is_held.load(std::memory_order_relaxed) && !is_held.exchange(true, std::memory_order_acquire);
    }
    void let_go() { is_held.store(false, std::memory_order_release); }
};

// A thread at work.
struct MegaCpu::Hand {
    PlanStop* stop;  // of the calling thread
    StopClock clock;
    uint64_t idle = 0;     // rounds
    uint64_t idle_ns = 0;  // since when

    explicit Hand(PlanStop* asked) : stop(asked), clock(asked) {}
};

MegaCpu::MegaCpu(MegaProgram& program)
    : m_program(program), m_workers(program.workers()), m_ns_per_tick(measure_ns_per_tick(m_clock)),
      m_cursors(new Cursor[program.workers()]) {}

MegaCpu::~MegaCpu() {
    if (m_is_dead) m_crew.wait(Doorbell::FOREVER);
}

// ------------------------------------------------------------------------------------------- one run

MegaOutcome MegaCpu::run(const MegaOptions& options) {
    MegaOutcome refused;
    refused.problem = m_is_dead ? "the engine is dead: an item of an earlier run has not returned"
                                : prepare(options);
    if (!refused.problem.empty()) return refused;
    bool has_ended = true;
    if (options.deadline_ns || (options.is_watched && m_last_ns >= SHORT_NS)) {
        if (!m_crew.begin(*this, m_workers)) {
            refused.problem = "the machine gives no threads";  // it counts as cut off: counters are made anew
            return refused;
        }
        has_ended = run_watched();
    } else {
        run_along();
    }
    m_is_running = false;
    m_is_dead = !has_ended;
    return outcome(has_ended);
}

std::string MegaCpu::prepare(const MegaOptions& options) {
    m_asked_ns = monotonic_ns();
    std::string problem = m_program.refresh();
    if (!problem.empty()) return problem;
    m_options = options;
    if (m_seen != m_program.structure_version() || m_is_running) make_room();
    m_is_running = true;
    m_set = 1 - m_set;
    if (m_has_faults.exchange(false, std::memory_order_relaxed)) forget_faults();
    m_records.assign(options.is_recorded ? m_program.lists().size() : 0, {});
    m_begin_ns = monotonic_ns();
    const uint64_t begin = m_clock.now();
    for (uint32_t w = 0; w < m_workers; ++w) {
        Cursor& cursor = m_cursors[w];
        cursor.is_held.store(false, std::memory_order_relaxed);
        cursor.has_left.store(false, std::memory_order_relaxed);
        cursor.has_begun = cursor.has_entered = cursor.has_fault = false;
        cursor.worker = w;
        cursor.at = m_program.list_begin()[w];
        cursor.end = m_program.list_begin()[w + 1];
        cursor.random = options.delay_seed + w * 0x9e3779b97f4a7c15ull;
        cursor.ready = 0;
        cursor.progress = {};
        cursor.progress.task = cursor.at < cursor.end ? m_program.lists()[cursor.at] : MEGA_NONE;
        cursor.progress.missing = MEGA_NONE;
        cursor.progress.begin_ns = m_begin_ns;
        cursor.progress.begin = begin;
    }
    m_reason.store(0, std::memory_order_relaxed);
    m_arrivals.store(0, std::memory_order_relaxed);
    m_left.store(0, std::memory_order_relaxed);
    m_deadline_tick = options.deadline_ns ? begin + uint64_t(double(options.deadline_ns) / m_ns_per_tick) : 0;
    return "";
}

void MegaCpu::make_room() {
    m_seen = m_program.structure_version();
    m_last_ns = ~0ull;
    m_tasks = uint32_t(m_program.tasks().size());
    m_counters.reset(new Counter[2 * size_t{m_tasks}]);
    m_states.reset(new TaskState[m_tasks]);
    m_executed.resize(m_program.lists().size());
    m_sleepers.store(0, std::memory_order_relaxed);
    forget_faults();
}

void MegaCpu::forget_faults() {
    for (uint32_t task = 0; task < m_tasks; ++task) {
        m_states[task].fault.store(NO_FAULT, std::memory_order_relaxed);
        m_states[task].faulted.store(0, std::memory_order_relaxed);
        m_states[task].is_skipped.store(false, std::memory_order_relaxed);
    }
}

void MegaCpu::run_along() {
    m_arrivals.store(1, std::memory_order_relaxed);
    Hand hand(m_options.stop);
    if (m_workers == 1) return work(0, hand);
    const WorkerPool::Help others(WorkerPool::instance(), *this, m_workers - 1);
    work(0, hand);
}

// Whether all workers have left.
bool MegaCpu::run_watched() {
    PlanStop* const stop = m_options.stop;
    const uint64_t interval_ns = stop ? stop->interval_ns() : SLEEP_NS;
    uint64_t now_ns = monotonic_ns();
    uint64_t last_ns = m_options.deadline_ns ? now_ns + m_options.deadline_ns + GRACE_NS : Doorbell::FOREVER;
    bool is_ending = false;
    while (!m_crew.wait(std::min(last_ns, now_ns + interval_ns))) {
        now_ns = monotonic_ns();
        if (now_ns >= last_ns) {
            m_is_given_up.store(true, std::memory_order_relaxed);
            end(MegaReason::Deadline);
            return false;
        }
        if (stop && !m_reason.load(std::memory_order_relaxed) && stop->is_wanted()) end(MegaReason::Signal);
        if (!is_ending && m_reason.load(std::memory_order_relaxed)) {
            is_ending = true;
            last_ns = std::min(last_ns, now_ns + GRACE_NS);
        }
    }
    return true;
}

MegaOutcome MegaCpu::outcome(bool has_ended) {
    MegaOutcome found;
    found.reason = MegaReason(m_reason.load(std::memory_order_relaxed));
    found.asked_ns = m_asked_ns;
    found.begin_ns = m_begin_ns;
    found.end_ns = monotonic_ns();
    m_last_ns = found.end_ns - found.begin_ns;
    bool is_whole = true;
    for (uint32_t w = 0; w < m_workers; ++w) {
        Cursor& cursor = m_cursors[w];
        const bool has_left = cursor.has_left.load(std::memory_order_acquire);
        if (!has_left && !has_ended) {  // it ends here as far as anybody can say
            const uint64_t now = m_clock.now(), ready = get(cursor.ready);
            if (ready) put(cursor.progress.work, get(cursor.progress.work) + (now - ready));
            put(cursor.progress.state, uint32_t(MegaState::Hung));
            put(cursor.progress.end_ns, found.end_ns);
            put(cursor.progress.end, now);
        }
        is_whole &= get(cursor.progress.state) == uint32_t(MegaState::Finished);
        found.items += get(cursor.progress.items);
        found.skipped += get(cursor.progress.skipped);
    }
    found.remaining = m_program.items() - found.items;
    found.state = !has_ended ? MegaState::Hung : is_whole ? MegaState::Finished : MegaState::Stopped;
    // It ended by itself before anybody looked; but a signal's exception is there all the same.
    if (is_whole && found.reason != MegaReason::Signal) found.reason = MegaReason::None;
    m_is_finished.assign(m_tasks, true);
    if (!is_whole || m_has_faults.load(std::memory_order_relaxed)) find_finished();
    for (uint32_t task = 0; task < m_tasks; ++task) found.done += m_is_finished[task];
    for (uint32_t task = 0; task < m_tasks && found.where < 0; ++task) {
        if (!m_has_faults.load(std::memory_order_relaxed)) break;
        found.fault = fault(task);
        if (found.fault.code) found.where = int32_t(task);
    }
    return found;
}

void MegaCpu::find_finished() {
    std::vector<uint32_t> parts(m_tasks);
    for (uint32_t w = 0; w < m_workers; ++w) {
        const uint32_t begin = m_program.list_begin()[w];
        const uint32_t position = get(m_cursors[w].progress.position);
        for (uint32_t k = 0; k < position; ++k) ++parts[m_program.lists()[begin + k]];
    }
    for (uint32_t task = 0; task < m_tasks; ++task) {
        const uint32_t other = m_program.computed_by(task);
        m_is_finished[task] = other < task ? m_is_finished[other]
                                           : parts[task] == m_program.tasks()[task].parts && !fault(task).code &&
                                                 !is_skipped(task);
    }
}

// ------------------------------------------------------------------------------------------- threads

void MegaCpu::help(uint32_t) {
    const uint32_t home = m_arrivals.fetch_add(1, std::memory_order_relaxed);
    Hand hand(nullptr);
    if (home < m_workers) work(home, hand);
}

void MegaCpu::work(uint32_t home, Hand& hand) {
    while (!is_over()) {
        if (step_all(home, hand)) hand.idle = 0;
        else rest(home, hand);
    }
}

// The list of its own as far as it goes, and then one entry of each other that nobody is at: those that
// no thread has come for, and those whose thread is busy with another one.
bool MegaCpu::step_all(uint32_t home, Hand& hand) {
    bool has_moved = false;
    for (uint32_t k = 0, w = home; k < m_workers; ++k, w = w + 1 == m_workers ? 0 : w + 1) {
        Cursor& cursor = m_cursors[w];
        if (cursor.has_left.load(std::memory_order_relaxed) || !cursor.hold()) continue;
        Step found = cursor.has_left.load(std::memory_order_relaxed) ? Step::Blocked : step(cursor, hand);
        has_moved |= found != Step::Blocked;
        while (k == 0 && found == Step::Moved) found = step(cursor, hand);
        cursor.let_go();
    }
    return has_moved;
}

// Who signals looks for sleepers after it has changed a counter; who sleeps is counted before it looks
// at the counters for the last time. So either the signaller sees the sleeper, or the sleeper the signal.
void MegaCpu::rest(uint32_t home, Hand& hand) {
    (void)should_stop(hand);
    if (hand.idle++ < WATCH_ROUNDS) {
        relax();
        if (hand.idle == WATCH_ROUNDS) hand.idle_ns = monotonic_ns();
        return;
    }
    if (monotonic_ns() - hand.idle_ns < YIELD_NS) {
        ::sched_yield();
        return;
    }
    const uint32_t seen = m_alarm.load(std::memory_order_seq_cst);
    m_sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (step_all(home, hand)) {
        hand.idle = 0;
    } else if (!is_over() && !m_reason.load(std::memory_order_seq_cst)) {
        const timespec most = {0, SLEEP_NS};
        ::syscall(SYS_futex, &m_alarm, FUTEX_WAIT_PRIVATE, seen, &most, nullptr, 0);
    }
    m_sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void MegaCpu::end(MegaReason reason) {
    uint32_t none = 0;
    if (m_reason.compare_exchange_strong(none, uint32_t(reason), std::memory_order_seq_cst)) wake();
}

void MegaCpu::wake() {
    if (!m_sleepers.load(std::memory_order_seq_cst)) [[likely]] return;
    m_alarm.fetch_add(1, std::memory_order_seq_cst);
    ::syscall(SYS_futex, &m_alarm, FUTEX_WAKE_PRIVATE, ~0u >> 1, nullptr, nullptr, 0);
}

bool MegaCpu::should_stop(Hand& hand) {
    if (m_reason.load(std::memory_order_relaxed)) [[unlikely]] return true;
    if (m_deadline_tick && m_clock.now() >= m_deadline_tick) [[unlikely]] {
        end(MegaReason::Deadline);
        return true;
    }
    if (!hand.stop || !hand.clock.is_due()) [[likely]] return false;
    if (hand.stop->is_wanted()) end(MegaReason::Signal);
    hand.clock.restart();
    return m_reason.load(std::memory_order_relaxed) != 0;
}

// ------------------------------------------------------------------------------------------ one list

MegaCpu::Step MegaCpu::step(Cursor& cursor, Hand& hand) {
    if (!cursor.has_begun) begin(cursor);
    if (cursor.at == cursor.end) return leave(cursor, MegaState::Finished);
    if (!cursor.has_entered) enter(cursor);
    if (should_stop(hand)) return leave(cursor, MegaState::Stopped);
    if (!is_ready(cursor)) return Step::Blocked;
    if (!execute(cursor, hand)) return leave(cursor, MegaState::Stopped);
    finish(cursor);
    return cursor.at == cursor.end ? leave(cursor, MegaState::Finished) : Step::Moved;
}

void MegaCpu::begin(Cursor& cursor) {
    const uint32_t other = 1 - m_set;
    const MegaShare share = mega_share(m_tasks, 0, m_workers, cursor.worker, m_workers);
    for (uint32_t task = share.first; task < share.last; ++task) {
        counter(other, task).value.store(0, std::memory_order_relaxed);
    }
    cursor.has_begun = true;
    cursor.begin = m_clock.now();
    put(cursor.progress.begin, cursor.begin);
    put(cursor.progress.begin_ns, monotonic_ns());
}

void MegaCpu::enter(Cursor& cursor) {
    cursor.task = m_program.lists()[cursor.at];
    const MegaTask& task = m_program.tasks()[cursor.task];
    const MegaShare share = mega_share(task.blocks, task.first_worker, task.parts, cursor.worker, m_workers);
    cursor.first = cursor.next = share.first;
    cursor.last = share.last;
    cursor.wait = 0;
    cursor.has_entered = true;
    // A member of a region waits for the part before it of the same worker, and for nothing else of it.
    if (!(task.flags & MEGA_JOINED)) cursor.has_fault = false;
    put(cursor.progress.task, cursor.task);
    put(cursor.progress.blocks, 0u);
}

bool MegaCpu::is_ready(Cursor& cursor) {
    if (cursor.ready) return true;
    const MegaTask& task = m_program.tasks()[cursor.task];
    for (; cursor.wait < task.waits; ++cursor.wait) {
        const MegaWait& wait = m_program.waits()[task.first_wait + cursor.wait];
        const uint32_t value = counter(m_set, wait.task).value.load(std::memory_order_acquire);
        cursor.has_fault |= mega_is_faulted(value);
        if (mega_arrivals(value) >= wait.parts) continue;
        put(cursor.progress.missing, wait.task);
        put(cursor.progress.arrived, mega_arrivals(value));
        return false;
    }
    put(cursor.progress.missing, MEGA_NONE);
    put(cursor.progress.arrived, 0u);
    put(cursor.ready, task.waits ? m_clock.now() : cursor.begin);
    MegaProgress& progress = cursor.progress;
    put(progress.dependency_wait, progress.dependency_wait + (cursor.ready - cursor.begin));
    return true;
}

// Whether it came to the end of its part.
bool MegaCpu::execute(Cursor& cursor, Hand& hand) {
    MegaProgress& progress = cursor.progress;
    if (cursor.has_fault) [[unlikely]] {
        m_states[cursor.task].is_skipped.store(true, std::memory_order_relaxed);
        put(progress.skipped, progress.skipped + (cursor.last - cursor.next));
        cursor.next = cursor.last;
        return true;
    }
    brickline_launch local = m_program.program().launch(cursor.task).host;
    while (cursor.next < cursor.last) {
        if (m_options.delay_seed) [[unlikely]] dawdle(cursor);
        if (should_stop(hand)) [[unlikely]] return false;
        // Who was asked to stop may have used this thread's memory, and grown it.
        local.shared = host_scratch().of(local.shared_bytes);
        execute_item(cursor, local);
        ++cursor.next;
        put(progress.blocks, progress.blocks + 1);
        put(progress.items, progress.items + 1);
    }
    return true;
}

void MegaCpu::execute_item(Cursor& cursor, brickline_launch& local) {
    uint32_t code = 0;
    if (local.shared_bytes && !local.shared) [[unlikely]] {
        code = PLAN_NO_MEMORY;
    } else {
        local.first = cursor.next;
        local.last = cursor.next + uint64_t{1};
        local.fault = &code;
        reinterpret_cast<HostFunction>(m_program.program().launch(cursor.task).function)(&local);
    }
    if (!code) [[likely]] return;
    cursor.has_fault = true;
    lower(m_states[cursor.task].fault, uint64_t{cursor.next} << 32 | code);
    m_states[cursor.task].faulted.fetch_add(1, std::memory_order_relaxed);
    m_has_faults.store(true, std::memory_order_relaxed);
}

void MegaCpu::finish(Cursor& cursor) {
    const uint64_t now = m_clock.now();
    MegaProgress& progress = cursor.progress;
    write_down(cursor, now);
    put(m_executed[cursor.at], progress.blocks);
    if (m_program.tasks()[cursor.task].flags & MEGA_SIGNALS) {
        if (m_options.delay_seed) [[unlikely]] dawdle(cursor);
        counter(m_set, cursor.task)
            .value.fetch_add(cursor.has_fault ? 1 + MEGA_FAULT_SIGNAL : 1, std::memory_order_seq_cst);
        wake();
    }
    ++cursor.at;
    cursor.has_entered = false;
    cursor.begin = now;
    put(progress.position, progress.position + 1);
}

// A part as far as it was executed. Nobody reads the times of a run that was given up but its caller,
// who may do so now.
void MegaCpu::write_down(Cursor& cursor, uint64_t now) {
    MegaProgress& progress = cursor.progress;
    if (!m_is_given_up.load(std::memory_order_relaxed)) {
        put(progress.work, progress.work + (now - cursor.ready));
        if (!m_records.empty()) {
            m_records[cursor.at] = {cursor.begin, cursor.ready, now, cursor.task, progress.blocks};
        }
    }
    put(cursor.ready, uint64_t{0});
}

MegaCpu::Step MegaCpu::leave(Cursor& cursor, MegaState state) {
    MegaProgress& progress = cursor.progress;
    if (state == MegaState::Finished) {
        put(progress.task, MEGA_NONE);
        put(progress.blocks, 0u);
    } else if (cursor.ready) {
        write_down(cursor, m_clock.now());
    } else if (cursor.has_entered && progress.missing != MEGA_NONE) {
        put(progress.dependency_wait, progress.dependency_wait + (m_clock.now() - cursor.begin));
    }
    if (!m_is_given_up.load(std::memory_order_relaxed)) {
        put(progress.end, m_clock.now());
        put(progress.end_ns, monotonic_ns());
        put(progress.state, uint32_t(state));
    }
    cursor.has_left.store(true, std::memory_order_release);
    m_left.fetch_add(1, std::memory_order_seq_cst);
    wake();
    return Step::Left;
}

void MegaCpu::dawdle(Cursor& cursor) const {
    cursor.random ^= cursor.random << 13;
    cursor.random ^= cursor.random >> 7;
    cursor.random ^= cursor.random << 17;
    if (cursor.random & 3) return;
    if ((cursor.random & 0xfc) == 0) ::sched_yield();
    for (uint64_t rounds = cursor.random >> 16 & 0xff; rounds > 0; --rounds) relax();
}

// ------------------------------------------------------------------------------------- what came of it

MegaProgress MegaCpu::progress(uint32_t worker) const {
    MegaProgress& live = m_cursors[worker].progress;
    MegaProgress out = {};
    out.state = get(live.state);
    out.position = get(live.position);
    out.task = get(live.task);
    out.blocks = get(live.blocks);
    out.items = get(live.items);
    out.skipped = get(live.skipped);
    out.begin_ns = get(live.begin_ns);
    out.end_ns = get(live.end_ns);
    out.begin = get(live.begin);
    out.end = get(live.end);
    out.work = get(live.work);
    out.dependency_wait = get(live.dependency_wait);
    out.missing = get(live.missing);
    out.arrived = get(live.arrived);
    return out;
}

MegaFault MegaCpu::fault(uint32_t task) const {
    const uint64_t found = m_states[task].fault.load(std::memory_order_relaxed);
    if (found == NO_FAULT) return {0, 0};
    return {uint32_t(found), uint32_t(found >> 32)};
}

bool MegaCpu::is_skipped(uint32_t task) const {
    return m_states[task].is_skipped.load(std::memory_order_relaxed);
}

std::vector<uint64_t> MegaCpu::items_executed() const {
    std::vector<uint64_t> executed(m_tasks);
    for (uint32_t w = 0; w < m_workers; ++w) {
        const MegaProgress now = progress(w);
        const uint32_t begin = m_program.list_begin()[w];
        for (uint32_t k = 0; k < now.position; ++k) {
            executed[m_program.lists()[begin + k]] += get(const_cast<uint32_t&>(m_executed[begin + k]));
        }
        if (now.task != MEGA_NONE) executed[now.task] += now.blocks;
    }
    return executed;
}

std::vector<uint64_t> MegaCpu::items_done() const {
    std::vector<uint64_t> done = items_executed();
    for (uint32_t task = 0; task < m_tasks; ++task) {
        done[task] -= m_states[task].faulted.load(std::memory_order_relaxed);
        done[task] = done[m_program.computed_by(task)];
    }
    return done;
}

}  // namespace brickline
