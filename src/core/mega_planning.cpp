#include "mega_planning.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "mega_touched.h"

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;

void require(bool holds, const char* what, size_t place) {
    if (!holds) throw MegaFaulty(std::string(what) + " - at " + std::to_string(place));
}

void check_begins(std::span<const uint32_t> begins, size_t tasks, size_t rows, const char* what) {
    bool is_right = begins.size() == tasks + 1 && begins[0] == 0 && begins[tasks] == rows;
    if (is_right) {
        uint32_t falls = 0;  // without a way out, so that many are compared at once
        for (size_t k = 0; k < tasks; ++k) falls |= begins[k] > begins[k + 1];
        is_right = !falls;
    }
    if (!is_right) {
        throw MegaFaulty(std::string("expected ") + what + " of " + std::to_string(tasks) +
                         " tasks and an end, ascending from 0 to " + std::to_string(rows));
    }
}

constexpr size_t AHEAD = 64;  // accesses that are fetched meanwhile: beyond a page, where the processor stops

bool fits(const MegaAccess& access) {
    return (access.mode - 1 <= 2u) & (access.begin <= access.end) & (access.per_block >= 0);
}

// A task after its level: whoever has the highest one of several is the last that may begin.
uint64_t after_level(uint32_t level, uint32_t task) { return uint64_t(level) << 32 | task; }
uint32_t level_of(uint64_t latest) { return uint32_t(latest >> 32); }

// Of several tasks, what matters to those that wait for them.
struct Facts {
    uint64_t latest = 0;       // the last one of the highest level, after it
    uint32_t others = 0;       // the highest level + 1 of those outside of its region, 0: none
    uint32_t outsider = NONE;  // one of that level
    uint64_t finish = 0;
    uint32_t last = NONE;  // who finishes then; not known where all tasks cost the same

    uint32_t level() const { return level_of(latest); }
    uint32_t task() const { return uint32_t(latest); }
};

class Planner {
public:
    Planner(const MegaTaskTable& tasks, const MegaPlanOptions& options)
        : m_tasks(tasks), m_options(options), m_has_costs(!options.costs.empty()) {}

    MegaPlanned plan() {
        const uint32_t count = m_tasks.size();
        m_out.alias.assign(count, -1);
        m_out.entry_begin.resize(size_t(count) + 1);
        m_out.entry_begin[0] = 0;
        m_out.entries.reserve(size_t(count) * 2);
        m_out.region.resize(count);
        m_out.level.resize(count);
        m_out.refusals.reserve(count);
        m_heads.reserve(count);
        m_tails.reserve(count);
        if (m_has_costs) m_finish.assign(count, 0);
        m_from.resize(count);
        m_versions.resize(m_tasks.accesses.size());
        if (m_options.dedupes) {
            m_prior.resize(count);
            m_come.assign(std::bit_ceil(size_t(count) * BITS_OF_TASK / 64 + 1), 0);
        }
        m_tracker.reserve(m_tasks.accesses.size());
        for (const MegaInitial& each : m_options.initial) m_tracker.add_initial(each.space, each.begin, each.end);
        for (uint32_t first = 0; first < count; first += CHECKED_TOGETHER) {
            const uint32_t last = std::min(count - first, CHECKED_TOGETHER) + first;
            if (!m_tasks.has_right_accesses(first, last)) m_tasks.check();
            for (uint32_t task = first; task < last; ++task) {
                place(task);
                m_out.entry_begin[task + 1] = uint32_t(m_out.entries.size());
            }
        }
        finish_order();
        finish_critical();
        m_out.sets = m_tracker.take_sets();
        return std::move(m_out);
    }

private:
    void place(uint32_t task) {
        if (m_options.dedupes) {
            const uint32_t earlier = find_alike(task);
            if (earlier != NONE && dedupe(earlier, task)) return;
        }
        const std::span<const MegaAccess> accesses = m_tasks.accesses_of(task);
        const std::span<MegaVersion> versions(m_versions.data() + m_tasks.access_begin[task], accesses.size());
        const std::span<const uint32_t> entries = m_tracker.add_shared(task, accesses, versions);
        if (m_options.finds_unwritten) {
            for (uint32_t k = 0; k < accesses.size(); ++k) {
                if (versions[k].has_unwritten) refuse(task, task, MegaCode::NeverWritten, k);
            }
        }
        if (entries.empty()) {
            m_out.level[task] = 0;
            m_from[task] = NONE;
            if (m_has_costs) m_finish[task] = m_options.costs[task];
        } else if (is_sibling(task, entries)) {
            m_out.level[task] = m_out.level[task - 1];
            m_from[task] = m_from[task - 1];
            m_refused.task = task;
            refuse(m_refused.before, task, m_refused.code, m_refused.other);
            m_out.entries.push_back(entries[0]);
        } else {
            const uint64_t latest = latest_of(entries);
            m_out.level[task] = level_of(latest) + 1;
            m_from[task] = uint32_t(latest);
            if (m_has_costs) find_finish(task, entries);
            if (m_options.joins && join(task, entries, uint32_t(latest))) {
                keep_outsiders(task, entries);
                return;
            }
            for (const uint32_t entry : entries) m_out.entries.push_back(entry);
        }
        m_out.region[task] = uint32_t(m_heads.size());
        m_heads.push_back(task);
        m_tails.push_back(task);
    }

