// Rows of plans for the native tests: launches, slots and expressions in one line each.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan_program.h"

namespace plan_rows {

using namespace brickline;

inline PlanSlot value(uint64_t bits) {
    PlanSlot slot;
    slot.bits = bits;
    return slot;
}

inline PlanSlot buffer(uint32_t storage, uint64_t offset) {
    PlanSlot slot;
    slot.kind = PlanSlot::Kind::Buffer;
    slot.source = storage;
    slot.bits = offset;
    return slot;
}

inline PlanSlot expression(std::string code, bool is_narrow) {
    PlanSlot slot;
    slot.kind = PlanSlot::Kind::Expression;
    slot.code = std::move(code);
    slot.is_narrow = is_narrow;
    return slot;
}

inline PlanSlot real_slot(uint32_t variable, bool is_f32) {
    PlanSlot slot;
    slot.kind = PlanSlot::Kind::Float;
    slot.source = variable;
    slot.is_narrow = is_f32;
    return slot;
}

// Postfix code from (operation, operand) pairs.
inline std::string code(const std::vector<std::pair<uint32_t, int64_t>>& instructions) {
    std::string bytes;
    for (const auto& [operation, operand] : instructions) {
        const Instruction each = {operation, 0, operand};
        bytes.append(reinterpret_cast<const char*>(&each), sizeof each);
    }
    return bytes;
}

template <class Function>
PlanRow row(Function* function, uint32_t flags, uint64_t blocks) {
    PlanRow made;
    made.function = reinterpret_cast<uint64_t>(function);
    made.flags = flags;
    made.sizes[0].value = int64_t(blocks);
    made.sizes[6].value = 0;
    return made;
}

inline std::unique_ptr<PlanProgram> make_program(PlanDevice device, const std::vector<PlanRow>& rows,
                                                 std::vector<PlanVariable> variables = {},
                                                 uint32_t storages = 0, const Driver* driver = nullptr,
                                                 uint64_t context = 0) {
    const uint64_t limits[8] = {(1ull << 31) - 1, 65535, 65535, 1024, 1024, 64, 1 << 20, 1024};
    return std::make_unique<PlanProgram>(device, context, std::move(variables), storages, rows, limits, driver);
}

}  // namespace plan_rows
