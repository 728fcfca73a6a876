#include "mega_queue_signature.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace brickline {

namespace {

using Why = MegaColumnRefusal::Why;
using Type = MegaQueueArgument::Type;

Why why_of(ExpressionFault fault) {
    return fault == ExpressionFault::Overflow ? Why::Overflow : Why::Division;
}

}  // namespace

// The arguments of one job, as bits and as values of expressions, and its job.
struct MegaQueueSignature::Row {
    std::vector<uint64_t> bits;
    std::vector<int64_t> values;
    std::vector<int64_t> per_block;
    MegaJob job;
    bool has_changed = true;  // a value that expressions may use
};

MegaQueueSignature::MegaQueueSignature(uint32_t op, std::vector<MegaQueueArgument> arguments,
                                       std::vector<Expression> sizes, std::span<const uint64_t> limits)
    : m_op(op), m_arguments(std::move(arguments)), m_sizes(std::move(sizes)) {
    if (m_sizes.size() != 7 || limits.size() != 8) throw std::invalid_argument("expected seven sizes and eight limits");
    std::copy(limits.begin(), limits.end(), m_limits);
}

MegaColumnRefusal MegaQueueSignature::append(MegaBatch& batch, std::span<const MegaQueueColumn> columns,
                                             uint32_t count, const uint32_t* priorities,
                                             uint32_t priority) const {
    const size_t jobs = batch.jobs.size(), words = batch.arguments.size(), ranges = batch.accesses.size();
    const uint64_t items = batch.items;
    Row row;
    row.bits.resize(m_arguments.size());
    row.values.resize(m_arguments.size());
    row.per_block.resize(m_arguments.size());
    row.job.op = m_op;
    MegaColumnRefusal refused;
    for (uint32_t job = 0; job < count && !refused; ++job) {
        refused = read(columns, job, row);
        if (!refused && row.has_changed) refused = shape(columns, job, row);
        if (!refused) refused = check_memory(columns, job, row);
        if (refused) break;
        row.job.priority = priorities ? priorities[job] : priority;
        row.has_changed = false;
        batch.jobs.push_back(row.job);
        batch.items += uint64_t{row.job.grid[0]} * row.job.grid[1] * row.job.grid[2];
        batch.arguments.insert(batch.arguments.end(), row.bits.begin(), row.bits.end());
        for (size_t k = 0; k < m_arguments.size(); ++k) {
            if (m_arguments[k].type != Type::Buffer) continue;  // one of each, so that it is known whose it is
            batch.accesses.push_back(
                {row.bits[k], row.bits[k] + columns[k].nbytes, row.per_block[k], 0, m_arguments[k].access});
        }
        batch.access_end.push_back(uint32_t(batch.accesses.size()));
    }
    if (refused) batch.shorten(jobs, words, ranges, items);
    return refused;
}

MegaColumnRefusal MegaQueueSignature::read(std::span<const MegaQueueColumn> columns, uint32_t job,
                                           Row& row) const {
    for (uint32_t k = 0; k < m_arguments.size(); ++k) {
        const MegaQueueArgument& argument = m_arguments[k];
        const MegaQueueColumn& column = columns[k];
        if (argument.type == Type::Buffer) {
            row.bits[k] = column.addresses ? column.addresses[job] : column.address + job * column.step;
        } else if (argument.type == Type::Integer) {
            const int64_t value = column.integers ? column.integers[job] : column.integer;
            if (value < argument.low || value > argument.high) return {Why::Range, job, k, 0, value, 0};
            row.has_changed |= value != row.values[k];
            row.values[k] = value;
            row.bits[k] = uint64_t(value);  // whatever its size: the low bytes come first
        } else {
            const double value = column.reals ? column.reals[job] : column.real;
            if (argument.type == Type::F64) {
                std::memcpy(&row.bits[k], &value, 8);
                continue;
            }
            // Half a unit beyond the largest float a double rounds to infinity.
            if (std::isfinite(value) && std::fabs(value) >= 0x1.ffffffp127) return {Why::Narrow, job, k, 0, 0, 0};
            const float narrow = float(value);
            row.bits[k] = 0;
            std::memcpy(&row.bits[k], &narrow, 4);
        }
    }
    return {};
}

