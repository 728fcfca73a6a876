// A prepared plan as Python sees it: PlanCore, under the names it has in C++. Owns no rules: plan.py
// checks what it is given and writes the messages; here rows become structs, runs release the GIL, and a
// handler of a signal that raises ends them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "pending_signals.h"
#include "plan_graph.h"
#include "plan_program.h"
#include "plan_streams.h"
#include "plan_threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace brickline {
namespace {

std::string bytes_of(nb::handle object) {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(object.ptr(), &bytes, &length)) throw nb::python_error();
    return {bytes, size_t(length)};
}

// ("buffer", storage, byte offset), ("value", bits), ("expression", code, is narrow) or
// ("float", variable, is f32)
PlanSlot slot_of(nb::handle object) {
    const nb::sequence row = nb::cast<nb::sequence>(object);
    const std::string kind = nb::cast<std::string>(row[0]);
    PlanSlot slot;
    if (kind == "buffer") {
        slot.kind = PlanSlot::Kind::Buffer;
        slot.source = nb::cast<uint32_t>(row[1]);
        slot.bits = nb::cast<uint64_t>(row[2]);
    } else if (kind == "value") {
        slot.bits = PyLong_AsUnsignedLongLongMask(nb::object(row[1]).ptr());  // negative numbers, too
        if (PyErr_Occurred()) throw nb::python_error();
    } else if (kind == "expression") {
        slot.kind = PlanSlot::Kind::Expression;
        slot.code = bytes_of(nb::object(row[1]));
        slot.is_narrow = nb::cast<bool>(row[2]);
    } else if (kind == "float") {
        slot.kind = PlanSlot::Kind::Float;
        slot.source = nb::cast<uint32_t>(row[1]);
        slot.is_narrow = nb::cast<bool>(row[2]);
    } else {
        throw nb::value_error(("expected buffer, value, expression or float, got " + kind).c_str());
    }
    return slot;
}

// (function, fault, flags, slots, sizes, dependencies)
PlanRow row_of(nb::handle object) {
    const nb::sequence given = nb::cast<nb::sequence>(object);
    PlanRow row;
    row.function = nb::cast<uint64_t>(given[0]);
    row.fault = nb::cast<uint64_t>(given[1]);
    row.flags = nb::cast<uint32_t>(given[2]);
    for (nb::handle slot : nb::object(given[3])) row.slots.push_back(slot_of(slot));
    const nb::object sizes = given[4];
    if (nb::len(sizes) != 7) throw nb::value_error("expected seven sizes of a launch");
    for (size_t k = 0; k < 7; ++k) {
        const nb::object size = sizes[k];
        if (PyBytes_Check(size.ptr())) row.sizes[k].code = bytes_of(size);
        else row.sizes[k].value = nb::cast<int64_t>(size);
    }
    for (nb::handle each : nb::object(given[5])) row.dependencies.push_back(nb::cast<uint32_t>(each));
    return row;
}

std::vector<PlanVariable> variables_of(nb::handle given) {
    std::vector<PlanVariable> variables;
    for (nb::handle each : given) {
        const nb::sequence row = nb::cast<nb::sequence>(each);
        PlanVariable variable;
        variable.is_float = nb::cast<bool>(row[2]);
        if (!variable.is_float) {
            variable.low = nb::cast<int64_t>(row[0]);
            variable.high = nb::cast<int64_t>(row[1]);
        }
        variables.push_back(variable);
    }
    return variables;
}

nb::object refusal_tuple(const PlanRefusal& refused, nb::handle given = nb::handle()) {
    const char* const where[] = {"", "variable", "size", "argument"};
    const char* const why[] = {"range", "overflow", "division", "lanes"};
    const nb::object value = given.is_valid()    ? nb::borrow(given)
                             : refused.is_float ? nb::object(nb::float_(refused.value.real))
                                                : nb::object(nb::int_(refused.value.integer));
    return nb::make_tuple(refused.launch, where[size_t(refused.where)], refused.place,
                          why[size_t(refused.why)], value);
}

