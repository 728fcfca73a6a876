#include "mega_planning.h"

#include <algorithm>
#include <queue>

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;

void require(bool holds, const char* what, size_t place) {
    if (!holds) throw MegaFaulty(std::string(what) + " - at " + std::to_string(place));
}

void check_begins(std::span<const uint32_t> begins, size_t tasks, size_t rows, const char* what) {
    bool is_right = begins.size() == tasks + 1 && begins[0] == 0 && begins[tasks] == rows;
    for (size_t k = 0; is_right && k < tasks; ++k) is_right = begins[k] <= begins[k + 1];
    if (!is_right) {
        throw MegaFaulty(std::string("expected ") + what + " of " + std::to_string(tasks) +
                         " tasks and an end, ascending from 0 to " + std::to_string(rows));
    }
}

bool fits(const MegaAccess& access) {
    return (access.mode - 1 <= 2u) & (access.begin <= access.end) & (access.per_block >= 0);
}

// Of a task or a set of tasks, what matters to those that wait for it.
struct Facts {
    uint32_t level = 0;    // the highest
    uint32_t latest = 0;   // the last one of that level
    uint32_t others = 0;   // the highest level + 1 of those outside of `latest`'s region, 0: none
    uint32_t outsider = NONE;  // one of that level
    uint64_t finish = 0;
    uint32_t last = NONE;  // who finishes then
};

class Planner {
public:
    Planner(const MegaTaskTable& tasks, const MegaPlanOptions& options)
        : m_tasks(tasks), m_options(options) {}

    MegaPlanned plan() {
        const uint32_t count = m_tasks.size();
        m_out.alias.assign(count, -1);
        m_out.entry_begin.reserve(count + 1);
        m_out.entry_begin.push_back(0);
        m_out.entries.reserve(count);
        m_out.region.assign(count, MegaPlanned::NO_REGION);
        m_out.level.assign(count, 0);
        m_heads.reserve(count);
        m_tails.reserve(count);
        m_finish.assign(count, 0);
        m_from.assign(count, NONE);
        if (m_options.dedupes) {
            m_versions.resize(m_tasks.accesses.size());
            m_prior.assign(count, NONE);
        }
        for (const MegaInitial& each : m_options.initial) m_tracker.add_initial(each.space, each.begin, each.end);
        for (uint32_t task = 0; task < count; ++task) {
            place(task);
            m_out.entry_begin.push_back(uint32_t(m_out.entries.size()));
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
        const std::span<const uint32_t> entries = m_tracker.add_shared(task, accesses);
        const std::span<const MegaVersion> versions = m_tracker.versions();
        if (m_options.dedupes) {
            uint32_t* const to = m_versions.data() + m_tasks.access_begin[task];
            for (size_t k = 0; k < accesses.size(); ++k) to[k] = versions[k].newest;
        }
        if (m_options.finds_unwritten) {
            for (uint32_t k = 0; k < accesses.size(); ++k) {
                if (versions[k].has_unwritten) refuse(task, task, MegaCode::NeverWritten, k);
            }
        }
        const Facts facts = facts_of(entries);
        m_out.level[task] = entries.empty() ? 0 : facts.level + 1;
        m_finish[task] = facts.finish + (m_options.costs.empty() ? 1 : m_options.costs[task]);
        m_from[task] = facts.last;
        if (m_options.joins && !entries.empty() && join(task, entries, facts)) {
            keep_outsiders(task, entries);
            return;
        }
        m_out.entries.insert(m_out.entries.end(), entries.begin(), entries.end());
        m_out.region[task] = uint32_t(m_heads.size());
        m_heads.push_back(task);
        m_tails.push_back(task);
    }

    void refuse(uint32_t earlier, uint32_t later, MegaCode code, uint32_t other = NONE) {
        m_out.refusals.push_back({earlier, later, code, other});
    }

    // -------------------------------------------------------------------------------- duplicates

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
        for (const MegaAccess& access : m_tasks.accesses_of(task)) {
            if (!(access.mode & MEGA_WRITE) || access.begin == access.end) continue;
            const uint32_t newest = m_tracker.version(access.space, access.begin, access.end).newest;
            if (newest < 2) return NONE;
            m_prior[task] = newest - 2;
            uint32_t earlier = newest - 2;
            for (int k = 0; k < LOOK_BACK && earlier != NONE; ++k, earlier = m_prior[earlier]) {
                if (are_alike(earlier, task)) return earlier;
            }
            return NONE;
        }
        return NONE;
    }