    // Whether a task waits for the one set that the task before it waits for, which was not joined for a
    // reason that holds for both. So many who wait for many cost one look at those.
    bool is_sibling(uint32_t task, std::span<const uint32_t> entries) const {
        return m_refused.task + 1 == task && entries.size() == 1 && entries[0] == m_refused.entry &&
               m_tasks.blocks[task] == m_tasks.blocks[task - 1] && m_tasks.flags[task] == m_tasks.flags[task - 1];
    }

    void refuse(uint32_t earlier, uint32_t later, MegaCode code, uint32_t other = NONE) {
        m_out.refusals.push_back({earlier, later, code, other});
    }

    // -------------------------------------------------------------------------------- duplicates

    // Equal for those that are alike, and for few others.
    uint32_t identity_of(uint32_t task) const {
        uint64_t hash = (uint64_t(m_tasks.op[task]) << 32 | m_tasks.blocks[task]) * 0x9e3779b97f4a7c15ull;
        for (uint32_t k = m_tasks.param_begin[task]; k < m_tasks.param_begin[task + 1]; ++k) {
            hash = (hash ^ m_tasks.params[k]) * 0xff51afd7ed558ccdull;
        }
        if (const auto accesses = m_tasks.accesses_of(task); !accesses.empty()) {
            const MegaAccess &first = accesses.front(), &last = accesses.back();
            const uint64_t places = first.begin + (uint64_t(first.space) << 40) + 3 * last.begin + last.space;
            hash = (hash ^ places) * 0xff51afd7ed558ccdull;
        }
        return uint32_t(hash >> 32) ^ uint32_t(hash);
    }

    bool are_alike(uint32_t a, uint32_t b) const {
        const auto same = [](const MegaAccess& x, const MegaAccess& y) {
            return x.begin == y.begin && x.end == y.end && x.per_block == y.per_block && x.space == y.space &&
                   x.mode == y.mode;
        };
        return m_tasks.op[a] == m_tasks.op[b] && m_tasks.blocks[a] == m_tasks.blocks[b] &&
               std::ranges::equal(m_tasks.params_of(a), m_tasks.params_of(b)) &&
               std::ranges::equal(m_tasks.accesses_of(a), m_tasks.accesses_of(b), same);
    }

    // A task with the same op, blocks, parameters and ranges. What it computed is there only if it wrote last
    // where this one would write; a few who wrote before that are looked at for the sake of the reason.
    uint32_t find_alike(uint32_t task) {
        const uint32_t identity = identity_of(task);
        m_prior[task] = {identity, NONE};
        return may_have_come(identity) ? look_back(task) : NONE;
    }

    // Kept out of the way of tasks that come for the first time.
    [[gnu::noinline]] uint32_t look_back(uint32_t task) {
        Prior& mine = m_prior[task];
        const MegaAccess* const output = output_of(task);
        if (!output) return NONE;
        mine.newest = m_tracker.version(output->space, output->begin, output->end).newest;
        uint32_t newest = mine.newest;
        for (int k = 0; newest >= 2; newest = newest_before(newest - 2)) {
            const uint32_t earlier = newest - 2;
            if (m_prior[earlier].identity == mine.identity && are_alike(earlier, task)) return earlier;
            if (++k == LOOK_BACK) break;
        }
        return NONE;
    }

