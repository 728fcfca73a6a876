#include "plan_threads.h"

#include <algorithm>

#include "clock.h"
#include "host_scratch.h"

namespace brickline {
namespace {

using HostFunction = void (*)(const brickline_launch*);

constexpr float CHUNK_NS = 4000;         // a chunk takes at least as long, where that is known
constexpr uint64_t WORTH_WAKING_NS = 20000;
constexpr uint64_t WORTH_SHARING_NS = 20000;  // a whole plan, and beside it
constexpr uint64_t HAND_OFF_NS = 1000;        // for each of its launches

void lower(std::atomic<uint64_t>& value, uint64_t to) {
    uint64_t found = value.load(std::memory_order_relaxed);
    while (to < found && !value.compare_exchange_weak(found, to, std::memory_order_acq_rel)) {}
}

uint64_t fault_of(uint64_t place, uint32_t code) { return place << 32 | code; }

}  // namespace

PlanThreads::PlanThreads(PlanProgram& program) : m_program(program), m_nodes(new Node[program.size()]) {
    const uint32_t count = program.size();
    std::vector<uint32_t> dependents(count);
    for (uint32_t i = 0; i < count; ++i) {
        const std::vector<uint32_t>& all = program.dependencies(i);
        m_nodes[i].dependencies = uint32_t(all.size());
        for (const uint32_t each : all) ++dependents[each];
        if (all.empty()) m_roots.push_back(i);
        // Not a chain: launch i need not wait for the one before it.
        m_can_overlap |= i > 0 && (all.empty() || all.back() != i - 1);
        m_can_overlap |= (program.launch(i).flags & PLAN_MAY_SPLIT) != 0;
    }
    uint32_t first = 0;
    for (uint32_t i = 0; i < count; ++i) {
        m_nodes[i].first_dependent = m_nodes[i].last_dependent = first;
        first += dependents[i];
    }
    m_dependents.resize(first);
    for (uint32_t i = 0; i < count; ++i) {
        for (const uint32_t each : program.dependencies(i)) m_dependents[m_nodes[each].last_dependent++] = i;
    }
    m_finished.resize(count);
    reset();
}

void PlanThreads::reset() {
    for (uint32_t i = 0; i < m_program.size(); ++i) m_nodes[i].pending = m_nodes[i].dependencies;
}

// ------------------------------------------------------------------------------------- choosing a way

PlanOutcome PlanThreads::run(uint32_t threads, PlanWay way, PlanStop* stop) {
    ++m_run;
    threads = std::min(threads, WorkerPool::MAX_WORKERS + 1);
    if (threads < 2 || !m_can_overlap) return run_alone(stop);
    const uint64_t worth_ns = WORTH_SHARING_NS + HAND_OFF_NS * m_program.size();
    if (way != PlanWay::Shared && m_total_ns && m_total_ns < worth_ns) return run_alone(stop);
    if (threads != m_threads) prepare(threads);
    return run_together(stop);
}

PlanOutcome PlanThreads::run_alone(PlanStop* stop) {
    const bool is_measured = m_run % 16 == 1;  // now and then, so that a plan which grows is noticed
    const uint64_t begin_ns = is_measured ? monotonic_ns() : 0;
    const PlanOutcome outcome = m_program.run_serial(0, 0, m_program.size(), stop);
    if (is_measured && !outcome.code && !outcome.is_stopped) m_total_ns = monotonic_ns() - begin_ns;
    m_is_alone = true;
    m_done_alone = outcome.done;
    return outcome;
}

void PlanThreads::prepare(uint32_t threads) {
    m_threads = threads;
    uint32_t entries = m_program.size();
    for (uint32_t i = 0; i < m_program.size(); ++i) {
        if (m_program.launch(i).flags & PLAN_MAY_SPLIT) entries += threads - 1;
    }
    if (entries <= m_queue_size) return;
    m_queue.reset(new std::atomic<uint64_t>[entries]());
    m_queue_size = entries;
}

PlanOutcome PlanThreads::run_together(PlanStop* stop) {
    if (m_is_running) reset();  // in a forked child
    m_is_running = true;
    m_is_alone = false;
    m_head.store(0, std::memory_order_relaxed);
    m_tail.store(0, std::memory_order_relaxed);
    m_done.store(0, std::memory_order_relaxed);
    m_fault.store(NO_FAULT, std::memory_order_relaxed);
    m_busy_ns.store(0, std::memory_order_relaxed);
    m_is_stopped.store(false, std::memory_order_relaxed);
    const uint64_t now_ns = monotonic_ns();
    m_last_wake_ns.store(now_ns, std::memory_order_relaxed);
    m_stop = stop;
    m_ask_ns = stop ? now_ns + stop->interval_ns() : Doorbell::FOREVER;
    for (const uint32_t root : m_roots) {
        make_ready(root);
        for (uint32_t k = copies(m_nodes[root]); k > 0; --k) push(root);
    }
    {
        const WorkerPool::Help others(WorkerPool::instance(), *this, m_threads - 1);
        help(0);
    }
    m_is_running = false;
    const PlanOutcome found = outcome();
    if (!found.code && !found.is_stopped) m_total_ns = m_busy_ns.load(std::memory_order_relaxed);
    return found;
}

PlanOutcome PlanThreads::outcome() const {
    PlanOutcome found;
    const uint64_t fault = m_fault.load(std::memory_order_relaxed);
    if (m_is_stopped.load(std::memory_order_relaxed)) {
        found.is_stopped = true;
        found.done = uint32_t(std::count(m_finished.begin(), m_finished.end(), m_run));
    } else if (fault == NO_FAULT) {
        found.done = m_program.size();
    } else {
        found.done = uint32_t(fault >> 32);
        found.where = int32_t(fault >> 32);
        found.code = uint32_t(fault);
    }
    return found;
}

// ------------------------------------------------------------------------------------- ready launches

float PlanThreads::estimate_ns(uint32_t launch) const {
    return m_nodes[launch].block_ns.load(std::memory_order_relaxed) * float(m_program.launch(launch).host.last);
}

// Nobody else touches a launch that waits for nothing and is not yet in the queue.
void PlanThreads::make_ready(uint32_t launch) {
    Node& node = m_nodes[launch];
    const PlanLaunch& planned = m_program.launch(launch);
    const uint64_t blocks = planned.host.last;
    node.pending.store(node.dependencies, std::memory_order_relaxed);
    uint64_t chunks = 1;
    if (blocks > 1 && (planned.flags & PLAN_MAY_SPLIT)) {
        chunks = std::min<uint64_t>(blocks, 4 * m_threads);
        const float most = estimate_ns(launch) / CHUNK_NS;
        if (most > 0 && most < float(chunks)) chunks = std::max<uint64_t>(uint64_t(most), 1);
    }
    node.chunk_blocks = (blocks + chunks - 1) / chunks;
    node.chunks = uint32_t((blocks + node.chunk_blocks - 1) / node.chunk_blocks);
    node.next.store(0, std::memory_order_relaxed);
    node.remaining.store(node.chunks, std::memory_order_relaxed);
    node.fault.store(NO_FAULT, std::memory_order_relaxed);
    node.busy_ns.store(0, std::memory_order_relaxed);
    node.is_skipped.store(false, std::memory_order_relaxed);
}

uint32_t PlanThreads::copies(const Node& node) const { return std::min(node.chunks, m_threads); }

void PlanThreads::push(uint32_t launch) {
    const uint32_t at = m_tail.fetch_add(1, std::memory_order_relaxed);
    m_queue[at].store(uint64_t(m_run) << 32 | launch, std::memory_order_release);
}

uint32_t PlanThreads::pop() {
    uint32_t head = m_head.load(std::memory_order_relaxed);
    while (head < m_tail.load(std::memory_order_relaxed)) {
        const uint64_t entry = m_queue[head].load(std::memory_order_acquire);
        if (entry >> 32 != m_run) return NOTHING;  // its writer is about to ring
        if (m_head.compare_exchange_weak(head, head + 1, std::memory_order_relaxed)) return uint32_t(entry);
    }
    return NOTHING;
}

bool PlanThreads::has_queued() const {
    return m_head.load(std::memory_order_relaxed) < m_tail.load(std::memory_order_relaxed);
}

// Waking a thread costs about as much as a small launch, so it has to pay.
void PlanThreads::wake_others(uint32_t launch, uint64_t now_ns) {
    if (!m_bell.has_sleepers() || !has_queued()) return;
    const float estimate = estimate_ns(launch);
    const bool is_long = estimate == 0 || estimate > float(WORTH_WAKING_NS);
    if (!is_long && now_ns - m_last_wake_ns.load(std::memory_order_relaxed) < WORTH_WAKING_NS) return;
    m_last_wake_ns.store(now_ns, std::memory_order_relaxed);
    m_bell.ring(m_threads);
}

// ------------------------------------------------------------------------------------------- working

void PlanThreads::help(uint32_t worker) {
    const uint64_t shared_bytes = m_program.shared_bytes();
    Hand hand = {worker, host_scratch().of(shared_bytes), monotonic_ns()};
    if (shared_bytes && !hand.shared && worker != 0) return;  // the others do it
    while (!is_over()) {
        const uint32_t seen = m_bell.seen();
        uint32_t launch = pop();
        if (launch == NOTHING) {
            if (is_over()) break;
            m_bell.wait(seen, worker == 0 ? m_ask_ns : Doorbell::FOREVER);
            hand.now_ns = monotonic_ns();
            ask(hand);
            continue;
        }
        while (launch != NOTHING) {
            wake_others(launch, hand.now_ns);
            launch = execute(launch, hand);
        }
    }
}

// Only the calling thread asks whether to stop; the others find its answer.
void PlanThreads::ask(Hand& hand) {
    if (hand.worker != 0 || hand.now_ns < m_ask_ns) [[likely]] return;
    const bool is_stopped = m_stop->is_wanted();
    if (is_stopped) m_is_stopped.store(true, std::memory_order_relaxed);
    hand.shared = host_scratch().of(m_program.shared_bytes());  // who was asked may have used it, too
    hand.now_ns = monotonic_ns();
    m_ask_ns = is_stopped ? Doorbell::FOREVER : hand.now_ns + m_stop->interval_ns();
}

// Takes chunks of a launch until none is left; returns a launch to go on with.
uint32_t PlanThreads::execute(uint32_t launch, Hand& hand) {
    Node& node = m_nodes[launch];
    brickline_launch local = m_program.launch(launch).host;
    const bool is_timed = m_program.is_timed();
    for (;;) {
        ask(hand);
        local.shared = hand.shared;
        const uint64_t chunk = node.chunks == 1 ? 0 : node.next.fetch_add(1, std::memory_order_relaxed);
        if (chunk >= node.chunks) return NOTHING;
        if (is_timed && chunk == 0) {
            m_program.times()[launch].worker = hand.worker;
            m_program.times()[launch].start_ns = hand.now_ns;
        }
        execute_chunk(launch, chunk, local);
        const uint64_t before_ns = hand.now_ns;
        hand.now_ns = monotonic_ns();
        uint64_t busy_ns = hand.now_ns - before_ns;
        if (node.chunks > 1) {
            node.busy_ns.fetch_add(busy_ns, std::memory_order_relaxed);
            if (node.remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
            busy_ns = node.busy_ns.load(std::memory_order_relaxed);
        }
        if (is_timed) m_program.times()[launch].end_ns = hand.now_ns;
        return complete(launch, busy_ns);
    }
}

void PlanThreads::execute_chunk(uint32_t launch, uint64_t chunk, brickline_launch& local) {
    Node& node = m_nodes[launch];
    // After a stop everything is left out; after a fault what follows it in the plan, and nothing else.
    const bool is_stopped = m_is_stopped.load(std::memory_order_relaxed);
    const uint64_t fault = m_fault.load(std::memory_order_relaxed);
    const uint64_t own_fault = node.fault.load(std::memory_order_relaxed);
    if (is_stopped || fault >> 32 < launch || own_fault >> 32 < chunk) [[unlikely]] {
        node.is_skipped.store(true, std::memory_order_relaxed);
        return;
    }
    uint32_t code = 0;
    if (local.shared_bytes && !local.shared) [[unlikely]] {
        code = PLAN_NO_MEMORY;
    } else {
        const PlanLaunch& planned = m_program.launch(launch);
        local.first = chunk * node.chunk_blocks;
        local.last = std::min(local.first + node.chunk_blocks, planned.host.last);
        local.fault = &code;
        reinterpret_cast<HostFunction>(planned.function)(&local);
    }
    if (code) [[unlikely]] lower(node.fault, fault_of(chunk, code));
}

uint32_t PlanThreads::complete(uint32_t launch, uint64_t busy_ns) {
    Node& node = m_nodes[launch];
    const uint64_t fault = node.fault.load(std::memory_order_relaxed);
    if (fault != NO_FAULT) [[unlikely]] lower(m_fault, fault_of(launch, uint32_t(fault)));
    else if (!node.is_skipped.load(std::memory_order_relaxed)) [[likely]] {
        m_finished[launch] = m_run;
        const float block_ns = float(busy_ns) / float(m_program.launch(launch).host.last);
        const float known_ns = node.block_ns.load(std::memory_order_relaxed);
        node.block_ns.store(known_ns > 0 ? 0.75f * known_ns + 0.25f * block_ns : block_ns,
                            std::memory_order_relaxed);
        m_busy_ns.fetch_add(busy_ns, std::memory_order_relaxed);
    }
    uint32_t own = NOTHING, pushed = 0;
    for (uint32_t k = node.first_dependent; k < node.last_dependent; ++k) {
        const uint32_t dependent = m_dependents[k];
        if (m_nodes[dependent].pending.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        make_ready(dependent);
        uint32_t entries = copies(m_nodes[dependent]);
        if (own == NOTHING) {
            own = dependent;
            --entries;
        }
        pushed += entries;
        for (; entries > 0; --entries) push(dependent);
    }
    if (m_done.fetch_add(1, std::memory_order_acq_rel) + 1 == m_program.size()) m_bell.ring(~0u >> 1);
    else if (pushed) m_bell.ring(0);
    return own;
}

}  // namespace brickline
