#include "mega_queue.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "mega_queue_memory.h"

namespace brickline {
namespace {

using Atomics = platform::Atomics;

constexpr uint32_t NOTHING = MEGA_NOTHING;
constexpr uint64_t ASK_NS = 50'000'000;       // between two looks whether to stop
constexpr uint32_t FORGET_EVERY = 1u << 16;   // submissions
constexpr uint32_t MAX_ROWS = 1u << 24;       // submissions between two moments at which nothing is open
constexpr uint32_t MAX_GRID = 0x7fffffff;

constexpr auto NONE = [](uint32_t) { return 0u; };
constexpr auto HALF = [](uint32_t open) { return open / 2; };
constexpr auto ONE_LESS = [](uint32_t open) { return open ? open - 1 : 0; };

// What workers wrote last lies in their caches; asked for early, it is here when it is needed.
constexpr uint32_t AHEAD = 6;
void ask_for(const void* memory) { __builtin_prefetch(memory, 1); }

std::atomic<uint32_t> g_forks{0};  // of this process since its ancestor loaded this code

uint32_t forks() {
    static const int registered = ::pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
    (void)registered;
    return g_forks.load(std::memory_order_relaxed);
}

}  // namespace

void MegaBatch::clear() { shorten(0, 0, 0, 0); }

void MegaBatch::shorten(size_t keep_jobs, size_t keep_arguments, size_t keep_accesses, uint64_t keep_items) {
    jobs.resize(keep_jobs);
    access_end.resize(keep_jobs);
    arguments.resize(keep_arguments);
    accesses.resize(keep_accesses);
    items = keep_items;
}

// What the owner knows. Submissions have an order: their number, less that of the first.
struct MegaQueueEngine::Publisher {
    struct Batch {
        uint64_t first;
        uint32_t open;
        bool is_missing;  // values of a submission are not there
    };
    struct Wait {
        uint32_t producer;  // order
        bool reads_value;
    };
    struct Place {  // of an open submission, by its place in the table
        uint32_t first_edge, batch;
    };

    explicit Publisher(std::shared_ptr<Memory> given) : memory(std::move(given)), q(memory->queue) {
        reset();
        begin_tracking();
    }

    void reset();
    void start_threads();
    void end_threads();
    // Waiting.
    bool have_left() const { return memory->left.load(std::memory_order_seq_cst) == q.workers; }
    uint32_t open_now() const { return Atomics::load(&memory->control.open); }
    MegaQueueMode mode() const { return MegaQueueMode(Atomics::load(&memory->control.mode)); }
    void say(MegaQueueMode wanted);
    MegaQueueWait run_on();
    void set_deadline(uint64_t deadline_ns);
    template <class Condition>
    void sleep(Condition is_over, uint32_t until_open, uint64_t until_ns);
    template <class Condition, class Enough>
    MegaQueueWait wait_for(Condition is_done, Enough enough, uint64_t until_ns, PlanStop* stop);
    MegaQueueWait wait_for_workers();
    // Publishing.
    MegaPublished check(const MegaBatch& batch) const;
    MegaQueueWait make_room(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop);
    void plan(const MegaBatch& batch);
    void plan_job(uint32_t order, std::span<const MegaAccess> accesses);
    uint32_t twin_of(const MegaBatch& batch, uint32_t job, const uint64_t* values, uint32_t first_access);
    void note(std::span<const uint32_t> producers);
    void expand(std::span<const uint32_t> found, std::vector<uint32_t>& numbers, uint64_t begin) const;
    MegaQueueWait make_room_for_edges();
    bool write(const MegaBatch& batch);
    void write_alias(const MegaJob& job, uint32_t twin);
    bool write_job(const MegaJob& job, const uint64_t* values, uint32_t place, uint32_t batch_place,
                   std::span<const Wait> job_waits);
    // What has finished.
    void collect();
    void collect_one(uint32_t place);
    void forget();
    void begin_tracking();
    // The whole number of an open submission, of which the table holds the low half.
    uint64_t number_of(uint32_t place) const {
        return first + (Atomics::peek(&q.submissions[place].order) - uint32_t(first));
    }

    std::shared_ptr<Memory> memory;
    const MegaQueue& q;
    std::vector<std::thread> threads;
    const uint32_t made_at_fork = forks();
    bool is_running = false;
    bool is_dead = false;
    bool is_broken = false;

    HazardTracker hazards;
    std::vector<uint32_t> free_slots, free_submissions, free_edges, free_batches;
    std::vector<Place> places;
    std::vector<Batch> batches;
    std::vector<uint64_t> finished_batches;
    std::vector<uint64_t> missing_batches;  // whose memory is not to be another's while it counts as missing

    uint64_t first = 0;                  // number of the submission whose order is 0
    std::vector<MegaSubmissionRow> rows; // by order
    std::vector<uint32_t> place_of;      // by order; NOTHING of one that is finished
    MegaQueueReasons all_waits, sources;
    std::vector<MegaItemFault> faults;
    uint32_t first_missing = NOTHING;    // the first order whose values are not there
    uint32_t readers = 0;                // that asked who wrote last; then it begins again
    uint32_t finished = 0;               // orders below are, and their values are there
    uint32_t forgotten = 0;              // the tracker does not know those below
    MegaQueueTotals totals;
    std::vector<MegaWorkerTotals> before;                   // of workers, when it began again
    std::vector<std::pair<uint64_t, uint64_t>> ops_before;
    uint64_t requeued_before = 0;
    uint64_t begin_tick = 0;

