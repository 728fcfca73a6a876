#include "mega_program.h"

#include <algorithm>
#include <stdexcept>

namespace brickline {

MegaProgram::MegaProgram(const PlanProgram& program, std::vector<MegaRow> rows, uint32_t workers)
    : m_program(program), m_rows(std::move(rows)), m_workers(workers) {
    if (workers == 0 || workers > MEGA_MAX_WORKERS) {
        throw std::invalid_argument("expected 1 to " + std::to_string(MEGA_MAX_WORKERS) + " workers, got " +
                                    std::to_string(workers));
    }
    if (m_rows.size() != program.size()) {
        throw std::invalid_argument("expected " + std::to_string(program.size()) + " rows, got " +
                                    std::to_string(m_rows.size()));
    }
    m_tasks.resize(m_rows.size());
    uint32_t arguments = 0;
    for (uint32_t i = 0; i < m_rows.size(); ++i) {
        const MegaRow& row = m_rows[i];
        const bool is_alias = row.alias != MEGA_NONE;
        if (row.arguments > MEGA_MAX_ARGUMENTS || (row.is_joined && (i == 0 || is_alias)) ||
            (is_alias && (row.alias >= i || !is_run(row.alias))) ||
            (row.stream != MEGA_NONE && (row.stream >= row.arguments || !row.row_bytes ||
                                         row.row_bytes % 16 || !row.block_rows))) {
            throw std::invalid_argument("row " + std::to_string(i) + " is none of a megakernel");
        }
        MegaTask& task = m_tasks[i] = {};
        task.op = row.op;
        task.first_argument = arguments;
        task.arguments = row.arguments;
        task.stream = row.stream;
        task.row_bytes = row.row_bytes;
        task.block_rows = row.block_rows;
        task.rows = row.rows;
        arguments += row.arguments;
    }
    m_arguments.resize(arguments);
    find_order();
}

// Launches that are not run hold nobody up, whether others may overlap them or not.
void MegaProgram::find_order() {
    const auto is_alias = [](const MegaRow& row) { return row.alias != MEGA_NONE; };
    if (std::none_of(m_rows.begin(), m_rows.end(), is_alias)) return;
    std::vector<std::vector<uint32_t>> waits;
    std::vector<uint32_t> flags;
    std::vector<bool> runs;
    for (uint32_t i = 0; i < m_rows.size(); ++i) {
        waits.push_back(m_rows[i].waits);
        flags.push_back(m_program.launch(i).flags);
        runs.push_back(is_run(i));
    }
    m_order = plan_order(waits, flags, runs);
}

std::string MegaProgram::refresh() {
    if (m_seen == m_program.version()) return "";
    bool has_changed = m_structure_version == 0;
    const std::string problem = look(has_changed);
    if (!problem.empty()) return problem;
    if (has_changed) {
        share_out();
        ++m_structure_version;
    }
    ++m_argument_version;
    m_seen = m_program.version();
    return "";
}

// Reads sizes and arguments; says whether a size has changed.
std::string MegaProgram::look(bool& has_changed) {
    for (uint32_t i = 0; i < m_tasks.size(); ++i) {
        MegaTask& task = m_tasks[i];
        const brickline_launch& host = m_program.launch(i).host;
        const uint64_t lanes = uint64_t{host.lanes[0]} * host.lanes[1] * host.lanes[2];
        // Grids have up to 2^31 * 2^16 * 2^16 blocks.
        const unsigned __int128 blocks =
            static_cast<unsigned __int128>(uint64_t{host.grid[0]} * host.grid[1]) * host.grid[2];
        if (blocks > UINT32_MAX) return "launch " + std::to_string(i) + " has more than 2^32 - 1 blocks";
        const bool same = task.lanes == lanes && task.shared_bytes == host.shared_bytes &&
                          std::equal(task.grid, task.grid + 3, host.grid);
        has_changed |= !same;
        task.lanes = uint32_t(lanes);
        task.shared_bytes = uint32_t(host.shared_bytes);
        std::copy(host.grid, host.grid + 3, task.grid);
        task.blocks = uint32_t(blocks);
        for (uint32_t k = 0; k < task.arguments; ++k) {
            m_arguments[task.first_argument + k] = *static_cast<const uint64_t*>(host.arguments[k]);
        }
    }
    return "";
}

// A task of fewer blocks than workers goes to the workers after those of the small task before it.
void MegaProgram::share_out() {
    uint32_t next = 0;
    m_items = m_shared_bytes = 0;
    for (MegaTask& task : m_tasks) task.flags = 0;
    m_waits.clear();
    uint32_t before = 0, region = 0;  // the last task that is run, and the first of its region
    for (uint32_t i = 0; i < m_tasks.size(); ++i) {
        MegaTask& task = m_tasks[i];
        const MegaRow& row = m_rows[i];
        task.first_wait = uint32_t(m_waits.size());
        task.parts = task.first_worker = task.waits = 0;
        if (!is_run(i)) continue;
        m_items += task.blocks;
        m_shared_bytes = std::max(m_shared_bytes, uint64_t{task.shared_bytes});
        task.parts = std::max(1u, std::min(task.blocks, m_workers));
        // What blocks add to one element depends on their order, which threads would not keep.
        const bool may_split = m_program.launch(i).flags & PLAN_MAY_SPLIT;
        if (m_program.device() == PlanDevice::Cpu && !may_split) task.parts = 1;
        // A part of either is the same range of blocks only where there are as many of them.
        const bool is_joined = row.is_joined && m_tasks[before].blocks == task.blocks &&
                               m_tasks[before].parts == task.parts;
        if (!is_joined) region = i;
        if (is_joined) {
            task.first_worker = m_tasks[before].first_worker;
            task.flags |= MEGA_JOINED;
        } else if (task.parts < m_workers) {
            task.first_worker = next;
            next = (next + task.parts) % m_workers;
        }
        if (row.stream != MEGA_NONE) task.flags |= MEGA_STREAMS;
        // A worker runs its parts of a region one after the other, so nobody waits within it.
        for (const uint32_t each : dependencies(i)) {
            if (each >= region) break;
            m_waits.push_back({each, m_tasks[each].parts});
            m_tasks[each].flags |= MEGA_SIGNALS;
        }
        task.waits = uint32_t(m_waits.size()) - task.first_wait;
        before = i;
    }
    make_lists();
}

// Tasks in their order, so every list is in it.
void MegaProgram::make_lists() {
    m_list_begin.assign(m_workers + 1, 0);
    const auto each_part = [&](auto take) {
        for (uint32_t i = 0; i < m_tasks.size(); ++i) {
            const MegaTask& task = m_tasks[i];
            for (uint32_t part = 0, worker = task.first_worker; part < task.parts; ++part) {
                take(worker, i);
                if (++worker == m_workers) worker = 0;
            }
        }
    };
    each_part([&](uint32_t worker, uint32_t) { ++m_list_begin[worker + 1]; });
    for (uint32_t worker = 0; worker < m_workers; ++worker) m_list_begin[worker + 1] += m_list_begin[worker];
    m_lists.resize(m_list_begin[m_workers]);
    std::vector<uint32_t> next(m_list_begin.begin(), m_list_begin.end() - 1);
    each_part([&](uint32_t worker, uint32_t task) { m_lists[next[worker]++] = task; });
}

}  // namespace brickline
