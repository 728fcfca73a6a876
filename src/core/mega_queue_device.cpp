#include "mega_queue_device.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "clock.h"
#include "plan_program.h"  // PlanContext

namespace brickline {
namespace {

using Atomics = platform::Atomics;

constexpr uint64_t PINNED_BYTES = 1 << 20;
constexpr uint64_t EDGES_OF_SLOT = 4;          // at first
constexpr uint64_t SPIN_NS = 50'000;           // then it sleeps between two looks
constexpr long NAP_NS = 20'000;
constexpr uint64_t ALIVE_NS = 500'000;         // between two looks whether workers are there
constexpr uint64_t REST_PATIENCE_NS = 2'000'000'000;

uint32_t most_arguments(const std::vector<MegaQueueOp>& ops) {
    uint32_t most = 0;
    for (const MegaQueueOp& op : ops) most = std::max(most, op.arguments);
    return most;
}

// What was stored before is seen by whoever stores what is loaded after.
void full_fence() {
    static thread_local std::atomic<uint32_t> word{0};
    word.exchange(1, std::memory_order_seq_cst);
}

void nap() {
    const timespec length = {0, NAP_NS};
    ::nanosleep(&length, nullptr);
}

}  // namespace

// ------------------------------------------------------------------------------------------------ memory

uint64_t MegaQueueDevice::bytes_of(const MegaQueueOptions& options, uint32_t stride, uint32_t ops, uint32_t ring_bits) {
    const MegaQueueLayout layout = MegaQueueLayout::of(options, stride, ops, ring_bits);
    return layout.end + layout.shared_end + PINNED_BYTES + EDGES_OF_SLOT * options.slots * MegaQueueLayout::EDGE_BYTES;
}

uint64_t MegaQueueDevice::bytes() const {
    return m_layout.end + m_layout.shared_end + PINNED_BYTES + m_room.edges_count * MegaQueueLayout::EDGE_BYTES;
}

MegaQueueDevice::MegaQueueDevice(const MegaQueueOptions& options, const std::vector<MegaQueueOp>& ops,
                                 const MegaDevicePlace& place)
    : m_options(options), m_place(place), m_driver(place.driver ? *place.driver : cuda_driver()),
      m_ops(uint32_t(ops.size())), m_layout(MegaQueueLayout::of(options, most_arguments(ops), m_ops, place.ring_bits)) {
    if (!m_driver.problem.empty()) throw std::runtime_error(m_driver.problem);
    if (!m_driver.launch_cooperative || !m_driver.memory_allocate || !m_driver.host_allocate || !m_driver.host_address)
        throw std::runtime_error("the CUDA driver is too old: it has no cooperative launch or no mapped memory");
    const PlanContext current(m_driver, m_place.context);
    try {
        must(m_driver.stream_create(&m_stream, CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
        must(m_driver.stream_create(&m_copy_stream, CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
        allocate(m_room.tables, m_layout.end);
        void* memory = allocate_host(m_layout.shared_end, CUDA_HOST_PORTABLE_MAPPED);
        m_mapped = static_cast<unsigned char*>(memory);
        must(m_driver.host_address(&m_room.shared, memory, 0), "cuMemHostGetDevicePointer");
        m_pinned = static_cast<unsigned char*>(allocate_host(PINNED_BYTES, 0));
        m_host = new (m_mapped + m_layout.host_words) MegaHostWords{};
        m_words = new (m_mapped + m_layout.intake_words) MegaIntakeWords{};
        m_commands = m_mapped + m_layout.commands;
        m_completions = reinterpret_cast<MegaCompletion*>(m_mapped + m_layout.completions);
        allocate_edges(EDGES_OF_SLOT * options.slots);
        // Counters are of all time, so this is the only time that they are zero.
        must(m_driver.fill_words(m_room.tables, 0, m_layout.records / 4, m_stream), "cuMemsetD32Async");
        make_launch();
        make_empty();
    } catch (...) {
        give_back();
        throw;
    }
}

MegaQueueDevice::~MegaQueueDevice() {
    if (m_has_ended) return;
    stop();
    end(!have_left());
}

void MegaQueueDevice::must(CUresult code, const char* call) {
    if (code) throw std::runtime_error(m_driver.check(code, call));
}

// False, and the reason is kept, where the driver refuses.
bool MegaQueueDevice::check(CUresult code, const char* call) {
    if (code && m_failure.empty()) m_failure = m_driver.check(code, call);
    return code == CUDA_SUCCESS;
}

void MegaQueueDevice::allocate(uint64_t& address, uint64_t bytes) {
    must(m_driver.memory_allocate(&address, bytes), "cuMemAlloc");
    ++m_traffic.allocations;
}

void* MegaQueueDevice::allocate_host(uint64_t bytes, unsigned flags) {
    void* memory = nullptr;
    must(m_driver.host_allocate(&memory, bytes, flags), "cuMemHostAlloc");
    ++m_traffic.allocations;
    return memory;
}

void MegaQueueDevice::allocate_edges(uint64_t count) {
    count = std::min<uint64_t>(count, MEGA_CLOSED - 1);
    if (m_room.edges) m_driver.memory_free(m_room.edges);
    m_room.edges = 0;
    allocate(m_room.edges, count * MegaQueueLayout::EDGE_BYTES);
    m_room.edges_count = count;
}

void MegaQueueDevice::grow_edges(uint64_t count) {
    if (!rest_now()) return;
    const PlanContext current(m_driver, m_place.context);
    allocate_edges(count);
    make_launch();
    m_launch.is_fresh = 1;  // nothing is open: all slots and edges are free
}

void MegaQueueDevice::make_launch() {
    const uint32_t run = m_launch.run;
    m_launch = m_layout.launch(m_options, m_room);
    m_launch.run = run;
    m_launch.rest_ns = m_place.rest_ns;
}

// As before the first submission, but for what workers have counted. No worker is there.
void MegaQueueDevice::make_empty() {
    const auto zero = [&](uint64_t at, uint64_t end) {
        must(m_driver.fill_words(m_room.tables + at, 0, (end - at) / 4, m_stream), "cuMemsetD32Async");
    };
    zero(m_layout.control, m_layout.finished);
    zero(m_layout.intake, m_layout.free_slots);
    must(m_driver.stream_synchronize(m_stream), "cuStreamSynchronize");
    std::vector<uint32_t> lists((m_options.workers + 1) * MEGA_FINISHED_STEP);
    read(lists.data(), m_room.tables + m_layout.finished, lists.size() * sizeof(uint32_t));
    for (uint32_t k = 0; k <= m_options.workers; ++k) lists[k * MEGA_FINISHED_STEP] = MEGA_NOTHING;
    const uint64_t lists_bytes = lists.size() * sizeof(uint32_t);
    must(m_driver.copy_to_device(m_room.tables + m_layout.finished, lists.data(), lists_bytes, m_stream),
         "cuMemcpyHtoDAsync");
    const std::vector<uint32_t>& codes = m_options.retry_codes;
    if (!codes.empty())
        must(m_driver.copy_to_device(m_room.tables + m_layout.retry_codes, codes.data(), codes.size() * 4, m_stream),
             "cuMemcpyHtoDAsync");
    must(m_driver.stream_synchronize(m_stream), "cuStreamSynchronize");
    m_is_expired |= mode() == MegaQueueMode::Expired;  // until it goes on
    const uint32_t deadlines = m_host->deadlines;
    *m_host = {};
    m_host->deadlines = deadlines;
    m_host->stop = m_is_stopped.load();
    *m_words = {};
    m_launch.is_fresh = 1;
    m_open = m_tail = m_read = 0;
}

void MegaQueueDevice::reset() {
    const PlanContext current(m_driver, m_place.context);
    make_empty();
}

void MegaQueueDevice::give_back() {
    const PlanContext current(m_driver, m_place.context);
    if (m_room.tables) m_driver.memory_free(m_room.tables);
    if (m_room.edges) m_driver.memory_free(m_room.edges);
    if (m_mapped) m_driver.host_free(m_mapped);
    if (m_pinned) m_driver.host_free(m_pinned);
    if (m_stream) m_driver.stream_destroy(m_stream);
    if (m_copy_stream) m_driver.stream_destroy(m_copy_stream);
    m_has_ended = true;
}

void MegaQueueDevice::end(bool is_hung) {
    if (m_has_ended || is_hung) {
        m_has_ended = true;
        m_is_stopped = true;
        return;
    }
    give_back();
}

// ---------------------------------------------------------------------------------------------- batches

bool MegaQueueDevice::write(const MegaQueueEntry& entry) {
    const uint64_t half = uint64_t{m_layout.command_lines} * MEGA_LINE_BYTES / 2;
    const auto bytes_with = [&](uint64_t jobs, uint64_t ties) {
        return sizeof(MegaChunk) + jobs * (sizeof(MegaCommand) + 8 * uint64_t{m_layout.stride}) + 4 * ties + MEGA_LINE_BYTES;
    };
    if (!m_chunk_jobs.empty() &&
        bytes_with(m_chunk_jobs.size() + 1, m_chunk_ties.size() + entry.producers.size()) > half && !emit(0))
        return false;
    MegaCommand& command = m_chunk_jobs.emplace_back();
    command.place = entry.place;
    command.order = entry.order;
    command.op = entry.job.op;
    command.flags = entry.flags;
    command.blocks = entry.blocks;
    std::copy_n(entry.job.grid, 3, command.grid);
    command.lanes = entry.job.lanes;
    command.shared_bytes = entry.job.shared_bytes;
    command.priority = entry.job.priority;
    command.outcome = entry.is_missing ? uint32_t{MEGA_FAULT_SKIPPED} : 0;
    command.first_tie = uint32_t(m_chunk_ties.size());
    command.ties = uint32_t(entry.producers.size());
    command.follows = entry.follows;
    m_chunk_ties.insert(m_chunk_ties.end(), entry.producers.begin(), entry.producers.end());
    m_chunk_arguments.insert(m_chunk_arguments.end(), entry.values.begin(), entry.values.end());
    m_chunk_arguments.resize(m_chunk_jobs.size() * m_layout.stride);
    return true;
}

bool MegaQueueDevice::commit(uint32_t submissions, bool is_first) {
    if (!emit(MEGA_LAST_CHUNK | (is_first ? uint32_t{MEGA_FIRST_BATCH} : 0))) return false;
    m_open += submissions;
    m_are_counters_fresh = false;
    full_fence();  // the intake says that it rests before it looks at the tail for the last time
    const bool is_resting = Atomics::load(&m_words->resting) == m_launch.run;
    return !is_resting && m_is_launched ? true : launch();
}

// Writes a chunk; it counts from the moment at which the tail is stored.
bool MegaQueueDevice::emit(uint32_t flags) {
    const uint64_t arguments = m_chunk_arguments.size() * sizeof(uint64_t);
    const uint64_t ties = m_chunk_ties.size() * sizeof(uint32_t);
    const uint64_t jobs = m_chunk_jobs.size() * sizeof(MegaCommand);
    const uint64_t bytes = sizeof(MegaChunk) + jobs + arguments + ties;
    const uint32_t lines = uint32_t((bytes + MEGA_LINE_BYTES - 1) / MEGA_LINE_BYTES);
    const uint32_t until_end = m_layout.command_lines - m_tail % m_layout.command_lines;
    if (lines > until_end) {
        if (!wait_for_lines(until_end)) return false;
        const MegaChunk nothing = {until_end, 0, 0, 0, {}};
        std::memcpy(m_commands + uint64_t{m_tail % m_layout.command_lines} * MEGA_LINE_BYTES, &nothing, sizeof nothing);
        m_tail += until_end;
        Atomics::store(&m_host->tail, m_tail);
    }
    if (!wait_for_lines(lines)) return false;
    unsigned char* to = m_commands + uint64_t{m_tail % m_layout.command_lines} * MEGA_LINE_BYTES;
    const MegaChunk chunk = {lines, uint32_t(m_chunk_jobs.size()), flags, uint32_t(m_chunk_ties.size()), {}};
    const auto append = [&](const void* from, uint64_t count) {
        if (count) std::memcpy(to, from, count);
        to += count;
    };
    append(&chunk, sizeof chunk);
    append(m_chunk_jobs.data(), jobs);
    append(m_chunk_arguments.data(), arguments);
    append(m_chunk_ties.data(), ties);
    m_tail += lines;
    Atomics::store(&m_host->tail, m_tail);
    m_traffic.uploaded_bytes += uint64_t{lines} * MEGA_LINE_BYTES;
    m_chunk_jobs.clear();
    m_chunk_arguments.clear();
    m_chunk_ties.clear();
    return true;
}

bool MegaQueueDevice::wait_for_lines(uint32_t lines) {
    const auto has_room = [&] { return m_tail - Atomics::load(&m_words->head) + lines <= m_layout.command_lines; };
    if (has_room()) return true;
    ++m_traffic.syncs;
    if (!m_is_launched && !launch()) return false;
    watch([&] { return has_room() || !m_failure.empty(); }, MEGA_FOREVER);
    return m_failure.empty();
}

bool MegaQueueDevice::collect(std::vector<MegaFinished>& finished, std::vector<MegaItemFault>& faults) {
    if (m_has_ended) return true;
    const uint32_t tail = Atomics::load(&m_words->completions);
    m_traffic.read_back_bytes += uint64_t{tail - m_read} * sizeof(MegaCompletion);
    const auto next = [&] { return m_completions[m_read++ & m_launch.completion_mask]; };
    while (m_read != tail) {
        const MegaCompletion each = next();
        finished.push_back({each.word[0], each.word[1], each.word[2], each.word[3]});
        --m_open;
        for (uint32_t k = 0; k < each.word[2]; ++k) {
            const MegaCompletion fault = next();
            faults.push_back({fault.word[0], fault.word[1], fault.word[2], fault.word[3]});
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------- running

bool MegaQueueDevice::launch() {
    const PlanContext current(m_driver, m_place.context);
    Atomics::store(&m_host->mode, uint32_t(MegaQueueMode::Running));
    set_deadline(m_deadline_ns);  // what is left of it
    // Workers and their count of those that have left; in the order of the stream, when the last run is over.
    if (!check(m_driver.fill_words(m_room.tables + m_layout.control, 0, 2, m_stream), "cuMemsetD32Async")) return false;
    ++m_launch.run;
    void* arguments[] = {&m_launch};
    if (!check(m_driver.launch_cooperative(reinterpret_cast<CUfunction>(m_place.function), m_options.workers + 1, 1, 1,
                                           m_place.threads, 1, 1,
                                           mega_queue_shared_bytes(m_ops, m_layout.stride, m_place.item_bytes), m_stream,
                                           arguments),
               "cuLaunchCooperativeKernel"))
        return false;
    m_launch.is_fresh = 0;
    m_is_launched = true;
    ++m_traffic.launches;
    return true;
}

MegaQueueMode MegaQueueDevice::mode() const {
    if (m_is_stopped.load(std::memory_order_acquire)) return MegaQueueMode::Stopped;
    if (m_is_expired) return MegaQueueMode::Expired;
    const uint32_t word = Atomics::load(&m_words->mode), run = word >> 2;
    if (run == 0 || run != (m_launch.run & 0x3fffffff) || run == m_ignored_run) return MegaQueueMode::Running;
    return MegaQueueMode(word & 3);
}

void MegaQueueDevice::stop() {
    if (m_has_ended) return;
    m_is_stopped.store(true, std::memory_order_release);
    Atomics::store(&m_host->stop, 1);
}

void MegaQueueDevice::expire() {
    m_is_expired = true;
    Atomics::store(&m_host->mode, uint32_t(MegaQueueMode::Expired));
}

void MegaQueueDevice::go_on() {
    m_is_expired = false;
    m_ignored_run = m_launch.run & 0x3fffffff;
    m_deadline_ns = MEGA_FOREVER;
    if (m_open) launch();
}

bool MegaQueueDevice::have_left() {
    if (!m_is_launched) return true;
    const PlanContext current(m_driver, m_place.context);
    const CUresult code = m_driver.stream_query(m_stream);
    if (code == CUDA_ERROR_NOT_READY) return false;
    check(code, "cuStreamQuery");
    m_is_launched = false;
    return true;
}

// Launches again where something is open and nobody works on it.
bool MegaQueueDevice::go_on_where_needed() {
    if (!have_left() || !m_failure.empty() || mode() != MegaQueueMode::Running) return false;
    const bool is_wanted = Atomics::load(&m_words->head) != m_tail ||
                           (m_open && Atomics::load(&m_words->completions) == m_read);
    return is_wanted && launch();
}

void MegaQueueDevice::set_deadline(uint64_t deadline_ns) {
    m_deadline_ns = deadline_ns;
    const uint64_t now_ns = monotonic_ns();
    uint64_t left_ns = ~0ull;
    if (deadline_ns != MEGA_FOREVER) left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    const uint32_t number = m_host->deadlines + 1;
    Atomics::store(&m_host->left[number & 1][0], uint32_t(left_ns));
    Atomics::store(&m_host->left[number & 1][1], uint32_t(left_ns >> 32));
    Atomics::store(&m_host->deadlines, number);
}

template <class Condition>
void MegaQueueDevice::watch(Condition is_over, uint64_t until_ns) {
    const uint64_t begin_ns = monotonic_ns();
    uint64_t alive_ns = begin_ns + ALIVE_NS;
    for (uint32_t turn = 0; !is_over(); ++turn) {
        const uint64_t now_ns = monotonic_ns();
        if (now_ns >= until_ns) return;
        if (now_ns >= alive_ns) {
            go_on_where_needed();
            if (!m_failure.empty()) return;
            alive_ns = monotonic_ns() + ALIVE_NS;
        }
        if (now_ns - begin_ns > SPIN_NS) nap();
        else if (turn % 16 == 15) ::sched_yield();
    }
}

void MegaQueueDevice::sleep_until_open(uint32_t few, uint64_t until_ns) {
    const uint32_t read = m_read, enough = m_open > few ? m_open - few : 0;
    // Completions of faults count, too: it looks again earlier than it must.
    watch([&] { return Atomics::load(&m_words->completions) - read >= enough || mode() != MegaQueueMode::Running; },
          std::min(until_ns, monotonic_ns() + 50'000'000));
}

void MegaQueueDevice::sleep_until_left(uint64_t until_ns) {
    const uint64_t begin_ns = monotonic_ns();
    while (!have_left() && monotonic_ns() < until_ns) {
        if (monotonic_ns() - begin_ns > SPIN_NS) nap();
    }
}

// Makes the launch end before the time; nothing is open.
bool MegaQueueDevice::rest_now() {
    Atomics::store(&m_host->mode, uint32_t(MegaQueueMode::Resting));
    sleep_until_left(monotonic_ns() + REST_PATIENCE_NS);
    return !m_is_launched && m_failure.empty();
}

void MegaQueueDevice::wait_for_stream(uint64_t stream) {
    const PlanContext current(m_driver, m_place.context);
    const CUstream given = reinterpret_cast<CUstream>(stream);
    if (m_driver.stream_query(given) == CUDA_SUCCESS) return;
    ++m_traffic.syncs;
    check(m_driver.stream_synchronize(given), "cuStreamSynchronize");
}

// ------------------------------------------------------------------------------------------ what is seen

void MegaQueueDevice::read(void* to, uint64_t from, uint64_t bytes) {
    const PlanContext current(m_driver, m_place.context);
    for (uint64_t done = 0; done < bytes && m_failure.empty();) {
        const uint64_t now = std::min(bytes - done, PINNED_BYTES);
        if (!check(m_driver.copy_from_device(m_pinned, from + done, now, m_copy_stream), "cuMemcpyDtoHAsync") ||
            !check(m_driver.stream_synchronize(m_copy_stream), "cuStreamSynchronize"))
            return;
        std::memcpy(static_cast<unsigned char*>(to) + done, m_pinned, now);
        ++m_traffic.syncs;
        done += now;
    }
    m_traffic.read_back_bytes += bytes;
    ++m_traffic.reads;
}

const MegaQueue& MegaQueueDevice::look() {
    m_seen_slots.resize(m_options.slots);
    m_seen_submissions.resize(m_options.slots);
    m_seen_edges.resize(m_room.edges_count);
    m_seen = m_launch.queue;
    m_seen.control = &m_seen_control;
    m_seen.slots = m_seen_slots.data();
    m_seen.submissions = m_seen_submissions.data();
    m_seen.edges = m_seen_edges.data();
    if (m_has_ended && !m_is_launched) return m_seen;
    read(&m_seen_control, m_room.tables + m_layout.control, sizeof m_seen_control);
    read(m_seen_slots.data(), m_room.tables + m_layout.slots, m_seen_slots.size() * sizeof(MegaSlot));
    read(m_seen_submissions.data(), m_room.tables + m_layout.submissions, m_seen_submissions.size() * sizeof(MegaSubmission));
    read(m_seen_edges.data(), m_room.edges, m_seen_edges.size() * sizeof(MegaEdge));
    return m_seen;
}

// A copy costs far more than what it holds, and a report asks several times: all of it is read at once, and
// again only when something may have been counted since. What workers count of an item, they count before
// they finish it.
const unsigned char* MegaQueueDevice::read_counters() {
    m_counters.resize(m_layout.arguments - m_layout.finished);
    if (!m_are_counters_fresh && (!m_has_ended || m_is_launched))
        read(m_counters.data(), m_room.tables + m_layout.finished, m_counters.size());
    m_are_counters_fresh = m_open == 0;
    return m_counters.data();
}

std::vector<MegaWorkerTotals> MegaQueueDevice::hands() {
    const unsigned char* const counters = read_counters();
    const auto* const hands = reinterpret_cast<const MegaDeviceHand*>(counters + (m_layout.hands - m_layout.finished));
    const auto* const lists = reinterpret_cast<const uint32_t*>(counters);
    std::vector<MegaWorkerTotals> all(m_options.workers);
    for (uint32_t k = 0; k < m_options.workers; ++k) {
        const MegaDeviceHand& hand = hands[k];
        MegaWorkerTotals& found = all[k];
        found.items = hand.items;
        found.skipped = lists[k * MEGA_FINISHED_STEP + MEGA_SKIPPED_WORD];
        found.requeued = lists[k * MEGA_FINISHED_STEP + MEGA_REQUEUED_WORD];
        found.work_ticks = hand.work_ns;
        found.wait_ticks = hand.wait_ns;
        found.idle_ticks = hand.idle_ns;
        found.dropped_records = hand.records > m_layout.records_count ? hand.records - m_layout.records_count : 0;
        found.is_inside = hand.inside != 0;
        found.slot = hand.slot;
        found.block = hand.block;
        found.order = hand.order;
        found.since = hand.since;
    }
    return all;
}

std::vector<MegaOpTotals> MegaQueueDevice::op_totals() {
    const auto* const words =
        reinterpret_cast<const uint64_t*>(read_counters() + (m_layout.op_totals - m_layout.finished));
    std::vector<MegaOpTotals> all(m_ops);
    for (size_t k = 0; k < size_t{2} * m_ops * m_options.workers; k += 2) {
        all[k / 2 % m_ops].items += words[k];
        all[k / 2 % m_ops].work_ticks += words[k + 1];
    }
    return all;
}

std::vector<MegaQueueRecord> MegaQueueDevice::records() {
    std::vector<MegaQueueRecord> all;
    if (!m_options.is_recorded || m_has_ended) return all;
    const auto* const hands =
        reinterpret_cast<const MegaDeviceHand*>(read_counters() + (m_layout.hands - m_layout.finished));
    static_assert(sizeof(MegaItemRecord) == sizeof(MegaQueueRecord));
    for (uint32_t k = 0; k < m_options.workers; ++k) {
        const uint64_t count = std::min<uint64_t>(hands[k].records, m_layout.records_count);
        const uint64_t before = all.size();
        all.resize(before + count);
        const uint64_t from = m_layout.records + uint64_t{k} * m_layout.records_count * sizeof(MegaItemRecord);
        read(all.data() + before, m_room.tables + from, count * sizeof(MegaItemRecord));
    }
    return all;
}

// Workers that are there know for themselves how many they have written.
void MegaQueueDevice::forget_records() {
    if (!m_options.is_recorded || !rest_now()) return;
    const PlanContext current(m_driver, m_place.context);
    std::vector<MegaDeviceHand> hands(m_options.workers);
    const uint64_t bytes = hands.size() * sizeof(MegaDeviceHand);
    read(hands.data(), m_room.tables + m_layout.hands, bytes);
    for (MegaDeviceHand& hand : hands) hand.records = 0;
    m_are_counters_fresh = false;
    if (check(m_driver.copy_to_device(m_room.tables + m_layout.hands, hands.data(), bytes, m_stream), "cuMemcpyHtoDAsync"))
        check(m_driver.stream_synchronize(m_stream), "cuStreamSynchronize");
}

uint64_t MegaQueueDevice::now_tick() {
    if (m_has_ended && !m_is_launched) return 0;
    return Atomics::peek(&m_words->now[0]) | uint64_t{Atomics::peek(&m_words->now[1])} << 32;
}

uint64_t MegaQueueDevice::begin_tick() const {
    if (m_has_ended && !m_is_launched) return 0;
    return Atomics::peek(&m_words->begin[0]) | uint64_t{Atomics::peek(&m_words->begin[1])} << 32;
}

}  // namespace brickline
