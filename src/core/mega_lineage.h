// mega_lineage.h: of each task, the tasks that contributed to what it computed, from what was really read
// and written: who wrote the bytes that it read, whoever wrote what those read, and so on.
//
// Closures of any size. One is a list of runs of task numbers, kept once however many tasks have it; where
// it would have many runs it is another closure and a few tasks more, so that a graph of long chains costs
// as much as it has edges.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mega_planning.h"

namespace brickline {

struct MegaRun {
    uint32_t first, last;  // tasks [first, last)
};

// Who wrote what tasks read themselves.
struct MegaDirectLists {
    MegaVector<uint32_t> list_of;  // of each task
    MegaVector<uint64_t> begin;    // of each list in `sources`; one more at the end
    MegaVector<uint32_t> sources;  // tasks, ascending in each list
};

class MegaLineage {
public:
    // alias: as in MegaPlanned; none: every task is run. Throws MegaFaulty for tables that do not fit.
    MegaLineage(const MegaTaskTable& tasks, std::span<const int32_t> alias);

    uint32_t size() const { return uint32_t(m_closure.size()); }
    // Tasks that contributed, ascending, without itself. Of an alias, those of what computed it.
    MegaVector<MegaRun> of(uint32_t task) const;
    // Those who wrote what it reads itself, ascending.
    MegaVector<uint32_t> direct(uint32_t task) const;
    // `direct` of the first tasks at once, in lists that tasks share which read from the same entries. Of an
    // alias the list is what computed it.
    MegaDirectLists direct_lists(uint32_t tasks) const;
    // Of each access, whether it reads bytes that no task wrote before.
    const MegaVector<uint8_t>& reads_initial() const { return m_reads_initial; }
    // What computed it: itself, but of an alias.
    uint32_t computed_by(uint32_t task) const { return m_alias.empty() || m_alias[task] < 0 ? task : uint32_t(m_alias[task]); }
    size_t bytes() const;

private:
    // Runs, or a smaller closure and the members of an entry.
    struct Closure {
        uint64_t first;     // of its runs
        uint32_t count;     // of them; NOT_RUNS: base and entry hold instead
        uint32_t base, entry;
        uint32_t depth;     // down to runs
    };
    static constexpr uint32_t NOT_RUNS = ~0u;

    void add_members(std::span<const uint32_t> entries, MegaVector<uint32_t>& tasks) const;
    uint32_t closure_of(std::span<const uint32_t> entries);
    uint32_t closure_of_set(uint32_t set);
    uint32_t whole_of(uint32_t task);
    uint32_t with(uint32_t base, uint32_t entry);
    uint32_t united(std::span<const uint32_t> closures);
    bool has(uint32_t closure, uint32_t task) const;
    uint32_t runs_closure(std::span<const MegaRun> runs);
    void expand(uint32_t closure, MegaVector<MegaRun>& runs) const;
    void add_entry(uint32_t entry, MegaVector<MegaRun>& runs) const;
    void grow();

    MegaVector<int32_t> m_alias;
    MegaVector<uint32_t> m_closure;       // of each task
    MegaVector<uint32_t> m_whole;         // of each task, itself included, where it was asked for
    MegaVector<uint32_t> m_entry_begin, m_entries;
    MegaSets m_sets;
    MegaVector<Closure> m_closures;
    MegaVector<MegaRun> m_runs;
    MegaVector<uint32_t> m_table;         // of closures that are runs, + 1
    size_t m_held = 0;
    MegaVector<uint32_t> m_set_closure;   // of the members of a set and theirs; by set
    MegaVector<uint8_t> m_reads_initial;
    MegaVector<uint32_t> m_scratch, m_tops;
};

}  // namespace brickline
