// A queue of a megakernel as Python sees it: MegaQueueCore. Owns no rules: queue.py checks what it is given
// and writes the messages; here rows become structs, columns of arguments become jobs, and what waits
// releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <stdexcept>

#include "clock.h"
#include "mega_queue.h"
#include "mega_queue_device.h"
#include "mega_queue_signature.h"
#include "pending_signals.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace brickline {
namespace {

using Type = MegaQueueArgument::Type;
template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Expression expression_of(nb::handle code, uint32_t values) {
    char* bytes = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(code.ptr(), &bytes, &length)) throw nb::python_error();
    std::string problem;
    Expression found(bytes, uint64_t(length), values, problem);
    if (!problem.empty()) throw std::invalid_argument(problem);
    return found;
}

// ("buffer", access, align, shape, bytes of a block or None) or ("i64" | "i32" | "f64" | "f32", low, high)
MegaQueueArgument argument_of(nb::handle object, uint32_t values) {
    const nb::sequence row = nb::cast<nb::sequence>(object);
    const std::string type = nb::cast<std::string>(row[0]);
    MegaQueueArgument argument;
    if (type == "buffer") {
        argument.type = Type::Buffer;
        argument.access = nb::cast<uint32_t>(row[1]);
        argument.align = nb::cast<uint32_t>(row[2]);
        for (nb::handle code : nb::object(row[3])) argument.shape.push_back(expression_of(code, values));
        if (const nb::object code = row[4]; !code.is_none()) argument.per_block.push_back(expression_of(code, values));
    } else if (type == "i64" || type == "i32") {
        argument.low = nb::cast<int64_t>(row[1]);
        argument.high = nb::cast<int64_t>(row[2]);
    } else if (type == "f64" || type == "f32") {
        argument.type = type == "f64" ? Type::F64 : Type::F32;
    } else {
        throw std::invalid_argument("expected buffer, i64, i32, f64 or f32, got " + type);
    }
    return argument;
}

template <class T>
const T* column_data(nb::handle object, uint32_t count, std::vector<Array<T>>& kept) {
    kept.push_back(nb::cast<Array<T>>(object));
    if (kept.back().shape(0) != count) throw std::invalid_argument("expected an element for each submission");
    return kept.back().data();
}

class MegaQueueCore {
  public:
    // An op: (function, arguments, seven sizes, flags).
    MegaQueueCore(nb::handle ops, const std::vector<uint64_t>& limits, nb::handle options) {
        MegaQueueOptions chosen;
        chosen.workers = nb::cast<uint32_t>(options["workers"]);
        chosen.slots = nb::cast<uint32_t>(options["slots"]);
        chosen.retry_limit = nb::cast<uint32_t>(options["retry_limit"]);
        chosen.retry_codes = nb::cast<std::vector<uint32_t>>(options["retry_codes"]);
        chosen.is_recorded = nb::cast<bool>(options["recorded"]);
        chosen.has_lineage = nb::cast<bool>(options["lineage"]);
        chosen.is_deduping = nb::cast<bool>(options["dedupe"]);
        chosen.is_fusing = nb::cast<bool>(options["fuse"]);
        chosen.is_proved = nb::cast<bool>(options["prove"]);
        chosen.delay_seed = nb::cast<uint64_t>(options["delay_seed"]);
        chosen.grace_ns = nb::cast<uint64_t>(options["grace_ns"]);
        m_held = options["held"];
        std::vector<MegaQueueOp> functions;
        for (nb::handle object : ops) {
            const nb::sequence row = nb::cast<nb::sequence>(object);
            std::vector<MegaQueueArgument> arguments;
            const nb::object declared = row[1];
            const uint32_t count = uint32_t(nb::len(declared));
            for (nb::handle each : declared) arguments.push_back(argument_of(each, count));
            std::vector<Expression> sizes;
            for (nb::handle code : nb::object(row[2])) sizes.push_back(expression_of(code, count));
            MegaQueueOp op;
            op.function = reinterpret_cast<void (*)(const brickline_launch*)>(nb::cast<uint64_t>(row[0]));
            op.arguments = count;
            op.flags = nb::cast<uint32_t>(row[3]);
            m_signatures.emplace_back(uint32_t(functions.size()), std::move(arguments), std::move(sizes), limits);
            functions.push_back(op);
        }
        const nb::object device = options["device"];
        if (device.is_none()) {
            m_engine = std::make_unique<MegaQueueEngine>(chosen, std::move(functions));
            return;
        }
        MegaDevicePlace place;
        place.context = nb::cast<uint64_t>(device["context"]);
        place.function = nb::cast<uint64_t>(device["function"]);
        place.threads = nb::cast<uint32_t>(device["threads"]);
        place.item_bytes = nb::cast<uint32_t>(device["item_bytes"]);
        place.ring_bits = nb::cast<uint32_t>(device["ring_bits"]);
        place.rest_ns = nb::cast<uint64_t>(device["rest_ns"]);
        auto workers = std::make_unique<MegaQueueDevice>(chosen, functions, place);
        m_device = workers.get();
        m_engine = std::make_unique<MegaQueueEngine>(chosen, std::move(functions), std::move(workers));
    }
    // A thread that never came back still uses all of it, until the process ends. An interpreter that ends
    // lets go of everything else, so nothing in it could keep it.
    ~MegaQueueCore() {
        {
            const nb::gil_scoped_release released;
            if (!m_engine->is_foreign()) m_engine->close();
        }
        if (m_engine->state() == MegaQueueState::Dead) {
            (void)m_engine.release();
            (void)m_held.release();
            return;
        }
        const nb::gil_scoped_release released;
        m_engine.reset();
    }