    // Whether a task with an identity came before, or one with an identity of the same bit; notes it.
    bool may_have_come(uint32_t identity) {
        uint64_t& bits = m_come[(identity >> 6) & (m_come.size() - 1)];
        const uint64_t bit = uint64_t(1) << (identity & 63);
        const bool has_come = bits & bit;
        bits |= bit;
        return has_come;
    }

    // The first range that a task writes; null: none.
    const MegaAccess* output_of(uint32_t task) const {
        for (const MegaAccess& access : m_tasks.accesses_of(task)) {
            if ((access.mode & MEGA_WRITE) && access.begin < access.end) return &access;
        }
        return nullptr;
    }

    // Who wrote last to the output of a task before it did, as MegaVersion says it.
    uint32_t newest_before(uint32_t task) const {
        if (m_prior[task].newest != NONE) return m_prior[task].newest;
        const MegaAccess* const output = output_of(task);
        const MegaVersion& noted = m_versions[size_t(output - m_tasks.accesses.data())];
        return output->mode & MEGA_READ ? noted.newest : m_tracker.newest_of(noted, output->begin, output->end);
    }

    bool dedupe(uint32_t earlier, uint32_t task) {
        const uint32_t one = m_tasks.flags[earlier], other = m_tasks.flags[task];
        if ((one | other) & MEGA_TASK_ATOMIC) return refuse(earlier, task, MegaCode::Accumulates), false;
        if (!(one & other & MEGA_TASK_PURE)) return refuse(earlier, task, MegaCode::NotPure), false;
        const std::span<const MegaAccess> accesses = m_tasks.accesses_of(task);
        const MegaVersion* const before = m_versions.data() + m_tasks.access_begin[earlier];
        for (size_t k = 0; k < accesses.size(); ++k) {
            const MegaAccess& access = accesses[k];
            const uint32_t newest = m_tracker.version(access.space, access.begin, access.end).newest;
            if ((access.mode & MEGA_READ) && newest != before[k].newest) {
                return refuse(earlier, task, MegaCode::InputChanged, newest - 2), false;
            }
            if ((access.mode & MEGA_WRITE) && access.begin < access.end && newest != earlier + 2) {
                return refuse(earlier, task, MegaCode::OutputChanged, newest - 2), false;
            }
        }
        m_out.alias[task] = int32_t(earlier);
        m_out.level[task] = m_out.level[earlier];
        m_out.region[task] = MegaPlanned::NO_REGION;
        return true;
    }

    // ------------------------------------------------------------------------------------ facts

    void widen(Facts& facts, const Facts& by) const {
        facts.latest = std::max(facts.latest, by.latest);
        if (m_has_costs && (facts.last == NONE || by.finish > facts.finish)) {
            facts.finish = by.finish;
            facts.last = by.last;
        }
    }
    void widen(Facts& facts, uint32_t task) const {
        Facts by{after_level(m_out.level[task], task)};
        if (m_has_costs) by.finish = m_finish[task], by.last = task;
        widen(facts, by);
    }

    const Facts& set_facts(uint32_t set) {
        while (m_set_facts.size() <= set) m_set_facts.push_back(facts_of_set(uint32_t(m_set_facts.size())));
        return m_set_facts[set];
    }

    Facts facts_of_set(uint32_t set) const {
        Facts facts;
        const std::span<const uint32_t> members = m_tracker.sets()[set];
        for (const uint32_t member : members) widen(facts, member);
        const uint32_t region = m_out.region[facts.task()];
        for (const uint32_t member : members) {
            if (m_out.level[member] + 1 > facts.others && m_out.region[member] != region) {
                facts.others = m_out.level[member] + 1;
                facts.outsider = member;
            }
        }
        return facts;
    }

    uint64_t latest_of(std::span<const uint32_t> entries) {
        uint64_t latest = 0;
        for (const uint32_t entry : entries) {
            latest = std::max(latest, entry & MEGA_SET ? set_facts(entry & ~MEGA_SET).latest
                                                       : after_level(m_out.level[entry], entry));
        }
        return latest;
    }

