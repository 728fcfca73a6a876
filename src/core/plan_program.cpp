#include "plan_program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "clock.h"
#include "host_scratch.h"

namespace brickline {
namespace {

using HostFunction = void (*)(const brickline_launch*);
using Where = PlanRefusal::Where;
using Why = PlanRefusal::Why;

PlanRefusal refusal(Where where, Why why, uint32_t launch, uint32_t place, int64_t value) {
    PlanRefusal made;
    made.where = where;
    made.why = why;
    made.launch = int32_t(launch);
    made.place = place;
    made.value.integer = value;
    return made;
}

}  // namespace

PlanContext::PlanContext(const Driver& driver, uint64_t context) : m_driver(driver) {
    CUcontext current = nullptr;
    const CUcontext wanted = reinterpret_cast<CUcontext>(context);
    if (!wanted || (driver.context_current(&current) == CUDA_SUCCESS && current == wanted)) return;
    m_pushed = driver.context_push(wanted) == CUDA_SUCCESS;
}

PlanContext::~PlanContext() {
    CUcontext popped = nullptr;
    if (m_pushed) m_driver.context_pop(&popped);
}

std::vector<std::vector<uint32_t>> plan_order(const std::vector<std::vector<uint32_t>>& waits,
                                              const std::vector<uint32_t>& flags,
                                              const std::vector<bool>& is_run) {
    std::vector<std::vector<uint32_t>> order(waits.size());
    const auto runs = [&](int64_t launch) { return is_run.empty() || is_run[size_t(launch)]; };
    int64_t barrier = -1;
    for (uint32_t i = 0; i < waits.size(); ++i) {
        if (!runs(i)) continue;
        std::vector<uint32_t>& all = order[i];
        for (const uint32_t each : waits[i]) {
            if (each >= i || !runs(each)) {
                throw std::invalid_argument("launch " + std::to_string(i) + " cannot wait for launch " +
                                            std::to_string(each) + ", which is not " +
                                            (each >= i ? "earlier" : "run"));
            }
            if (int64_t(each) > barrier) all.push_back(each);
        }
        if (barrier >= 0) all.push_back(uint32_t(barrier));
        if (!(flags[i] & PLAN_MAY_OVERLAP)) {
            for (int64_t each = barrier + 1; each < int64_t(i); ++each) {
                if (runs(each)) all.push_back(uint32_t(each));
            }
            barrier = i;
        }
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
    }
    return order;
}

// -------------------------------------------------------------------------------------- from its rows

PlanProgram::PlanProgram(PlanDevice device, uint64_t context, std::vector<PlanVariable> variables,
                         uint32_t storages, const std::vector<PlanRow>& rows,
                         const uint64_t (&limits)[8], const Driver* driver)
    : m_device(device), m_context(context), m_driver(driver), m_variables(std::move(variables)) {
    if (device == PlanDevice::Cuda) {
        if (!m_driver) m_driver = &cuda_driver();
        if (!m_driver->problem.empty()) throw std::invalid_argument(m_driver->problem);
    }
    std::copy(limits, limits + 8, m_limits);
    m_users.resize(storages);
    m_is_bound.resize(storages);
    m_unbound = storages;
    m_launches.resize(rows.size());
    m_parts.resize(rows.size());
    m_sizes.resize(rows.size());
    m_stamps.resize(rows.size());
    m_dependents_of_variable.resize(m_variables.size());
    std::vector<std::vector<bool>> uses(rows.size(), std::vector<bool>(m_variables.size()));
    for (uint32_t i = 0; i < rows.size(); ++i) add_row(rows[i], i, uses);
    for (uint32_t i = 0; i < rows.size(); ++i) {
        for (size_t v = 0; v < m_variables.size(); ++v) {
            if (uses[i][v]) m_dependents_of_variable[v].push_back(i);
        }
    }
    // All slots are there, so their places no longer change.
    m_pointers.resize(m_slots.size());
    for (size_t k = 0; k < m_slots.size(); ++k) m_pointers[k] = &m_slots[k];
    for (uint32_t i = 0; i < rows.size(); ++i) {
        m_launches[i].host.arguments = m_pointers.data() + m_parts[i].first_slot;
        m_launches[i].host.fault = &m_launches[i].fault;
    }
    std::vector<std::vector<uint32_t>> waits;
    std::vector<uint32_t> flags;
    for (const PlanRow& row : rows) {
        waits.push_back(row.dependencies);
        flags.push_back(row.flags);
    }
    m_dependencies = plan_order(waits, flags);
    m_values.resize(m_variables.size());
    m_staged.resize(m_dynamics.size());
    m_touched.reserve(rows.size());
    if (m_variables.empty()) (void)set(nullptr);  // what it refuses, the caller's own call reports
}

void PlanProgram::add_row(const PlanRow& row, uint32_t launch, std::vector<std::vector<bool>>& uses) {
    Parts& parts = m_parts[launch];
    parts.first_slot = uint32_t(m_slots.size());
    parts.first_dynamic = uint32_t(m_dynamics.size());
    m_launches[launch].function = row.function;
    m_launches[launch].flags = row.flags;
    if (!row.function && m_device != PlanDevice::Null) {
        throw std::invalid_argument("launch " + std::to_string(launch) + " has no function");
    }
    for (uint32_t k = 0; k < row.slots.size(); ++k) {
        const PlanSlot& slot = row.slots[k];
        m_slots.push_back(slot.bits);
        if (slot.kind == PlanSlot::Kind::Buffer) {
            if (slot.source >= m_users.size()) {
                throw std::invalid_argument("expected a storage below " + std::to_string(m_users.size()) +
                                            ", got " + std::to_string(slot.source));
            }
            m_users[slot.source].push_back({launch, uint32_t(m_slots.size() - 1), slot.bits});
        } else if (slot.kind != PlanSlot::Kind::Value) {
            add_dynamic(slot, k, uses[launch]);
        }
    }
    m_slots.push_back(row.fault);
    for (uint32_t k = 0; k < 7; ++k) {
        m_sizes[launch].value[k] = row.sizes[k].value;
        if (row.sizes[k].code.empty()) continue;
        Dynamic dynamic;
        dynamic.expression = expression_of(row.sizes[k].code, uses[launch]);
        dynamic.place = k;
        m_dynamics.push_back(std::move(dynamic));
    }
    parts.last_dynamic = uint32_t(m_dynamics.size());
}

void PlanProgram::add_dynamic(const PlanSlot& slot, uint32_t place, std::vector<bool>& used) {
    Dynamic dynamic;
    dynamic.where = Where::Argument;
    dynamic.place = place;
    dynamic.is_narrow = slot.is_narrow;
    if (slot.kind == PlanSlot::Kind::Float) {
        if (slot.source >= m_variables.size() || !m_variables[slot.source].is_float) {
            throw std::invalid_argument("expected a variable that is a float, got variable " +
                                        std::to_string(slot.source));
        }
        dynamic.is_float = true;
        dynamic.variable = slot.source;
        used[slot.source] = true;
    } else {
        dynamic.expression = expression_of(slot.code, used);
    }
    m_dynamics.push_back(std::move(dynamic));
}

Expression PlanProgram::expression_of(const std::string& code, std::vector<bool>& used) const {
    std::string problem;
    Expression expression(code.data(), code.size(), uint32_t(m_variables.size()), problem);
    if (!problem.empty()) throw std::invalid_argument(problem);
    for (size_t at = 0; at < code.size(); at += sizeof(Instruction)) {
        Instruction each;
        std::memcpy(&each, code.data() + at, sizeof each);
        if (each.operation != uint32_t(Operation::Value)) continue;
        if (m_variables[size_t(each.operand)].is_float) {
            throw std::invalid_argument("expected an expression over whole numbers, got the float variable " +
                                        std::to_string(each.operand));
        }
        used[size_t(each.operand)] = true;
    }
    return expression;
}

// A launch that may not overlap waits for everything since the one before it, and all that follows
// waits for it: two edges a launch at most.
// ------------------------------------------------------------------------------ addresses and variables

void PlanProgram::bind(uint32_t storage, uint64_t address) {
    if (!m_is_bound[storage]) --m_unbound;
    m_is_bound[storage] = true;
    for (const Use& use : m_users[storage]) {
        uint64_t& slot = m_slots[use.slot];
        if (slot == address + use.offset) continue;
        slot = address + use.offset;
        m_launches[use.launch].version = ++m_version;
    }
}

std::string PlanProgram::missing() const {
    if (!m_is_set) return "the values of the variables; call set first";
    if (!m_unbound) return "";
    const auto found = std::find(m_is_bound.begin(), m_is_bound.end(), false);
    return "an address for storage " + std::to_string(found - m_is_bound.begin()) + "; call bind first";
}

PlanRefusal PlanProgram::check_variables(const PlanValue* values) const {
    for (uint32_t v = 0; v < m_variables.size(); ++v) {
        const PlanVariable& variable = m_variables[v];
        const int64_t value = values[v].integer;
        if (variable.is_float || (value >= variable.low && value <= variable.high)) continue;
        return refusal(Where::Variable, Why::Range, uint32_t(-1), v, value);
    }
    return {};
}

PlanRefusal PlanProgram::set(const PlanValue* values) {
    if (PlanRefusal refused = check_variables(values)) return refused;
    m_touched.clear();
    if (!m_is_set) {
        for (uint32_t i = 0; i < size(); ++i) m_touched.push_back(i);
    } else {
        ++m_stamp;
        for (uint32_t v = 0; v < m_variables.size(); ++v) {
            if (m_values[v].integer == values[v].integer) continue;  // of a float the bits
            for (const uint32_t launch : m_dependents_of_variable[v]) {
                if (m_stamps[launch] == m_stamp) continue;
                m_stamps[launch] = m_stamp;
                m_touched.push_back(launch);
            }
        }
        std::sort(m_touched.begin(), m_touched.end());  // the first that is refused is named
    }
    for (const uint32_t launch : m_touched) {
        if (PlanRefusal refused = stage(launch, values)) return refused;
    }
    for (const uint32_t launch : m_touched) commit(launch, m_staged.data());
    if (values) std::copy(values, values + m_variables.size(), m_values.begin());
    if (!m_touched.empty()) {
        m_shared_bytes = 0;
        for (const PlanLaunch& each : m_launches) {
            m_shared_bytes = std::max(m_shared_bytes, each.host.shared_bytes);
        }
    }
    m_is_set = true;
    return {};
}

PlanRefusal PlanProgram::stage(uint32_t launch, const PlanValue* values) {
    static_assert(sizeof(PlanValue) == sizeof(int64_t));
    const int64_t* const integers = values ? &values->integer : nullptr;
    const Parts& parts = m_parts[launch];
    Sizes sizes = m_sizes[launch];
    for (uint32_t k = parts.first_dynamic; k < parts.last_dynamic; ++k) {
        const Dynamic& dynamic = m_dynamics[k];
        if (dynamic.is_float) {
            const double number = values[dynamic.variable].real;
            m_staged[k] = 0;
            if (!dynamic.is_narrow) {
                std::memcpy(&m_staged[k], &number, 8);
                continue;
            }
            // Half a unit beyond the largest float a double rounds to infinity.
            if (std::isfinite(number) && std::fabs(number) >= 0x1.ffffffp127) {
                PlanRefusal refused = refusal(Where::Argument, Why::Range, launch, dynamic.place, 0);
                refused.is_float = true;
                refused.value.real = number;
                return refused;
            }
            const float narrow = float(number);
            std::memcpy(&m_staged[k], &narrow, 4);
            continue;
        }
        int64_t value = 0;
        const ExpressionFault fault = dynamic.expression.evaluate(integers, value);
        if (fault != ExpressionFault::None) {
            const Why why = fault == ExpressionFault::Overflow ? Why::Overflow : Why::DivisionByZero;
            return refusal(dynamic.where, why, launch, dynamic.place, 0);
        }
        if (dynamic.is_narrow && value != int32_t(value)) {
            return refusal(dynamic.where, Why::Range, launch, dynamic.place, value);
        }
        m_staged[k] = uint64_t(value);
        if (dynamic.where == Where::Size) sizes.value[dynamic.place] = value;
    }
    return check_sizes(launch, sizes);
}

PlanRefusal PlanProgram::check_sizes(uint32_t launch, const Sizes& sizes) const {
    uint64_t lanes = 1;
    int64_t blocks = 1;
    for (uint32_t k = 0; k < 7; ++k) {
        const int64_t value = sizes.value[k];
        if (value < (k < 6 ? 1 : 0) || uint64_t(value) > m_limits[k] || (k < 6 && value > UINT32_MAX)) {
            return refusal(Where::Size, Why::Range, launch, k, value);
        }
        if (k < 3 && __builtin_mul_overflow(blocks, value, &blocks)) {
            return refusal(Where::Size, Why::Overflow, launch, k, value);
        }
        if (k >= 3 && k < 6 && __builtin_mul_overflow(lanes, uint64_t(value), &lanes)) lanes = UINT64_MAX;
    }
    if (lanes <= m_limits[7]) return {};
    return refusal(Where::Size, Why::Lanes, launch, 3, int64_t(std::min(lanes, uint64_t(INT64_MAX))));
}

void PlanProgram::commit(uint32_t launch, const uint64_t* staged) {
    const Parts& parts = m_parts[launch];
    bool is_changed = !m_is_set;
    for (uint32_t k = parts.first_dynamic; k < parts.last_dynamic; ++k) {
        const Dynamic& dynamic = m_dynamics[k];
        if (dynamic.where == Where::Size) {
            int64_t& size = m_sizes[launch].value[dynamic.place];
            is_changed |= size != int64_t(staged[k]);
            size = int64_t(staged[k]);
        } else {
            uint64_t& slot = m_slots[parts.first_slot + dynamic.place];
            is_changed |= slot != staged[k];
            slot = staged[k];
        }
    }
    if (is_changed) apply_sizes(launch);
}

void PlanProgram::apply_sizes(uint32_t launch) {
    const int64_t* const sizes = m_sizes[launch].value;
    brickline_launch& host = m_launches[launch].host;
    host.first = 0;
    host.last = 1;
    for (int k = 0; k < 3; ++k) {
        host.grid[k] = uint32_t(sizes[k]);
        host.lanes[k] = uint32_t(sizes[3 + k]);
        host.last *= uint64_t(sizes[k]);
    }
    host.shared_bytes = uint64_t(sizes[6]);
    m_launches[launch].version = ++m_version;
}

// ---------------------------------------------------------------------------------------- serial runs

void PlanProgram::set_timed(bool timed) {
    m_is_timed = timed;
    if (timed) m_times.assign(size(), {});
    else m_times.clear();
}

PlanOutcome PlanProgram::run_serial(uint64_t stream, uint32_t first, uint32_t last, PlanStop* stop) {
    if (m_device == PlanDevice::Cpu) return run_host(first, last, stop);
    if (m_device == PlanDevice::Cuda) return run_cuda(stream, first, last, stop);
    PlanOutcome outcome;
    outcome.done = last - first;  // NULL executes nothing
    return outcome;
}

PlanOutcome PlanProgram::run_cuda(uint64_t stream, uint32_t first, uint32_t last, PlanStop* stop) const {
    PlanOutcome outcome;
    StopClock clock(stop);
    const PlanContext guard(*m_driver, m_context);
    for (uint32_t i = first; i < last; ++i, ++outcome.done) {
        if (clock.is_due()) [[unlikely]] {
            outcome.is_stopped = stop->is_wanted();
            if (outcome.is_stopped) return outcome;
            clock.restart();
        }
        const CUresult result = enqueue(i, stream);
        if (result == CUDA_SUCCESS) [[likely]] continue;
        outcome.code = uint32_t(result);
        outcome.where = int32_t(i);
        outcome.call = "cuLaunchKernel";
        return outcome;
    }
    return outcome;
}

CUresult PlanProgram::enqueue(uint32_t i, uint64_t stream) const {
    const PlanLaunch& launch = m_launches[i];
    const brickline_launch& host = launch.host;
    return m_driver->launch(reinterpret_cast<CUfunction>(launch.function), host.grid[0], host.grid[1],
                            host.grid[2], host.lanes[0], host.lanes[1], host.lanes[2],
                            unsigned(host.shared_bytes), reinterpret_cast<CUstream>(stream),
                            const_cast<void**>(host.arguments), nullptr);
}

PlanOutcome PlanProgram::run_host(uint32_t first, uint32_t last, PlanStop* stop) {
    PlanOutcome outcome;
    StopClock clock(stop);
    void* shared = host_scratch().of(m_shared_bytes);
    for (uint32_t i = first; i < last; ++i, ++outcome.done) {
        if (clock.is_due()) [[unlikely]] {
            outcome.is_stopped = stop->is_wanted();
            if (outcome.is_stopped) return outcome;
            clock.restart();
            shared = host_scratch().of(m_shared_bytes);  // who was asked may have used it, too
        }
        if (!shared && m_shared_bytes) [[unlikely]] {
            outcome.code = PLAN_NO_MEMORY;
            outcome.where = int32_t(i);
            return outcome;
        }
        PlanLaunch& launch = m_launches[i];
        launch.host.shared = shared;
        if (m_is_timed) [[unlikely]] m_times[i] = {0, monotonic_ns(), 0};
        reinterpret_cast<HostFunction>(launch.function)(&launch.host);
        if (m_is_timed) [[unlikely]] m_times[i].end_ns = monotonic_ns();
        if (!launch.fault) [[likely]] continue;
        outcome.code = launch.fault;
        outcome.where = int32_t(i);
        launch.fault = 0;
        return outcome;
    }
    return outcome;
}

}  // namespace brickline
