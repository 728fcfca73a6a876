// What a caller supplies rather than has measured: durations, tiles, facts, and rows of the tables.
#include "hot.h"

#include <algorithm>

namespace brickline::hot {

PyObject* profiler_record(PyObject* self, PyObject* args, PyObject* names) {
    static const char* keys[] = {"brick", "duration_ns", "elements", "layer", "bytes_in", "bytes_out",
                                 "flops", "cycles", "approximate", nullptr};
    PyObject *id = nullptr, *layer_value = Py_None;
    unsigned long long duration = 0, elements = 1, bytes_in = 0, bytes_out = 0, cycles = 0;
    double flops = 0;
    int approximate = 0;
    if (!PyArg_ParseTupleAndKeywords(args, names, "OKK|OKKdKp", const_cast<char**>(keys), &id,
                                     &duration, &elements, &layer_value, &bytes_in, &bytes_out, &flops,
                                     &cycles, &approximate)) {
        return nullptr;
    }
    ProfilerObject* profiler = as_profiler(self);
    if (profiler->mode == Mode::Off) Py_RETURN_NONE;
    const int64_t brick = find_brick(profiler, id);
    int32_t layer = -1;
    if (brick < 0 || !parse_layer(layer_value, layer)) return nullptr;
    HandleObject* handle = handle_for(profiler, uint32_t(brick), layer);
    Lane* lane = handle ? caller_lane(profiler) : nullptr;
    if (!lane) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    const bool has_work = bytes_in || bytes_out || flops != 0 || cycles;
    WorkRecord work{bytes_in, flops, bytes_out, uint32_t(cycles), uint8_t(cycles >> 32),
                    uint8_t(cycles >> 40), RECORD_IS_WORK, 0};
    BrickRecord record{};
    const double ns_per_tick = profiler->state->recorder->spool().ns_per_tick();
    record.start = profiler->source->now() - uint64_t(double(duration) / ns_per_tick);
    record.end = duration;
    record.slot = handle->slot;
    record.elements_low = uint32_t(elements);
    record.elements_high = uint8_t(elements >> 32);
    record.depth = uint8_t(std::min(lane->depth, MAX_DEPTH - 1));
    record.phase = lane->step->phase;
    record.step = lane->step->step;
    // An exact duration at an unknown place; fold_records keeps both kinds out of coverage.
    record.flags = uint8_t(RECORD_EXACT | (has_work ? RECORD_WORK : 0) |
                           (approximate ? RECORD_APPROXIMATE : 0));
    lane->append(record, has_work ? &work : nullptr);
    Py_RETURN_NONE;
}

PyObject* profiler_record_tile(PyObject* self, PyObject* args) {
    unsigned int level = 0, row = 0, column = 0;
    unsigned long long duration = 0, elements = 0, bytes = 0;
    double flops = 0;
    if (!PyArg_ParseTuple(args, "IIIKKdK", &level, &row, &column, &duration, &elements, &flops, &bytes)) {
        return nullptr;
    }
    ProfilerObject* profiler = as_profiler(self);
    if (profiler->mode == Mode::Off || !profiler->state->tiles_enabled) Py_RETURN_NONE;
    Lane* lane = caller_lane(profiler);
    if (!lane) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    const int64_t slot = tile_slot(profiler, lane, level);
    if (slot < 0) return nullptr;
    WorkRecord work{};
    work.bytes_in = bytes;
    work.flops = flops;
    work.detail = uint64_t(row) << 32 | column;
    work.flags = RECORD_IS_WORK;
    BrickRecord record{};
    record.start = profiler->source->now();
    record.end = duration;
    record.slot = uint32_t(slot);
    record.elements_low = uint32_t(elements);
    record.elements_high = uint8_t(elements >> 32);
    record.depth = uint8_t(std::min(lane->depth, MAX_DEPTH - 1));
    record.phase = lane->step->phase;
    record.step = lane->step->step;
    record.flags = RECORD_EXACT | RECORD_TILE | RECORD_WORK;
    lane->append(record, &work);
    Py_RETURN_NONE;
}

PyObject* profiler_fact(PyObject* self, PyObject* args) {
    const char* name = nullptr;
    double value = 0;
    if (!PyArg_ParseTuple(args, "sd", &name, &value)) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    if (!is_open(profiler)) Py_RETURN_NONE;
    if (!guarded([&] {
            Spool& spool = profiler->state->recorder->spool();
            const FactRow row{spool.intern(name), 0, value};
            spool.append(ExtentKind::Fact, &row, sizeof row);
        })) {
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject* profiler_intern(PyObject* self, PyObject* text) {
    Py_ssize_t length = 0;
    const char* bytes = utf8_of(text, "name", &length);
    ProfilerObject* profiler = as_profiler(self);
    if (!bytes || !require_open(profiler)) return nullptr;
    uint32_t id = 0;
    if (!written(profiler, [&] { id = profiler->state->recorder->spool().intern({bytes, size_t(length)}); })) {
        return nullptr;
    }
    return PyLong_FromUnsignedLong(id);
}

PyObject* profiler_append(PyObject* self, PyObject* args) {
    unsigned int table = 0;
    Py_buffer rows;
    if (!PyArg_ParseTuple(args, "Iy*", &table, &rows)) return nullptr;
    ProfilerObject* profiler = as_profiler(self);
    const bool done = require_open(profiler) && written(profiler, [&] {
        profiler->state->recorder->spool().append(ExtentKind(table), rows.buf, uint64_t(rows.len));
    });
    PyBuffer_Release(&rows);
    if (!done) return nullptr;
    Py_RETURN_NONE;
}

}  // namespace brickline::hot
