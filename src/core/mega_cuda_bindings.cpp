// A megakernel on CUDA as Python sees it: MegaCudaCore. Rows become structs; runs release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "mega_cuda.h"
#include "mega_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace brickline {
namespace {

uint32_t number_of(nb::handle values, const char* name) {
    return nb::cast<uint32_t>(values[name]);
}

class MegaCudaCore {
  public:
    MegaCudaCore(nb::object plan, nb::handle rows, uint32_t workers) : m_plan(std::move(plan)) {
        const auto* program = reinterpret_cast<const PlanProgram*>(nb::cast<uintptr_t>(m_plan.attr("program")));
        if (program->device() != PlanDevice::Cuda) throw std::invalid_argument("expected a plan on CUDA");
        if (!program->driver().launch_cooperative || !program->driver().copy_to_device ||
            !program->driver().fill_words) {
            throw std::runtime_error("the CUDA driver is too old: it has no cooperative launch");
        }
        m_program = std::make_unique<MegaProgram>(*program, mega_rows_of(rows), workers);
        m_cuda = std::make_unique<MegaCuda>(*m_program);
    }

    nb::object refresh() {
        const std::string problem = m_program->refresh();
        return problem.empty() ? nb::none() : nb::object(nb::str(problem.c_str()));
    }

    nb::dict facts() const {
        nb::dict out;
        out["tasks"] = m_program->tasks().size();
        out["entries"] = m_program->lists().size();
        out["items"] = m_program->items();
        out["workers"] = m_program->workers();
        out["shared_bytes"] = m_program->shared_bytes();
        out["tables_bytes"] = m_cuda->tables_bytes();
        out["uploaded_bytes"] = m_cuda->uploaded_bytes();
        out["launches"] = m_cuda->launches();
        out["structure_version"] = m_program->structure_version();
        return out;
    }

    void place(nb::handle values) {
        const auto address = [&](const char* name) { return nb::cast<uint64_t>(values[name]); };
        MegaPlace place;
        place.function = address("function");
        place.threads = number_of(values, "threads");
        place.dynamic_bytes = number_of(values, "dynamic_bytes");
        place.ring_slots = number_of(values, "ring_slots");
        place.slot_bytes = number_of(values, "slot_bytes");
        place.item_bytes = number_of(values, "item_bytes");
        place.tables = address("tables");
        place.tables_bytes = address("tables_bytes");
        place.counters = address("counters");
        place.faults = address("faults");
        place.progress = address("progress");
        place.stop = address("stop");
        place.stopped = address("stopped");
        place.records = address("records");
        place.executed = address("executed");
        m_cuda->place(place);
    }

    nb::tuple run(uint64_t stream, uint64_t max_ns, uint64_t grace_ns, uint32_t delay_seed) {
        PlanOutcome outcome;
        {
            nb::gil_scoped_release released;
            outcome = m_cuda->run(stream, {max_ns, grace_ns, delay_seed});
        }
        return tuple_of(outcome);
    }

    nb::tuple clear(uint64_t stream) { return tuple_of(m_cuda->clear(stream)); }

    nb::bytes table(const std::string& name) const {
        if (name == "tasks") return mega_bytes_of(m_program->tasks());
        if (name == "list_begin") return mega_bytes_of(m_program->list_begin());
        if (name == "lists") return mega_bytes_of(m_program->lists());
        if (name == "waits") return mega_bytes_of(m_program->waits());
        throw nb::key_error(name.c_str());
    }

    std::string failure_text(int code) const { return m_program->program().driver().check(code, m_failed_call); }

  private:
    nb::tuple tuple_of(const PlanOutcome& outcome) {
        m_failed_call = outcome.call;
        return nb::make_tuple(outcome.done, outcome.code, outcome.where);
    }

    nb::object m_plan;  // owns the program
    std::unique_ptr<MegaProgram> m_program;
    std::unique_ptr<MegaCuda> m_cuda;
    const char* m_failed_call = "";
};

}  // namespace

void bind_mega_cuda(nb::module_& module) {
    nb::class_<MegaCudaCore>(module, "MegaCudaCore", "A plan as one persistent launch on CUDA.")
        .def(nb::init<nb::object, nb::handle, uint32_t>(), "plan"_a, "rows"_a, "workers"_a)
        .def("refresh", &MegaCudaCore::refresh,
             "Follow the plan's variables and addresses; None, or why it cannot be run.")
        .def("facts", &MegaCudaCore::facts, "Tasks, items, entries of lists, bytes of tables, launches.")
        .def("place", &MegaCudaCore::place, "values"_a, "Say where memory lies and how a worker is made.")
        .def("run", &MegaCudaCore::run, "stream"_a, "max_ns"_a, "grace_ns"_a, "delay_seed"_a = 0,
             "Enqueue a run: (done, code, where).")
        .def("clear", &MegaCudaCore::clear, "stream"_a, "Zero what a stopped or faulted run has left.")
        .def("table", &MegaCudaCore::table, "name"_a, "The bytes of tasks, list_begin, lists or waits.")
        .def("failure_text", &MegaCudaCore::failure_text, "code"_a, "The driver's words for the last failure.");
}

}  // namespace brickline