class PlanCore {
  public:
    PlanCore(int kind, int number, uint64_t context, nb::handle variables, uint32_t storages,
             nb::handle launches, const std::vector<uint64_t>& limits)
        : m_number(number) {
        if (kind < 0 || kind > 2) throw nb::value_error("expected a kind of device from 0 to 2");
        if (limits.size() != 8) throw nb::value_error("expected eight limits");
        std::vector<PlanRow> rows;
        for (nb::handle each : launches) rows.push_back(row_of(each));
        uint64_t bounds[8];
        std::copy(limits.begin(), limits.end(), bounds);
        m_program = std::make_unique<PlanProgram>(PlanDevice(kind), context, variables_of(variables),
                                                  storages, rows, bounds);
        m_values.resize(m_program->variables().size());
        if (kind == int(PlanDevice::Cpu)) m_threads = std::make_unique<PlanThreads>(*m_program);
        if (kind == int(PlanDevice::Cuda)) m_cuda = std::make_unique<CudaWays>(*m_program);
    }

    void bind(uint32_t storage, uint64_t address) {
        if (storage >= m_program->storages()) throw nb::index_error("there is no such storage");
        m_program->bind(storage, address);
    }

    nb::object set(nb::handle values) {
        const nb::object items = nb::steal(PySequence_Fast(values.ptr(), "expected a list of values"));
        if (!items.is_valid()) throw nb::python_error();
        const size_t count = size_t(PySequence_Fast_GET_SIZE(items.ptr()));
        if (count != m_values.size()) {
            throw nb::value_error(("expected " + std::to_string(m_values.size()) + " values, got " +
                                   std::to_string(count)).c_str());
        }
        for (uint32_t v = 0; v < count; ++v) {
            PyObject* const item = PySequence_Fast_GET_ITEM(items.ptr(), Py_ssize_t(v));
            int overflow = 0;
            if (m_program->variables()[v].is_float) m_values[v].real = PyFloat_AsDouble(item);
            else m_values[v].integer = PyLong_AsLongLongAndOverflow(item, &overflow);
            if (PyErr_Occurred()) throw nb::python_error();
            if (!overflow) continue;
            PlanRefusal refused;
            refused.where = PlanRefusal::Where::Variable;
            refused.place = v;
            return refusal_tuple(refused, item);
        }
        const PlanRefusal refused = m_program->set(m_values.data());
        return refused ? refusal_tuple(refused) : nb::none();
    }

    nb::tuple run_serial(uint64_t stream, int64_t first, int64_t last) {
        check_ready();
        const int64_t end = last < 0 ? int64_t(m_program->size()) : last;
        if (first < 0 || first > end || end > int64_t(m_program->size())) {
            throw nb::index_error("expected launches of this plan, the first before the last");
        }
        return run([&] { return m_program->run_serial(stream, uint32_t(first), uint32_t(end), &m_signals); });
    }

    nb::tuple run_parallel(uint32_t threads) {
        if (!m_threads) throw std::runtime_error("only a plan on CPU runs on threads of the host");
        check_ready();
        return run([&] { return m_threads->run(threads, PlanWay::Sensible, &m_signals); });
    }

    // Launches that the last parallel run finished.
    nb::list finished() const {
        nb::list out;
        for (uint32_t i = 0; m_threads && i < m_program->size(); ++i) {
            if (m_threads->is_finished(i)) out.append(i);
        }
        return out;
    }

    // How many launches the run had finished that a handler's exception ended; told once.
    nb::object take_stopped() {
        const int64_t stopped = std::exchange(m_stopped, -1);
        return stopped < 0 ? nb::none() : nb::object(nb::int_(stopped));
    }

    bool can_overlap() const { return m_threads && m_threads->can_overlap(); }

    void set_streams(std::vector<uint64_t> handles) {
        const std::string problem = cuda().streams.set_streams(std::move(handles));
        if (!problem.empty()) throw std::runtime_error(problem);
    }
    nb::tuple run_streams(uint64_t stream) {
        check_ready();
        if (!cuda().streams.is_ready()) throw std::runtime_error("the plan lacks streams; call set_streams first");
        return run([&] { return m_cuda->streams.run(stream); });
    }