    // Appends jobs to the batch; None, or why not: (why, job, argument, place, found, expected).
    // A column is (address, step, nbytes, shape), (addresses, None, nbytes, shape), a number or an array.
    nb::object append(uint32_t op, uint32_t count, nb::sequence given, nb::handle priority) {
        const MegaQueueSignature& signature = m_signatures.at(op);
        const size_t arguments = signature.arguments().size();
        if (nb::len(given) != arguments) throw std::invalid_argument("expected a column for each argument");
        std::vector<MegaQueueColumn> columns(arguments);
        std::vector<Array<uint64_t>> addresses;
        std::vector<Array<int64_t>> integers;
        std::vector<Array<double>> reals;
        std::vector<Array<uint32_t>> levels;
        for (size_t k = 0; k < arguments; ++k) {
            const nb::object value = given[k];
            MegaQueueColumn& column = columns[k];
            const Type type = signature.arguments()[k].type;
            if (type == Type::Buffer) {
                const nb::sequence row = nb::cast<nb::sequence>(value);
                const nb::object step = row[1];
                if (step.is_none()) {
                    column.addresses = column_data<uint64_t>(nb::object(row[0]), count, addresses);
                } else {
                    column.address = nb::cast<uint64_t>(row[0]);
                    column.step = nb::cast<uint64_t>(step);
                }
                column.nbytes = nb::cast<uint64_t>(row[2]);
                for (nb::handle size : nb::object(row[3])) column.shape.push_back(nb::cast<int64_t>(size));
            } else if (type == Type::Integer) {
                if (PyLong_Check(value.ptr())) column.integer = nb::cast<int64_t>(value);
                else column.integers = column_data<int64_t>(value, count, integers);
            } else {
                if (PyFloat_Check(value.ptr())) column.real = nb::cast<double>(value);
                else column.reals = column_data<double>(value, count, reals);
            }
        }
        const bool is_one = PyLong_Check(priority.ptr());
        const uint32_t* const each = is_one ? nullptr : column_data<uint32_t>(priority, count, levels);
        const MegaColumnRefusal refused =
            signature.append(m_batch, columns, count, each, is_one ? nb::cast<uint32_t>(priority) : 0);
        if (!refused) return nb::none();
        static const char* const WHY[] = {"", "range", "narrow", "dimensions", "shape", "align", "overlap", "size",
                                          "lanes", "overflow", "division", "address"};
        return nb::make_tuple(WHY[size_t(refused.why)], refused.job, refused.argument, refused.place, refused.found,
                              refused.expected);
    }

    // What a stream was given before is done when this returns.
    void follow(uint64_t stream) {
        const nb::gil_scoped_release released;
        if (m_device) m_device->wait_for_stream(stream);
    }

    void discard() { m_batch.clear(); }
    size_t pending() const { return m_batch.jobs.size(); }

    // (refused, number of the first submission, jobs, items, batches that have finished); the batch is
    // empty afterwards.
    nb::tuple publish(double seconds) {
        MegaPublished found;
        {
            const nb::gil_scoped_release released;
            found = m_engine->publish(m_batch, moment(seconds), &m_signals);
        }
        const size_t jobs = m_batch.jobs.size();
        const uint64_t items = m_batch.items;
        m_batch.clear();
        if (found.wait == MegaQueueWait::Interrupted) throw nb::python_error();
        static const char* const REFUSED[] = {"", "jobs", "op", "priority", "grid", "items", "accesses", "waiting",
                                              "state", "broken"};
        return nb::make_tuple(REFUSED[size_t(found.refused)], found.first, jobs, items, take_finished_batches());
    }