    bool dedupe(uint32_t earlier, uint32_t task) {
        if (m_tasks.flags[task] & MEGA_ATOMIC) return refuse(earlier, task, MegaCode::Accumulates), false;
        if (!(m_tasks.flags[task] & m_tasks.flags[earlier] & MEGA_PURE)) {
            return refuse(earlier, task, MegaCode::NotPure), false;
        }
        const std::span<const MegaAccess> accesses = m_tasks.accesses_of(task);
        const uint32_t* const before = m_versions.data() + m_tasks.access_begin[earlier];
        for (size_t k = 0; k < accesses.size(); ++k) {
            const MegaAccess& access = accesses[k];
            const uint32_t newest = m_tracker.version(access.space, access.begin, access.end).newest;
            if ((access.mode & MEGA_READ) && newest != before[k]) {
                return refuse(earlier, task, MegaCode::InputChanged, newest - 2), false;
            }
            if ((access.mode & MEGA_WRITE) && access.begin < access.end && newest != earlier + 2) {
                return refuse(earlier, task, MegaCode::OutputChanged, newest - 2), false;
            }
        }
        m_out.alias[task] = int32_t(earlier);
        m_out.level[task] = m_out.level[earlier];
        return true;
    }

    // ------------------------------------------------------------------------------------ facts

    void widen(Facts& facts, uint32_t task) const {
        const uint32_t level = m_out.level[task];
        if (facts.last == NONE || level > facts.level || (level == facts.level && task > facts.latest)) {
            facts.level = level;
            facts.latest = task;
        }
        if (facts.last == NONE || m_finish[task] > facts.finish) {
            facts.finish = m_finish[task];
            facts.last = task;
        }
    }

    void find_outsiders(Facts& facts, uint32_t task) const {
        if (m_out.region[task] != m_out.region[facts.latest] && m_out.level[task] + 1 > facts.others) {
            facts.others = m_out.level[task] + 1;
            facts.outsider = task;
        }
    }

    const Facts& set_facts(uint32_t set) {
        while (m_set_facts.size() <= set) {
            Facts facts;
            const std::span<const uint32_t> members = m_tracker.sets()[uint32_t(m_set_facts.size())];
            for (const uint32_t member : members) widen(facts, member);
            for (const uint32_t member : members) find_outsiders(facts, member);
            m_set_facts.push_back(facts);
        }
        return m_set_facts[set];
    }

    Facts facts_of(std::span<const uint32_t> entries) {
        Facts all;
        for (const uint32_t entry : entries) {
            if (!(entry & MEGA_SET)) {
                widen(all, entry);
                continue;
            }
            const Facts& facts = set_facts(entry & ~MEGA_SET);
            if (all.last == NONE || facts.level > all.level ||
                (facts.level == all.level && facts.latest > all.latest)) {
                all.level = facts.level;
                all.latest = facts.latest;
            }
            if (all.last == NONE || facts.finish > all.finish) {
                all.finish = facts.finish;
                all.last = facts.last;
            }
        }
        return all;
    }

    // ---------------------------------------------------------------------------------- regions

    // What the members of a region touch, each range once. Not only what a task waits for counts: a
    // member that another one hides may read what the task writes.
    std::vector<MegaAccess>& touched_by(uint32_t region) {
        if (m_touched.size() <= region) m_touched.resize(m_heads.size());
        std::vector<MegaAccess>& touched = m_touched[region];
        if (touched.empty()) touch(touched, m_heads[region]);
        return touched;
    }
    void touch(std::vector<MegaAccess>& touched, uint32_t task) const {
        for (const MegaAccess& access : m_tasks.accesses_of(task)) {
            const auto is_same = [&](const MegaAccess& each) {
                return each.space == access.space && each.begin == access.begin && each.end == access.end &&
                       each.per_block == access.per_block && each.mode == access.mode;
            };
            if (std::none_of(touched.begin(), touched.end(), is_same)) touched.push_back(access);
        }
    }

