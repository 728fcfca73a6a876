#include "mega_queue_publisher.h"

#include <algorithm>
#include <bit>

namespace brickline {
namespace {

using Atomics = platform::Atomics;

constexpr uint32_t NOTHING = MEGA_NOTHING;
constexpr uint32_t FORGET_EVERY = 1u << 16;   // submissions
constexpr uint32_t MAX_GRID = 0x7fffffff;
constexpr uint32_t AHEAD = 6;                 // places that are asked for early

uint32_t blocks_of(const MegaJob& job) { return job.grid[0] * job.grid[1] * job.grid[2]; }

}  // namespace

void MegaBatch::clear() { shorten(0, 0, 0, 0); }

void MegaBatch::shorten(size_t keep_jobs, size_t keep_arguments, size_t keep_accesses, uint64_t keep_items) {
    jobs.resize(keep_jobs);
    access_end.resize(keep_jobs);
    arguments.resize(keep_arguments);
    accesses.resize(keep_accesses);
    items = keep_items;
}

MegaPublisher::MegaPublisher(const MegaQueueOptions& options, std::vector<MegaQueueOp> ops, MegaQueueWorkers& workers)
    : m_options(options), m_ops(std::move(ops)), m_workers(workers), m_proof(m_ops) {
    reset();
    begin_tracking();
}

void MegaPublisher::reset() {
    const uint32_t count = m_options.slots;
    m_free_slots = count;
    m_free_edges = m_workers.edges();
    m_free_places.resize(count);
    m_places.assign(count, {0, 0, NOTHING});
    for (uint32_t k = 0; k < count; ++k) m_free_places[k] = count - 1 - k;
    m_free_batches.clear();
    m_batches.clear();
}

// ------------------------------------------------------------------------------------------- publishing

MegaPublished MegaPublisher::check(const MegaBatch& batch) const {
    if (is_broken) return {MegaRefused::Broken};
    if (batch.jobs.empty()) return {MegaRefused::NoJobs};
    if (batch.access_end.size() != batch.jobs.size()) return {MegaRefused::Accesses};
    uint64_t items = 0, arguments = 0;
    uint32_t access = 0;
    for (uint32_t k = 0; k < batch.jobs.size(); ++k) {
        const MegaJob& job = batch.jobs[k];
        const auto refuse = [&](MegaRefused why) { return MegaPublished{why, MegaQueueWait::Done, k}; };
        if (job.op >= m_ops.size()) return refuse(MegaRefused::Op);
        if (job.priority >= MEGA_PRIORITIES) return refuse(MegaRefused::Priority);
        uint64_t blocks = 1;
        for (const uint32_t size : job.grid) {
            if (size == 0 || size > MAX_GRID) return refuse(MegaRefused::Grid);
            blocks *= size;
            if (blocks > m_options.slots) return refuse(MegaRefused::Grid);
        }
        items += blocks;
        if (items > m_options.slots) return refuse(MegaRefused::Items);
        arguments += m_ops[job.op].arguments;
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

void MegaPublisher::plan(const MegaBatch& batch) {
    const uint32_t count = uint32_t(batch.jobs.size());
    m_producers.clear();
    m_wait_end.clear();
    m_is_missing.assign(count, false);
    m_twins.assign(count, NOTHING);
    m_regions.assign(count, {});
    m_touched.clear();
    const bool is_deduping = m_options.is_deduping && count > 1;
    m_known_jobs.assign(is_deduping ? std::bit_ceil(2 * count) : 0, {NOTHING, nullptr});
    uint32_t access = 0;
    const uint64_t* values = batch.arguments.data();
    for (uint32_t k = 0; k < count; ++k) {
        if (is_deduping) m_twins[k] = twin_of(batch, k, values, access);
        if (m_twins[k] == NOTHING) {
            plan_job(batch, k, std::span(batch.accesses).subspan(access, batch.access_end[k] - access));
        } else {
            if (m_options.is_recorded) note({});
            m_wait_end.push_back(uint32_t(m_producers.size()));
        }
        access = batch.access_end[k];
        values += m_ops[batch.jobs[k].op].arguments;
    }
    if (m_options.has_lineage) {
        const uint64_t before = all_accesses.rows.size();
        all_accesses.rows.insert(all_accesses.rows.end(), batch.accesses.begin(), batch.accesses.end());
        for (const uint32_t end : batch.access_end) all_accesses.ends.push_back(before + end);
    }
}

bool MegaPublisher::prove(const MegaBatch& batch) {
    if (!m_options.is_proved) return true;
    const uint32_t known = uint32_t(rows.size());
    std::vector<MegaDecision> decisions(batch.jobs.size());
    for (uint32_t k = 0, wait = 0; k < batch.jobs.size(); wait = m_wait_end[k++]) {
        MegaDecision& each = decisions[k];
        for (uint32_t at = wait; at < m_wait_end[k]; ++at) each.waits.push_back(m_producers[at] & ~MEGA_VALUE);
        if (m_regions[k].follows != NOTHING) each.follows = known + m_regions[k].follows;
        if (m_twins[k] != NOTHING) each.alias = known + m_twins[k];
    }
    problem = m_proof.prove(batch, known, decisions);
    if (!problem.empty()) is_broken = true;
    return problem.empty();
}

// An earlier job of the batch with the same op and arguments, where nobody has written to what either
// reads or writes since; else NOTHING, and later ones may find this job.
uint32_t MegaPublisher::twin_of(const MegaBatch& batch, uint32_t number, const uint64_t* values,
                                uint32_t first_access) {
    const MegaJob& job = batch.jobs[number];
    const MegaQueueOp& op = m_ops[job.op];
    if (!(op.flags & MEGA_PURE)) return NOTHING;
    uint64_t hash = job.op + 1;
    for (uint32_t k = 0; k < op.arguments; ++k) {
        hash = (hash ^ values[k]) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 32;
    }
    const size_t mask = m_known_jobs.size() - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        auto& [found, found_values] = m_known_jobs[at];
        if (found == NOTHING) {
            m_known_jobs[at] = {number, values};
            return NOTHING;
        }
        // Arguments decide sizes, too.
        if (batch.jobs[found].op != job.op || !std::equal(values, values + op.arguments, found_values)) continue;
        const uint32_t written = uint32_t(rows.size()) + found + 2;  // as the tracker counts versions
        bool is_same = true;
        for (uint32_t k = first_access; k < batch.access_end[number] && is_same; ++k) {
            const MegaAccess& each = batch.accesses[k];
            if (each.begin == each.end) continue;
            const uint32_t newest = m_hazards.version(each.space, each.begin, each.end).newest;
            is_same = each.mode & MEGA_WRITE ? newest == written && each.mode == MEGA_WRITE : newest < written;
        }
        if (is_same) return found;
        found = number;  // whoever comes later is compared with this one
        found_values = values;
        return NOTHING;
    }
}

void MegaPublisher::plan_job(const MegaBatch& batch, uint32_t job, std::span<const MegaAccess> accesses) {
    const uint32_t known = uint32_t(rows.size());  // later ones are of this batch
    const size_t begin = m_producers.size();
    const std::span<const uint32_t> producers = m_hazards.add(known + job, accesses);
    m_read_from.clear();
    expand(m_hazards.sources(), m_read_from, 0);
    if (m_first_missing != NOTHING) {
        m_is_missing[job] = std::any_of(m_read_from.begin(), m_read_from.end(), [&](uint32_t producer) {
            return producer < known && m_place_of[producer] == NOTHING &&
                   rows[producer].state != MegaSubmissionState::Done;
        });
    }
    if (m_options.is_recorded) note(producers);
    for (const uint32_t producer : producers) {
        if (producer < known && m_place_of[producer] == NOTHING) continue;
        const bool is_value = std::binary_search(m_read_from.begin(), m_read_from.end(), producer);
        m_producers.push_back(producer | (is_value ? MEGA_VALUE : 0));
    }
    if (m_producers.size() > begin && !m_is_missing[job]) {
        Region& region = m_regions[job];
        region.apart = m_options.is_fusing ? join(batch, job, std::span(m_producers).subspan(begin), accesses)
                                           : MegaCode::FuseOff;
        if (region.follows != NOTHING) m_producers.resize(begin);
    }
    m_wait_end.push_back(uint32_t(m_producers.size()));
}

// Joins a job to the last one that it waits for, or says why not.
MegaCode MegaPublisher::join(const MegaBatch& batch, uint32_t job, std::span<const uint32_t> producers,
                              std::span<const MegaAccess> accesses) {
    const uint32_t known = uint32_t(rows.size()), last = producers.back() & ~MEGA_VALUE;
    if (last < known) return MegaCode::OtherBatch;
    const uint32_t before = last - known;
    const MegaJob &one = batch.jobs[before], &other = batch.jobs[job];
    Region& region = m_regions[before];
    if ((m_ops[one.op].flags | m_ops[other.op].flags) & MEGA_IN_ORDER) return MegaCode::JoinAccumulates;
    if (blocks_of(one) != blocks_of(other)) return MegaCode::DifferentBlocks;
    if (one.priority != other.priority) return MegaCode::OtherPriority;
    if (region.has_follower) return MegaCode::HasFollower;
    if (!(producers.back() & MEGA_VALUE)) return MegaCode::NoValue;
    // All else must be over when the region begins, or be part of it; and what it reads must be there then.
    const uint32_t head = head_of(before), first = head ? m_wait_end[head - 1] : 0;
    const std::span<const uint32_t> of_head(m_producers.data() + first, m_wait_end[head] - first);
    for (const uint32_t each : producers.first(producers.size() - 1)) {
        const uint32_t order = each & ~MEGA_VALUE;
        if (order >= known && head_of(order - known) == head) continue;
        const auto is_it = [&](uint32_t waited) { return waited == each || waited == (order | MEGA_VALUE); };
        if (std::none_of(of_head.begin(), of_head.end(), is_it)) return MegaCode::WaitsForOther;
    }
    if (blocks_of(other) > 1) {
        MegaTouched& touched = m_touched[head];
        if (touched.is_empty()) {
            const uint32_t from = head ? batch.access_end[head - 1] : 0;
            touched.add(std::span(batch.accesses).subspan(from, batch.access_end[head] - from));
        }
        if (!touched.are_apart(accesses)) return MegaCode::NotBlockwise;
        touched.add(accesses);
    }
    region.has_follower = true;
    m_regions[job].head = head;
    m_regions[job].follows = before;
    return MegaCode::None;
}

void MegaPublisher::note(std::span<const uint32_t> producers) {
    all_waits.numbers.insert(all_waits.numbers.end(), producers.begin(), producers.end());
    all_waits.ends.push_back(all_waits.numbers.size());
}

// Appends the members of entries of the tracker to `numbers`, whose end from `begin` on is theirs.
void MegaPublisher::expand(std::span<const uint32_t> found, std::vector<uint32_t>& numbers, uint64_t begin) const {
    for (const uint32_t entry : found) {
        if (!(entry & MEGA_SET)) {
            numbers.push_back(entry);
            continue;
        }
        const std::span<const uint32_t> members = m_hazards.sets()[entry & ~MEGA_SET];
        numbers.insert(numbers.end(), members.begin(), members.end());
    }
    std::sort(numbers.begin() + ptrdiff_t(begin), numbers.end());
    numbers.erase(std::unique(numbers.begin() + ptrdiff_t(begin), numbers.end()), numbers.end());
}

void MegaPublisher::grow_edges() {
    const uint64_t before = m_workers.edges();
    m_workers.grow_edges(std::max(2 * before, uint64_t{m_producers.size()}));
    m_free_edges += m_workers.edges() - before;
}

bool MegaPublisher::write(const MegaBatch& batch) {
    if (m_free_batches.empty()) {
        m_free_batches.push_back(uint32_t(m_batches.size()));
        m_batches.push_back({});
    }
    const uint32_t batch_place = m_free_batches.back();
    m_free_batches.pop_back();
    const uint32_t own_jobs = uint32_t(std::count(m_twins.begin(), m_twins.end(), NOTHING));
    m_batches[batch_place] = {first + rows.size(), own_jobs, false};
    const uint32_t known = uint32_t(rows.size());
    const uint64_t* values = batch.arguments.data();
    uint32_t wait = 0;
    for (uint32_t k = 0; k < batch.jobs.size(); ++k) {
        const MegaJob& job = batch.jobs[k];
        if (m_twins[k] != NOTHING) {
            write_alias(job, known + m_twins[k]);
        } else {
            const std::span<uint32_t> own(m_producers.data() + wait, m_wait_end[k] - wait);
            if (!write_job(batch, k, values, batch_place, own)) return false;
        }
        wait = m_wait_end[k];
        values += m_ops[job.op].arguments;
    }
    return m_workers.commit(own_jobs, known == 0);
}

void MegaPublisher::write_alias(const MegaJob& job, uint32_t twin) {
    const uint32_t blocks = blocks_of(job);
    rows.push_back({job.op, blocks, 0, twin, NOTHING, MegaSubmissionState::Alias, uint8_t(job.priority)});
    m_place_of.push_back(NOTHING);
    totals.deduped += blocks;
    ++totals.submissions;
}

bool MegaPublisher::write_job(const MegaBatch& batch, uint32_t number, const uint64_t* values, uint32_t batch_place,
                              std::span<uint32_t> producers) {
    const MegaJob& job = batch.jobs[number];
    const Region& region = m_regions[number];
    const uint32_t blocks = blocks_of(job), order = uint32_t(rows.size());
    const uint32_t follows = region.follows == NOTHING ? NOTHING : order - number + region.follows;
    const uint32_t place = m_free_places.back();
    m_free_places.pop_back();
    for (uint32_t& each : producers) each = m_place_of[each & ~MEGA_VALUE] | (each & MEGA_VALUE);
    const MegaQueueOp& op = m_ops[job.op];
    const uint32_t soon = m_free_places.size() > AHEAD ? *(m_free_places.end() - AHEAD) : place;
    const MegaQueueEntry entry = {job, {values, op.arguments}, producers, place, uint32_t(first + order), blocks,
                                  op.flags, m_is_missing[number], follows == NOTHING ? NOTHING : m_place_of[follows],
                                  soon};
    if (!m_workers.write(entry)) return false;
    m_places[place] = {order, uint32_t(producers.size()), batch_place};
    rows.push_back({job.op, blocks, 0, NOTHING, follows, MegaSubmissionState::Open, uint8_t(job.priority), uint16_t(region.apart)});
    totals.joined += follows != NOTHING;
    m_place_of.push_back(place);
    m_free_slots -= blocks;
    m_free_edges -= producers.size();
    totals.edges += producers.size();
    totals.published += blocks;
    ++totals.submissions;
    return true;
}

// -------------------------------------------------------------------------------------------- finishing

void MegaPublisher::collect() {
    m_done.clear();
    m_done_faults.clear();
    if (!m_workers.collect(m_done, m_done_faults)) is_broken = true;
    const MegaItemFault* fault = m_done_faults.data();
    for (const MegaFinished& each : m_done) {
        finish(each, {fault, each.faulted});
        fault += each.faulted;
    }
    while (m_finished < rows.size() && m_place_of[m_finished] == NOTHING && m_finished < m_first_missing) ++m_finished;
    if (m_finished - m_forgotten >= FORGET_EVERY) m_hazards.forget(m_forgotten = m_finished);
}

void MegaPublisher::finish(const MegaFinished& each, std::span<const MegaItemFault> own_faults) {
    const Place& place = m_places[each.place];
    const uint32_t order = place.order;
    MegaSubmissionRow& row = rows[order];
    row.done = each.done;
    for (MegaItemFault fault : own_faults) {
        fault.submission = first + order;
        faults.push_back(fault);
    }
    row.state = each.faulted ? MegaSubmissionState::Faulted
                             : each.skipped ? MegaSubmissionState::Skipped : MegaSubmissionState::Done;
    if (row.state != MegaSubmissionState::Done) m_first_missing = std::min(m_first_missing, order);
    totals.done += each.done;
    totals.faulted += each.faulted;
    totals.skipped += each.skipped;
    m_free_slots += row.items;
    m_free_edges += place.edges;
    Batch& batch = m_batches[place.batch];
    batch.is_missing |= row.state != MegaSubmissionState::Done;
    if (--batch.open == 0) {
        (batch.is_missing ? m_missing_batches : finished_batches).push_back(batch.first);
        m_free_batches.push_back(place.batch);
    }
    m_place_of[order] = NOTHING;
    m_free_places.push_back(each.place);
    if (m_options.is_proved) m_proof.finish(order);
}

void MegaPublisher::cancel(const MegaQueue& tables) {
    for (uint32_t order = 0; order < rows.size(); ++order) {
        const uint32_t place = m_place_of[order];
        if (place == NOTHING) continue;
        MegaSubmissionRow& row = rows[order];
        for (uint32_t slot = tables.submissions[place].first_slot; slot != NOTHING; slot = tables.slots[slot].next) {
            const MegaSlot& item = tables.slots[slot];
            const MegaItem state = mega_state(item.state);
            if (state == MegaItem::Done) {
                ++row.done;
            } else if (state == MegaItem::Faulted) {
                ++totals.faulted;
                faults.push_back({first + order, item.block, item.code, mega_attempts(item.state)});
            } else {
                if (!mega_is_legal(state, MegaItem::Faulted)) is_broken = true;
                ++totals.cancelled;
            }
        }
        totals.done += row.done;
        row.state = MegaSubmissionState::Cancelled;
        m_place_of[order] = NOTHING;
        Batch& batch = m_batches[m_places[place].batch];
        if (--batch.open == 0) finished_batches.push_back(batch.first);
    }
    reset();
    begin_tracking();
    m_proof.forget();
    m_first_missing = NOTHING;
}

void MegaPublisher::forget() {
    for (uint32_t order = 0; order < rows.size(); ++order) {
        const bool is_alias = rows[order].state == MegaSubmissionState::Alias;
        const MegaSubmissionRow& row = rows[is_alias ? rows[order].alias : order];
        if (is_alias) totals.deduped_done += row.done;
        if (row.state != MegaSubmissionState::Done) lost.emplace_hint(lost.end(), first + order, row.state);
    }
    first += rows.size();
    rows.clear();
    m_place_of.clear();
    all_waits = {};
    all_accesses = {};
    m_first_missing = NOTHING;
    finished_batches.insert(finished_batches.end(), m_missing_batches.begin(), m_missing_batches.end());
    m_missing_batches.clear();
    m_finished = m_forgotten = 0;
    m_proof.forget();
    begin_tracking();
}

void MegaPublisher::forget_totals() {
    faults.clear();
    totals = {};
}

void MegaPublisher::begin_tracking() {
    m_hazards = HazardTracker();
    m_hazards.keep_sources();
}

// ------------------------------------------------------------------------------------------ what is seen

std::vector<MegaSubmissionRow> MegaPublisher::rows_now(const MegaQueue& tables) const {
    std::vector<MegaSubmissionRow> found = rows;
    for (uint32_t order = 0; order < found.size(); ++order) {
        const uint32_t place = m_place_of[order];
        if (found[order].state == MegaSubmissionState::Alias) found[order].done = found[found[order].alias].done;
        if (place == NOTHING) continue;
        for (uint32_t slot = tables.submissions[place].first_slot; slot != NOTHING; slot = tables.slots[slot].next)
            found[order].done += mega_state(Atomics::load(&tables.slots[slot].state)) == MegaItem::Done;
    }
    return found;
}

uint64_t MegaPublisher::bytes() const {
    return m_hazards.bytes() + rows.capacity() * sizeof(MegaSubmissionRow) +
           all_accesses.rows.capacity() * sizeof(MegaAccess) + all_accesses.ends.capacity() * sizeof(uint64_t) +
           m_place_of.capacity() * sizeof(uint32_t) + bytes_of(m_options);
}

}  // namespace brickline
