// The cold half of brickline._core, through nanobind: reading spools, the clock, the driver's facts,
// struct layouts for the tests, and the joint between a profiler and its graph.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cuda_events.h"
#include "histogram.h"
#include "host_library.h"
#include "buffers.h"
#include "call_book.h"
#include "hot.h"
#include "snapshot.h"

namespace nb = nanobind;

namespace brickline {

void bind_graph(nb::module_& module);
void bind_mega_cpu(nb::module_& module);
void bind_mega_cuda(nb::module_& module);
void bind_mega_queue(nb::module_& module);
void bind_mega_planning(nb::module_& module);
void bind_plan(nb::module_& module);

namespace {

template <class T>
nb::bytes as_bytes(const std::vector<T>& rows) {
    return nb::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(T));
}

nb::dict header_dict(const SpoolHeader& header) {
    nb::dict out;
    out["version"] = header.version;
    out["process"] = header.process;
    out["rank"] = header.rank;
    out["created_unix_ns"] = header.created_unix_ns;
    out["clock_kind"] = header.clock_kind;
    out["closed"] = header.closed;
    out["file_bytes"] = header.file_bytes;
    out["anchor_tick"] = header.anchor_tick;
    out["anchor_ns"] = header.anchor_ns;
    out["anchor_unix_ns"] = header.anchor_unix_ns;
    out["ns_per_tick"] = header.ns_per_tick;
    out["lost_records"] = header.lost_records;
    out["orphan_exits"] = header.orphan_exits;
    out["abandoned_timers"] = header.abandoned_timers;
    out["overhead_ns"] = header.overhead_ns;
    out["counting_ns"] = header.counting_ns;
    out["observing_ns"] = header.observing_ns;
    out["waiting_ns"] = header.waiting_ns;
    out["pending_device_spans"] = header.pending_device_spans;
    return out;
}

// Bytes that are not UTF-8 can only come from a damaged file; they are shown, not refused.
nb::object lenient_text(const char* text, size_t length) {
    return nb::steal(PyUnicode_DecodeUTF8(text, Py_ssize_t(length), "replace"));
}

nb::dict lane_dict(const LaneHeader& lane) {
    nb::dict out;
    out["lane"] = lane.lane;
    out["thread"] = lane.thread;
    out["threads"] = lane.threads;
    out["clock_domain"] = lane.clock_domain;
    out["device"] = lane.device;
    out["stream"] = lane.stream;
    out["name"] = lenient_text(lane.name, strnlen(lane.name, sizeof lane.name));
    out["closed"] = lane.closed;
    out["fold_ns"] = lane.fold_ns;
    out["folded"] = lane.folded;
    out["lost"] = lane.lost;
    return out;
}

nb::dict snapshot_dict(const std::string& path, bool statistics_only) {
    Snapshot snapshot;
    {
        nb::gil_scoped_release released;
        snapshot = read_spool(path, statistics_only ? ReadWhat::Statistics : ReadWhat::Everything);
    }
    nb::dict out;
    out["header"] = header_dict(snapshot.header);
    nb::list lanes;
    for (const LaneHeader& lane : snapshot.lanes) lanes.append(lane_dict(lane));
    out["lanes"] = lanes;
    out["nodes"] = as_bytes(snapshot.nodes);
    out["node_lanes"] = as_bytes(snapshot.node_lanes);
    out["bins"] = as_bytes(snapshot.bins);
    out["cells"] = as_bytes(snapshot.cells);
    out["cell_lanes"] = as_bytes(snapshot.cell_lanes);
    out["recent"] = as_bytes(snapshot.recent);
    out["recent_lanes"] = as_bytes(snapshot.recent_lanes);
    nb::list strings;
    for (const std::string& text : snapshot.strings) strings.append(lenient_text(text.data(), text.size()));
    out["strings"] = strings;
    nb::dict tables;
    for (const auto& [kind, rows] : snapshot.tables) {
        tables[nb::int_(kind)] = nb::bytes(rows.data(), rows.size());
    }
    out["tables"] = tables;
    nb::dict spans;
    for (const auto& [kind, found] : snapshot.spans) {
        nb::list places;
        for (const Span& span : found) places.append(nb::make_tuple(span.offset, span.bytes));
        spans[nb::int_(kind)] = places;
    }
    out["spans"] = spans;
    nb::list problems;
    for (const std::string& problem : snapshot.problems) problems.append(nb::str(problem.c_str()));
    out["problems"] = problems;
    return out;
}

PyObject* g_spool_error = nullptr;

const char* fault_code(SpoolFault fault) {
    switch (fault) {
        case SpoolFault::NotASpool: return "not_spool";
        case SpoolFault::Version: return "version";
        case SpoolFault::Damaged: return "damaged";
        default: return "io";
    }
}

hot::ProfilerObject* profiler_of(nb::handle object) {
    if (!PyObject_TypeCheck(object.ptr(), &hot::ProfilerType)) {
        throw nb::type_error("expected a profiler");
    }
    return reinterpret_cast<hot::ProfilerObject*>(object.ptr());
}

// Sizes that the Python side must agree with; tests/contracts/test_abi.py asks for them.
nb::dict layout() {
    nb::dict out;
    out["SpoolHeader"] = sizeof(SpoolHeader);
    out["BrickRecord"] = sizeof(BrickRecord);
    out["WorkRecord"] = sizeof(WorkRecord);
    out["Node"] = sizeof(Node);
    out["TileCell"] = sizeof(TileCell);
    out["SlotRow"] = sizeof(SlotRow);
    out["TraceRow"] = sizeof(TraceRow);
    out["OperandRow"] = sizeof(OperandRow);
    out["TraceTimeRow"] = sizeof(TraceTimeRow);
    out["FactRow"] = sizeof(FactRow);
    out["FingerprintRow"] = sizeof(FingerprintRow);
    out["BinRow"] = sizeof(BinRow);
    nb::dict offsets;
#define OFFSET(type, field) offsets[#type "." #field] = offsetof(type, field)
    OFFSET(BrickRecord, slot);
    OFFSET(BrickRecord, depth);
    OFFSET(BrickRecord, step);
    OFFSET(Node, count);
    OFFSET(Node, sum_squares);
    OFFSET(Node, exclusive_ns);
    OFFSET(Node, flops);
    OFFSET(Node, cycles_count);
    OFFSET(Node, host_ns);
    OFFSET(Node, zero_count);
    OFFSET(Node, chunk);
    OFFSET(Node, batch);
    OFFSET(TileCell, count);
    OFFSET(TileCell, flops);
    OFFSET(SlotRow, layer);
    OFFSET(SlotRow, owner);
    OFFSET(TraceRow, enqueue_ns);
    OFFSET(TraceRow, name);
    OFFSET(TraceRow, backend);
    OFFSET(TraceRow, phase);
    OFFSET(OperandRow, role);
    OFFSET(OperandRow, shape);
    OFFSET(OperandRow, strides);
    OFFSET(TraceTimeRow, time_us);
    OFFSET(FactRow, value);
    OFFSET(FingerprintRow, sketch);
    OFFSET(FingerprintRow, columns);
    OFFSET(FingerprintRow, elements);
    OFFSET(FingerprintRow, dtype);
    OFFSET(FingerprintRow, shape);
#undef OFFSET
    out["offsets"] = offsets;
    return out;
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "brickline's native core.";
    // Profilers live until the interpreter ends, and so do their graphs.
    nb::set_leak_warnings(false);
    PyObject* self = module.ptr();
    if (hot::intern_argument_names() || hot::ready_handle_type(self) || hot::ready_timer_type(self) ||
        hot::ready_step_type(self) || hot::ready_profiler_type(self) ||
        hot::ready_buffer_type(self) || hot::ready_launcher_type(self) || hot::ready_fingerprints(self) ||
        hot::ready_ring_type(self) || hot::ready_tensor_book_type(self) ||
        hot::ready_call_book_type(self) || hot::ready_forwards(self)) {
        throw nb::python_error();
    }
    g_spool_error = PyErr_NewException("brickline._core.SpoolError", nullptr, nullptr);
    if (!g_spool_error || PyModule_AddObjectRef(module.ptr(), "SpoolError", g_spool_error)) {
        throw nb::python_error();
    }
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const SpoolError& error) {
            // (text, code), so that the reader of a whole run can say which partition it was.
            PyErr_SetObject(g_spool_error, nb::make_tuple(error.what(), fault_code(error.fault())).ptr());
        }
    });
    bind_graph(module);
    bind_mega_cpu(module);
    bind_mega_cuda(module);
    bind_mega_queue(module);
    bind_mega_planning(module);
    bind_plan(module);
    module.def("read_spool", &snapshot_dict, nb::arg("path"), nb::arg("statistics_only") = false,
               "A consistent picture of a spool, whether or not it is still written to.");
    module.def("monotonic_ns", &monotonic_ns, "CLOCK_MONOTONIC in nanoseconds.");
    module.def("bucket_index", [](uint64_t ns) {
        if (ns == 0) throw nb::value_error("0 ns has no bucket; it is counted apart");
        return bucket_index(ns);
    }, nb::arg("ns"), "Histogram bucket of a duration.");
    module.def("clock_name", [] {
        switch (host_clock_kind()) {
            case ClockKind::Tsc: return "tsc";
            case ClockKind::Cntvct: return "cntvct";
            default: return "clock_gettime";
        }
    }, "Which counter the host's clock is.");
    module.def("clock_cost_ns", [] {
        const TickSource source;
        uint64_t best = ~0ull, sink = 0;
        for (int round = 0; round < 20; ++round) {
            const uint64_t before = monotonic_ns();
            for (int i = 0; i < 1000; ++i) sink += source.now();
            best = std::min(best, monotonic_ns() - before);
        }
        return sink ? double(best) / 1000 : 0.0;
    }, "Nanoseconds that one reading of the host's clock takes.");
    module.def("cuda_driver", [] {
        const CudaDriverFacts facts = cuda_driver_facts();
        nb::dict out;
        out["present"] = facts.present;
        out["version"] = facts.version;
        out["devices"] = facts.devices;
        out["problem"] = facts.problem;
        return out;
    }, "What the CUDA driver says of itself.");
    nb::class_<HostLibrary>(module, "HostLibrary", "Compiled host code, loaded from memory.")
        .def("__init__", [](HostLibrary* self, nb::bytes code, const std::string& name) {
            new (self) HostLibrary({code.c_str(), code.size()}, name);
        }, nb::arg("code"), nb::arg("name"))
        .def("address", &HostLibrary::address, nb::arg("symbol"), "Where a function lies.");
    module.def("layout", &layout, "Sizes and offsets of the structs in abi.h.");
    module.def("connect_graph", [](nb::handle object, GraphStore* graph, bool draw) {
        Recorder* recorder = profiler_of(object)->state->recorder.get();
        if (recorder && recorder->is_open()) {
            recorder->connect_graph_table(graph);
            recorder->set_graph(draw ? graph : nullptr);
        }
        graph->set_open(draw);  // last: set_graph still draws what finished before
    }, nb::arg("profiler"), nb::arg("graph"), nb::arg("draw"),
       "Write a graph's rows to the profiler's spool and, with draw, add finished bricks to it; without,\n"
       "the graph takes nothing.");
}

}  // namespace brickline
