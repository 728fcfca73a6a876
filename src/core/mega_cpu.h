// MegaCpu: a MegaProgram on threads of the host, by the rules of megakernel.h.
//
// A worker is a list, not a thread. A thread has a list of its own; while that has to wait, and when it
// is done, it works on lists that nobody is at, one entry at a time. So a program with any number of
// workers ends on any number of threads, and none is idle while an item is ready.
//
// An unwatched run has the calling thread work along, and an item that never returns keeps it. Of one
// that is watched, or has a deadline, all items run on threads of the engine: workers leave by
// themselves between two items once the deadline or a stop has come, and the caller goes on without one
// that does not. The engine is dead then: that thread may still write to the memory of the program, so
// engine, program and memory have to stay. Where the last run was so short that handing it over would
// take a good part of it, the next one is unwatched, unless it has a deadline.
#pragma once

#include <memory>

#include "clock.h"
#include "mega_crew.h"
#include "mega_program.h"
#include "plan_stop.h"
#include "worker_pool.h"

namespace brickline {

// Why a run ended before its last item.
enum class MegaReason : uint32_t { None = 0, Asked = 1, Signal = 2, Deadline = 3 };

struct MegaOptions {
    uint64_t deadline_ns = 0;    // from the beginning of the run; 0: none
    bool is_watched = false;     // the caller waits instead of working along, unless the last run was short
    bool is_recorded = false;    // entry by entry
    uint64_t delay_seed = 0;     // other than 0: workers dawdle before items and signals, at random
    PlanStop* stop = nullptr;    // asked by the calling thread, null: never
};

struct MegaOutcome {
    MegaState state = MegaState::Finished;  // Stopped or Hung where any worker did or is
    MegaReason reason = MegaReason::None;
    uint64_t items = 0;      // that were executed
    uint64_t skipped = 0;    // that were not, because of a fault before them
    uint64_t remaining = 0;  // that were not executed, the skipped ones among them
    uint32_t done = 0;       // tasks of which every item was executed, without a fault
    int32_t where = -1;      // the first task with a fault, -1: none
    MegaFault fault = {0, 0};
    uint64_t asked_ns = 0;   // monotonic_ns when the run was asked for,
    uint64_t begin_ns = 0;   // when the tables were up to date,
    uint64_t end_ns = 0;     // and when all had left
    std::string problem;     // why nothing was run, "": it was
};

class MegaCpu final : private SharedWork {
  public:
    // How long after the deadline, or a stop, a worker may take for the item that it is at.
    static constexpr uint64_t GRACE_NS = 1'800'000'000;
    static constexpr uint64_t SHORT_NS = 200'000;

    // The program stays the caller's, and is brought up to date at each run.
    explicit MegaCpu(MegaProgram& program);
    // Of a dead engine it waits for the item that hangs.
    ~MegaCpu();

    MegaOutcome run(const MegaOptions& options);
    // Ends the run that is under way, between two items. From any thread.
    void stop() { end(MegaReason::Asked); }

    bool is_dead() const { return m_is_dead; }
    // Of the last run. All may be asked for while a worker hangs.
    MegaProgress progress(uint32_t worker) const;
    // As lists() has them, one that was left with the items until then; of an entry that no worker came
    // to everything is 0.
    const std::vector<MegaRecord>& records() const { return m_records; }
    MegaFault fault(uint32_t task) const;
    bool is_skipped(uint32_t task) const;
    // Items of each task that were executed without a fault; of an alias, of the task that computed it.
    std::vector<uint64_t> items_done() const;
    // Items of each task that were executed, those that faulted among them; of an alias none.
    std::vector<uint64_t> items_executed() const;
    bool is_finished(uint32_t task) const { return m_is_finished[task]; }

  private:
    struct Cursor;
    struct Hand;
    enum class Step : uint8_t { Moved, Blocked, Left };
    struct alignas(64) Counter {
        std::atomic<uint32_t> value{0};
    };
    struct TaskState {
        std::atomic<uint64_t> fault;  // the first block that has one and its code, NO_FAULT: none
        std::atomic<uint32_t> faulted;  // items
        std::atomic<bool> is_skipped;
    };

    std::string prepare(const MegaOptions& options);
    void make_room();
    void forget_faults();
    void run_along();
    bool run_watched();
    MegaOutcome outcome(bool has_ended);
    void find_finished();

    // Threads.
    void help(uint32_t) override;
    void work(uint32_t home, Hand& hand);
    bool step_all(uint32_t home, Hand& hand);
    bool is_over() const { return m_left.load(std::memory_order_acquire) == m_workers; }
    void rest(uint32_t home, Hand& hand);
    void end(MegaReason reason);
    void wake();
    bool should_stop(Hand& hand);

    // One list; only who holds the cursor may call these.
    Step step(Cursor& cursor, Hand& hand);
    void begin(Cursor& cursor);
    void enter(Cursor& cursor);
    bool is_ready(Cursor& cursor);
    bool execute(Cursor& cursor, Hand& hand);
    void execute_item(Cursor& cursor, brickline_launch& local);
    void finish(Cursor& cursor);
    void write_down(Cursor& cursor, uint64_t now);
    Step leave(Cursor& cursor, MegaState state);
    void dawdle(Cursor& cursor) const;

    Counter& counter(uint32_t set, uint32_t task) { return m_counters[size_t{set} * m_tasks + task]; }

    MegaProgram& m_program;
    const uint32_t m_workers;
    const TickSource m_clock;
    const double m_ns_per_tick;
    MegaCrew m_crew;
    MegaOptions m_options;
    uint64_t m_seen = 0;        // the program's structure
    uint32_t m_tasks = 0;
    uint32_t m_set = 0;         // of counters, the one that is used
    bool m_is_running = false;  // still set where a fork cut a run off
    bool m_is_dead = false;
    uint64_t m_asked_ns = 0, m_begin_ns = 0;
    uint64_t m_last_ns = ~0ull;  // that the last run of these tables took
    uint64_t m_deadline_tick = 0;
    std::unique_ptr<Counter[]> m_counters;
    std::unique_ptr<TaskState[]> m_states;
    std::unique_ptr<Cursor[]> m_cursors;
    std::vector<bool> m_is_finished;
    std::vector<uint32_t> m_executed;  // items, of each entry of the lists that is passed
    std::vector<MegaRecord> m_records;
    alignas(64) std::atomic<uint32_t> m_reason{0};  // MegaReason
    std::atomic<bool> m_is_given_up{false};
    std::atomic<bool> m_has_faults{false};
    alignas(64) std::atomic<uint32_t> m_arrivals{0};  // threads that have come, each for a list of its own
    std::atomic<uint32_t> m_left{0};                  // lists that are done or given up
    alignas(64) std::atomic<uint32_t> m_alarm{0};
    std::atomic<uint32_t> m_sleepers{0};
};

}  // namespace brickline
