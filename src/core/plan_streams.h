// PlanStreams: the launches of a program on several CUDA streams. Each launch goes to the stream where
// it can start first; events order those on different streams, and only where nothing else does. All
// of it forks from one stream and joins back to it. Which goes where is decided once, not per run.
#pragma once

#include <vector>

#include "plan_program.h"

namespace brickline {

class PlanStreams {
  public:
    explicit PlanStreams(const PlanProgram& program) : m_program(program) {}
    ~PlanStreams();
    PlanStreams(const PlanStreams&) = delete;
    PlanStreams& operator=(const PlanStreams&) = delete;

    // Streams beside the one that a run is given; "" or why they cannot be used.
    std::string set_streams(std::vector<uint64_t> streams);
    // Whether there are streams to run on.
    bool is_ready() const { return m_is_ordered; }
    // Enqueues everything; what follows on `stream` waits for all of it. Only when ready.
    PlanOutcome run(uint64_t stream);

    // The stream of launch i: 0 is the one that a run is given.
    uint32_t lane(uint32_t i) const { return m_lanes[i]; }
    uint32_t events() const { return uint32_t(m_events.size()); }

  private:
    struct Step {
        enum class Kind : uint8_t { Launch, Record, Wait };
        Kind kind;
        uint32_t lane;
        uint32_t which;  // launch or event
    };

    void assign();
    void order();
    std::string make_events();
    void destroy_events();
    CUresult take(const Step& step, const uint64_t* streams, const char*& call) const;
    void join_all(uint64_t stream);

    const PlanProgram& m_program;
    std::vector<uint64_t> m_streams;  // the first is set by each run
    std::vector<uint32_t> m_lanes;    // by launch
    std::vector<Step> m_steps;
    std::vector<CUevent> m_events;
    uint32_t m_event_count = 0;
    bool m_is_ordered = false;
};

}  // namespace brickline