    void find_finish(uint32_t task, std::span<const uint32_t> entries) {
        Facts all;
        for (const uint32_t entry : entries) {
            if (entry & MEGA_SET) widen(all, set_facts(entry & ~MEGA_SET));
            else widen(all, entry);
        }
        m_finish[task] = all.finish + m_options.costs[task];
        m_from[task] = all.last;
    }

    // ---------------------------------------------------------------------------------- regions

    // What the members of a region touch. Not only what a task waits for counts: a member that another one
    // hides may read what the task writes.
    MegaTouched& touched_by(uint32_t region) {
        if (m_touched.size() <= region) m_touched.resize(m_heads.size());
        MegaTouched& touched = m_touched[region];
        if (touched.is_empty()) touched.add(m_tasks.accesses_of(m_heads[region]));
        return touched;
    }

    // Calls with each task of the entries that is in a region.
    template <class Call>
    void each_in(uint32_t region, std::span<const uint32_t> entries, const Call& call) {
        for (const uint32_t entry : entries) {
            if (!(entry & MEGA_SET)) {
                if (m_out.region[entry] == region) call(entry);
                continue;
            }
            const std::span<const uint32_t> members = m_tracker.sets()[entry & ~MEGA_SET];
            if (members.back() < m_heads[region]) continue;  // all of them are older
            for (const uint32_t member : members) {
                if (m_out.region[member] == region) call(member);
            }
        }
    }

    // Joins a task to the region of the last one that it waits for, or says why not.
    bool join(uint32_t task, std::span<const uint32_t> entries, uint32_t before) {
        const uint32_t region = m_out.region[before];
        const Hindrance found = hindrance_of(task, entries, before);
        if (found.code != MegaCode::None) {
            refuse(before, task, found.code, found.other);
            if (entries.size() == 1 && !m_has_costs) m_refused = {task, entries[0], before, found.code, found.other};
            return false;
        }
        if (m_tasks.blocks[task] > 1) {
            MegaTouched& touched = touched_by(region);
            if (!touched.are_apart(m_tasks.accesses_of(task))) return refuse(before, task, MegaCode::NotBlockwise), false;
            touched.add(m_tasks.accesses_of(task));
        }
        m_out.region[task] = region;
        m_tails[region] = task;
        return true;
    }

    // What of the tasks that it waits for keeps a task apart from them, whatever it touches.
    struct Hindrance {
        MegaCode code = MegaCode::None;
        uint32_t other = NONE;
    };
    Hindrance hindrance_of(uint32_t task, std::span<const uint32_t> entries, uint32_t before) {
        const uint32_t region = m_out.region[before];
        if ((m_tasks.flags[before] | m_tasks.flags[task]) & MEGA_TASK_ATOMIC) return {MegaCode::JoinAccumulates};
        if (m_tasks.blocks[before] != m_tasks.blocks[task]) return {MegaCode::DifferentBlocks};
        if (m_tails[region] != before) return {MegaCode::HasFollower, m_tails[region]};
        // All that it waits for besides must be over when the region begins: it is where it has a
        // lower level, and then no region waits for another that waits for it.
        const uint32_t begin = m_out.level[m_heads[region]];
        uint32_t outsider = NONE;
        for (const uint32_t entry : entries) {
            if (entry & MEGA_SET) {
                const Facts& set = set_facts(entry & ~MEGA_SET);
                if (m_out.region[set.task()] != region) {
                    if (set.level() >= begin) outsider = set.task();
                } else if (set.others > begin) {
                    outsider = set.outsider;
                }
            } else if (m_out.region[entry] != region && m_out.level[entry] >= begin) {
                outsider = entry;
            }
        }
        if (outsider == NONE) return {};
        return {waits_for_region(outsider, region) ? MegaCode::Cycle : MegaCode::WaitsForOther, outsider};
    }

    bool waits_for_region(uint32_t task, uint32_t region) {
        bool does = false;
        const std::span<const uint32_t> entries(m_out.entries.data() + m_out.entry_begin[task],
                                                m_out.entry_begin[task + 1] - m_out.entry_begin[task]);
        each_in(region, entries, [&](uint32_t) { does = true; });
        return does;
    }