    // Of the batch that is being published.
    std::vector<Wait> waits;
    std::vector<uint32_t> wait_end;      // by job
    std::vector<uint32_t> twins;         // by job: an earlier one that computes the same, or NOTHING
    std::vector<std::pair<uint32_t, const uint64_t*>> known_jobs;  // by a hash: job and arguments
    std::vector<bool> is_missing;        // by job: reads something that was never written
    std::vector<uint32_t> read_from;     // orders whose values a job reads, ascending
    std::vector<uint32_t> done;          // places
};

// --------------------------------------------------------------------------------------------- its life

uint64_t MegaQueueEngine::bytes(const MegaQueueOptions& options, uint32_t most_arguments) {
    uint64_t cells = 2;
    while (cells < options.slots) cells *= 2;
    return options.slots * (sizeof(MegaSlot) + sizeof(MegaSubmission) + 4 * sizeof(MegaEdge) +
                            uint64_t{most_arguments} * 8 + 9 * sizeof(uint32_t)) +
           cells * (MEGA_PRIORITIES + 1) * sizeof(MegaCell) + uint64_t{options.workers} * sizeof(MegaHand);
}

MegaQueueEngine::MegaQueueEngine(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops) {
    if (options.workers < 1 || options.workers > MegaQueueOptions::MAX_WORKERS)
        throw std::invalid_argument("expected 1 to 255 workers, got " + std::to_string(options.workers));
    if (options.slots < 1 || options.slots > MEGA_MAX_SLOTS_OF_QUEUE)
        throw std::invalid_argument("expected 1 to 16777216 slots, got " + std::to_string(options.slots));
    if (options.retry_limit >= 1u << 24)
        throw std::invalid_argument("expected fewer than 16777216 retries, got " + std::to_string(options.retry_limit));
    m_memory = std::make_shared<Memory>(options, std::move(ops));
    m = std::make_unique<Publisher>(m_memory);
    m->start_threads();
    m->run_on();
}

MegaQueueEngine::~MegaQueueEngine() {
    if (is_foreign()) {  // threads that exist in the parent alone can be neither joined nor forgotten
        for (std::thread& each : m->threads) new std::thread(std::move(each));
        return;
    }
    close();
}

MegaQueueWait MegaQueueEngine::close() {
    if (m->is_dead) return MegaQueueWait::Hung;
    m->say(MegaQueueMode::Stopped);
    const MegaQueueWait waited = m->wait_for_workers();
    m->end_threads();
    return waited;
}

void MegaQueueEngine::Publisher::reset() {
    const uint32_t count = q.slots_count;
    free_slots.resize(count);
    free_submissions.resize(count);
    places.assign(count, {NOTHING, NOTHING});
    for (uint32_t k = 0; k < count; ++k) free_slots[k] = free_submissions[k] = count - 1 - k;
    free_edges.resize(q.edges_count);
    for (uint32_t k = 0; k < q.edges_count; ++k) free_edges[k] = q.edges_count - 1 - k;
    free_batches.clear();
    batches.clear();
    before.resize(q.workers);
    ops_before.resize(memory->ops.size());
}

void MegaQueueEngine::Publisher::start_threads() {
    sigset_t all, mask;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &mask);  // signals are the other threads' business
    try {
        for (uint32_t number = 0; number < q.workers; ++number)
            threads.emplace_back(&Memory::work, memory, number);
    } catch (...) {
        ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
        end_threads();
        throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
}

void MegaQueueEngine::Publisher::end_threads() {
    memory->is_closing.store(true, std::memory_order_seq_cst);
    memory->runs.fetch_add(1, std::memory_order_seq_cst);
    memory->gate.ring_all();
    for (std::thread& each : threads) {
        if (is_dead) each.detach();  // it keeps what it works on
        else each.join();
    }
    threads.clear();
}

// ---------------------------------------------------------------------------------------------- waiting

void MegaQueueEngine::Publisher::say(MegaQueueMode wanted) {
    Atomics::exchange(&memory->control.mode, uint32_t(wanted));
    memory->bell.ring_all();
    memory->host_bell.ring_all();
}

// Lets workers that have left at a deadline begin again.
MegaQueueWait MegaQueueEngine::Publisher::run_on() {
    if (is_running && mode() == MegaQueueMode::Running) return MegaQueueWait::Done;
    if (is_dead) return MegaQueueWait::Hung;
    if (mode() == MegaQueueMode::Stopped) return wait_for_workers();
    if (is_running) {
        const MegaQueueWait waited = wait_for_workers();
        if (waited != MegaQueueWait::Expired) return waited;
    }
    memory->deadline_tick.store(FOREVER, std::memory_order_relaxed);
    memory->deadline_ns.store(FOREVER, std::memory_order_relaxed);
    memory->left.store(0, std::memory_order_seq_cst);
    Atomics::replace(&memory->control.mode, uint32_t(MegaQueueMode::Expired), uint32_t(MegaQueueMode::Running));
    is_running = true;
    memory->runs.fetch_add(1, std::memory_order_seq_cst);
    memory->gate.ring_all();
    return MegaQueueWait::Done;
}

void MegaQueueEngine::Publisher::set_deadline(uint64_t deadline_ns) {
    const uint64_t now_ns = monotonic_ns();
    const uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    const double ticks = double(left_ns) / memory->ns_per_tick;
    const uint64_t now = memory->clock.now();
    const bool is_never = deadline_ns == FOREVER || ticks > double(~0ull - now) / 2;
    memory->deadline_ns.store(is_never ? FOREVER : deadline_ns, std::memory_order_seq_cst);
    memory->deadline_tick.store(is_never ? FOREVER : now + uint64_t(ticks), std::memory_order_seq_cst);
    if (!is_never) memory->bell.ring_all();  // who sleeps looks when to wake up
}

// Sleeps until it is over, so few submissions are open, workers leave, or that moment comes.
template <class Condition>
void MegaQueueEngine::Publisher::sleep(Condition is_over, uint32_t until_open, uint64_t until_ns) {
    memory->wake_at.store(until_open, std::memory_order_seq_cst);
    ++totals.waits;
    memory->host_bell.sleep(is_over, until_ns);
    memory->wake_at.store(NOTHING, std::memory_order_seq_cst);
}

// Waits while workers work. Expired: the moment came, whatever the workers do. Of so many open submissions
// `enough` says how few are worth waking up for.
template <class Condition, class Enough>
MegaQueueWait MegaQueueEngine::Publisher::wait_for(Condition is_done, Enough enough, uint64_t until_ns,
                                                   PlanStop* stop) {
    uint64_t ask_ns = monotonic_ns() + ASK_NS;
    for (;;) {
        collect();
        if (is_done()) return MegaQueueWait::Done;
        if (mode() != MegaQueueMode::Running) return wait_for_workers();
        const uint64_t now_ns = monotonic_ns();
        if (now_ns >= until_ns) return MegaQueueWait::Expired;
        if (stop && now_ns >= ask_ns) {
            if (stop->is_wanted()) return MegaQueueWait::Interrupted;
            ask_ns = monotonic_ns() + ASK_NS;
        }
        const uint32_t until_open = enough(open_now());
        const auto is_over = [&] {
            return __atomic_load_n(&memory->control.open, __ATOMIC_SEQ_CST) <= until_open ||
                   __atomic_load_n(&memory->control.mode, __ATOMIC_SEQ_CST) != uint32_t(MegaQueueMode::Running);
        };
        sleep(is_over, until_open, std::min(until_ns, stop ? ask_ns : FOREVER));
    }
}

// Workers have been told to leave; one that does not makes the engine dead.
MegaQueueWait MegaQueueEngine::Publisher::wait_for_workers() {
    const uint64_t until_ns = monotonic_ns() + memory->options.grace_ns;
    while (is_running && !have_left()) {
        if (monotonic_ns() >= until_ns) {
            is_dead = true;
            Atomics::exchange(&memory->control.mode, uint32_t(MegaQueueMode::Stopped));
            end_threads();  // who hangs ends when it comes back
            return MegaQueueWait::Hung;
        }
        sleep([&] { return have_left(); }, NOTHING, until_ns);
    }
    is_running = false;
    collect();
    return mode() == MegaQueueMode::Stopped ? MegaQueueWait::Stopped : MegaQueueWait::Expired;
}

// ------------------------------------------------------------------------------------------- publishing

MegaPublished MegaQueueEngine::Publisher::check(const MegaBatch& batch) const {
    if (is_dead || mode() == MegaQueueMode::Stopped) return {MegaRefused::State};
    if (is_broken) return {MegaRefused::Broken};
    if (batch.jobs.empty()) return {MegaRefused::NoJobs};
    if (batch.access_end.size() != batch.jobs.size()) return {MegaRefused::Accesses};
    uint64_t items = 0, arguments = 0;
    uint32_t access = 0;
    for (uint32_t k = 0; k < batch.jobs.size(); ++k) {
        const MegaJob& job = batch.jobs[k];
        const auto refuse = [&](MegaRefused why) { return MegaPublished{why, MegaQueueWait::Done, k}; };
        if (job.op >= memory->ops.size()) return refuse(MegaRefused::Op);
        if (job.priority >= MEGA_PRIORITIES) return refuse(MegaRefused::Priority);
        uint64_t blocks = 1;
        for (const uint32_t size : job.grid) {
            if (size == 0 || size > MAX_GRID) return refuse(MegaRefused::Grid);
            blocks *= size;
            if (blocks > q.slots_count) return refuse(MegaRefused::Grid);
        }
        items += blocks;
        if (items > q.slots_count) return refuse(MegaRefused::Items);
        arguments += memory->ops[job.op].arguments;
        if (arguments > batch.arguments.size()) return refuse(MegaRefused::Op);
        if (batch.access_end[k] < access || batch.access_end[k] > batch.accesses.size())
            return refuse(MegaRefused::Accesses);
        for (; access < batch.access_end[k]; ++access) {
            const MegaAccess& each = batch.accesses[access];
            if (each.begin > each.end || each.mode < 1 || each.mode > 3) return refuse(MegaRefused::Accesses);
        }
    }
    return {};
}

MegaQueueWait MegaQueueEngine::Publisher::make_room(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop) {
    const auto has_room = [&] {
        return free_slots.size() >= batch.items && free_submissions.size() >= batch.jobs.size();
    };
    if (!has_room()) {
        const MegaQueueWait waited = wait_for(has_room, HALF, until_ns, stop);
        if (waited != MegaQueueWait::Done) return waited;
    }
    if (rows.size() + batch.jobs.size() <= MAX_ROWS) [[likely]] return MegaQueueWait::Done;
    const MegaQueueWait waited = wait_for([&] { return free_slots.size() == q.slots_count; }, NONE, until_ns, stop);
    if (waited == MegaQueueWait::Done) forget();
    return waited;
}

// What each job waits for, in the order of submission. From here on the tracker knows the batch.
void MegaQueueEngine::Publisher::plan(const MegaBatch& batch) {
    const uint32_t count = uint32_t(batch.jobs.size());
    waits.clear();
    wait_end.clear();
    is_missing.assign(count, false);
    twins.assign(count, NOTHING);
    const bool is_deduping = memory->options.is_deduping && count > 1;
    known_jobs.assign(is_deduping ? std::bit_ceil(2 * count) : 0, {NOTHING, nullptr});
    uint32_t order = uint32_t(rows.size());
    uint32_t access = 0;
    const uint64_t* values = batch.arguments.data();
    for (uint32_t k = 0; k < count; ++k, ++order) {
        if (is_deduping) twins[k] = twin_of(batch, k, values, access);
        if (twins[k] == NOTHING) {
            plan_job(order, std::span(batch.accesses).subspan(access, batch.access_end[k] - access));
        } else {
            if (memory->options.has_lineage) note({});
            wait_end.push_back(uint32_t(waits.size()));
        }
        access = batch.access_end[k];
        values += memory->ops[batch.jobs[k].op].arguments;
    }
}

// An earlier job of the batch with the same op and arguments, where nobody has written to what either
// reads or writes since; else NOTHING, and later ones may find this job.
uint32_t MegaQueueEngine::Publisher::twin_of(const MegaBatch& batch, uint32_t number, const uint64_t* values,
                                             uint32_t first_access) {
    const MegaJob& job = batch.jobs[number];
    const MegaQueueOp& op = memory->ops[job.op];
    if (!(op.flags & MEGA_PURE)) return NOTHING;
    uint64_t hash = job.op + 1;
    for (uint32_t k = 0; k < op.arguments; ++k) {
        hash = (hash ^ values[k]) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 32;
    }
    const size_t mask = known_jobs.size() - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        auto& [found, found_values] = known_jobs[at];
        if (found == NOTHING) {
            known_jobs[at] = {number, values};
            return NOTHING;
        }
        // Arguments decide sizes, too.
        if (batch.jobs[found].op != job.op || !std::equal(values, values + op.arguments, found_values)) continue;
        const uint32_t written = uint32_t(rows.size()) + found + 2;  // as the tracker counts versions
        bool is_same = true;
        for (uint32_t k = first_access; k < batch.access_end[number] && is_same; ++k) {
            const MegaAccess& each = batch.accesses[k];
            const uint32_t newest = hazards.version(each.space, each.begin, each.end).newest;
            is_same = each.mode & MEGA_WRITE ? newest == written && each.mode == MEGA_WRITE : newest < written;
        }
        if (is_same) return found;
        found = number;  // whoever comes later is compared with this one
        found_values = values;
        return NOTHING;
    }
}