    const char* drain(double seconds) {
        return waited([&] { return m_engine->drain(moment(seconds), &m_signals); });
    }
    const char* wait(uint64_t submission, double seconds) {
        return waited([&] { return m_engine->wait(submission, moment(seconds), &m_signals); });
    }
    const char* join() {
        return waited([&] { return m_engine->join(); });
    }
    const char* close() {
        return waited([&] { return m_engine->close(); });
    }
    void stop() { m_engine->stop(); }
    void clear() { m_engine->clear(); }
    void begin_again() { m_engine->begin_again(); }
    void collect() { m_engine->collect(); }

    const char* state() const {
        static const char* const STATES[] = {"running", "expired", "stopped", "dead"};
        if (m_engine->is_foreign()) return "foreign";
        return STATES[size_t(m_engine->state())];
    }
    uint64_t open() const { return m_engine->open(); }
    uint64_t first() const { return m_engine->first(); }
    uint64_t next() const { return m_engine->next(); }
    std::string problem() const { return m_engine->problem(); }
    std::string failure() const { return m_engine->failure(); }
    nb::dict traffic() const {
        const MegaQueueTraffic found = m_engine->traffic();
        nb::dict out;
        out["uploaded_bytes"] = found.uploaded_bytes;
        out["read_back_bytes"] = found.read_back_bytes;
        out["reads"] = found.reads;
        out["allocations"] = found.allocations;
        out["launches"] = found.launches;
        out["syncs"] = found.syncs;
        return out;
    }
    uint64_t tables_bytes() const { return m_engine->tables_bytes(); }
    uint8_t state_of(uint64_t submission) const { return uint8_t(m_engine->state_of(submission)); }
    std::vector<uint64_t> take_finished_batches() { return m_engine->take_finished_batches(); }

    nb::bytes rows() const {
        const std::vector<MegaSubmissionRow> found = m_engine->rows_now();
        return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(MegaSubmissionRow));
    }
    nb::tuple waits() const { return columns(m_engine->waits().ends, m_engine->waits().numbers); }
    nb::tuple accesses() const { return columns(m_engine->accesses().ends, m_engine->accesses().rows); }
    nb::bytes records() const {
        const std::vector<MegaQueueRecord> found = m_engine->records();
        return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(MegaQueueRecord));
    }
    nb::list faults() const {
        nb::list all;
        for (const MegaItemFault& each : m_engine->faults())
            all.append(nb::make_tuple(each.submission, each.block, each.code, each.attempts));
        return all;
    }
    nb::dict totals() const {
        const MegaQueueTotals found = m_engine->totals();
        nb::dict out;
        out["submissions"] = found.submissions;
        out["published"] = found.published;
        out["deduped"] = found.deduped;
        out["deduped_done"] = found.deduped_done;
        out["joined"] = found.joined;
        out["done"] = found.done;
        out["faulted"] = found.faulted;
        out["skipped"] = found.skipped;
        out["cancelled"] = found.cancelled;
        out["requeued"] = found.requeued;
        out["plan_ns"] = found.plan_ns;
        out["publish_ns"] = found.publish_ns;
        out["edges"] = found.edges;
        out["waits"] = found.waits;
        out["dropped_records"] = found.dropped_records;
        out["begin_tick"] = m_engine->begin_tick();
        out["ns_per_tick"] = m_engine->ns_per_tick();
        return out;
    }
    nb::list workers() const {
        nb::list all;
        const double rate = m_engine->ns_per_tick();
        for (const MegaWorkerTotals& each : m_engine->hands()) {
            nb::dict out;
            out["items"] = each.items;
            out["skipped"] = each.skipped;
            out["work_ns"] = uint64_t(double(each.work_ticks) * rate);
            out["wait_ns"] = uint64_t(double(each.wait_ticks) * rate);
            out["idle_ns"] = uint64_t(double(each.idle_ticks) * rate);
            out["inside"] = each.is_inside;
            out["submission"] = each.submission;
            out["block"] = each.block;
            all.append(out);
        }
        return all;
    }
    nb::list ops() const {
        nb::list all;
        for (const MegaOpTotals& each : m_engine->op_totals())
            all.append(nb::make_tuple(each.items, uint64_t(double(each.work_ticks) * m_engine->ns_per_tick())));
        return all;
    }
    nb::list hung() const {
        nb::list all;
        for (const MegaHung& each : m_engine->hung()) {
            nb::object waiter = nb::none();
            if (each.waiter != MegaHung::NO_SUBMISSION) waiter = nb::int_(each.waiter);
            all.append(nb::make_tuple(each.worker, each.submission, each.block, each.op, each.since_ns, waiter,
                                      each.waiters));
        }
        return all;
    }

  private:
    // Where the rows of each submission end, and the rows.
    template <class Row>
    static nb::tuple columns(const std::vector<uint64_t>& ends, const std::vector<Row>& rows) {
        return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(ends.data()), ends.size() * sizeof(uint64_t)),
                              nb::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row)));
    }
    // From now on; infinity: never.
    static uint64_t moment(double seconds) {
        if (!(seconds < 1e9)) return MegaQueueEngine::FOREVER;
        return seconds <= 0 ? 0 : monotonic_ns() + uint64_t(seconds * 1e9);
    }
    template <class Call>
    const char* waited(Call call) {
        MegaQueueWait found;
        {
            const nb::gil_scoped_release released;
            found = call();
        }
        if (found == MegaQueueWait::Interrupted) throw nb::python_error();
        static const char* const WAITS[] = {"done", "expired", "stopped", "interrupted", "hung"};
        return WAITS[size_t(found)];
    }

    std::vector<MegaQueueSignature> m_signatures;
    std::unique_ptr<MegaQueueEngine> m_engine;
    MegaQueueDevice* m_device = nullptr;  // the engine's; null: it is on threads
    nb::object m_held;                    // what workers use: code and memory
    MegaBatch m_batch;
    PendingSignals m_signals;
};

}  // namespace

