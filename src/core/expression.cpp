#include "expression.h"

#include <algorithm>
#include <cstring>

namespace brickline {
namespace {

// Quotients and remainders that round down or up, as Python's do.
int64_t divide(Operation operation, int64_t above, int64_t below) {
    if (below == -1) return operation == Operation::Modulo ? 0 : -above;
    const int64_t quotient = above / below, remainder = above % below;
    const bool is_below = remainder != 0 && (remainder < 0) != (below < 0);
    switch (operation) {
        case Operation::Modulo: return is_below ? remainder + below : remainder;
        case Operation::CeilDivide: return quotient + (remainder != 0 && !is_below);
        default: return quotient - is_below;
    }
}

}  // namespace

Expression::Expression(const char* bytes, uint64_t length, uint32_t values, std::string& problem) {
    if (length == 0 || length % sizeof(Instruction) != 0) {
        problem = "expected whole instructions of 16 bytes, got " + std::to_string(length) + " bytes";
        return;
    }
    m_code.resize(length / sizeof(Instruction));
    std::memcpy(m_code.data(), bytes, length);
    uint32_t depth = 0;
    for (const Instruction& each : m_code) {
        const bool is_leaf = each.operation <= uint32_t(Operation::Value);
        const bool is_unary = each.operation == uint32_t(Operation::Negate);
        const bool is_value = each.operation == uint32_t(Operation::Value);
        if (each.operation > uint32_t(Operation::Negate) || depth < (is_leaf ? 0u : is_unary ? 1u : 2u) ||
            (is_value && (each.operand < 0 || each.operand >= int64_t(values)))) {
            problem = "not code of an expression";
            return;
        }
        depth += is_leaf ? 1 : 0;
        depth -= is_leaf || is_unary ? 0 : 1;
        if (depth > MAX_STACK) {
            problem = "an expression needs more than " + std::to_string(MAX_STACK) + " places";
            return;
        }
    }
    if (depth != 1) problem = "not code of one expression";
}

ExpressionFault Expression::run(const int64_t* values, int64_t& result) const {
    int64_t stack[MAX_STACK];
    uint32_t depth = 0;
    for (const Instruction& each : m_code) {
        const Operation operation = Operation(each.operation);
        if (operation == Operation::Constant) {
            stack[depth++] = each.operand;
            continue;
        }
        if (operation == Operation::Value) {
            stack[depth++] = values[each.operand];
            continue;
        }
        if (operation == Operation::Negate) {
            if (__builtin_sub_overflow(int64_t(0), stack[depth - 1], &stack[depth - 1])) {
                return ExpressionFault::Overflow;
            }
            continue;
        }
        const int64_t right = stack[--depth];
        int64_t& left = stack[depth - 1];
        bool fits = true;
        switch (operation) {
            case Operation::Add: fits = !__builtin_add_overflow(left, right, &left); break;
            case Operation::Multiply: fits = !__builtin_mul_overflow(left, right, &left); break;
            case Operation::Minimum: left = std::min(left, right); break;
            case Operation::Maximum: left = std::max(left, right); break;
            default:
                if (right == 0) return ExpressionFault::DivisionByZero;
                // The one quotient that does not fit; its remainder does.
                fits = operation == Operation::Modulo || left != INT64_MIN || right != -1;
                if (fits) left = divide(operation, left, right);
        }
        if (!fits) return ExpressionFault::Overflow;
    }
    result = stack[0];
    return ExpressionFault::None;
}

}  // namespace brickline
