// From arguments to jobs: MegaQueueSignature knows what one op takes, checks columns of arguments against
// it, and appends a job for each row to a batch. Knows no Python; whoever calls says why in words.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "expression.h"
#include "mega_queue.h"

namespace brickline {

struct MegaQueueArgument {
    enum class Type : uint8_t { Buffer, Integer, F64, F32 };
    Type type = Type::Integer;
    uint32_t access = 0;  // of a buffer: 1 reads, 2 writes, 3 both
    uint32_t align = 1;
    std::vector<Expression> shape;
    std::vector<Expression> per_block;  // bytes of it that one block has to itself, or none where that is not known
    int64_t low = INT64_MIN, high = INT64_MAX;
};

// One argument of several jobs: an array with an element for each, or one value for all of them.
struct MegaQueueColumn {
    const uint64_t* addresses = nullptr;  // null: `address`, and `step` bytes further for each job
    uint64_t address = 0, step = 0;
    uint64_t nbytes = 0;                  // of each job's buffer
    std::vector<int64_t> shape;
    const int64_t* integers = nullptr;    // null: `integer`
    int64_t integer = 0;
    const double* reals = nullptr;        // null: `real`
    double real = 0;
};

struct MegaColumnRefusal {
    enum class Why : uint8_t {
        None, Range, Narrow, Dimensions, Shape, Align, Overlap, Size, Lanes, Overflow, Division, Address,
    };
    Why why = Why::None;
    uint32_t job = 0;
    uint32_t argument = 0;  // or the size, or the axis' buffer
    uint32_t place = 0;     // the axis, or the other argument
    int64_t found = 0, expected = 0;

    explicit operator bool() const { return why != Why::None; }
};

class MegaQueueSignature {
  public:
    // `limits` bounds the seven sizes and, last, the product of the lanes.
    MegaQueueSignature(uint32_t op, std::vector<MegaQueueArgument> arguments, std::vector<Expression> sizes,
                       std::span<const uint64_t> limits);

    uint32_t op() const { return m_op; }
    const std::vector<MegaQueueArgument>& arguments() const { return m_arguments; }

    // Appends `count` jobs; where one is refused, the batch stays as it was. `priorities` may be null.
    MegaColumnRefusal append(MegaBatch& batch, std::span<const MegaQueueColumn> columns, uint32_t count,
                             const uint32_t* priorities, uint32_t priority) const;

  private:
    struct Row;
    MegaColumnRefusal read(std::span<const MegaQueueColumn> columns, uint32_t job, Row& row) const;
    MegaColumnRefusal shape(std::span<const MegaQueueColumn> columns, uint32_t job, Row& row) const;
    MegaColumnRefusal check_memory(std::span<const MegaQueueColumn> columns, uint32_t job, const Row& row) const;

    uint32_t m_op;
    std::vector<MegaQueueArgument> m_arguments;
    std::vector<Expression> m_sizes;
    uint64_t m_limits[8];
};

}  // namespace brickline
