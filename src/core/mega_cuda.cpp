#include "mega_cuda.h"

namespace brickline {
namespace {

constexpr uint64_t ALIGNED = 256;

uint64_t aligned(uint64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

template <class T>
uint64_t bytes_of(const std::vector<T>& all) {
    return all.size() * sizeof(T);
}

PlanOutcome failure(CUresult code, const char* call) {
    PlanOutcome outcome;
    outcome.code = uint32_t(code);
    outcome.call = call;
    return outcome;
}

}  // namespace

void MegaCuda::place(const MegaPlace& place) {
    m_place = place;
    m_structure = m_arguments = 0;
    m_set = 0;
}

// Arguments come last: they alone change with every run.
MegaCuda::Offsets MegaCuda::offsets() const {
    Offsets at = {};
    at.tasks = 0;
    at.list_begin = at.tasks + aligned(bytes_of(m_program.tasks()));
    at.lists = at.list_begin + aligned(bytes_of(m_program.list_begin()));
    at.waits = at.lists + aligned(bytes_of(m_program.lists()));
    at.arguments = at.waits + aligned(bytes_of(m_program.waits()));
    at.end = at.arguments + aligned(bytes_of(m_program.arguments()));
    return at;
}

uint64_t MegaCuda::tables_bytes() const { return offsets().end; }

CUresult MegaCuda::copy(uint64_t stream, uint64_t to, const void* from, uint64_t bytes) {
    if (!bytes) return CUDA_SUCCESS;
    m_uploaded += bytes;
    // The driver has read memory of the host that is not pinned when this returns.
    return m_program.program().driver().copy_to_device(m_place.tables + to, from, bytes,
                                                       reinterpret_cast<CUstream>(stream));
}

PlanOutcome MegaCuda::upload(uint64_t stream) {
    const Offsets at = offsets();
    const auto send = [&](uint64_t to, const auto& all) { return copy(stream, to, all.data(), bytes_of(all)); };
    CUresult code = CUDA_SUCCESS;
    if (m_structure != m_program.structure_version()) {
        if ((code = send(at.tasks, m_program.tasks())) || (code = send(at.list_begin, m_program.list_begin())) ||
            (code = send(at.lists, m_program.lists())) || (code = send(at.waits, m_program.waits())))
            return failure(code, "cuMemcpyHtoDAsync");
        m_structure = m_program.structure_version();
        m_arguments = 0;
    }
    if (m_arguments != m_program.argument_version()) {
        if ((code = send(at.arguments, m_program.arguments()))) return failure(code, "cuMemcpyHtoDAsync");
        m_arguments = m_program.argument_version();
    }
    return {};
}

PlanOutcome MegaCuda::run(uint64_t stream, const MegaLimits& limits) {
    const Driver& driver = m_program.program().driver();
    const PlanContext current(driver, m_program.program().context());
    const PlanOutcome uploaded = upload(stream);
    if (uploaded.code) return uploaded;
    const Offsets at = offsets();
    const uint32_t tasks = uint32_t(m_program.tasks().size());
    const uint64_t set_bytes = uint64_t{tasks} * MEGA_COUNTER_STEP * sizeof(uint32_t);
    const auto table = [&](auto type, uint64_t offset) {
        return reinterpret_cast<decltype(type)>(m_place.tables + offset);
    };
    MegaLaunch launch = {};
    launch.tasks = table(static_cast<const MegaTask*>(nullptr), at.tasks);
    launch.list_begin = table(static_cast<const uint32_t*>(nullptr), at.list_begin);
    launch.lists = table(static_cast<const uint32_t*>(nullptr), at.lists);
    launch.waits = table(static_cast<const MegaWait*>(nullptr), at.waits);
    launch.arguments = table(static_cast<const uint64_t*>(nullptr), at.arguments);
    launch.counters = reinterpret_cast<uint32_t*>(m_place.counters + m_set * set_bytes);
    launch.next_counters = reinterpret_cast<uint32_t*>(m_place.counters + (1 - m_set) * set_bytes);
    launch.faults = reinterpret_cast<MegaFault*>(m_place.faults);
    launch.progress = reinterpret_cast<MegaProgress*>(m_place.progress);
    launch.records = reinterpret_cast<MegaRecord*>(m_place.records);
    launch.executed = reinterpret_cast<uint32_t*>(m_place.executed);
    launch.stop = reinterpret_cast<uint32_t*>(m_place.stop);
    launch.stopped = reinterpret_cast<uint32_t*>(m_place.stopped);
    launch.tables_bytes = at.end;
    launch.max_ns = limits.max_ns;
    launch.grace_ns = limits.grace_ns;
    launch.tasks_count = tasks;
    launch.workers = m_program.workers();
    launch.ring_slots = m_place.ring_slots;
    launch.slot_bytes = m_place.slot_bytes;
    launch.shared_bytes = m_place.item_bytes;
    launch.delay_seed = limits.delay_seed;
    void* arguments[] = {&launch};
    const CUresult code = driver.launch_cooperative(
        reinterpret_cast<CUfunction>(m_place.function), m_program.workers(), 1, 1, m_place.threads, 1, 1,
        m_place.dynamic_bytes, reinterpret_cast<CUstream>(stream), arguments);
    if (code) return failure(code, "cuLaunchCooperativeKernel");
    m_set ^= 1;
    ++m_launches;
    PlanOutcome outcome;
    outcome.done = tasks;
    return outcome;
}

PlanOutcome MegaCuda::clear(uint64_t stream) {
    const Driver& driver = m_program.program().driver();
    const PlanContext current(driver, m_program.program().context());
    const uint64_t tasks = m_program.tasks().size();
    const auto fill = [&](uint64_t at, unsigned value, uint64_t words) {
        return driver.fill_words(at, value, words, reinterpret_cast<CUstream>(stream));
    };
    const auto zero = [&](uint64_t at, uint64_t words) { return fill(at, 0, words); };
    CUresult code = zero(m_place.counters, 2 * tasks * MEGA_COUNTER_STEP);
    if (!code) code = zero(m_place.faults, tasks * sizeof(MegaFault) / 4);
    if (!code) code = zero(m_place.stopped, 1);
    if (!code && !m_program.lists().empty()) code = fill(m_place.executed, MEGA_NONE, m_program.lists().size());
    return code ? failure(code, "cuMemsetD32Async") : PlanOutcome{};
}

}  // namespace brickline
