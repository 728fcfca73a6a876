// MegaProgram: a PlanProgram as the tables of a megakernel: tasks, the list of each worker, waits and
// argument values. Follows the program's variables and addresses; knows neither threads nor CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "brickline/megakernel.h"
#include "plan_program.h"

namespace brickline {

// What a megakernel must know of a launch beyond its PlanRow.
struct MegaRow {
    uint32_t op = 0;
    uint32_t arguments = 0;
    bool is_joined = false;        // with the region of the last launch before it that is run: a part of it
                                   // touches nothing that another part of a member writes, or the reverse
    uint32_t alias = MEGA_NONE;    // the earlier launch that computes the same; it is not run itself
    std::vector<uint32_t> waits;   // for whom it waits by its data, where there are aliases; else the
                                   // program says
    uint32_t stream = MEGA_NONE;   // the argument whose rows are streamed, and what MegaTask says of them
    uint32_t row_bytes = 0, block_rows = 0, rows = 0;
};

class MegaProgram {
  public:
    // Throws std::invalid_argument where rows and program do not fit.
    MegaProgram(const PlanProgram& program, std::vector<MegaRow> rows, uint32_t workers);

    // Brings the tables up to date with the program. "" or why it cannot be run.
    std::string refresh();

    uint32_t workers() const { return m_workers; }
    const PlanProgram& program() const { return m_program; }
    // The launch that computes what a launch does: itself, but of an alias.
    uint32_t computed_by(uint32_t launch) const {
        return m_rows[launch].alias == MEGA_NONE ? launch : m_rows[launch].alias;
    }
    // All of them, of every worker's list.
    uint64_t items() const { return m_items; }
    uint64_t shared_bytes() const { return m_shared_bytes; }

    // Count changes: of tasks, lists and waits; and of argument values.
    uint64_t structure_version() const { return m_structure_version; }
    uint64_t argument_version() const { return m_argument_version; }

    // One for each launch; of one that is not run `parts` is 0.
    const std::vector<MegaTask>& tasks() const { return m_tasks; }
    // The list of worker w is [list_begin()[w], list_begin()[w + 1]) of lists(), numbers of tasks.
    const std::vector<uint32_t>& list_begin() const { return m_list_begin; }
    const std::vector<uint32_t>& lists() const { return m_lists; }
    const std::vector<MegaWait>& waits() const { return m_waits; }
    const std::vector<uint64_t>& arguments() const { return m_arguments; }

  private:
    void find_order();
    std::string look(bool& has_changed);
    void share_out();
    void make_lists();
    bool is_run(uint32_t task) const { return m_rows[task].alias == MEGA_NONE; }
    const std::vector<uint32_t>& dependencies(uint32_t task) const {
        return m_order.empty() ? m_program.dependencies(task) : m_order[task];
    }

    const PlanProgram& m_program;
    std::vector<MegaRow> m_rows;
    uint32_t m_workers;
    std::vector<std::vector<uint32_t>> m_order;  // where there are aliases: what each launch waits for
    uint64_t m_items = 0;
    uint64_t m_shared_bytes = 0;
    uint64_t m_seen = 0;  // the program's version
    uint64_t m_structure_version = 0, m_argument_version = 0;
    std::vector<MegaTask> m_tasks;
    std::vector<uint32_t> m_list_begin, m_lists;
    std::vector<MegaWait> m_waits;
    std::vector<uint64_t> m_arguments;
};

}  // namespace brickline
