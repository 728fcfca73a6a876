#include "plan_streams.h"

#include <algorithm>

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;

}  // namespace

PlanStreams::~PlanStreams() { destroy_events(); }

void PlanStreams::destroy_events() {
    if (m_events.empty()) return;
    const PlanContext guard(m_program.driver(), m_program.context());
    for (const CUevent event : m_events) m_program.driver().event_destroy(event);
    m_events.clear();
}

std::string PlanStreams::set_streams(std::vector<uint64_t> streams) {
    if (!m_program.driver().stream_wait) return "the CUDA driver has no cuStreamWaitEvent";
    m_streams.assign(1, 0);
    m_streams.insert(m_streams.end(), streams.begin(), streams.end());
    m_is_ordered = false;
    assign();
    order();
    const std::string problem = make_events();
    m_is_ordered = problem.empty();
    return problem;
}

std::string PlanStreams::make_events() {
    const Driver& driver = m_program.driver();
    const PlanContext guard(driver, m_program.context());
    while (m_events.size() < m_event_count) {
        CUevent made = nullptr;
        const CUresult result = driver.event_create(&made, CUDA_EVENT_DISABLE_TIMING);
        if (result != CUDA_SUCCESS) return driver.check(result, "cuEventCreate");
        m_events.push_back(made);
    }
    return "";
}

// Every launch is taken to last equally long. A launch goes to the stream where it can start first;
// among those to the one whose last launch it waits for anyway, so that no event is needed.
void PlanStreams::assign() {
    const uint32_t count = m_program.size();
    m_lanes.assign(count, 0);
    std::vector<uint64_t> free_at(m_streams.size()), end(count);
    std::vector<uint32_t> last(m_streams.size(), NONE);
    for (uint32_t i = 0; i < count; ++i) {
        const std::vector<uint32_t>& waits = m_program.dependencies(i);
        uint64_t ready = 0;
        for (const uint32_t each : waits) ready = std::max(ready, end[each]);
        uint32_t best = 0;
        uint64_t best_start = ~0ull;
        bool is_best_waited = false;
        for (uint32_t lane = 0; lane < m_streams.size(); ++lane) {
            const uint64_t start = std::max(ready, free_at[lane]);
            const bool is_waited = std::binary_search(waits.begin(), waits.end(), last[lane]);
            if (start > best_start || (start == best_start && is_best_waited >= is_waited)) continue;
            best = lane;
            best_start = start;
            is_best_waited = is_waited;
        }
        m_lanes[i] = best;
        last[best] = i;
        end[i] = free_at[best] = best_start + 1;
    }
}

// Walks through the launches in order. `known[a][b]` says how many launches of stream b stream a is
// known to come after; a wait is left out where that suffices.
void PlanStreams::order() {
    const uint32_t count = m_program.size(), lanes = uint32_t(m_streams.size());
    std::vector<uint32_t> place(count), event_of(count, NONE), issued(lanes);
    std::vector<std::vector<uint32_t>> known(lanes, std::vector<uint32_t>(lanes));
    std::vector<std::vector<uint32_t>> known_at(count);  // after the launch itself
    std::vector<std::vector<uint32_t>> waits(count);     // launches whose events launch i waits for
    std::vector<bool> has_begun(lanes), begins_with_fork(count);
    const auto learn = [&](uint32_t lane, uint32_t launch) {
        for (uint32_t k = 0; k < lanes; ++k) known[lane][k] = std::max(known[lane][k], known_at[launch][k]);
    };
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t lane = m_lanes[i];
        const std::vector<uint32_t>& all = m_program.dependencies(i);
        for (auto each = all.rbegin(); each != all.rend(); ++each) {  // later ones know more
            if (m_lanes[*each] == lane || known[lane][m_lanes[*each]] >= place[*each]) continue;
            waits[i].push_back(*each);
            learn(lane, *each);
        }
        // A wait for any launch of this plan is a wait for what came before it on the given stream.
        begins_with_fork[i] = lane != 0 && !has_begun[lane] && waits[i].empty();
        has_begun[lane] = true;
        place[i] = known[lane][lane] = ++issued[lane];
        known_at[i] = known[lane];
    }
    std::vector<uint32_t> last(lanes, NONE);
    for (uint32_t i = 0; i < count; ++i) last[m_lanes[i]] = i;
    std::vector<uint32_t> joins;
    for (uint32_t i = count; i-- > 0;) {  // from the end: later ones know more
        const uint32_t lane = m_lanes[i];
        if (lane == 0 || last[lane] != i || known[0][lane] >= place[i]) continue;
        joins.push_back(i);
        learn(0, i);
    }
    m_event_count = 0;
    for (uint32_t i = 0; i < count; ++i) {
        for (const uint32_t each : waits[i]) event_of[each] = 0;
    }
    for (const uint32_t each : joins) event_of[each] = 0;
    m_steps.clear();
    using Kind = Step::Kind;
    if (std::find(begins_with_fork.begin(), begins_with_fork.end(), true) != begins_with_fork.end()) {
        m_steps.push_back({Kind::Record, 0, m_event_count++});
    }
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t lane = m_lanes[i];
        if (begins_with_fork[i]) m_steps.push_back({Kind::Wait, lane, 0});
        for (const uint32_t each : waits[i]) m_steps.push_back({Kind::Wait, lane, event_of[each]});
        m_steps.push_back({Kind::Launch, lane, i});
        if (event_of[i] == NONE) continue;
        event_of[i] = m_event_count++;
        m_steps.push_back({Kind::Record, lane, event_of[i]});
    }
    for (const uint32_t each : joins) m_steps.push_back({Kind::Wait, 0, event_of[each]});
}

CUresult PlanStreams::take(const Step& step, const uint64_t* streams, const char*& call) const {
    const Driver& driver = m_program.driver();
    const CUstream stream = reinterpret_cast<CUstream>(streams[step.lane]);
    switch (step.kind) {
        case Step::Kind::Record:
            call = "cuEventRecordWithFlags";
            return driver.event_record(m_events[step.which], stream, 0);
        case Step::Kind::Wait:
            call = "cuStreamWaitEvent";
            return driver.stream_wait(stream, m_events[step.which], 0);
        default:
            call = "cuLaunchKernel";
            return m_program.enqueue(step.which, streams[step.lane]);
    }
}

PlanOutcome PlanStreams::run(uint64_t stream) {
    const PlanContext guard(m_program.driver(), m_program.context());
    m_streams[0] = stream;
    PlanOutcome outcome;
    for (const Step& step : m_steps) {
        const char* call = "";
        const CUresult result = take(step, m_streams.data(), call);
        const bool is_launch = step.kind == Step::Kind::Launch;
        if (result != CUDA_SUCCESS) [[unlikely]] {
            outcome.code = uint32_t(result);
            outcome.where = is_launch ? int32_t(step.which) : -1;
            outcome.call = call;
            join_all(stream);
            return outcome;
        }
        outcome.done += is_launch;
    }
    return outcome;
}

// After a failure: what was enqueued still comes before what follows on the stream.
void PlanStreams::join_all(uint64_t stream) {
    const Driver& driver = m_program.driver();
    if (m_events.empty()) return;
    for (size_t lane = 1; lane < m_streams.size(); ++lane) {
        if (driver.event_record(m_events[0], reinterpret_cast<CUstream>(m_streams[lane]), 0) == CUDA_SUCCESS) {
            driver.stream_wait(reinterpret_cast<CUstream>(stream), m_events[0], 0);
        }
    }
}

}  // namespace brickline
