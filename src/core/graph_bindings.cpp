// GraphStore and its analyses as Python sees them, under the names they have in C++. Owns no rules:
// brickline/graph_arguments.py checks arguments and turns ValueError into GraphError.
//
// Rows cross as bytes with the layout of graph_rows.h; graph_layout() tells Python the offsets, so
// that a test can hold its dtypes against them. Analyses release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>
#include <limits>

#include "graph.h"
#include "graph_analysis.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace brickline {

namespace {

using OptionalNs = std::optional<uint64_t>;

template <class Row>
nb::bytes bytes_of(const std::vector<Row>& rows) {
    return nb::bytes(rows.data(), rows.size() * sizeof(Row));
}

template <class Row>
std::vector<Row> rows_of(const nb::bytes& bytes, const char* table) {
    if (bytes.size() % sizeof(Row) != 0)
        throw GraphFault("graph table '" + std::string(table) + "': expected a multiple of " +
                         std::to_string(sizeof(Row)) + " bytes, got " +
                         std::to_string(bytes.size()) + "; the table is cut off");
    std::vector<Row> rows(bytes.size() / sizeof(Row));
    if (!rows.empty())
        std::memcpy(static_cast<void*>(rows.data()), bytes.c_str(), bytes.size());
    return rows;
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> array_of(std::vector<T>&& values) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

EdgeKind edge_kind(uint8_t code) {
    if (code >= EDGE_KINDS) throw GraphFault("expected an edge kind below 6");
    return static_cast<EdgeKind>(code);
}

TransferDirection direction(uint8_t code) {
    if (code >= TRANSFER_DIRECTIONS) throw GraphFault("expected a transfer direction below 3");
    return static_cast<TransferDirection>(code);
}

uint32_t add_brick(GraphStore& store, std::string_view name, int16_t brick, int32_t layer,
                   OptionalNs timing_ns, uint64_t elements, uint64_t start_ns) {
    GraphNodeRow row =
        brick_row(NO_STRING, brick, layer, timing_ns.value_or(0), elements, start_ns);
    if (!timing_ns) row.flags = 0;
    return store.add_named_brick(name, row);
}

uint32_t add_kernel(GraphStore& store, std::string_view name, uint64_t source_hash,
                    const std::vector<uint32_t>& grid, const std::vector<uint32_t>& block,
                    uint32_t shared_bytes, OptionalNs timing_ns, double arithmetic_intensity,
                    double achieved_tflops, uint64_t start_ns) {
    if (grid.size() != 3 || block.size() != 3)
        throw GraphFault("expected three grid and three block sizes");
    KernelDetail kernel{};
    kernel.source_hash = source_hash;
    kernel.arithmetic_intensity = arithmetic_intensity;
    kernel.achieved_tflops = achieved_tflops;
    std::copy(grid.begin(), grid.end(), kernel.grid);
    std::copy(block.begin(), block.end(), kernel.block);
    kernel.shared_bytes = shared_bytes;
    return store.add_kernel(name, kernel, timing_ns, start_ns);
}

// (node row, detail row or None, name, source or file, target)
nb::tuple node_tuple(const GraphStore& store, uint32_t id) {
    const GraphNodeView view = store.node(id);
    nb::object detail = nb::none();
    if (view.detail) detail = nb::bytes(&*view.detail, sizeof(GraphDetailRow));
    return nb::make_tuple(nb::bytes(&view.row, sizeof(view.row)), detail, view.name, view.source,
                          view.target);
}

// (source, target, kind, weight, bytes or None, direction or None)
nb::tuple edge_tuple(const GraphStore& store, uint32_t index) {
    const GraphEdgeRow edge = store.edge(index);
    const auto detail = store.edge_detail(index);
    const nb::object bytes = detail ? nb::object(nb::int_(detail->transfer.bytes)) : nb::none();
    const nb::object way =
        detail ? nb::object(nb::int_(static_cast<uint8_t>(detail->direction))) : nb::none();
    return nb::make_tuple(edge.source, edge.target, static_cast<uint8_t>(edge.kind), edge.weight,
                          bytes, way);
}

nb::dict counts_dict(const GraphStore& store) {
    const GraphCounts counts = store.counts();
    nb::dict out;
    out["nodes"] = counts.nodes;
    out["edges"] = counts.edges;
    out["details"] = counts.details;
    out["strings"] = counts.strings;
    out["dropped_nodes"] = counts.dropped_nodes;
    out["dropped_edges"] = counts.dropped_edges;
    return out;
}

nb::tuple tables(const GraphStore& store) {
    GraphRows rows;
    {
        nb::gil_scoped_release release;
        rows = store.rows();
    }
    return nb::make_tuple(rows.strings, bytes_of(rows.nodes), bytes_of(rows.edges),
                          bytes_of(rows.details));
}

uint64_t load(GraphStore& store, std::vector<std::string> strings, const nb::bytes& nodes,
              const nb::bytes& edges, const nb::bytes& details, bool drop_torn_tail) {
    GraphRows rows{std::move(strings), rows_of<GraphNodeRow>(nodes, "nodes"),
                   rows_of<GraphEdgeRow>(edges, "edges"),
                   rows_of<GraphDetailRow>(details, "details")};
    nb::gil_scoped_release release;
    const size_t dropped = drop_torn_tail ? rows.drop_torn_tail() : 0;
    store.load(rows);
    return dropped;
}

nb::tuple critical_path_tuple(const GraphStore& store) {
    CriticalPath path;
    {
        nb::gil_scoped_release release;
        path = critical_path(store);
    }
    std::vector<uint32_t> nodes;
    std::vector<uint64_t> starts, contributions;
    for (const PathStep& step : path.steps) {
        nodes.push_back(step.node);
        starts.push_back(step.start_ns);
        contributions.push_back(step.contribution_ns);
    }
    return nb::make_tuple(path.total_ns, array_of(std::move(nodes)), array_of(std::move(starts)),
                          array_of(std::move(contributions)));
}

auto slack_array(const GraphStore& store) {
    std::vector<uint64_t> slack;
    {
        nb::gil_scoped_release release;
        slack = slack_ns(store);
    }
    return array_of(std::move(slack));
}

// (node, attainable, achieved, distance, is memory bound) for each kernel.
nb::list roofline_list(const GraphStore& store, double peak_tflops, double peak_gbps) {
    nb::list out;
    for (const RooflineDistance& d : roofline_distance(store, peak_tflops, peak_gbps))
        out.append(nb::make_tuple(d.node, d.attainable_tflops, d.achieved_tflops, d.distance,
                                  d.is_memory_bound));
    return out;
}

nb::list ping_pong_list(const GraphStore& store) {
    nb::list out;
    for (const PingPong& pair : ping_pong(store))
        out.append(nb::make_tuple(pair.first, pair.second, pair.bytes));
    return out;
}

nb::list kernel_ids(const GraphStore& store) {
    nb::list out;
    for (const auto& [id, row] : store.nodes_of_kind(NodeKind::Kernel)) out.append(id);
    return out;
}

auto containers_array(const GraphStore& store) {
    return array_of(std::move(store.dependency_view().container));
}

nb::dict layout() {
    nb::dict out, node, edge, detail;
#define BRICKLINE_FIELD(dict, type, field, name) dict[name] = offsetof(type, field)
    BRICKLINE_FIELD(node, GraphNodeRow, timing_ns, "timing_ns");
    BRICKLINE_FIELD(node, GraphNodeRow, elements, "elements");
    BRICKLINE_FIELD(node, GraphNodeRow, start_ns, "start_ns");
    BRICKLINE_FIELD(node, GraphNodeRow, name, "name");
    BRICKLINE_FIELD(node, GraphNodeRow, detail, "detail");
    BRICKLINE_FIELD(node, GraphNodeRow, layer, "layer");
    BRICKLINE_FIELD(node, GraphNodeRow, brick, "brick");
    BRICKLINE_FIELD(node, GraphNodeRow, kind, "kind");
    BRICKLINE_FIELD(node, GraphNodeRow, flags, "flags");
    BRICKLINE_FIELD(edge, GraphEdgeRow, source, "source");
    BRICKLINE_FIELD(edge, GraphEdgeRow, target, "target");
    BRICKLINE_FIELD(edge, GraphEdgeRow, weight, "weight");
    BRICKLINE_FIELD(edge, GraphEdgeRow, kind, "kind");
    BRICKLINE_FIELD(detail, GraphDetailRow, owner, "owner");
    BRICKLINE_FIELD(detail, GraphDetailRow, kind, "kind");
    BRICKLINE_FIELD(detail, GraphDetailRow, direction, "direction");
    BRICKLINE_FIELD(detail, GraphDetailRow, kernel.source_hash, "source_hash");
    BRICKLINE_FIELD(detail, GraphDetailRow, kernel.arithmetic_intensity, "arithmetic_intensity");
    BRICKLINE_FIELD(detail, GraphDetailRow, kernel.achieved_tflops, "achieved_tflops");
    BRICKLINE_FIELD(detail, GraphDetailRow, kernel.grid, "grid");
    BRICKLINE_FIELD(detail, GraphDetailRow, kernel.block, "block");
    BRICKLINE_FIELD(detail, GraphDetailRow, kernel.shared_bytes, "shared_bytes");
    BRICKLINE_FIELD(detail, GraphDetailRow, transfer.bytes, "bytes");
    BRICKLINE_FIELD(detail, GraphDetailRow, transfer.source, "transfer_source");
    BRICKLINE_FIELD(detail, GraphDetailRow, transfer.target, "transfer_target");
    BRICKLINE_FIELD(detail, GraphDetailRow, function.file, "file");
    BRICKLINE_FIELD(detail, GraphDetailRow, function.line, "line");
    BRICKLINE_FIELD(detail, GraphDetailRow, task.poll_count, "poll_count");
    BRICKLINE_FIELD(detail, GraphDetailRow, task.yield_count, "yield_count");
#undef BRICKLINE_FIELD
    out["node"] = nb::make_tuple(sizeof(GraphNodeRow), node);
    out["edge"] = nb::make_tuple(sizeof(GraphEdgeRow), edge);
    out["detail"] = nb::make_tuple(sizeof(GraphDetailRow), detail);
    return out;
}

}  // namespace

void bind_graph(nb::module_& m) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    nb::class_<GraphStore>(m, "GraphStore", "The rows of one execution graph.")
        .def(nb::init<uint32_t>(), "node_budget"_a = GraphStore::DEFAULT_NODE_BUDGET)
        .def("add_brick", &add_brick, "name"_a, "brick"_a = -1, "layer"_a = -1,
             "timing_ns"_a = nb::none(), "elements"_a = 0, "start_ns"_a = 0)
        .def("add_kernel", &add_kernel, "name"_a, "source_hash"_a, "grid"_a, "block"_a,
             "shared_bytes"_a = 0, "timing_ns"_a = nb::none(), "arithmetic_intensity"_a = nan,
             "achieved_tflops"_a = nan, "start_ns"_a = 0)
        .def("add_transfer",
             [](GraphStore& store, std::string_view source, std::string_view target, uint64_t bytes,
                uint8_t way, OptionalNs timing_ns, uint64_t start_ns) {
                 return store.add_transfer(source, target, bytes, direction(way), timing_ns,
                                           start_ns);
             },
             "source"_a, "target"_a, "bytes"_a, "direction"_a, "timing_ns"_a = nb::none(),
             "start_ns"_a = 0)
        .def("add_function", &GraphStore::add_function, "name"_a, "file"_a = nb::none(),
             "line"_a = 0, "timing_ns"_a = nb::none(), "start_ns"_a = 0)
        .def("add_layer", &GraphStore::add_layer, "index"_a, "timing_ns"_a = nb::none(),
             "start_ns"_a = 0)
        .def("add_async_task",
             [](GraphStore& store, std::string_view name, uint64_t polls, uint64_t yields,
                uint64_t total_poll_ns, uint64_t start_ns) {
                 return store.add_async_task(name, {polls, yields}, total_poll_ns, start_ns);
             },
             "name"_a, "poll_count"_a, "yield_count"_a, "total_poll_ns"_a, "start_ns"_a = 0)
        .def("add_edge",
             [](GraphStore& store, uint32_t source, uint32_t target, uint8_t kind, float weight) {
                 return store.add_edge(source, target, edge_kind(kind), weight);
             },
             "source"_a, "target"_a, "kind"_a, "weight"_a = 1.0f)
        .def("add_transfer_edge",
             [](GraphStore& store, uint32_t source, uint32_t target, uint64_t bytes, uint8_t way,
                float weight) {
                 return store.add_transfer_edge(source, target, bytes, direction(way), weight);
             },
             "source"_a, "target"_a, "bytes"_a, "direction"_a, "weight"_a = 1.0f)
        .def("tables", &tables)
        .def("load", &load, "strings"_a, "nodes"_a, "edges"_a, "details"_a,
             "drop_torn_tail"_a = false)
        .def("note_dropped", &GraphStore::note_dropped, "nodes"_a, "edges"_a)
        .def("containers", &containers_array)
        .def("clear", &GraphStore::clear)
        .def("is_open", &GraphStore::is_open)
        .def("counts", &counts_dict)
        .def("bytes", &GraphStore::bytes)
        .def_prop_ro("node_budget", &GraphStore::node_budget)
        .def("node", &node_tuple, "id"_a)
        .def("edge", &edge_tuple, "index"_a)
        .def("is_contained", &GraphStore::is_contained, "id"_a)
        .def("nodes_by_name", &GraphStore::nodes_by_name, "name"_a)
        .def("last_node_by_name", &GraphStore::last_node_by_name, "name"_a)
        .def("kernel_ids", &kernel_ids)
        .def("outgoing", &GraphStore::outgoing, "id"_a)
        .def("incoming", &GraphStore::incoming, "id"_a)
        .def("critical_path", &critical_path_tuple)
        .def("slack", &slack_array)
        .def("slowest_kernel", &slowest_kernel)
        .def("roofline_distance", &roofline_list, "peak_tflops"_a, "peak_gbps"_a)
        .def("ping_pong", &ping_pong_list);
    m.def("graph_layout", &layout);
    m.attr("NO_NODE") = NO_NODE;
    m.def("fnv1a_64", [](const nb::bytes& bytes) {
        return fnv1a_64({bytes.c_str(), bytes.size()});
    }, "bytes"_a);
}

}  // namespace brickline