    // Notes what a joined task waits for outside of its region.
    void keep_outsiders(uint32_t task, std::span<const uint32_t> entries) {
        const uint32_t region = m_out.region[task];
        size_t done = 0;
        for (; done < entries.size() && !(entries[done] & MEGA_SET); ++done) {
            if (m_out.region[entries[done]] != region) m_out.entries.push_back(entries[done]);
        }
        if (done == entries.size()) return;
        m_kept.assign(entries.begin() + std::ptrdiff_t(done), entries.end());  // making a set ends the span
        for (const uint32_t entry : m_kept) {
            m_members.clear();
            const std::span<const uint32_t> members = m_tracker.sets()[entry & ~MEGA_SET];
            for (const uint32_t member : members) {
                if (m_out.region[member] != region) m_members.push_back(member);
            }
            if (m_members.size() == members.size()) m_out.entries.push_back(entry);
            else if (m_members.size() == 1) m_out.entries.push_back(m_members[0]);
            else if (!m_members.empty()) m_out.entries.push_back(MEGA_SET | m_tracker.make_set(m_members));
        }
    }

    // ------------------------------------------------------------------------------- at the end

    // Numbers regions by the level of their first task, then by its number.
    void finish_order() {
        const size_t regions = m_heads.size();
        m_out.regions = uint32_t(regions);
        uint32_t levels = 0;
        for (const uint32_t head : m_heads) levels = std::max(levels, m_out.level[head] + 1);
        MegaVector<uint32_t> next(levels + 1, 0);
        for (const uint32_t head : m_heads) ++next[m_out.level[head] + 1];
        for (uint32_t k = 0; k < levels; ++k) next[k + 1] += next[k];
        if (regions == m_tasks.size()) {  // nothing is joined: a task's number is its region's
            m_out.order.resize(regions);
            for (uint32_t task = 0; task < regions; ++task) {
                const uint32_t number = next[m_out.level[task]]++;
                m_out.region[task] = number;
                m_out.order[number] = task;
            }
            return;
        }
        MegaVector<uint32_t> number(regions);
        for (size_t region = 0; region < regions; ++region) {
            number[region] = next[m_out.level[m_heads[region]]]++;
        }
        MegaVector<uint32_t> place(regions + 1, 0);
        for (uint32_t& region : m_out.region) {
            if (region == MegaPlanned::NO_REGION) continue;
            region = number[region];
            ++place[region + 1];
        }
        for (size_t k = 0; k < regions; ++k) place[k + 1] += place[k];
        m_out.order.resize(place.back());
        for (uint32_t task = 0; task < m_tasks.size(); ++task) {
            const uint32_t region = m_out.region[task];
            if (region != MegaPlanned::NO_REGION) m_out.order[place[region]++] = task;
        }
    }

    void finish_critical() {
        if (!m_tasks.size()) return;
        // A task that is not run has no finish, and the level of an earlier one that is.
        uint32_t last = 0;
        if (m_has_costs) {
            last = uint32_t(std::ranges::max_element(m_finish) - m_finish.begin());
            m_out.critical_cost = m_finish[last];
        } else {
            uint32_t level = 0;
            for (const uint32_t each : m_out.level) level = std::max(level, each);
            last = uint32_t(std::ranges::find(m_out.level, level) - m_out.level.begin());
            m_out.critical_cost = level + uint64_t(1);
        }
        for (; last != NONE; last = m_from[last]) m_out.critical.push_back(last);
        std::reverse(m_out.critical.begin(), m_out.critical.end());
    }

    const MegaTaskTable& m_tasks;
    const MegaPlanOptions& m_options;
    const bool m_has_costs;
    static constexpr uint32_t CHECKED_TOGETHER = 256;  // tasks whose accesses then lie in a cache
    static constexpr int LOOK_BACK = 2;
    static constexpr size_t BITS_OF_TASK = 8;  // in m_come: one in eight of the last tasks is looked up in vain
    HazardTracker m_tracker;
    MegaPlanned m_out;
    MegaVector<MegaVersion> m_versions;  // of each access, as the tracker notes them
    struct Prior {
        uint32_t identity;
        uint32_t newest;  // who wrote last to a task's output before it; NONE: nobody has asked
    };
    MegaVector<Prior> m_prior;
    MegaVector<uint64_t> m_come;  // a bit for each of several identities; as many words as a power of two
    MegaVector<uint64_t> m_finish;    // where tasks have costs
    MegaVector<uint32_t> m_from;      // on whom the beginning of a task depends
    MegaVector<uint32_t> m_heads, m_tails;  // of regions, in the order in which they were found
    std::vector<MegaTouched> m_touched;  // by regions whose blocks keep to themselves
    MegaVector<Facts> m_set_facts;
    // The last task that waits for one entry alone and was not joined, whatever it touches.
    struct {
        uint32_t task = NONE - 1, entry = NONE, before = NONE;
        MegaCode code = MegaCode::None;
        uint32_t other = NONE;
    } m_refused;
    MegaVector<uint32_t> m_kept, m_members;
};

}  // namespace