void MegaQueueEngine::Publisher::plan_job(uint32_t order, std::span<const MegaAccess> accesses) {
    const std::span<const uint32_t> producers = hazards.add(order, accesses);
    read_from.clear();
    expand(hazards.sources(), read_from, 0);
    const uint32_t known = uint32_t(rows.size());  // later ones are of this batch
    if (first_missing != NOTHING) {
        is_missing[order - known] = std::any_of(read_from.begin(), read_from.end(), [&](uint32_t producer) {
            return producer < known && place_of[producer] == NOTHING &&
                   rows[producer].state != MegaSubmissionState::Done;
        });
    }
    if (memory->options.has_lineage) note(producers);
    for (const uint32_t producer : producers) {
        if (producer < known && place_of[producer] == NOTHING) continue;
        waits.push_back({producer, std::binary_search(read_from.begin(), read_from.end(), producer)});
    }
    wait_end.push_back(uint32_t(waits.size()));
}

void MegaQueueEngine::Publisher::note(std::span<const uint32_t> producers) {
    all_waits.numbers.insert(all_waits.numbers.end(), producers.begin(), producers.end());
    all_waits.ends.push_back(all_waits.numbers.size());
    sources.numbers.insert(sources.numbers.end(), read_from.begin(), read_from.end());
    sources.ends.push_back(sources.numbers.size());
}

