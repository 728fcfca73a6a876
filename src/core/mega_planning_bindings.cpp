// Planning, validation and lineage of a megakernel as Python sees them: columns in, columns out, under the
// names they have in C++. Owns no rules: planning.py and lineage.py write the messages.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "mega_lineage.h"
#include "mega_planning.h"
#include "mega_validation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace brickline {
namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span_of(const Column<T>& column) {
    return {column.data(), column.size()};
}

template <class T>
std::span<const T> span_of(const std::optional<Column<T>>& column) {
    return column ? span_of(*column) : std::span<const T>();
}

template <class T>
nb::object array_of(MegaVector<T>&& values) {
    auto* const owned = new MegaVector<T>(std::move(values));
    nb::capsule owner(owned, [](void* vector) noexcept { delete static_cast<MegaVector<T>*>(vector); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

// Rows of 32-bit words.
template <class Row>
nb::object rows_of(MegaVector<Row>&& rows) {
    constexpr size_t WIDTH = sizeof(Row) / sizeof(uint32_t);
    static_assert(sizeof(Row) == WIDTH * sizeof(uint32_t) && alignof(Row) == alignof(uint32_t));
    auto* const owned = new MegaVector<Row>(std::move(rows));
    nb::capsule owner(owned, [](void* vector) noexcept { delete static_cast<MegaVector<Row>*>(vector); });
    auto* const words = reinterpret_cast<uint32_t*>(owned->data());
    return nb::cast(nb::ndarray<nb::numpy, uint32_t, nb::ndim<2>>(words, {owned->size(), WIDTH}, owner));
}

// The columns of tasks; the arrays are kept alive by whoever holds it.
struct MegaColumns {
    Column<uint32_t> op, blocks, flags, param_begin;
    Column<uint64_t> params;
    Column<uint32_t> access_begin;
    Words accesses;  // begin, end, per_block, space | mode << 32

    MegaTaskTable table() const {
        static_assert(sizeof(MegaAccess) == 4 * sizeof(uint64_t));
        return {span_of(op), span_of(blocks), span_of(flags), span_of(param_begin), span_of(params),
                span_of(access_begin),
                {reinterpret_cast<const MegaAccess*>(accesses.data()), accesses.shape(0)}};
    }
};

nb::dict plan(const MegaColumns& columns, bool dedupes, bool joins, std::optional<Words> initial,
              std::optional<Column<uint64_t>> costs) {
    std::vector<MegaInitial> ranges;
    MegaPlanOptions options;
    options.dedupes = dedupes;
    options.joins = joins;
    options.costs = span_of(costs);
    if (initial) {
        for (size_t k = 0; k < initial->shape(0); ++k) {
            const uint64_t* const row = initial->data() + 4 * k;
            ranges.push_back({row[0], row[1], uint32_t(row[3])});
        }
        options.finds_unwritten = true;
        options.initial = ranges;
    }
    MegaPlanned planned;
    {
        nb::gil_scoped_release released;
        planned = mega_plan(columns.table(), options);
    }
    nb::dict out;
    out["alias"] = array_of(std::move(planned.alias));
    out["entry_begin"] = array_of(std::move(planned.entry_begin));
    out["entries"] = array_of(std::move(planned.entries));
    auto [set_begin, set_members] = planned.sets.take();
    out["set_begin"] = array_of(std::move(set_begin));
    out["set_members"] = array_of(std::move(set_members));
    out["region"] = array_of(std::move(planned.region));
    out["regions"] = planned.regions;
    out["order"] = array_of(std::move(planned.order));
    out["level"] = array_of(std::move(planned.level));
    out["refusals"] = rows_of(std::move(planned.refusals));
    out["critical_cost"] = planned.critical_cost;
    out["critical"] = array_of(std::move(planned.critical));
    return out;
}

nb::tuple validate(const MegaColumns& columns, std::optional<Column<int32_t>> alias, Column<uint32_t> entry_begin,
                   Column<uint32_t> entries, Column<uint64_t> set_begin, Column<uint32_t> set_members,
                   std::optional<Column<uint32_t>> order, std::optional<Column<uint32_t>> region,
                   std::optional<Column<uint8_t>> signals, uint32_t workers,
                   std::optional<Column<uint32_t>> first_worker, std::optional<Column<uint64_t>> list_begin,
                   std::optional<Column<uint32_t>> list_tasks, uint64_t slots) {
    MegaSchedule schedule;
    schedule.tasks = columns.table();
    schedule.alias = span_of(alias);
    schedule.entry_begin = span_of(entry_begin);
    schedule.entries = span_of(entries);
    schedule.set_begin = span_of(set_begin);
    schedule.set_members = span_of(set_members);
    schedule.order = span_of(order);
    schedule.region = span_of(region);
    schedule.signals = span_of(signals);
    schedule.workers = workers;
    schedule.first_worker = span_of(first_worker);
    schedule.list_begin = span_of(list_begin);
    schedule.list_tasks = span_of(list_tasks);
    schedule.slots = slots;
    MegaVerdict verdict;
    {
        nb::gil_scoped_release released;
        verdict = mega_validate(schedule);
    }
    return nb::make_tuple(uint32_t(verdict.breach), verdict.task, verdict.other);
}

uint32_t checked(const MegaLineage& lineage, uint32_t task) {
    if (task >= lineage.size()) throw nb::index_error("there is no such task");
    return task;
}

}  // namespace

void bind_mega_planning(nb::module_& module) {
    nb::class_<MegaColumns>(module, "MegaColumns", "Tasks in the order of submission, as columns.")
        .def("__init__", [](MegaColumns* self, Column<uint32_t> op, Column<uint32_t> blocks, Column<uint32_t> flags,
                            Column<uint32_t> param_begin, Column<uint64_t> params, Column<uint32_t> access_begin,
                            Words accesses) {
            new (self) MegaColumns{op, blocks, flags, param_begin, params, access_begin, accesses};
        }, "op"_a, "blocks"_a, "flags"_a, "param_begin"_a, "params"_a, "access_begin"_a, "accesses"_a)
        .def("check", [](const MegaColumns& self) { self.table().check(); }, "Raise where columns do not fit.");
    module.def("mega_plan", &plan, "columns"_a, "dedupes"_a, "joins"_a, "initial"_a.none(), "costs"_a.none(),
               "What each task waits for, which are computed already, and which run together.");
    module.def("mega_flat", [](Column<uint32_t> entry_begin, Column<uint32_t> entries, Column<uint64_t> set_begin,
                               Column<uint32_t> set_members) {
        MegaFlat flat = mega_flat(span_of(entry_begin), span_of(entries), span_of(set_begin), span_of(set_members));
        return nb::make_tuple(array_of(std::move(flat.begin)), array_of(std::move(flat.tasks)));
    }, "entry_begin"_a, "entries"_a, "set_begin"_a, "set_members"_a, "Waits as plain lists of tasks.");
    module.def("mega_assign", [](Column<uint32_t> order, Column<uint32_t> region, Column<uint32_t> blocks,
                                 std::optional<Column<uint64_t>> costs, uint32_t workers) {
        return array_of(mega_assign(span_of(order), span_of(region), span_of(blocks), span_of(costs), workers));
    }, "order"_a, "region"_a, "blocks"_a, "costs"_a.none(), "workers"_a, "The worker of each task's first part.");
    module.def("mega_lists", [](Column<uint32_t> order, Column<uint32_t> blocks, Column<uint32_t> first_worker,
                                uint32_t workers) {
        MegaLists lists = mega_lists(span_of(order), span_of(blocks), span_of(first_worker), workers);
        return nb::make_tuple(array_of(std::move(lists.begin)), array_of(std::move(lists.tasks)));
    }, "order"_a, "blocks"_a, "first_worker"_a, "workers"_a, "The list of each worker.");
    module.def("mega_validate", &validate, "columns"_a, "alias"_a.none(), "entry_begin"_a, "entries"_a, "set_begin"_a,
               "set_members"_a, "order"_a.none(), "region"_a.none(), "signals"_a.none(), "workers"_a,
               "first_worker"_a.none(), "list_begin"_a.none(), "list_tasks"_a.none(), "slots"_a,
               "Whether a schedule can be run: (0, 0, 0), or the code of a breach and its tasks.");
    nb::class_<MegaLineage>(module, "MegaLineage", "The tasks that contributed to what each task computed.")
        .def("__init__", [](MegaLineage* self, const MegaColumns& columns, std::optional<Column<int32_t>> alias) {
            nb::gil_scoped_release released;
            new (self) MegaLineage(columns.table(), span_of(alias));
        }, "columns"_a, "alias"_a.none())
        .def("__len__", &MegaLineage::size)
        .def("of", [](const MegaLineage& self, uint32_t task) { return rows_of(self.of(checked(self, task))); },
             "task"_a, "Runs of tasks, [first, last).")
        .def("direct", [](const MegaLineage& self, uint32_t task) { return array_of(self.direct(checked(self, task))); },
             "task"_a, "Those who wrote what it reads itself.")
        .def("direct_lists", [](const MegaLineage& self, uint32_t tasks) {
            if (tasks > self.size()) throw nb::index_error("there are not so many tasks");
            MegaDirectLists lists;
            {
                nb::gil_scoped_release released;
                lists = self.direct_lists(tasks);
            }
            return nb::make_tuple(array_of(std::move(lists.list_of)), array_of(std::move(lists.begin)),
                                  array_of(std::move(lists.sources)));
        }, "tasks"_a, "The same of the first tasks: the list of each, where lists begin, and their tasks.")
        .def("computed_by", [](const MegaLineage& self, uint32_t task) { return self.computed_by(checked(self, task)); },
             "task"_a)
        .def("reads_initial", [](const MegaLineage& self) { return array_of(MegaVector<uint8_t>(self.reads_initial())); },
             "Of each access, whether it reads bytes that no task wrote before.")
        .def("bytes", &MegaLineage::bytes);
}

}  // namespace brickline