void MegaTaskTable::check_columns() const {
    const size_t tasks = op.size();
    if (tasks >= MEGA_MAX_TASKS) throw MegaFaulty("expected fewer tasks, got " + std::to_string(tasks));
    require(blocks.size() == tasks && flags.size() == tasks, "expected as many blocks and flags as tasks",
            std::min(blocks.size(), flags.size()));
    check_begins(param_begin, tasks, params.size(), "begins of parameters");
    check_begins(access_begin, tasks, accesses.size(), "begins of accesses");
    uint32_t known = 0;
    for (const uint32_t each : flags) known |= each;
    constexpr uint32_t ALL = MEGA_TASK_PURE | MEGA_TASK_ATOMIC;
    if (known <= ALL) return;
    for (size_t k = 0; k < tasks; ++k) {
        require(flags[k] <= ALL, "expected flags of PURE (1) and ATOMIC (2) alone, task", k);
    }
}

bool MegaTaskTable::has_right_accesses(uint32_t first, uint32_t last) const {
    uint32_t modes = 0;  // all that were seen, as bits that stay: it takes no branch
    uint32_t falls = 0;
    int64_t signs = 0;
    for (const MegaAccess& access : accesses.subspan(access_begin[first], access_begin[last] - access_begin[first])) {
        __builtin_prefetch(&access + AHEAD);
        modes |= access.mode | (access.mode - 1);  // more than two bits but for 1, 2 and 3
        falls |= access.begin > access.end;
        signs |= access.per_block;
    }
    return !(modes & ~3u) && !falls && signs >= 0;
}

void MegaTaskTable::check() const {
    check_columns();
    if (has_right_accesses(0, size())) return;
    for (size_t k = 0; k < accesses.size(); ++k) {
        require(fits(accesses[k]), "expected a mode of 1 (read), 2 (write) or 3, a range that ends no "
                "earlier than it begins, and 0 or more bytes of a block, access", k);
    }
}

MegaPlanned mega_plan(const MegaTaskTable& tasks, const MegaPlanOptions& options) {
    tasks.check_columns();
    require(options.costs.empty() || options.costs.size() == tasks.size(), "expected as many costs as tasks",
            options.costs.size());
    for (size_t k = 0; k < options.initial.size(); ++k) {
        require(options.initial[k].begin <= options.initial[k].end,
                "expected a range that ends after it begins, initial range", k);
    }
    return Planner(tasks, options).plan();
}

MegaFlat mega_flat(std::span<const uint32_t> entry_begin, std::span<const uint32_t> entries,
                   std::span<const uint64_t> set_begin, std::span<const uint32_t> set_members) {
    const size_t sets = set_begin.empty() ? 0 : set_begin.size() - 1;
    for (size_t k = 0; k < entry_begin.size(); ++k) {
        require(entry_begin[k] <= entries.size() && (k == 0 || entry_begin[k - 1] <= entry_begin[k]),
                "expected begins that ascend to the number of entries, task", k);
    }
    for (size_t k = 0; k < set_begin.size(); ++k) {
        require(set_begin[k] <= set_members.size() && (k == 0 || set_begin[k - 1] <= set_begin[k]),
                "expected begins that ascend to the number of members, set", k);
    }
    for (size_t k = 0; k < entries.size(); ++k) {
        require(!(entries[k] & MEGA_SET) || (entries[k] & ~MEGA_SET) < sets, "expected a set that is there, entry", k);
    }
    MegaFlat flat;
    flat.begin.reserve(entry_begin.size());
    flat.begin.push_back(0);
    for (size_t task = 0; task + 1 < entry_begin.size(); ++task) {
        const size_t first = flat.tasks.size();
        for (uint32_t k = entry_begin[task]; k < entry_begin[task + 1]; ++k) {
            if (entries[k] & MEGA_SET) {
                const uint32_t set = entries[k] & ~MEGA_SET;
                const auto members = set_members.subspan(set_begin[set], set_begin[set + 1] - set_begin[set]);
                flat.tasks.insert(flat.tasks.end(), members.begin(), members.end());
            } else {
                flat.tasks.push_back(entries[k]);
            }
        }
        const auto begin = flat.tasks.begin() + std::ptrdiff_t(first);
        if (entry_begin[task + 1] - entry_begin[task] > 1) {
            std::sort(begin, flat.tasks.end());
            flat.tasks.erase(std::unique(begin, flat.tasks.end()), flat.tasks.end());
        }
        flat.begin.push_back(flat.tasks.size());
    }
    return flat;
}