// Appends the members of entries of the tracker to `numbers`, whose end from `begin` on is theirs.
void MegaQueueEngine::Publisher::expand(std::span<const uint32_t> found, std::vector<uint32_t>& numbers,
                                        uint64_t begin) const {
    for (const uint32_t entry : found) {
        if (!(entry & MEGA_SET)) {
            numbers.push_back(entry);
            continue;
        }
        const std::span<const uint32_t> members = hazards.sets()[entry & ~MEGA_SET];
        numbers.insert(numbers.end(), members.begin(), members.end());
    }
    std::sort(numbers.begin() + ptrdiff_t(begin), numbers.end());
    numbers.erase(std::unique(numbers.begin() + ptrdiff_t(begin), numbers.end()), numbers.end());
}

MegaQueueWait MegaQueueEngine::Publisher::make_room_for_edges() {
    if (waits.size() <= free_edges.size()) [[likely]] return MegaQueueWait::Done;
    const auto has_room = [&] { return waits.size() <= free_edges.size(); };
    const MegaQueueWait waited = wait_for([&] { return has_room() || open_now() == 0; }, HALF, FOREVER, nullptr);
    if (waited != MegaQueueWait::Done || has_room()) return waited;
    const uint32_t count = q.edges_count;  // nobody looks at edges while nothing is open
    memory->grow_edges(std::max(2 * count, uint32_t(waits.size())));
    for (uint32_t k = count; k < q.edges_count; ++k) free_edges.push_back(k);
    return MegaQueueWait::Done;
}

