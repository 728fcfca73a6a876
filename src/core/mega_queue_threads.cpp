#include "mega_queue_threads.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>

namespace brickline {
namespace {

using Atomics = platform::Atomics;

constexpr uint32_t NOTHING = MEGA_NOTHING;

// What workers wrote last lies in their caches; asked for early, it is here when it is needed.
constexpr uint32_t AHEAD = 6;
void ask_for(const void* memory) { __builtin_prefetch(memory, 1); }

}  // namespace

uint64_t MegaQueueThreads::bytes_of(const MegaQueueOptions& options, uint32_t most_arguments) {
    uint64_t cells = 2;
    while (cells < options.slots) cells *= 2;
    return options.slots * (sizeof(MegaSlot) + sizeof(MegaSubmission) + 4 * sizeof(MegaEdge) +
                            uint64_t{most_arguments} * 8 + 6 * sizeof(uint32_t)) +
           cells * (MEGA_PRIORITIES + 1) * sizeof(MegaCell) + uint64_t{options.workers} * sizeof(MegaHand);
}

MegaQueueThreads::MegaQueueThreads(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops)
    : m_memory(std::make_shared<MegaThreadMemory>(options, std::move(ops))), m_queue(m_memory->queue) {
    free_all();
    start();
}

MegaQueueThreads::~MegaQueueThreads() {
    if (!m_threads.empty()) end(false);
}

void MegaQueueThreads::start() {
    sigset_t all, mask;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &mask);  // signals are the other threads' business
    try {
        for (uint32_t number = 0; number < m_queue.workers; ++number)
            m_threads.emplace_back(&MegaThreadMemory::work, m_memory, number);
    } catch (...) {
        ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
        end(false);
        throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
}

void MegaQueueThreads::end(bool is_hung) {
    Atomics::exchange(&m_memory->control.mode, uint32_t(MegaQueueMode::Stopped));
    m_memory->is_closing.store(true, std::memory_order_seq_cst);
    m_memory->runs.fetch_add(1, std::memory_order_seq_cst);
    m_memory->gate.ring_all();
    for (std::thread& each : m_threads) {
        if (is_hung) each.detach();  // it keeps what it works on, and ends when it comes back
        else each.join();
    }
    m_threads.clear();
}

// Threads that exist in the parent alone can be neither joined nor forgotten.
void MegaQueueThreads::forget() {
    for (std::thread& each : m_threads) new std::thread(std::move(each));
    m_threads.clear();
}

void MegaQueueThreads::free_all() {
    const uint32_t count = m_queue.slots_count;
    m_free_slots.resize(count);
    for (uint32_t k = 0; k < count; ++k) m_free_slots[k] = count - 1 - k;
    m_free_edges.resize(m_queue.edges_count);
    for (uint32_t k = 0; k < m_queue.edges_count; ++k) m_free_edges[k] = m_queue.edges_count - 1 - k;
    m_first_edge.assign(count, NOTHING);
    m_first = m_last = NOTHING;
}

void MegaQueueThreads::reset() {
    m_memory->reset_tables();
    free_all();
}

void MegaQueueThreads::grow_edges(uint64_t count) {
    const uint32_t before = m_queue.edges_count;
    m_memory->grow_edges(uint32_t(count));  // nobody looks at edges while nothing is open
    for (uint32_t k = before; k < m_queue.edges_count; ++k) m_free_edges.push_back(k);
}

// ---------------------------------------------------------------------------------------------- batches

bool MegaQueueThreads::write(const MegaQueueEntry& entry) {
    const uint32_t place = entry.place;
    ask_for(&m_queue.submissions[entry.soon]);
    uint32_t next = NOTHING;
    for (uint32_t block = entry.blocks; block-- > 0;) {
        const uint32_t slot = m_free_slots.back();
        m_free_slots.pop_back();
        if (m_free_slots.size() > AHEAD) ask_for(&m_queue.slots[*(m_free_slots.end() - AHEAD)]);
        if (!mega_publish_item<Atomics>(m_queue, slot, place, block, next)) return false;
        next = slot;
    }
    MegaSubmission& submission = m_queue.submissions[place];
    submission.op = entry.job.op;
    submission.flags = entry.flags;
    submission.blocks = entry.blocks;
    std::copy_n(entry.job.grid, 3, submission.grid);
    submission.lanes = entry.job.lanes;
    submission.shared_bytes = entry.job.shared_bytes;
    std::copy(entry.values.begin(), entry.values.end(), &m_memory->argument_words[size_t{place} * m_memory->stride]);
    const bool is_joined = entry.follows != NOTHING;
    mega_begin<Atomics>(m_queue, place, next, entry.blocks, is_joined ? MEGA_JOINED_WAITS : uint32_t(entry.producers.size()),
                        entry.order, entry.job.priority);
    m_first_edge[place] = NOTHING;
    for (const uint32_t producer : entry.producers) {
        const uint32_t edge = m_free_edges.back();
        m_free_edges.pop_back();
        m_queue.edges[edge].sibling = m_first_edge[place];
        m_first_edge[place] = edge;
        mega_follow<Atomics>(m_queue, place, edge, producer & ~MEGA_VALUE, producer & MEGA_VALUE);
    }
    if (entry.is_missing) Atomics::poke(&submission.outcome, MEGA_FAULT_SKIPPED);
    if (is_joined) {
        for (uint32_t slot = m_queue.submissions[entry.follows].first_slot; slot != NOTHING; slot = m_queue.slots[slot].next) {
            mega_join<Atomics>(m_queue, slot, next);
            next = m_queue.slots[next].next;
        }
        return true;
    }
    if (m_last == NOTHING) m_first = place;
    else Atomics::poke(&m_queue.submissions[m_last].link, place);
    m_last = place;
    return true;
}

bool MegaQueueThreads::commit(uint32_t submissions, bool is_first) {
    if (is_first) m_begin_tick = m_memory->clock.now();
    const uint32_t first = m_first;
    m_first = m_last = NOTHING;
    if (!mega_commit<Atomics>(m_queue, first, submissions)) return false;
    if (m_memory->bell.has_sleepers()) m_memory->bell.ring_one();
    return true;
}

bool MegaQueueThreads::collect(std::vector<MegaFinished>& finished, std::vector<MegaItemFault>& faults) {
    bool is_sound = true;
    for (uint32_t worker = 0; worker < m_queue.workers; ++worker) {
        m_done.clear();
        for (uint32_t place = mega_take_finished<Atomics>(m_queue, worker); place != NOTHING;) {
            m_done.push_back(place);
            const MegaSubmission& submission = m_queue.submissions[place];
            ask_for(&m_queue.slots[submission.first_slot]);
            place = Atomics::peek(&submission.link);
        }
        for (const uint32_t place : m_done) is_sound &= collect_one(place, finished, faults);
    }
    return is_sound;
}

bool MegaQueueThreads::collect_one(uint32_t place, std::vector<MegaFinished>& finished,
                                   std::vector<MegaItemFault>& faults) {
    bool is_sound = true;
    MegaFinished found = {place, 0, 0, 0};
    for (uint32_t slot = m_queue.submissions[place].first_slot; slot != NOTHING;) {
        const MegaSlot& item = m_queue.slots[slot];
        const uint32_t next = item.next, word = Atomics::load(&m_queue.slots[slot].state);
        if (mega_state(word) == MegaItem::Done) ++found.done;
        else if (item.code == MEGA_FAULT_SKIPPED) ++found.skipped;
        else {
            ++found.faulted;
            faults.push_back({place, item.block, item.code, mega_attempts(word)});
        }
        if (!mega_recycle<Atomics>(m_queue, slot)) is_sound = false;
        else m_free_slots.push_back(slot);
        slot = next;
    }
    for (uint32_t edge = m_first_edge[place]; edge != NOTHING; edge = m_queue.edges[edge].sibling)
        m_free_edges.push_back(edge);
    finished.push_back(found);
    return is_sound;
}

// ---------------------------------------------------------------------------------------------- running

void MegaQueueThreads::stop() {
    Atomics::exchange(&m_memory->control.mode, uint32_t(MegaQueueMode::Stopped));
    m_memory->bell.ring_all();
    m_memory->host_bell.ring_all();
}

void MegaQueueThreads::expire() {
    Atomics::replace(&m_memory->control.mode, uint32_t(MegaQueueMode::Running), uint32_t(MegaQueueMode::Expired));
    m_memory->bell.ring_all();
}

void MegaQueueThreads::go_on() {
    m_memory->deadline_tick.store(MEGA_FOREVER, std::memory_order_relaxed);
    m_memory->deadline_ns.store(MEGA_FOREVER, std::memory_order_relaxed);
    m_memory->left.store(0, std::memory_order_seq_cst);
    Atomics::replace(&m_memory->control.mode, uint32_t(MegaQueueMode::Expired), uint32_t(MegaQueueMode::Running));
    m_memory->runs.fetch_add(1, std::memory_order_seq_cst);
    m_memory->gate.ring_all();
}

void MegaQueueThreads::set_deadline(uint64_t deadline_ns) {
    const uint64_t now_ns = monotonic_ns();
    const uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    const double ticks = double(left_ns) / m_memory->ns_per_tick;
    const uint64_t now = m_memory->clock.now();
    const bool is_never = deadline_ns == MEGA_FOREVER || ticks > double(~0ull - now) / 2;
    m_memory->deadline_ns.store(is_never ? MEGA_FOREVER : deadline_ns, std::memory_order_seq_cst);
    m_memory->deadline_tick.store(is_never ? MEGA_FOREVER : now + uint64_t(ticks), std::memory_order_seq_cst);
    if (!is_never) m_memory->bell.ring_all();  // who sleeps looks when to wake up
}

void MegaQueueThreads::sleep_until_open(uint32_t few, uint64_t until_ns) {
    const auto is_over = [&] {
        return __atomic_load_n(&m_memory->control.open, __ATOMIC_SEQ_CST) <= few ||
               __atomic_load_n(&m_memory->control.mode, __ATOMIC_SEQ_CST) != uint32_t(MegaQueueMode::Running);
    };
    m_memory->wake_at.store(few, std::memory_order_seq_cst);
    m_memory->host_bell.sleep(is_over, until_ns);
    m_memory->wake_at.store(NOTHING, std::memory_order_seq_cst);
}

void MegaQueueThreads::sleep_until_left(uint64_t until_ns) {
    m_memory->host_bell.sleep([&] { return have_left(); }, until_ns);
}

// ------------------------------------------------------------------------------------------ what is seen

std::vector<MegaWorkerTotals> MegaQueueThreads::hands() {
    std::vector<MegaWorkerTotals> all(m_queue.workers);
    for (uint32_t k = 0; k < m_queue.workers; ++k) {
        const MegaHand& hand = m_memory->hands[k];
        MegaWorkerTotals& found = all[k];
        found.items = hand.items;
        found.skipped = m_memory->count(k, MEGA_SKIPPED_WORD);
        found.requeued = m_memory->count(k, MEGA_REQUEUED_WORD);
        found.work_ticks = hand.work;
        found.wait_ticks = hand.wait;
        found.idle_ticks = hand.idle;
        found.dropped_records = hand.dropped_records;
        found.is_inside = hand.inside.load(std::memory_order_acquire) != 0;
        if (!found.is_inside) continue;
        found.since = hand.since;
        found.slot = hand.slot.load(std::memory_order_relaxed);
        const MegaSlot& item = m_queue.slots[found.slot];
        found.block = Atomics::peek(&item.block);
        found.order = Atomics::peek(&m_queue.submissions[Atomics::peek(&item.submission)].order);
    }
    return all;
}

std::vector<MegaOpTotals> MegaQueueThreads::op_totals() {
    std::vector<MegaOpTotals> all(m_memory->ops.size());
    for (uint32_t op = 0; op < all.size(); ++op) {
        for (uint32_t k = 0; k < m_queue.workers; ++k) {
            all[op].items += m_memory->hands[k].op_items[op];
            all[op].work_ticks += m_memory->hands[k].op_work[op];
        }
    }
    return all;
}

std::vector<MegaQueueRecord> MegaQueueThreads::records() {
    std::vector<MegaQueueRecord> all;
    for (uint32_t k = 0; k < m_queue.workers; ++k) {
        const MegaHand& hand = m_memory->hands[k];
        if (hand.inside.load(std::memory_order_acquire)) continue;  // it hangs, and may write any time
        all.insert(all.end(), hand.records.begin(), hand.records.end());
    }
    return all;
}

void MegaQueueThreads::forget_records() {
    for (uint32_t k = 0; k < m_queue.workers; ++k) {
        m_memory->hands[k].records.clear();
        m_memory->hands[k].dropped_records = 0;
    }
}

}  // namespace brickline