    // Whether block b of a task touches nothing that another block of a region does, but for what both
    // only read. Of a region that touches too much to look through, it is not known.
    bool are_blockwise(const std::vector<MegaAccess>& touched, uint32_t task) const {
        if (touched.size() > MOST_TOUCHED) return false;
        for (const MegaAccess& x : touched) {
            for (const MegaAccess& y : m_tasks.accesses_of(task)) {
                if (x.space != y.space || !((x.mode | y.mode) & MEGA_WRITE)) continue;
                if (x.begin >= y.end || y.begin >= x.end || x.begin == x.end || y.begin == y.end) continue;
                if (x.per_block <= 0 || x.per_block != y.per_block || x.begin != y.begin) return false;
            }
        }
        return true;
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
    bool join(uint32_t task, std::span<const uint32_t> entries, const Facts& facts) {
        const uint32_t before = facts.latest;
        const uint32_t region = m_out.region[before];
        if ((m_tasks.flags[before] | m_tasks.flags[task]) & MEGA_ATOMIC) {
            return refuse(before, task, MegaCode::JoinAccumulates), false;
        }
        if (m_tasks.blocks[before] != m_tasks.blocks[task]) {
            return refuse(before, task, MegaCode::DifferentBlocks), false;
        }
        if (m_tails[region] != before) return refuse(before, task, MegaCode::HasFollower, m_tails[region]), false;
        // All that it waits for besides must be over when the region begins: it is where it has a
        // lower level, and then no region waits for another that waits for it.
        const uint32_t begin = m_out.level[m_heads[region]];
        uint32_t outsider = NONE;
        for (const uint32_t entry : entries) {
            if (entry & MEGA_SET) {
                const Facts& set = set_facts(entry & ~MEGA_SET);
                if (m_out.region[set.latest] != region) {
                    if (set.level >= begin) outsider = set.latest;
                } else if (set.others > begin) {
                    outsider = set.outsider;
                }
            } else if (m_out.region[entry] != region && m_out.level[entry] >= begin) {
                outsider = entry;
            }
        }
        if (outsider != NONE) {
            const MegaCode code = waits_for_region(outsider, region) ? MegaCode::Cycle : MegaCode::WaitsForOther;
            return refuse(before, task, code, outsider), false;
        }
        if (m_tasks.blocks[task] > 1) {
            std::vector<MegaAccess>& touched = touched_by(region);
            if (!are_blockwise(touched, task)) return refuse(before, task, MegaCode::NotBlockwise), false;
            touch(touched, task);
        }
        m_out.region[task] = region;
        m_tails[region] = task;
        return true;
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
        m_kept.assign(entries.begin(), entries.end());  // making a set ends the span
        for (const uint32_t entry : m_kept) {
            if (!(entry & MEGA_SET)) {
                if (m_out.region[entry] != region) m_out.entries.push_back(entry);
                continue;
            }
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
        uint32_t levels = 0;
        for (const uint32_t head : m_heads) levels = std::max(levels, m_out.level[head] + 1);
        MegaVector<uint32_t> next(levels + 1, 0);
        for (const uint32_t head : m_heads) ++next[m_out.level[head] + 1];
        for (uint32_t k = 0; k < levels; ++k) next[k + 1] += next[k];
        MegaVector<uint32_t> number(m_heads.size());
        for (size_t region = 0; region < m_heads.size(); ++region) {
            number[region] = next[m_out.level[m_heads[region]]]++;
        }
        m_out.regions = uint32_t(m_heads.size());
        MegaVector<uint32_t> place(m_heads.size() + 1, 0);
        for (uint32_t& region : m_out.region) {
            if (region == MegaPlanned::NO_REGION) continue;
            region = number[region];
            ++place[region + 1];
        }
        for (size_t k = 0; k < m_heads.size(); ++k) place[k + 1] += place[k];
        m_out.order.resize(place.back());
        for (uint32_t task = 0; task < m_tasks.size(); ++task) {
            const uint32_t region = m_out.region[task];
            if (region != MegaPlanned::NO_REGION) m_out.order[place[region]++] = task;
        }
    }

    void finish_critical() {
        uint32_t last = NONE;
        for (uint32_t task = 0; task < m_tasks.size(); ++task) {
            if (m_out.alias[task] < 0 && (last == NONE || m_finish[task] > m_finish[last])) last = task;
        }
        if (last == NONE) return;
        m_out.critical_cost = m_finish[last];
        for (; last != NONE; last = m_from[last]) m_out.critical.push_back(last);
        std::reverse(m_out.critical.begin(), m_out.critical.end());
    }

    const MegaTaskTable& m_tasks;
    const MegaPlanOptions& m_options;
    static constexpr size_t MOST_TOUCHED = 64;
    static constexpr int LOOK_BACK = 2;
    HazardTracker m_tracker;
    MegaPlanned m_out;
    MegaVector<uint32_t> m_versions;  // of each access, as it was read
    MegaVector<uint32_t> m_prior;     // who wrote last to a task's output before it
    MegaVector<uint64_t> m_finish;
    MegaVector<uint32_t> m_from;      // on whom the beginning of a task depends
    MegaVector<uint32_t> m_heads, m_tails;  // of regions, in the order in which they were found
    std::vector<std::vector<MegaAccess>> m_touched;  // by regions whose blocks keep to themselves
    MegaVector<Facts> m_set_facts;
    MegaVector<uint32_t> m_kept, m_members;
};

}  // namespace

void MegaTaskTable::check() const {
    const size_t tasks = op.size();
    if (tasks >= MEGA_MAX_TASKS) throw MegaFaulty("expected fewer tasks, got " + std::to_string(tasks));
    require(blocks.size() == tasks && flags.size() == tasks, "expected as many blocks and flags as tasks",
            std::min(blocks.size(), flags.size()));
    check_begins(param_begin, tasks, params.size(), "begins of parameters");
    check_begins(access_begin, tasks, accesses.size(), "begins of accesses");
    uint32_t known = 0;
    for (const uint32_t each : flags) known |= each;
    bool is_right = known <= (MEGA_PURE | MEGA_ATOMIC);
    for (const MegaAccess& access : accesses) is_right &= fits(access);
    if (is_right) return;
    for (size_t k = 0; k < tasks; ++k) {
        require(flags[k] <= (MEGA_PURE | MEGA_ATOMIC), "expected flags of PURE (1) and ATOMIC (2) alone, task", k);
    }
    for (size_t k = 0; k < accesses.size(); ++k) {
        require(fits(accesses[k]), "expected a mode of 1 (read), 2 (write) or 3, a range that ends no "
                "earlier than it begins, and 0 or more bytes of a block, access", k);
    }
}

MegaPlanned mega_plan(const MegaTaskTable& tasks, const MegaPlanOptions& options) {
    tasks.check();
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
