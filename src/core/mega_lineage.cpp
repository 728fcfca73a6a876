#include "mega_lineage.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;
constexpr size_t FEW_RUNS = 16;     // that are copied without a thought
constexpr uint32_t MAX_DEPTH = 64;  // from a closure down to its runs
constexpr size_t MAX_TOPS = 64;     // entries that are compared with each other

void keep_apart(MegaVector<MegaRun>& runs) {
    std::sort(runs.begin(), runs.end(), [](const MegaRun& a, const MegaRun& b) { return a.first < b.first; });
    size_t kept = 0;
    for (const MegaRun& run : runs) {
        if (kept && run.first <= runs[kept - 1].last) runs[kept - 1].last = std::max(runs[kept - 1].last, run.last);
        else runs[kept++] = run;
    }
    runs.resize(kept);
}

uint64_t hash_of(std::span<const MegaRun> runs) {
    uint64_t hash = runs.size();
    for (const MegaRun& run : runs) {
        hash = (hash ^ (uint64_t(run.first) << 32 | run.last)) * 0x9fb21c651e98df25ull;
        hash ^= hash >> 32;
    }
    return hash;
}

}  // namespace

MegaLineage::MegaLineage(const MegaTaskTable& tasks, std::span<const int32_t> alias)
    : m_alias(alias.begin(), alias.end()) {
    tasks.check();
    const uint32_t count = tasks.size();
    if (!alias.empty() && alias.size() != count) throw MegaFaulty("expected as many aliases as tasks");
    for (uint32_t task = 0; task < alias.size(); ++task) {
        if (alias[task] >= 0 && (uint32_t(alias[task]) >= task || alias[size_t(alias[task])] >= 0)) {
            throw MegaFaulty("expected an alias of an earlier task that is run - at task " + std::to_string(task));
        }
    }
    m_table.assign(1024, 0);
    runs_closure({});  // number 0: nobody
    m_closure.assign(count, 0);
    m_whole.assign(count, NONE);
    m_entry_begin.reserve(count + 1);
    m_entry_begin.push_back(0);
    m_reads_initial.assign(tasks.accesses.size(), 0);
    HazardTracker tracker;
    tracker.keep_sources();
    for (uint32_t task = 0; task < count; ++task) {
        if (computed_by(task) != task) {
            m_closure[task] = m_closure[computed_by(task)];
            m_entry_begin.push_back(uint32_t(m_entries.size()));
            continue;
        }
        tracker.add_shared(task, tasks.accesses_of(task));
        const std::span<const uint32_t> sources = tracker.sources();
        const std::span<const MegaVersion> versions = tracker.versions();
        for (size_t k = 0; k < versions.size(); ++k) {
            m_reads_initial[tasks.access_begin[task] + k] = versions[k].has_unwritten;
        }
        m_entries.insert(m_entries.end(), sources.begin(), sources.end());
        m_entry_begin.push_back(uint32_t(m_entries.size()));
        // Sets are numbered in the order in which they are made, here as there.
        while (m_sets.size() < tracker.sets().size()) m_sets.of(tracker.sets()[m_sets.size()]);
        m_closure[task] = closure_of(sources);
    }
}

// Entries and all that contributed to them.
uint32_t MegaLineage::closure_of(std::span<const uint32_t> entries) {
    if (entries.empty()) return 0;
    if (entries.size() == 1) {
        const uint32_t entry = entries[0];
        return entry & MEGA_SET ? closure_of_set(entry & ~MEGA_SET) : whole_of(entry);
    }
    // Whoever contributed to another one adds nothing: look at the latest ones first.
    m_tops.clear();
    for (size_t k = entries.size(); k-- > 0;) {
        const uint32_t entry = entries[k];
        uint32_t whole = NONE;
        if (entry & MEGA_SET) {
            whole = closure_of_set(entry & ~MEGA_SET);
        } else {
            const bool is_held = m_tops.size() < MAX_TOPS &&
                std::ranges::any_of(m_tops, [&](uint32_t top) { return has(top, entry); });
            if (is_held) continue;
            whole = whole_of(entry);
        }
        if (std::ranges::find(m_tops, whole) == m_tops.end()) m_tops.push_back(whole);
    }
    return m_tops.size() == 1 ? m_tops[0] : united(MegaVector<uint32_t>(m_tops));
}

uint32_t MegaLineage::closure_of_set(uint32_t set) {
    while (m_set_closure.size() <= set) m_set_closure.push_back(NONE);
    if (m_set_closure[set] != NONE) return m_set_closure[set];
    MegaVector<uint32_t> bases;
    for (const uint32_t member : m_sets[set]) bases.push_back(m_closure[member]);
    std::sort(bases.begin(), bases.end());
    bases.erase(std::unique(bases.begin(), bases.end()), bases.end());
    const uint32_t base = bases.size() == 1 ? bases[0] : united(bases);
    return m_set_closure[set] = with(base, MEGA_SET | set);
}

uint32_t MegaLineage::whole_of(uint32_t task) {
    if (m_whole[task] == NONE) m_whole[task] = with(m_closure[task], task);
    return m_whole[task];
}

uint32_t MegaLineage::with(uint32_t base, uint32_t entry) {
    const Closure below = m_closures[base];
    if (below.count > FEW_RUNS && below.depth < MAX_DEPTH) {  // NOT_RUNS is more, too
        m_closures.push_back({0, NOT_RUNS, base, entry, below.depth + 1});
        return uint32_t(m_closures.size() - 1);
    }
    MegaVector<MegaRun> runs;
    expand(base, runs);
    add_entry(entry, runs);
    keep_apart(runs);
    return runs_closure(runs);
}

