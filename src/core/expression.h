// Integer expressions of launch shapes, as postfix code: what symbolic.py compiles and a launch
// evaluates. Arithmetic is checked; nothing wraps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace brickline {

enum class Operation : uint32_t {
    Constant = 0, Value = 1, Add = 2, Multiply = 3, FloorDivide = 4, Modulo = 5, CeilDivide = 6,
    Minimum = 7, Maximum = 8, Negate = 9,
};

struct Instruction {  // as it crosses from Python
    uint32_t operation;
    uint32_t reserved;
    int64_t operand;  // a constant, or the position of a value
};
static_assert(sizeof(Instruction) == 16);

enum class ExpressionFault { None, Overflow, DivisionByZero };

class Expression {
  public:
    static constexpr uint32_t MAX_STACK = 32;

    Expression() = default;
    // Takes code as bytes; `problem` is set where it is not code over `values` values.
    Expression(const char* bytes, uint64_t length, uint32_t values, std::string& problem);

    ExpressionFault evaluate(const int64_t* values, int64_t& result) const {
        if (m_code.size() == 1) [[likely]] {
            const Instruction& only = m_code[0];
            result = only.operation == uint32_t(Operation::Constant) ? only.operand
                                                                     : values[only.operand];
            return ExpressionFault::None;
        }
        return run(values, result);
    }

  private:
    ExpressionFault run(const int64_t* values, int64_t& result) const;

    std::vector<Instruction> m_code{{uint32_t(Operation::Constant), 0, 1}};
};

}  // namespace brickline
