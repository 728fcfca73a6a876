// Expressions of launch shapes: random postfix programs against a brute force in 128 bits, and bytes
// that are no program. A fault is found exactly where a step leaves 64 bits or divides by zero.
#include "expression.h"

#include <cstring>
#include <optional>

#include "native_test.h"

using namespace brickline;
using namespace native_test;

namespace {

using Wide = __int128;
constexpr uint32_t VALUES = 4;

struct Outcome {
    ExpressionFault fault = ExpressionFault::None;
    int64_t result = 0;
};

bool fits(Wide value) { return value >= INT64_MIN && value <= INT64_MAX; }

Wide floor_divide(Wide above, Wide below) {
    const Wide quotient = above / below;
    return quotient * below != above && (above < 0) != (below < 0) ? quotient - 1 : quotient;
}

// One step of the model: 128 bits hold every product of two 64-bit numbers.
std::optional<Wide> step(Operation operation, Wide left, Wide right) {
    switch (operation) {
        case Operation::Add: return left + right;
        case Operation::Multiply: return left * right;
        case Operation::Minimum: return left < right ? left : right;
        case Operation::Maximum: return left < right ? right : left;
        default: break;
    }
    if (right == 0) return std::nullopt;
    const Wide quotient = floor_divide(left, right);
    if (operation == Operation::FloorDivide) return quotient;
    if (operation == Operation::Modulo) return left - quotient * right;
    return -floor_divide(-left, right);
}

Outcome model(const std::vector<Instruction>& code, const int64_t* values) {
    std::vector<Wide> stack;
    for (const Instruction& each : code) {
        const Operation operation = Operation(each.operation);
        if (operation == Operation::Constant) {
            stack.push_back(each.operand);
        } else if (operation == Operation::Value) {
            stack.push_back(values[each.operand]);
        } else if (operation == Operation::Negate) {
            stack.back() = -stack.back();
        } else {
            const Wide right = stack.back();
            stack.pop_back();
            const std::optional<Wide> found = step(operation, stack.back(), right);
            if (!found) return {ExpressionFault::DivisionByZero, 0};
            stack.back() = *found;
        }
        if (!fits(stack.back())) return {ExpressionFault::Overflow, 0};
    }
    return {ExpressionFault::None, int64_t(stack.back())};
}

Expression compile(const std::vector<Instruction>& code, uint32_t values, std::string& problem) {
    return Expression(reinterpret_cast<const char*>(code.data()), code.size() * sizeof(Instruction),
                      values, problem);
}

// Small numbers for quotients that matter, ends of the range for those that overflow.
int64_t number(Random& random) {
    switch (random.below(8)) {
        case 0: return INT64_MIN + int64_t(random.below(3));
        case 1: return INT64_MAX - int64_t(random.below(3));
        case 2: return int64_t(random.bits());
        case 3: return int64_t(random.bits()) >> random.below(64);
        default: return int64_t(random.below(21)) - 10;
    }
}

Instruction leaf(Random& random) {
    if (random.one_in(2)) return {uint32_t(Operation::Value), 0, int64_t(random.below(VALUES))};
    return {uint32_t(Operation::Constant), 0, number(random)};
}

std::vector<Instruction> program(Random& random) {
    std::vector<Instruction> code;
    uint32_t depth = 0;
    const uint64_t length = 1 + random.below(40);
    while (code.size() < length || depth != 1) {
        const bool must_shrink = code.size() >= length || depth == Expression::MAX_STACK;
        if (depth >= 2 && (must_shrink || random.one_in(2))) {
            code.push_back({uint32_t(2 + random.below(7)), 0, int64_t(random.bits())});
            --depth;
        } else if (depth >= 1 && random.one_in(5)) {
            code.push_back({uint32_t(Operation::Negate), 0, 0});
        } else if (!must_shrink || depth == 0) {
            code.push_back(leaf(random));
            ++depth;
        }
    }
    return code;
}

void test_random_programs() {
    Random random(1);
    int faults[3] = {};
    for (int round = 0; round < 60'000; ++round) {
        const std::vector<Instruction> code = program(random);
        std::string problem;
        const Expression expression = compile(code, VALUES, problem);
        if (!check(problem.empty(), "a sound program is taken: " + problem)) continue;
        for (int again = 0; again < 4; ++again) {
            int64_t values[VALUES];
            for (int64_t& value : values) value = number(random);
            const Outcome expected = model(code, values);
            int64_t result = 0;
            const ExpressionFault fault = expression.evaluate(values, result);
            check(fault == expected.fault, "the same fault");
            if (fault == ExpressionFault::None) check_equal(result, expected.result, "the same result");
            ++faults[int(fault)];
        }
    }
    for (const int count : faults) check(count > 1000, "programs of every outcome were run");
}

// Each operation over all pairs of numbers where something changes.
void test_every_operation_at_the_ends() {
    const int64_t ends[] = {INT64_MIN, INT64_MIN + 1, -4, -3, -2, -1, 0, 1, 2, 3, 4, 7,
                            INT64_MAX - 1, INT64_MAX, int64_t(1) << 32, -(int64_t(1) << 32)};
    for (uint32_t operation = uint32_t(Operation::Add); operation <= uint32_t(Operation::Maximum); ++operation) {
        const std::vector<Instruction> code = {{uint32_t(Operation::Value), 0, 0},
                                               {uint32_t(Operation::Value), 0, 1},
                                               {operation, 0, 0}};
        std::string problem;
        const Expression expression = compile(code, 2, problem);
        for (const int64_t left : ends) {
            for (const int64_t right : ends) {
                const int64_t values[] = {left, right};
                const Outcome expected = model(code, values);
                int64_t result = 0;
                const ExpressionFault fault = expression.evaluate(values, result);
                const std::string what = "operation " + std::to_string(operation) + " of " +
                                         std::to_string(left) + " and " + std::to_string(right);
                check(fault == expected.fault, what + ": fault");
                if (fault == ExpressionFault::None) check_equal(result, expected.result, what);
            }
        }
    }
    for (const int64_t value : ends) {
        std::string problem;
        const Expression negated = compile({{uint32_t(Operation::Value), 0, 0},
                                            {uint32_t(Operation::Negate), 0, 0}}, 1, problem);
        int64_t result = 0;
        const ExpressionFault fault = negated.evaluate(&value, result);
        check((fault == ExpressionFault::Overflow) == (value == INT64_MIN), "negation overflows once");
        if (fault == ExpressionFault::None) check_equal(result, -value, "negation");
    }
}

void refuse(const std::vector<Instruction>& code, const std::string& what) {
    std::string problem;
    compile(code, VALUES, problem);
    check(!problem.empty(), what + " is refused");
}

void test_malformed_code() {
    const Instruction one = {uint32_t(Operation::Constant), 0, 1};
    const Instruction add = {uint32_t(Operation::Add), 0, 0};
    const Instruction negate = {uint32_t(Operation::Negate), 0, 0};
    refuse({}, "no code");
    refuse({add}, "a binary operation of nothing");
    refuse({one, add}, "a binary operation of one");
    refuse({negate}, "a unary operation of nothing");
    refuse({one, one}, "two expressions");
    refuse({one, one, add, add}, "one operation too many");
    for (const uint32_t operation : {10u, 11u, 255u, 0x80000000u, 0xffffffffu}) {
        refuse({{operation, 0, 0}}, "an unknown operation");
        refuse({one, one, {operation, 0, 0}}, "an unknown operation of two");
    }
    for (const int64_t place : {int64_t(VALUES), int64_t(-1), INT64_MAX, INT64_MIN, int64_t(1) << 32}) {
        refuse({{uint32_t(Operation::Value), 0, place}}, "a value out of place");
    }
    const std::vector<Instruction> code(2, one);
    for (uint64_t length = 0; length < 32; ++length) {
        if (length == sizeof(Instruction)) continue;
        std::string problem;
        Expression(reinterpret_cast<const char*>(code.data()), length, VALUES, problem);
        check(!problem.empty(), "a part of an instruction is refused");
    }
    std::string problem;
    compile({{uint32_t(Operation::Value), 0, 0}}, 0, problem);
    check(!problem.empty(), "a value where there is none is refused");
}

void test_the_depth_of_the_stack() {
    for (const uint32_t depth : {Expression::MAX_STACK, Expression::MAX_STACK + 1}) {
        std::vector<Instruction> code(depth, {uint32_t(Operation::Constant), 0, 1});
        code.insert(code.end(), depth - 1, {uint32_t(Operation::Add), 0, 0});
        std::string problem;
        const Expression expression = compile(code, 0, problem);
        check(problem.empty() == (depth == Expression::MAX_STACK), "the deepest stack and no deeper");
        if (!problem.empty()) continue;
        int64_t result = 0;
        check(expression.evaluate(nullptr, result) == ExpressionFault::None, "a deep stack has no fault");
        check_equal(result, depth, "a deep stack");
    }
}

// Bytes of any kind are refused, or run without leaving the stack or the values.
void test_random_bytes() {
    Random random(2);
    int taken = 0;
    for (int round = 0; round < 200'000; ++round) {
        std::vector<Instruction> code(1 + random.below(6));
        for (Instruction& each : code) {
            each.operation = random.one_in(20) ? uint32_t(random.bits()) : uint32_t(random.below(11));
            each.reserved = uint32_t(random.bits());
            each.operand = random.one_in(4) ? number(random) : int64_t(random.below(VALUES + 1));
        }
        std::string problem;
        const Expression expression = compile(code, VALUES, problem);
        if (!problem.empty()) continue;
        ++taken;
        const int64_t values[VALUES] = {number(random), number(random), number(random), number(random)};
        const Outcome expected = model(code, values);
        int64_t result = 0;
        check(expression.evaluate(values, result) == expected.fault, "the same fault from any bytes");
    }
    check(taken > 1000, "some bytes are programs");
}

void test_no_code_at_all_is_one() {
    int64_t result = 0;
    check(Expression().evaluate(nullptr, result) == ExpressionFault::None, "an empty expression");
    check_equal(result, 1, "an empty expression is 1");
}

}  // namespace

int main() {
    watchdog(120);
    test_random_programs();
    test_every_operation_at_the_ends();
    test_malformed_code();
    test_the_depth_of_the_stack();
    test_random_bytes();
    test_no_code_at_all_is_one();
    return finish();
}
