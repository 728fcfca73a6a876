// Rows of Python as the rows of a MegaProgram, for the bindings of its engines.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "mega_program.h"

namespace brickline {

// {"op": 0, "arguments": 3, "joined": False}; of a launch that streams rows its "stream", an argument, with
// "row_bytes", "block_rows" and "rows"; where launches are not run, the "alias" of those, and of all others
// their "waits".
inline std::vector<MegaRow> mega_rows_of(nanobind::handle given) {
    namespace nb = nanobind;
    const auto number = [](nb::handle row, const char* name) { return nb::cast<uint32_t>(row[name]); };
    const auto has = [](nb::handle row, const char* name) {
        return nb::cast<bool>(row.attr("__contains__")(name));
    };
    std::vector<MegaRow> rows;
    for (nb::handle each : given) {
        MegaRow row;
        row.op = number(each, "op");
        row.arguments = number(each, "arguments");
        row.is_joined = nb::cast<bool>(each["joined"]);
        if (has(each, "alias")) row.alias = number(each, "alias");
        if (has(each, "waits")) {
            for (nb::handle wait : each["waits"]) row.waits.push_back(nb::cast<uint32_t>(wait));
        }
        if (has(each, "stream")) {
            row.stream = number(each, "stream");
            row.row_bytes = number(each, "row_bytes");
            row.block_rows = number(each, "block_rows");
            row.rows = number(each, "rows");
        }
        rows.push_back(row);
    }
    return rows;
}

template <class T>
nanobind::bytes mega_bytes_of(const std::vector<T>& rows) {
    return nanobind::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(T));
}

}  // namespace brickline