namespace {

void check_order(std::span<const uint32_t> order, size_t tasks, uint32_t workers) {
    require(workers > 0, "expected at least one worker", workers);
    for (size_t k = 0; k < order.size(); ++k) require(order[k] < tasks, "expected an order of tasks", k);
}

}  // namespace

MegaVector<uint32_t> mega_assign(std::span<const uint32_t> order, std::span<const uint32_t> regions,
                                  std::span<const uint32_t> blocks, std::span<const uint64_t> costs,
                                  uint32_t workers) {
    check_order(order, blocks.size(), workers);
    require(regions.size() == blocks.size(), "expected as many regions as tasks", regions.size());
    require(costs.empty() || costs.size() == blocks.size(), "expected as many costs as tasks", costs.size());
    MegaVector<uint32_t> first(blocks.size(), 0);
    MegaVector<uint64_t> load(workers, 0);
    // Loads as they were when a worker was last put here; one that has changed since is put again.
    using Loaded = std::pair<uint64_t, uint32_t>;
    std::priority_queue<Loaded, std::vector<Loaded>, std::greater<>> lightest;
    if (!costs.empty()) {
        for (uint32_t worker = 0; worker < workers; ++worker) lightest.push({0, worker});
    }
    uint32_t next = 0;
    uint32_t region = MegaPlanned::NO_REGION, begin = 0;
    for (const uint32_t task : order) {
        const uint32_t parts = std::min(blocks[task], workers);
        const uint64_t cost = costs.empty() ? 0 : costs[task];
        if (regions[task] != region) {
            region = regions[task];
            if (parts == workers) {
                begin = 0;
            } else if (costs.empty()) {
                begin = next;
                next = (next + parts) % workers;
            } else {
                while (lightest.top().first != load[lightest.top().second]) {
                    const uint32_t worker = lightest.top().second;
                    lightest.pop();
                    lightest.push({load[worker], worker});
                }
                begin = lightest.top().second;
            }
        }
        first[task] = begin;
        if (costs.empty()) continue;
        for (uint32_t part = 0, worker = begin; part < parts; ++part) {
            load[worker] += cost;
            worker = worker + 1 == workers ? 0 : worker + 1;
        }
    }
    return first;
}

MegaLists mega_lists(std::span<const uint32_t> order, std::span<const uint32_t> blocks,
                     std::span<const uint32_t> first_worker, uint32_t workers) {
    check_order(order, blocks.size(), workers);
    require(first_worker.size() == blocks.size(), "expected as many first workers as tasks", first_worker.size());
    for (const uint32_t task : order) {
        require(first_worker[task] < workers, "expected a first worker below the number of workers, task", task);
    }
    MegaLists lists;
    lists.begin.assign(size_t(workers) + 1, 0);
    const auto each_part = [&](const auto& call) {
        for (const uint32_t task : order) {
            const uint32_t parts = std::min(blocks[task], workers);
            for (uint32_t part = 0, worker = first_worker[task]; part < parts; ++part) {
                call(worker, task);
                worker = worker + 1 == workers ? 0 : worker + 1;
            }
        }
    };
    each_part([&](uint32_t worker, uint32_t) { ++lists.begin[worker + 1]; });
    for (uint32_t worker = 0; worker < workers; ++worker) lists.begin[worker + 1] += lists.begin[worker];
    lists.tasks.resize(lists.begin.back());
    MegaVector<uint64_t> next(lists.begin.begin(), lists.begin.end() - 1);
    each_part([&](uint32_t worker, uint32_t task) { lists.tasks[next[worker]++] = task; });
    return lists;
}

}  // namespace brickline