    nb::object build_graph(bool parallel) {
        check_ready();
        return problem_of([&] { return cuda().built.build(parallel); });
    }
    nb::tuple run_graph(uint64_t stream) { return run_graph(cuda().built, stream, "build_graph"); }

    nb::object begin_capture(uint64_t stream) {
        check_ready();
        return problem_of([&] { return cuda().captured.begin_capture(stream); });
    }
    nb::object capture_launch(uint32_t launch) {
        if (launch >= m_program->size()) throw nb::index_error("there is no such launch");
        return problem_of([&] { return cuda().captured.capture_launch(launch); });
    }
    nb::object end_capture() {
        return problem_of([&] { return cuda().captured.end_capture(); });
    }
    void abandon_capture() { cuda().captured.abandon_capture(); }
    nb::tuple run_captured(uint64_t stream) { return run_graph(cuda().captured, stream, "end_capture"); }

    nb::dict graph_facts() const {
        nb::dict out;
        const PlanGraphFacts built = cuda().built.facts(), captured = cuda().captured.facts();
        out["nodes"] = built.nodes;
        out["edges"] = built.edges;
        out["early"] = built.early;
        out["captured_nodes"] = captured.nodes;
        out["captured_edges"] = captured.edges;
        out["patched"] = built.patched + captured.patched;
        out["instantiations"] = built.instantiations + captured.instantiations;
        return out;
    }

    nb::list lanes() const {
        nb::list out;
        if (!cuda().streams.is_ready()) return out;
        for (uint32_t i = 0; i < m_program->size(); ++i) out.append(m_cuda->streams.lane(i));
        return out;
    }

    std::string driver_text(int code) const {
        return cuda_driver().check(code, m_failed_call);
    }

    void set_timed(bool timed) { m_program->set_timed(timed); }

    nb::list times(uint32_t first, int64_t last) const {
        nb::list out;
        const std::vector<PlanTime>& all = m_program->times();
        const uint64_t end = last < 0 ? all.size() : std::min(uint64_t(last), uint64_t(all.size()));
        for (uint64_t i = first; i < end; ++i) {
            out.append(nb::make_tuple(all[i].worker, all[i].start_ns, all[i].end_ns));
        }
        return out;
    }

    const char* failed_call() const { return m_failed_call; }
    uint32_t size() const { return m_program->size(); }
    int number() const { return m_number; }
    uintptr_t program() const { return reinterpret_cast<uintptr_t>(m_program.get()); }

  private:
    struct CudaWays {
        explicit CudaWays(const PlanProgram& program) : streams(program), built(program), captured(program) {}
        PlanStreams streams;
        PlanGraph built, captured;
    };

    CudaWays& cuda() const {
        if (!m_cuda) throw std::runtime_error("only a plan on CUDA has streams and graphs");
        return *m_cuda;
    }

    template <class Call>
    nb::object problem_of(Call call) {
        std::string problem;
        {
            nb::gil_scoped_release released;
            problem = call();
        }
        return problem.empty() ? nb::none() : nb::object(nb::str(problem.c_str()));
    }

    nb::tuple run_graph(PlanGraph& graph, uint64_t stream, const char* first) {
        check_ready();
        if (!graph.is_ready()) {
            throw std::runtime_error(std::string("the plan lacks a graph; call ") + first + " first");
        }
        return run([&] { return graph.run(stream); });
    }

    void check_ready() const {
        const std::string missing = m_program->missing();
        if (!missing.empty()) throw std::runtime_error("the plan lacks " + missing);
    }

    template <class Run>
    nb::tuple run(Run call) {
        PlanOutcome outcome;
        {
            nb::gil_scoped_release released;
            outcome = call();
        }
        m_failed_call = outcome.call;
        if (outcome.is_stopped) {
            m_stopped = outcome.done;
            throw nb::python_error();
        }
        return nb::make_tuple(outcome.done, outcome.code, outcome.where);
    }