uint32_t MegaLineage::united(std::span<const uint32_t> closures) {
    MegaVector<MegaRun> runs;
    for (const uint32_t closure : closures) expand(closure, runs);
    keep_apart(runs);
    return runs_closure(runs);
}

bool MegaLineage::has(uint32_t closure, uint32_t task) const {
    while (m_closures[closure].count == NOT_RUNS) {
        const Closure& it = m_closures[closure];
        if (it.entry == task) return true;
        if (it.entry & MEGA_SET) {
            const std::span<const uint32_t> members = m_sets[it.entry & ~MEGA_SET];
            if (std::binary_search(members.begin(), members.end(), task)) return true;
        }
        closure = it.base;
    }
    const std::span<const MegaRun> runs(m_runs.data() + m_closures[closure].first, m_closures[closure].count);
    const auto after = std::ranges::upper_bound(runs, task, {}, &MegaRun::first);
    return after != runs.begin() && task < std::prev(after)->last;
}

void MegaLineage::add_entry(uint32_t entry, MegaVector<MegaRun>& runs) const {
    if (!(entry & MEGA_SET)) {
        runs.push_back({entry, entry + 1});
        return;
    }
    for (const uint32_t member : m_sets[entry & ~MEGA_SET]) {
        if (!runs.empty() && runs.back().last == member) ++runs.back().last;
        else runs.push_back({member, member + 1});
    }
}

void MegaLineage::expand(uint32_t closure, MegaVector<MegaRun>& runs) const {
    for (; m_closures[closure].count == NOT_RUNS; closure = m_closures[closure].base) {
        add_entry(m_closures[closure].entry, runs);
    }
    const auto first = m_runs.begin() + std::ptrdiff_t(m_closures[closure].first);
    runs.insert(runs.end(), first, first + m_closures[closure].count);
}

uint32_t MegaLineage::runs_closure(std::span<const MegaRun> runs) {
    if (m_held * 2 >= m_table.size()) grow();
    const size_t mask = m_table.size() - 1;
    size_t at = hash_of(runs) & mask;
    for (; m_table[at]; at = (at + 1) & mask) {
        const Closure& held = m_closures[m_table[at] - 1];
        const auto is_same = [](const MegaRun& a, const MegaRun& b) { return a.first == b.first && a.last == b.last; };
        if (std::ranges::equal(runs, std::span<const MegaRun>(m_runs.data() + held.first, held.count), is_same)) {
            return m_table[at] - 1;
        }
    }
    m_closures.push_back({m_runs.size(), uint32_t(runs.size()), 0, 0, 0});
    m_runs.insert(m_runs.end(), runs.begin(), runs.end());
    m_table[at] = uint32_t(m_closures.size());
    ++m_held;
    return uint32_t(m_closures.size() - 1);
}

void MegaLineage::grow() {
    const size_t mask = m_table.size() * 2 - 1;
    m_table.assign(mask + 1, 0);
    for (size_t k = 0; k < m_closures.size(); ++k) {
        if (m_closures[k].count == NOT_RUNS) continue;
        size_t at = hash_of({m_runs.data() + m_closures[k].first, m_closures[k].count}) & mask;
        while (m_table[at]) at = (at + 1) & mask;
        m_table[at] = uint32_t(k + 1);
    }
}

MegaVector<MegaRun> MegaLineage::of(uint32_t task) const {
    MegaVector<MegaRun> runs;
    expand(m_closure[task], runs);
    keep_apart(runs);
    return runs;
}

// Appends the tasks of entries, ascending and each once.
void MegaLineage::add_members(std::span<const uint32_t> entries, MegaVector<uint32_t>& tasks) const {
    const auto before = std::ptrdiff_t(tasks.size());
    for (const uint32_t entry : entries) {
        if (entry & MEGA_SET) {
            const std::span<const uint32_t> members = m_sets[entry & ~MEGA_SET];
            tasks.insert(tasks.end(), members.begin(), members.end());
        } else {
            tasks.push_back(entry);
        }
    }
    std::sort(tasks.begin() + before, tasks.end());
    tasks.erase(std::unique(tasks.begin() + before, tasks.end()), tasks.end());
}

MegaVector<uint32_t> MegaLineage::direct(uint32_t task) const {
    const uint32_t computed = computed_by(task), first = m_entry_begin[computed];
    MegaVector<uint32_t> tasks;
    add_members({m_entries.data() + first, m_entry_begin[computed + 1] - first}, tasks);
    return tasks;
}

MegaDirectLists MegaLineage::direct_lists(uint32_t tasks) const {
    MegaDirectLists found;
    found.begin.push_back(0);
    std::unordered_map<std::string_view, uint32_t> known;  // by the bytes of entries
    for (uint32_t task = 0; task < tasks; ++task) {
        // The number of a task is an entry of its own.
        std::span<const uint32_t> entries(m_entries.data() + m_entry_begin[task], m_entry_begin[task + 1] - m_entry_begin[task]);
        if (computed_by(task) != task) entries = {reinterpret_cast<const uint32_t*>(&m_alias[task]), 1};
        const std::string_view key(reinterpret_cast<const char*>(entries.data()), entries.size_bytes());
        const auto [place, is_new] = known.try_emplace(key, uint32_t(known.size()));
        found.list_of.push_back(place->second);
        if (!is_new) continue;
        add_members(entries, found.sources);
        found.begin.push_back(found.sources.size());
    }
    return found;
}

size_t MegaLineage::bytes() const {
    return (m_closure.capacity() + m_entry_begin.capacity() + m_entries.capacity() + m_table.capacity()) * 4 +
           m_closures.capacity() * sizeof(Closure) + m_runs.capacity() * sizeof(MegaRun) +
           m_sets.members().capacity() * 4;
}

}  // namespace brickline