bool MegaQueueEngine::Publisher::write(const MegaBatch& batch) {
    if (free_batches.empty()) {
        free_batches.push_back(uint32_t(batches.size()));
        batches.push_back({});
    }
    const uint32_t batch_place = free_batches.back();
    free_batches.pop_back();
    const uint32_t own_jobs = uint32_t(std::count(twins.begin(), twins.end(), NOTHING));
    batches[batch_place] = {first + rows.size(), own_jobs, false};
    const uint32_t known = uint32_t(rows.size());
    const uint64_t* values = batch.arguments.data();
    uint32_t first_place = NOTHING, last_place = NOTHING, wait = 0;
    for (uint32_t k = 0; k < batch.jobs.size(); ++k) {
        if (twins[k] != NOTHING) {
            write_alias(batch.jobs[k], known + twins[k]);
            values += memory->ops[batch.jobs[k].op].arguments;
            continue;
        }
        const uint32_t place = free_submissions.back();
        free_submissions.pop_back();
        if (free_submissions.size() > AHEAD) ask_for(&q.submissions[*(free_submissions.end() - AHEAD)]);
        const std::span<const Wait> own(waits.data() + wait, wait_end[k] - wait);
        wait = wait_end[k];
        if (!write_job(batch.jobs[k], values, place, batch_place, own)) return false;
        if (is_missing[k]) Atomics::poke(&q.submissions[place].outcome, MEGA_FAULT_SKIPPED);
        values += memory->ops[batch.jobs[k].op].arguments;
        if (last_place == NOTHING) first_place = place;
        else Atomics::poke(&q.submissions[last_place].link, place);
        last_place = place;
    }
    if (known == 0) begin_tick = memory->clock.now();
    return mega_commit<Atomics>(q, first_place, own_jobs);
}

void MegaQueueEngine::Publisher::write_alias(const MegaJob& job, uint32_t twin) {
    const uint32_t blocks = job.grid[0] * job.grid[1] * job.grid[2];
    rows.push_back({job.op, blocks, 0, twin, MegaSubmissionState::Alias, uint8_t(job.priority)});
    place_of.push_back(NOTHING);
    totals.deduped += blocks;
    ++totals.submissions;
}

bool MegaQueueEngine::Publisher::write_job(const MegaJob& job, const uint64_t* values, uint32_t place,
                                           uint32_t batch_place, std::span<const Wait> job_waits) {
    const uint32_t number = uint32_t(first + rows.size());
    const uint32_t blocks = job.grid[0] * job.grid[1] * job.grid[2];
    uint32_t next = NOTHING;
    for (uint32_t block = blocks; block-- > 0;) {
        const uint32_t slot = free_slots.back();
        free_slots.pop_back();
        if (free_slots.size() > AHEAD) ask_for(&q.slots[*(free_slots.end() - AHEAD)]);
        if (!mega_publish_item<Atomics>(q, slot, place, block, next)) return false;
        next = slot;
    }
    MegaSubmission& submission = q.submissions[place];
    submission.op = job.op;
    submission.flags = memory->ops[job.op].flags;
    submission.blocks = blocks;
    std::copy_n(job.grid, 3, submission.grid);
    submission.lanes = job.lanes;
    submission.shared_bytes = job.shared_bytes;
    std::copy_n(values, memory->ops[job.op].arguments, &memory->argument_words[size_t{place} * memory->stride]);
    mega_begin<Atomics>(q, place, next, blocks, uint32_t(job_waits.size()), number, job.priority);
    places[place] = {NOTHING, batch_place};
    rows.push_back({job.op, blocks, 0, NOTHING, MegaSubmissionState::Open, uint8_t(job.priority)});
    place_of.push_back(place);
    for (const Wait& each : job_waits) {
        const uint32_t producer = place_of[each.producer];
        const uint32_t edge = free_edges.back();
        free_edges.pop_back();
        q.edges[edge].sibling = places[place].first_edge;
        places[place].first_edge = edge;
        ++totals.edges;
        mega_follow<Atomics>(q, place, edge, producer, each.reads_value);
    }
    totals.published += blocks;
    ++totals.submissions;
    return true;
}