void bind_mega_queue(nb::module_& module) {
    nb::class_<MegaQueueCore>(module, "MegaQueueCore", "A queue of a megakernel on threads of the host.")
        .def(nb::init<nb::handle, const std::vector<uint64_t>&, nb::handle>(), "ops"_a, "limits"_a, "options"_a)
        .def("append", &MegaQueueCore::append, "op"_a, "count"_a, "columns"_a, "priority"_a)
        .def("follow", &MegaQueueCore::follow, "stream"_a)
        .def("discard", &MegaQueueCore::discard)
        .def_prop_ro("pending", &MegaQueueCore::pending)
        .def("publish", &MegaQueueCore::publish, "seconds"_a)
        .def("drain", &MegaQueueCore::drain, "seconds"_a)
        .def("wait", &MegaQueueCore::wait, "submission"_a, "seconds"_a)
        .def("join", &MegaQueueCore::join)
        .def("close", &MegaQueueCore::close)
        .def("stop", &MegaQueueCore::stop)
        .def("clear", &MegaQueueCore::clear)
        .def("begin_again", &MegaQueueCore::begin_again)
        .def("collect", &MegaQueueCore::collect)
        .def_prop_ro("state", &MegaQueueCore::state)
        .def_prop_ro("open", &MegaQueueCore::open)
        .def_prop_ro("first", &MegaQueueCore::first)
        .def_prop_ro("next", &MegaQueueCore::next)
        .def_prop_ro("problem", &MegaQueueCore::problem)
        .def_prop_ro("failure", &MegaQueueCore::failure)
        .def("traffic", &MegaQueueCore::traffic)
        .def_prop_ro("tables_bytes", &MegaQueueCore::tables_bytes)
        .def("state_of", &MegaQueueCore::state_of, "submission"_a)
        .def("take_finished_batches", &MegaQueueCore::take_finished_batches)
        .def("rows", &MegaQueueCore::rows)
        .def("waits", &MegaQueueCore::waits)
        .def("accesses", &MegaQueueCore::accesses)
        .def("records", &MegaQueueCore::records)
        .def("faults", &MegaQueueCore::faults)
        .def("totals", &MegaQueueCore::totals)
        .def("workers", &MegaQueueCore::workers)
        .def("ops", &MegaQueueCore::ops)
        .def("hung", &MegaQueueCore::hung);
    module.def("mega_queue_bytes", [](uint32_t slots, uint32_t workers, uint32_t arguments) {
        MegaQueueOptions options;
        options.slots = slots;
        options.workers = workers;
        return MegaQueueEngine::bytes(options, arguments);
    }, "slots"_a, "workers"_a, "arguments"_a, "Bytes of the tables of a queue.");
    module.def("mega_queue_device_bytes", [](uint32_t slots, uint32_t workers, uint32_t arguments, uint32_t ops,
                                             bool recorded, uint32_t ring_bits) {
        MegaQueueOptions options;
        options.slots = slots;
        options.workers = workers;
        options.is_recorded = recorded;
        return MegaQueueDevice::bytes_of(options, arguments, ops, ring_bits);
    }, "slots"_a, "workers"_a, "arguments"_a, "ops"_a, "recorded"_a, "ring_bits"_a,
       "Bytes of the tables of a queue on a device, and of the memory that it shares with the host.");
    module.def("mega_queue_shared_bytes", &mega_queue_shared_bytes, "ops"_a, "arguments"_a, "item_bytes"_a,
               "Shared memory of a block of a queue, for items that need so much.");
}

}  // namespace brickline