    int m_number;
    const char* m_failed_call = "";
    int64_t m_stopped = -1;  // launches that were finished then; -1: it was not, or has been told
    PendingSignals m_signals;
    std::vector<PlanValue> m_values;
    std::unique_ptr<PlanProgram> m_program;
    std::unique_ptr<PlanThreads> m_threads;  // of a plan on CPU
    std::unique_ptr<CudaWays> m_cuda;        // of a plan on CUDA
};

}  // namespace

void bind_plan(nb::module_& module) {
    nb::class_<PlanCore>(module, "PlanCore", "The launches of a prepared plan.")
        .def("__init__", [](PlanCore* self, int kind, int number, uint64_t context, nb::handle variables,
                            uint32_t storages, nb::handle launches, const std::vector<uint64_t>& limits) {
            new (self) PlanCore(kind, number, context, variables, storages, launches, limits);
        }, "kind"_a, "number"_a, "context"_a, "variables"_a, "storages"_a, "launches"_a, "limits"_a)
        .def("__len__", &PlanCore::size)
        .def("bind", &PlanCore::bind, "storage"_a, "address"_a, "Give a storage its address.")
        .def("set", &PlanCore::set, "values"_a, "Set all variables; None, or why they are refused.")
        .def("run_serial", &PlanCore::run_serial, "stream"_a = 0, "first"_a = 0, "last"_a = -1,
             "Run launches one after the other: (done, code, where).")
        .def("run_parallel", &PlanCore::run_parallel, "threads"_a,
             "Run launches on threads of the host: (done, code, where).")
        .def("finished", &PlanCore::finished, "Launches that the last parallel run finished.")
        .def("take_stopped", &PlanCore::take_stopped,
             "Launches that a run had finished when a signal's handler raised; None where none did.")
        .def_prop_ro("can_overlap", &PlanCore::can_overlap, "Whether threads of the host can share it.")
        .def("set_streams", &PlanCore::set_streams, "handles"_a,
             "Streams to use beside the one that a run is given.")
        .def("run_streams", &PlanCore::run_streams, "stream"_a = 0,
             "Enqueue launches on several streams: (done, code, where).")
        .def("lanes", &PlanCore::lanes, "The stream of each launch; 0 is the one that a run is given.")
        .def("build_graph", &PlanCore::build_graph, "parallel"_a,
             "Make a CUDA graph of the launches; None, or what the driver said.")
        .def("run_graph", nb::overload_cast<uint64_t>(&PlanCore::run_graph), "stream"_a = 0,
             "Patch what has changed and launch the graph: (done, code, where).")
        .def("begin_capture", &PlanCore::begin_capture, "stream"_a,
             "Capture a stream; None, or what the driver said.")
        .def("capture_launch", &PlanCore::capture_launch, "launch"_a,
             "Enqueue one launch into the captured stream; None, or what the driver said.")
        .def("end_capture", &PlanCore::end_capture,
             "Make a graph of what was captured; None, or what the driver said.")
        .def("abandon_capture", &PlanCore::abandon_capture, "End a capture without a graph.")
        .def("run_captured", &PlanCore::run_captured, "stream"_a = 0,
             "Patch what has changed and launch the captured graph: (done, code, where).")
        .def("graph_facts", &PlanCore::graph_facts, "Nodes, edges, patched kernels, instantiations.")
        .def("driver_text", &PlanCore::driver_text, "code"_a, "The driver's words for the last failure.")
        .def("set_timed", &PlanCore::set_timed, "timed"_a, "Whether runs on CPU take the time.")
        .def("times", &PlanCore::times, "first"_a = 0, "last"_a = -1,
             "(worker, start_ns, end_ns) of each launch of the last run, of some of them where asked.")
        .def_prop_ro("failed_call", &PlanCore::failed_call, "The driver's call that failed last.")
        .def_prop_ro("number", &PlanCore::number, "Number of the device.")
        .def_prop_ro("program", &PlanCore::program,
                     "Address of its PlanProgram, for other classes of the core; it lives as long as this.");
    module.attr("PLAN_NO_MEMORY") = PLAN_NO_MEMORY;
}

}  // namespace brickline