// -------------------------------------------------------------------------------------------- finishing

void MegaQueueEngine::Publisher::collect() {
    for (uint32_t worker = 0; worker < q.workers; ++worker) {
        done.clear();
        for (uint32_t place = mega_take_finished<Atomics>(q, worker); place != NOTHING;) {
            done.push_back(place);
            const MegaSubmission& submission = q.submissions[place];
            ask_for(&q.slots[submission.first_slot]);
            place = Atomics::peek(&submission.link);
        }
        for (const uint32_t place : done) collect_one(place);
    }
    while (finished < rows.size() && place_of[finished] == NOTHING && finished < first_missing) ++finished;
    // Where values came from is asked for of finished ones, too.
    if (finished - forgotten >= FORGET_EVERY && !memory->options.has_lineage) hazards.forget(forgotten = finished);
}

void MegaQueueEngine::Publisher::collect_one(uint32_t place) {
    const MegaSubmission& submission = q.submissions[place];
    const uint32_t order = submission.order - uint32_t(first);
    MegaSubmissionRow& row = rows[order];
    uint32_t skipped = 0, faulted = 0;
    for (uint32_t slot = submission.first_slot; slot != NOTHING;) {
        const MegaSlot& item = q.slots[slot];
        const uint32_t next = item.next, word = Atomics::load(&q.slots[slot].state);
        if (mega_state(word) == MegaItem::Done) ++row.done;
        else if (item.code == MEGA_FAULT_SKIPPED) ++skipped;
        else {
            ++faulted;
            faults.push_back({first + order, item.block, item.code, mega_attempts(word)});
        }
        if (!mega_recycle<Atomics>(q, slot)) is_broken = true;
        else free_slots.push_back(slot);
        slot = next;
    }
    row.state = faulted ? MegaSubmissionState::Faulted
                        : skipped ? MegaSubmissionState::Skipped : MegaSubmissionState::Done;
    if (row.state != MegaSubmissionState::Done) first_missing = std::min(first_missing, order);
    totals.done += row.done;
    totals.faulted += faulted;
    totals.skipped += skipped;
    for (uint32_t edge = places[place].first_edge; edge != NOTHING; edge = q.edges[edge].sibling)
        free_edges.push_back(edge);
    Batch& batch = batches[places[place].batch];
    batch.is_missing |= row.state != MegaSubmissionState::Done;
    if (--batch.open == 0) {
        (batch.is_missing ? missing_batches : finished_batches).push_back(batch.first);
        free_batches.push_back(places[place].batch);
    }
    place_of[order] = NOTHING;
    free_submissions.push_back(place);
}

// Rows go, sums stay. Nothing is open.
void MegaQueueEngine::Publisher::forget() {
    for (const MegaSubmissionRow& row : rows) {
        if (row.state == MegaSubmissionState::Alias) totals.deduped_done += rows[row.alias].done;
    }
    first += rows.size();
    rows.clear();
    place_of.clear();
    all_waits = sources = {};
    first_missing = NOTHING;
    finished_batches.insert(finished_batches.end(), missing_batches.begin(), missing_batches.end());
    missing_batches.clear();
    finished = forgotten = readers = 0;
    begin_tracking();
}

void MegaQueueEngine::Publisher::begin_tracking() {
    hazards = HazardTracker();
    hazards.keep_sources();
}

// ------------------------------------------------------------------------------------------ what is seen

MegaPublished MegaQueueEngine::publish(const MegaBatch& batch, uint64_t until_ns, PlanStop* stop) {
    m->collect();
    MegaPublished found = m->check(batch);
    if (found.refused != MegaRefused::None) return found;
    found.wait = m->run_on();
    if (found.wait == MegaQueueWait::Done) found.wait = m->make_room(batch, until_ns, stop);
    if (found.wait != MegaQueueWait::Done) {
        found.refused = found.wait == MegaQueueWait::Stopped || found.wait == MegaQueueWait::Hung
                            ? MegaRefused::State : MegaRefused::Waiting;
        return found;
    }
    const uint64_t plan_ns = monotonic_ns();
    m->plan(batch);
    const uint64_t planned_ns = monotonic_ns();
    found.wait = m->make_room_for_edges();
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
    if (m_memory->bell.has_sleepers()) m_memory->bell.ring_one();
    found.plan_ns = planned_ns - plan_ns;
    found.publish_ns = monotonic_ns() - publish_ns;
    m->totals.plan_ns += found.plan_ns;
    m->totals.publish_ns += found.publish_ns;
    return found;
}

MegaQueueWait MegaQueueEngine::drain(uint64_t deadline_ns, PlanStop* stop) {
    const MegaQueueWait ready = m->run_on();
    if (ready != MegaQueueWait::Done) return ready;
    m->set_deadline(deadline_ns);
    const auto is_done = [&] { return Atomics::load(&m_memory->control.open) == 0; };
    MegaQueueWait waited = m->wait_for(is_done, NONE, deadline_ns, stop);
    if (waited == MegaQueueWait::Expired && m->is_running) {
        // Workers that sleep or execute have not looked yet.
        Atomics::replace(&m_memory->control.mode, uint32_t(MegaQueueMode::Running), uint32_t(MegaQueueMode::Expired));
        m_memory->bell.ring_all();
        waited = m->wait_for_workers();
    }
    if (waited != MegaQueueWait::Hung && is_done()) {  // the last item ended as the deadline came
        m->collect();
        if (waited == MegaQueueWait::Expired) waited = MegaQueueWait::Done;
    }
    if (waited == MegaQueueWait::Done || waited == MegaQueueWait::Interrupted) m->set_deadline(FOREVER);
    return waited;
}

