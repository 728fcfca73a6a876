// A megakernel on threads of the host as Python sees it: MegaCpuCore. Rows become structs; runs release
// the GIL, and a handler of a signal that raises ends them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "mega_cpu.h"
#include "mega_rows.h"
#include "pending_signals.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace brickline {
namespace {

class MegaCpuCore {
  public:
    // `held` is what items use: code and memory.
    MegaCpuCore(nb::object plan, nb::handle rows, uint32_t workers, nb::object held)
        : m_plan(std::move(plan)), m_held(std::move(held)) {
        m_planned = reinterpret_cast<PlanProgram*>(nb::cast<uintptr_t>(m_plan.attr("program")));
        if (m_planned->device() != PlanDevice::Cpu) throw std::invalid_argument("expected a plan on CPU");
        m_program = std::make_unique<MegaProgram>(*m_planned, mega_rows_of(rows), workers);
        m_cpu = std::make_unique<MegaCpu>(*m_program);
    }
    // A thread that never came back still uses all of it, until the process ends.
    ~MegaCpuCore() {
        if (!m_cpu || !m_cpu->is_dead()) return;
        (void)m_cpu.release();
        (void)m_program.release();
    }
    MegaCpuCore(const MegaCpuCore&) = delete;
    MegaCpuCore& operator=(const MegaCpuCore&) = delete;

    nb::dict run(uint64_t deadline_ns, bool recorded, uint64_t delay_seed) {
        const std::string missing = m_planned->missing();
        if (!missing.empty()) throw std::runtime_error("the plan lacks " + missing);
        MegaOptions options;
        options.deadline_ns = deadline_ns;
        options.is_recorded = recorded;
        options.delay_seed = delay_seed;
        options.stop = &m_signals;
        options.is_watched = m_signals.can_come();
        {
            nb::gil_scoped_release released;
            m_outcome = m_cpu->run(options);
        }
        if (m_outcome.state == MegaState::Hung) {
            m_plan.inc_ref();
            m_held.inc_ref();
        }
        if (m_outcome.reason == MegaReason::Signal) {
            m_stopped = m_outcome.done;
            throw nb::python_error();
        }
        return outcome();
    }

    // How many launches the run had finished that a handler's exception ended; told once.
    nb::object take_stopped() {
        const int64_t stopped = std::exchange(m_stopped, -1);
        return stopped < 0 ? nb::none() : nb::object(nb::int_(stopped));
    }

    nb::dict outcome() const {
        const char* const states[] = {"running", "finished", "stopped", "hung"};
        const char* const reasons[] = {"", "asked", "signal", "deadline"};
        nb::dict out;
        out["problem"] = m_outcome.problem;
        out["state"] = states[size_t(m_outcome.state)];
        out["reason"] = reasons[size_t(m_outcome.reason)];
        out["items"] = m_outcome.items;
        out["skipped"] = m_outcome.skipped;
        out["remaining"] = m_outcome.remaining;
        out["done"] = m_outcome.done;
        out["where"] = m_outcome.where;
        out["code"] = m_outcome.fault.code;
        out["block"] = m_outcome.fault.block;
        out["asked_ns"] = m_outcome.asked_ns;
        out["begin_ns"] = m_outcome.begin_ns;
        out["end_ns"] = m_outcome.end_ns;
        return out;
    }

    // Until the first run the tables are empty.
    nb::object refresh() {
        const std::string problem = m_program->refresh();
        return problem.empty() ? nb::none() : nb::object(nb::str(problem.c_str()));
    }

    nb::bytes table(const std::string& name) const {
        if (name == "tasks") return mega_bytes_of(m_program->tasks());
        if (name == "list_begin") return mega_bytes_of(m_program->list_begin());
        if (name == "lists") return mega_bytes_of(m_program->lists());
        if (name == "waits") return mega_bytes_of(m_program->waits());
        if (name == "records") return mega_bytes_of(m_cpu->records());
        if (name == "items_done") return mega_bytes_of(m_cpu->items_done());
        if (name == "items_executed") return mega_bytes_of(m_cpu->items_executed());
        if (name == "progress") {
            std::vector<MegaProgress> rows;
            for (uint32_t w = 0; w < m_program->workers(); ++w) rows.push_back(m_cpu->progress(w));
            return mega_bytes_of(rows);
        }
        if (name == "faults") {
            std::vector<MegaFault> rows;
            for (uint32_t task = 0; task < m_program->tasks().size(); ++task) rows.push_back(m_cpu->fault(task));
            return mega_bytes_of(rows);
        }
        throw nb::key_error(name.c_str());
    }

    // Of the last run: (finished, skipped) for each launch.
    nb::list ends() const {
        nb::list out;
        for (uint32_t task = 0; task < m_program->tasks().size(); ++task) {
            out.append(nb::make_tuple(m_cpu->is_finished(task), m_cpu->is_skipped(task)));
        }
        return out;
    }

    void stop() { m_cpu->stop(); }
    bool is_dead() const { return m_cpu->is_dead(); }
    uint64_t items() const { return m_program->items(); }
    uint64_t structure_version() const { return m_program->structure_version(); }

  private:
    nb::object m_plan;  // owns what is planned
    nb::object m_held;
    PlanProgram* m_planned = nullptr;
    std::unique_ptr<MegaProgram> m_program;
    std::unique_ptr<MegaCpu> m_cpu;
    MegaOutcome m_outcome;
    int64_t m_stopped = -1;  // launches that were finished then; -1: it was not, or has been told
    PendingSignals m_signals;
};

}  // namespace

void bind_mega_cpu(nb::module_& module) {
    nb::class_<MegaCpuCore>(module, "MegaCpuCore", "A plan as lists of items for workers on threads.")
        .def(nb::init<nb::object, nb::handle, uint32_t, nb::object>(), "plan"_a, "rows"_a, "workers"_a,
             "held"_a)
        .def("run", &MegaCpuCore::run, "deadline_ns"_a = 0, "recorded"_a = false, "delay_seed"_a = 0,
             "Run every item; what came of it.")
        .def("outcome", &MegaCpuCore::outcome, "What came of the last run.")
        .def("take_stopped", &MegaCpuCore::take_stopped,
             "Launches that a run had finished when a signal's handler raised; None where none did.")
        .def("refresh", &MegaCpuCore::refresh,
             "Follow the plan's variables and addresses; None, or why it cannot be run.")
        .def("stop", &MegaCpuCore::stop, "End the run that is under way, between two items.")
        .def("table", &MegaCpuCore::table, "name"_a,
             "The bytes of tasks, list_begin, lists, waits; of the last run: records, items_done, "
             "items_executed, progress, faults.")
        .def("ends", &MegaCpuCore::ends, "Whether each launch is finished, and whether part was skipped.")
        .def_prop_ro("items", &MegaCpuCore::items, "Items of all launches.")
        .def_prop_ro("structure_version", &MegaCpuCore::structure_version, "Counts changes of the tables.")
        .def_prop_ro("is_dead", &MegaCpuCore::is_dead, "Whether an item never came back.");
}

}  // namespace brickline