// The launch's sizes, and that every buffer has the shape which the values ask for.
MegaColumnRefusal MegaQueueSignature::shape(std::span<const MegaQueueColumn> columns, uint32_t job,
                                            Row& row) const {
    const int64_t* const values = row.values.data();
    int64_t sizes[7];
    uint64_t lanes = 1;
    for (uint32_t k = 0; k < 7; ++k) {
        const ExpressionFault fault = m_sizes[k].evaluate(values, sizes[k]);
        if (fault != ExpressionFault::None) return {why_of(fault), job, k, 1, 0, 0};
        if (sizes[k] < (k < 6 ? 1 : 0) || uint64_t(sizes[k]) > m_limits[k])
            return {Why::Size, job, k, 0, sizes[k], int64_t(m_limits[k])};
        if (k >= 3 && k < 6) lanes *= uint64_t(sizes[k]);
        if (lanes > m_limits[7]) return {Why::Lanes, job, k, 0, int64_t(lanes), int64_t(m_limits[7])};
    }
    for (uint32_t k = 0; k < 3; ++k) row.job.grid[k] = uint32_t(sizes[k]);
    row.job.lanes = uint32_t(lanes);
    row.job.shared_bytes = uint32_t(sizes[6]);
    for (uint32_t k = 0; k < m_arguments.size(); ++k) {
        if (m_arguments[k].type != Type::Buffer) continue;
        int64_t& per_block = row.per_block[k] = 0;
        // Blocks are told apart along one axis alone, and by what can be computed.
        if (!m_arguments[k].per_block.empty() && sizes[1] == 1 && sizes[2] == 1 &&
            (m_arguments[k].per_block[0].evaluate(values, per_block) != ExpressionFault::None || per_block < 0))
            per_block = 0;
        const std::vector<Expression>& expected = m_arguments[k].shape;
        const std::vector<int64_t>& found = columns[k].shape;
        if (expected.size() != found.size())
            return {Why::Dimensions, job, k, 0, int64_t(found.size()), int64_t(expected.size())};
        for (uint32_t axis = 0; axis < expected.size(); ++axis) {
            int64_t size = 0;
            const ExpressionFault fault = expected[axis].evaluate(values, size);
            if (fault != ExpressionFault::None) return {why_of(fault), job, k, 0, 0, 0};
            if (size != found[axis]) return {Why::Shape, job, k, axis, found[axis], size};
        }
    }
    return {};
}

// Nothing that is written may overlap another argument: the order of its reads is not defined.
MegaColumnRefusal MegaQueueSignature::check_memory(std::span<const MegaQueueColumn> columns, uint32_t job,
                                                   const Row& row) const {
    for (uint32_t k = 0; k < m_arguments.size(); ++k) {
        if (m_arguments[k].type != Type::Buffer || !columns[k].nbytes) continue;
        const uint64_t begin = row.bits[k], end = begin + columns[k].nbytes;
        if (!begin || end < begin) return {Why::Address, job, k, 0, 0, 0};
        if (begin & (m_arguments[k].align - 1)) return {Why::Align, job, k, 0, int64_t(begin), m_arguments[k].align};
        if (!(m_arguments[k].access & 2)) continue;
        for (uint32_t other = 0; other < m_arguments.size(); ++other) {
            if (other == k || m_arguments[other].type != Type::Buffer) continue;
            const uint64_t first = std::max(begin, row.bits[other]);
            const uint64_t last = std::min(end, row.bits[other] + columns[other].nbytes);
            if (first < last) return {Why::Overlap, job, k, other, int64_t(last - first), 0};
        }
    }
    return {};
}

}  // namespace brickline