MegaQueueWait MegaQueueEngine::wait(uint64_t submission, uint64_t until_ns, PlanStop* stop) {
    const MegaQueueWait ready = m->run_on();
    if (ready != MegaQueueWait::Done) return ready;
    return m->wait_for([&] { return state_of(submission) != MegaSubmissionState::Open; }, ONE_LESS, until_ns, stop);
}

void MegaQueueEngine::stop() { m->say(MegaQueueMode::Stopped); }

MegaQueueWait MegaQueueEngine::join() {
    if (m->is_dead) return MegaQueueWait::Hung;
    return m->wait_for_workers();
}

void MegaQueueEngine::clear() {
    if (m->is_running) throw std::logic_error("workers have not left");
    m->collect();
    for (uint32_t order = 0; order < m->rows.size(); ++order) {
        const uint32_t place = m->place_of[order];
        if (place == NOTHING) continue;
        MegaSubmissionRow& row = m->rows[order];
        for (uint32_t slot = m->q.submissions[place].first_slot; slot != NOTHING; slot = m->q.slots[slot].next) {
            const MegaSlot& item = m->q.slots[slot];
            const MegaItem state = mega_state(item.state);
            if (state == MegaItem::Done) {
                ++row.done;
            } else if (state == MegaItem::Faulted) {
                ++m->totals.faulted;
                m->faults.push_back({m->first + order, item.block, item.code, mega_attempts(item.state)});
            } else {
                if (!mega_is_legal(state, MegaItem::Faulted)) m->is_broken = true;
                ++m->totals.cancelled;
            }
        }
        m->totals.done += row.done;
        row.state = MegaSubmissionState::Cancelled;
        m->place_of[order] = NOTHING;
        Publisher::Batch& batch = m->batches[m->places[place].batch];
        if (--batch.open == 0) m->finished_batches.push_back(batch.first);
    }
    m_memory->reset_tables();
    m->reset();
    m->begin_tracking();
    m->first_missing = NOTHING;
}

void MegaQueueEngine::begin_again() {
    if (open() != 0) throw std::logic_error("submissions are open");
    for (uint32_t k = 0; k < workers(); ++k) {
        const MegaHand& hand = m_memory->hands[k];
        m->before[k] = {hand.items, m_memory->count(k, MEGA_SKIPPED_WORD), hand.work, hand.wait, hand.idle, false, 0, 0};
        m_memory->hands[k].records.clear();
        m_memory->hands[k].dropped_records = 0;
    }
    for (uint32_t op = 0; op < m_memory->ops.size(); ++op) {
        const auto [items, work] = op_totals(op);
        m->ops_before[op].first += items;
        m->ops_before[op].second += work;
    }
    m->requeued_before = 0;
    for (uint32_t k = 0; k < workers(); ++k) m->requeued_before += m_memory->count(k, MEGA_REQUEUED_WORD);
    m->forget();
    m->faults.clear();
    m->totals = {};
}

MegaQueueState MegaQueueEngine::state() const {
    return m->is_dead ? MegaQueueState::Dead : MegaQueueState(uint32_t(m->mode()));
}
bool MegaQueueEngine::is_foreign() const { return m->made_at_fork != forks(); }
uint64_t MegaQueueEngine::open() const { return Atomics::load(&m_memory->control.open); }
uint32_t MegaQueueEngine::free_slots() const { return uint32_t(m->free_slots.size()); }
void MegaQueueEngine::collect() { m->collect(); }
uint64_t MegaQueueEngine::first() const { return m->first; }
uint64_t MegaQueueEngine::next() const { return m->first + m->rows.size(); }
const std::vector<MegaSubmissionRow>& MegaQueueEngine::rows() const { return m->rows; }

std::vector<MegaSubmissionRow> MegaQueueEngine::rows_now() const {
    std::vector<MegaSubmissionRow> found = m->rows;
    for (uint32_t order = 0; order < found.size(); ++order) {
        const uint32_t place = m->place_of[order];
        if (found[order].state == MegaSubmissionState::Alias) found[order].done = found[found[order].alias].done;
        if (place == NOTHING) continue;
        for (uint32_t slot = m->q.submissions[place].first_slot; slot != NOTHING; slot = m->q.slots[slot].next)
            found[order].done += mega_state(Atomics::load(&m->q.slots[slot].state)) == MegaItem::Done;
    }
    return found;
}

const MegaQueueReasons& MegaQueueEngine::waits() const { return m->all_waits; }
const MegaQueueReasons& MegaQueueEngine::sources() const { return m->sources; }
const std::vector<MegaItemFault>& MegaQueueEngine::faults() const { return m->faults; }
double MegaQueueEngine::ns_per_tick() const { return m_memory->ns_per_tick; }
uint64_t MegaQueueEngine::begin_tick() const { return m->begin_tick; }
uint32_t MegaQueueEngine::workers() const { return m->q.workers; }
const MegaQueue& MegaQueueEngine::queue() const { return m->q; }

