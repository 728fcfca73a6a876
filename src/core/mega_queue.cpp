#include "mega_queue.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "clock.h"
#include "mega_queue_publisher.h"
#include "mega_queue_threads.h"

namespace brickline {
namespace {

using Atomics = platform::Atomics;

constexpr uint64_t ASK_NS = 50'000'000;  // between two looks whether to stop

constexpr auto NONE = [](uint32_t) { return 0u; };
constexpr auto HALF = [](uint32_t open) { return open / 2; };
constexpr auto ONE_LESS = [](uint32_t open) { return open ? open - 1 : 0; };

std::atomic<uint32_t> g_forks{0};  // of this process since its ancestor loaded this code

uint32_t forks() {
    static const int registered = ::pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
    (void)registered;
    return g_forks.load(std::memory_order_relaxed);
}

void check_options(const MegaQueueOptions& options) {
    const auto refuse = [](const char* expected, uint64_t got) {
        throw std::invalid_argument(std::string("expected ") + expected + ", got " + std::to_string(got));
    };
    if (options.workers < 1 || options.workers > MegaQueueOptions::MAX_WORKERS)
        refuse("1 to 4095 workers", options.workers);
    if (options.slots < 1 || options.slots > MEGA_MAX_SLOTS_OF_QUEUE) refuse("1 to 16777216 slots", options.slots);
    if (options.retry_limit >= 1u << 24) refuse("fewer than 16777216 retries", options.retry_limit);
}

std::unique_ptr<MegaQueueWorkers> threads_of(const MegaQueueOptions& options, const std::vector<MegaQueueOp>& ops) {
    check_options(options);
    if (options.workers > MegaQueueOptions::MAX_THREADS)
        throw std::invalid_argument("expected 1 to 255 threads, got " + std::to_string(options.workers));
    return std::make_unique<MegaQueueThreads>(options, ops);
}

}  // namespace

// --------------------------------------------------------------------------------------------- its life

MegaQueueEngine::MegaQueueEngine(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops)
    : MegaQueueEngine(options, ops, threads_of(options, ops)) {}

MegaQueueEngine::MegaQueueEngine(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops,
                                 std::unique_ptr<MegaQueueWorkers> workers)
    : m_workers(std::move(workers)), m_made_at_fork(forks()), m_before(m_workers->count()), m_ops_before(ops.size()),
      m_grace_ns(options.grace_ns) {
    check_options(options);
    m = std::make_unique<MegaPublisher>(options, std::move(ops), *m_workers);
    run_on();
}

MegaQueueEngine::~MegaQueueEngine() {
    if (is_foreign()) m_workers->forget();
    else close();
}

MegaQueueWait MegaQueueEngine::close() {
    if (m_is_dead) return MegaQueueWait::Hung;
    m_workers->stop();
    const MegaQueueWait waited = wait_for_workers();
    if (waited != MegaQueueWait::Hung) m_workers->end(false);
    return waited;
}

// ---------------------------------------------------------------------------------------------- waiting

// Lets workers that have left at a deadline begin again.
MegaQueueWait MegaQueueEngine::run_on() {
    if (m_is_running && m_workers->mode() == MegaQueueMode::Running) return MegaQueueWait::Done;
    if (m_is_dead) return MegaQueueWait::Hung;
    if (m_workers->mode() == MegaQueueMode::Stopped) return wait_for_workers();
    if (m_is_running) {
        const MegaQueueWait waited = wait_for_workers();
        if (waited != MegaQueueWait::Expired) return waited;
    }
    m_workers->go_on();
    m_is_running = true;
    return MegaQueueWait::Done;
}

// Waits while workers work. Expired: the moment came, whatever the workers do. Of so many open submissions
// `enough` says how few are worth waking up for.
template <class Condition, class Enough>
MegaQueueWait MegaQueueEngine::wait_for(Condition is_done, Enough enough, uint64_t until_ns, PlanStop* stop) {
    uint64_t ask_ns = monotonic_ns() + ASK_NS;
    for (;;) {
        m->collect();
        if (is_done()) return MegaQueueWait::Done;
        if (m_workers->mode() != MegaQueueMode::Running) return wait_for_workers();
        const uint64_t now_ns = monotonic_ns();
        if (now_ns >= until_ns) return MegaQueueWait::Expired;
        if (stop && now_ns >= ask_ns) {
            if (stop->is_wanted()) return MegaQueueWait::Interrupted;
            ask_ns = monotonic_ns() + ASK_NS;
        }
        ++m_waits;
        m_workers->sleep_until_open(enough(m_workers->open()), std::min(until_ns, stop ? ask_ns : FOREVER));
        if (!m_workers->failure().empty()) return give_up();
    }
}

// Workers have been told to leave; one that does not makes the engine dead.
MegaQueueWait MegaQueueEngine::wait_for_workers() {
    const uint64_t until_ns = monotonic_ns() + m_grace_ns;
    while (m_is_running && !m_workers->have_left()) {
        if (monotonic_ns() >= until_ns || !m_workers->failure().empty()) return give_up();
        ++m_waits;
        m_workers->sleep_until_left(until_ns);
    }
    if (!m_workers->failure().empty()) return give_up();
    m_is_running = false;
    m->collect();
    return m_workers->mode() == MegaQueueMode::Stopped ? MegaQueueWait::Stopped : MegaQueueWait::Expired;
}

MegaQueueWait MegaQueueEngine::give_up() {
    if (m_workers->failure().empty()) m->collect();  // what was done until now
    m_is_dead = true;
    m_workers->end(true);
    return MegaQueueWait::Hung;
}

MegaQueueWait MegaQueueEngine::make_room(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop) {
    if (!m->has_room(batch)) {
        const MegaQueueWait waited = wait_for([&] { return m->has_room(batch); }, HALF, until_ns, stop);
        if (waited != MegaQueueWait::Done) return waited;
    }
    if (m->has_rows(batch)) [[likely]] return MegaQueueWait::Done;
    const MegaQueueWait waited = wait_for([&] { return m->is_empty(); }, NONE, until_ns, stop);
    if (waited == MegaQueueWait::Done) m->forget();
    return waited;
}

MegaQueueWait MegaQueueEngine::make_room_for_edges() {
    if (m->has_edges()) [[likely]] return MegaQueueWait::Done;
    const auto is_done = [&] { return m->has_edges() || m_workers->open() == 0; };
    const MegaQueueWait waited = wait_for(is_done, HALF, FOREVER, nullptr);
    if (waited == MegaQueueWait::Done && !m->has_edges()) m->grow_edges();
    return waited;
}

// ------------------------------------------------------------------------------------------ what is done

MegaPublished MegaQueueEngine::publish(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop) {
    m->collect();
    if (m_is_dead || m_workers->mode() == MegaQueueMode::Stopped) return {MegaRefused::State};
    MegaPublished found = m->check(batch);
    if (found.refused != MegaRefused::None) return found;
    found.wait = run_on();
    if (found.wait == MegaQueueWait::Done) found.wait = make_room(batch, until_ns, stop);
    if (found.wait != MegaQueueWait::Done) {
        found.refused = found.wait == MegaQueueWait::Stopped || found.wait == MegaQueueWait::Hung
                            ? MegaRefused::State : MegaRefused::Waiting;
        return found;
    }
    const uint64_t plan_ns = monotonic_ns();
    m->plan(batch);
    if (!m->prove(batch)) {
        found.refused = MegaRefused::Broken;
        return found;
    }
    const uint64_t planned_ns = monotonic_ns();
    found.wait = make_room_for_edges();
    if (found.wait != MegaQueueWait::Done) {  // stopped or dead: nothing follows that could miss it
        found.refused = MegaRefused::State;
        return found;
    }
    const uint64_t publish_ns = monotonic_ns();
    found.first = next();
    if (!m->write(batch)) {
        m->is_broken = true;
        found.refused = MegaRefused::Broken;
        return found;
    }
    found.plan_ns = planned_ns - plan_ns;
    found.publish_ns = monotonic_ns() - publish_ns;
    m->totals.plan_ns += found.plan_ns;
    m->totals.publish_ns += found.publish_ns;
    return found;
}

MegaQueueWait MegaQueueEngine::drain(uint64_t deadline_ns, PlanStop* stop) {
    const MegaQueueWait ready = run_on();
    if (ready != MegaQueueWait::Done) return ready;
    m_workers->set_deadline(deadline_ns);
    const auto is_done = [&] { return m_workers->open() == 0; };
    MegaQueueWait waited = wait_for(is_done, NONE, deadline_ns, stop);
    if (waited == MegaQueueWait::Expired && m_is_running) {
        m_workers->expire();  // those that sleep or execute have not looked yet
        waited = wait_for_workers();
    }
    if (waited != MegaQueueWait::Hung && is_done()) {  // the last item ended as the deadline came
        m->collect();
        if (waited == MegaQueueWait::Expired) waited = MegaQueueWait::Done;
    }
    if (waited == MegaQueueWait::Done || waited == MegaQueueWait::Interrupted) m_workers->set_deadline(FOREVER);
    return waited;
}

MegaQueueWait MegaQueueEngine::wait(uint64_t submission, uint64_t until_ns, PlanStop* stop) {
    const MegaQueueWait ready = run_on();
    if (ready != MegaQueueWait::Done) return ready;
    return wait_for([&] { return state_of(submission) != MegaSubmissionState::Open; }, ONE_LESS, until_ns, stop);
}

void MegaQueueEngine::stop() { m_workers->stop(); }

MegaQueueWait MegaQueueEngine::join() {
    if (m_is_dead) return MegaQueueWait::Hung;
    return wait_for_workers();
}

void MegaQueueEngine::clear() {
    if (m_is_running) throw std::logic_error("workers have not left");
    m->collect();
    m->cancel(m_workers->look());
    m_workers->reset();
    run_on();  // else its state says that a time was up
}

void MegaQueueEngine::begin_again() {
    if (open() != 0) throw std::logic_error("submissions are open");
    m_before = m_workers->hands();
    for (MegaWorkerTotals& each : m_before) each.dropped_records = 0;
    m_ops_before = m_workers->op_totals();
    m_workers->forget_records();
    m_traffic_before = m_workers->traffic();
    m_waits = 0;
    m->forget();
    m->forget_totals();
}

// ------------------------------------------------------------------------------------------ what is seen

MegaQueueState MegaQueueEngine::state() const {
    return m_is_dead ? MegaQueueState::Dead : MegaQueueState(uint32_t(m_workers->mode()));
}
bool MegaQueueEngine::is_foreign() const { return m_made_at_fork != forks(); }
uint64_t MegaQueueEngine::open() const { return m_workers->open(); }
uint32_t MegaQueueEngine::free_slots() const { return m->free_slots(); }
void MegaQueueEngine::collect() { m->collect(); }
uint64_t MegaQueueEngine::first() const { return m->first; }
uint64_t MegaQueueEngine::next() const { return m->next(); }
const std::vector<MegaSubmissionRow>& MegaQueueEngine::rows() const { return m->rows; }
const MegaQueueReasons& MegaQueueEngine::waits() const { return m->all_waits; }
const MegaQueueAccesses& MegaQueueEngine::accesses() const { return m->all_accesses; }
const std::vector<MegaItemFault>& MegaQueueEngine::faults() const { return m->faults; }
double MegaQueueEngine::ns_per_tick() const { return m_workers->ns_per_tick(); }
uint64_t MegaQueueEngine::begin_tick() const { return m_workers->begin_tick(); }
uint32_t MegaQueueEngine::workers() const { return m_workers->count(); }
uint64_t MegaQueueEngine::tables_bytes() const { return m_workers->bytes() + m->bytes(); }
std::string MegaQueueEngine::failure() const { return m_workers->failure(); }

uint64_t MegaQueueEngine::bytes(const MegaQueueOptions& options, uint32_t most_arguments) {
    return MegaQueueThreads::bytes_of(options, most_arguments) + MegaPublisher::bytes_of(options);
}

std::vector<MegaSubmissionRow> MegaQueueEngine::rows_now() {
    static const MegaQueue nothing = {};
    return m->rows_now(m->is_empty() ? nothing : m_workers->look());
}

MegaSubmissionState MegaQueueEngine::state_of(uint64_t submission) const {
    if (submission < m->first) {
        const auto found = m->lost.find(submission);
        return found == m->lost.end() ? MegaSubmissionState::Done : found->second;
    }
    if (submission >= next()) return MegaSubmissionState::Open;
    const MegaSubmissionRow& row = m->rows[submission - m->first];
    return row.state == MegaSubmissionState::Alias ? m->rows[row.alias].state : row.state;
}

MegaQueueTotals MegaQueueEngine::totals() {
    MegaQueueTotals found = m->totals;
    found.waits = m_waits;
    found.requeued = 0;
    for (const MegaWorkerTotals& each : hands()) {
        found.requeued += each.requeued;
        found.dropped_records += each.dropped_records;
    }
    return found;
}

std::vector<MegaWorkerTotals> MegaQueueEngine::hands() {
    std::vector<MegaWorkerTotals> all = m_workers->hands();
    for (size_t k = 0; k < all.size(); ++k) {
        MegaWorkerTotals& found = all[k];
        const MegaWorkerTotals& before = m_before[k];
        found.items -= before.items;
        found.skipped -= before.skipped;
        found.requeued -= before.requeued;
        found.work_ticks -= before.work_ticks;
        found.wait_ticks -= before.wait_ticks;
        found.idle_ticks -= before.idle_ticks;
        if (found.is_inside) found.submission = m->number_of(found.order);
    }
    return all;
}

std::vector<MegaOpTotals> MegaQueueEngine::op_totals() {
    std::vector<MegaOpTotals> all = m_workers->op_totals();
    for (size_t op = 0; op < all.size(); ++op) {
        all[op].items -= m_ops_before[op].items;
        all[op].work_ticks -= m_ops_before[op].work_ticks;
    }
    return all;
}

MegaQueueTraffic MegaQueueEngine::traffic() const {
    MegaQueueTraffic found = m_workers->traffic();
    found.uploaded_bytes -= m_traffic_before.uploaded_bytes;
    found.read_back_bytes -= m_traffic_before.read_back_bytes;
    found.reads -= m_traffic_before.reads;
    found.allocations -= m_traffic_before.allocations;
    found.launches -= m_traffic_before.launches;
    found.syncs -= m_traffic_before.syncs;
    return found;
}

std::vector<MegaQueueRecord> MegaQueueEngine::records() { return m_workers->records(); }

std::vector<uint64_t> MegaQueueEngine::take_finished_batches() {
    std::vector<uint64_t> found;
    found.swap(m->finished_batches);
    return found;
}

std::vector<MegaHung> MegaQueueEngine::hung() {
    std::vector<MegaHung> all;
    if (!m_is_dead) return all;
    const MegaQueue& tables = m_workers->look();
    const std::vector<MegaWorkerTotals> seen = hands();
    for (uint32_t k = 0; k < seen.size(); ++k) {
        if (!seen[k].is_inside) continue;
        const MegaSubmission& submission = tables.submissions[tables.slots[seen[k].slot].submission];
        const double ns = double(m_workers->now_tick() - seen[k].since) * ns_per_tick();
        MegaHung each = {k, seen[k].submission, seen[k].block, submission.op, uint64_t(ns),
                         MegaHung::NO_SUBMISSION, 0};
        for (uint32_t edge = Atomics::load(&submission.dependents); edge < MEGA_CLOSED;
             edge = Atomics::peek(&tables.edges[edge].next)) {
            const uint32_t waiter = Atomics::peek(&tables.edges[edge].waiter) & ~MEGA_VALUE;
            each.waiter = std::min(each.waiter, m->number_of(Atomics::peek(&tables.submissions[waiter].order)));
            ++each.waiters;
        }
        if (const uint32_t follower = tables.slots[seen[k].slot].follower; follower != MEGA_NOTHING) {
            const uint32_t joined = tables.slots[follower].submission;
            each.waiter = std::min(each.waiter, m->number_of(Atomics::peek(&tables.submissions[joined].order)));
            ++each.waiters;
        }
        all.push_back(each);
    }
    return all;
}

std::string MegaQueueEngine::problem() {
    const MegaControl& control = *m_workers->look().control;
    const uint32_t count = Atomics::load(&control.violations);
    if (!m->problem.empty()) return m->problem;
    if (!count) return m->is_broken ? "a batch could not be written" : "";
    return std::to_string(count) + " steps found a slot in a state that they must not find, first slot " +
           std::to_string(control.violated_slot) + " in state " + std::to_string(control.violated_state);
}

}  // namespace brickline