std::vector<uint32_t> MegaQueueEngine::last_writers(uint64_t begin, uint64_t end) {
    if (open() != 0) throw std::logic_error("submissions are open");
    const MegaAccess read = {begin, end, 0, 0, MEGA_READ};
    m->hazards.add(uint32_t(m->rows.size()) + m->readers++, {&read, 1});
    std::vector<uint32_t> numbers;
    m->expand(m->hazards.sources(), numbers, 0);
    return numbers;
}

MegaSubmissionState MegaQueueEngine::state_of(uint64_t submission) const {
    if (submission < m->first) return MegaSubmissionState::Done;
    if (submission >= next()) return MegaSubmissionState::Open;
    const MegaSubmissionRow& row = m->rows[submission - m->first];
    return row.state == MegaSubmissionState::Alias ? m->rows[row.alias].state : row.state;
}

MegaQueueTotals MegaQueueEngine::totals() const {
    MegaQueueTotals found = m->totals;
    found.requeued = 0;
    for (uint32_t k = 0; k < workers(); ++k) {
        found.requeued += m_memory->count(k, MEGA_REQUEUED_WORD);
        found.dropped_records += m_memory->hands[k].dropped_records;
    }
    found.requeued -= m->requeued_before;
    return found;
}

MegaWorkerTotals MegaQueueEngine::worker(uint32_t number) const {
    const MegaHand& hand = m_memory->hands[number];
    const MegaWorkerTotals& before = m->before[number];
    MegaWorkerTotals found;
    found.items = hand.items - before.items;
    found.skipped = m_memory->count(number, MEGA_SKIPPED_WORD) - before.skipped;
    found.work_ticks = hand.work - before.work_ticks;
    found.wait_ticks = hand.wait - before.wait_ticks;
    found.idle_ticks = hand.idle - before.idle_ticks;
    found.is_inside = hand.inside.load(std::memory_order_acquire) != 0;
    if (found.is_inside) {
        const MegaSlot& item = m->q.slots[hand.slot.load(std::memory_order_relaxed)];
        found.block = Atomics::peek(&item.block);
        found.submission = m->number_of(Atomics::peek(&item.submission));
    }
    return found;
}

std::pair<uint64_t, uint64_t> MegaQueueEngine::op_totals(uint32_t op) const {
    uint64_t items = 0, work = 0;
    for (uint32_t k = 0; k < workers(); ++k) {
        items += m_memory->hands[k].op_items[op];
        work += m_memory->hands[k].op_work[op];
    }
    return {items - m->ops_before[op].first, work - m->ops_before[op].second};
}

std::vector<MegaQueueRecord> MegaQueueEngine::records() const {
    std::vector<MegaQueueRecord> all;
    for (uint32_t k = 0; k < workers(); ++k) {
        const MegaHand& hand = m_memory->hands[k];
        if (hand.inside.load(std::memory_order_acquire)) continue;  // it hangs, and may write any time
        all.insert(all.end(), hand.records.begin(), hand.records.end());
    }
    return all;
}

std::vector<uint64_t> MegaQueueEngine::take_finished_batches() {
    std::vector<uint64_t> found;
    found.swap(m->finished_batches);
    return found;
}

std::vector<MegaHung> MegaQueueEngine::hung() const {
    std::vector<MegaHung> all;
    if (!m->is_dead) return all;
    for (uint32_t k = 0; k < workers(); ++k) {
        const MegaHand& hand = m_memory->hands[k];
        if (!hand.inside.load(std::memory_order_acquire)) continue;
        const MegaSlot& item = m->q.slots[hand.slot];
        const MegaSubmission& submission = m->q.submissions[item.submission];
        const double ns = double(m_memory->clock.now() - hand.since) * m_memory->ns_per_tick;
        MegaHung each = {k, m->number_of(item.submission), item.block, submission.op, uint64_t(ns),
                         MegaHung::NO_SUBMISSION, 0};
        for (uint32_t edge = Atomics::load(&submission.dependents); edge < MEGA_CLOSED;
             edge = Atomics::peek(&m->q.edges[edge].next)) {
            const uint32_t waiter = Atomics::peek(&m->q.edges[edge].waiter) & ~MEGA_VALUE;
            each.waiter = std::min(each.waiter, m->number_of(waiter));
            ++each.waiters;
        }
        all.push_back(each);
    }
    return all;
}

uint64_t MegaQueueEngine::tables_bytes() const {
    return bytes(m_memory->options, m_memory->stride) + m->hazards.bytes() +
           m->rows.capacity() * sizeof(MegaSubmissionRow) + m->place_of.capacity() * sizeof(uint32_t);
}

std::string MegaQueueEngine::problem() const {
    const uint32_t count = Atomics::load(&m_memory->control.violations);
    if (!count) return m->is_broken ? "a batch could not be written" : "";
    return std::to_string(count) + " steps found a slot in a state that they must not find, first slot " +
           std::to_string(m_memory->control.violated_slot) + " in state " +
           std::to_string(m_memory->control.violated_state);
}

}  // namespace brickline
