// Reading a spool: a consistent picture of a file that may still be written to, may have been cut
// off by SIGKILL, or may be hostile. Never writes. Whatever the file says is checked before use.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "brickline/abi.h"
#include "spool.h"

namespace brickline {

struct BinRow {
    uint32_t node;   // row in Snapshot::nodes
    int32_t index;   // bucket index, base 2, scale 4
    uint64_t count;
};
static_assert(sizeof(BinRow) == 16);

struct Span {
    uint64_t offset;
    uint64_t bytes;
};

struct Snapshot {
    SpoolHeader header;
    std::vector<LaneHeader> lanes;
    std::vector<Node> nodes;              // entries counted > 0
    std::vector<uint32_t> node_lanes;
    std::vector<BinRow> bins;
    std::vector<TileCell> cells;
    std::vector<uint32_t> cell_lanes;
    std::vector<BrickRecord> recent;      // times in ns on the lane's clock
    std::vector<uint32_t> recent_lanes;
    std::vector<std::string> strings;
    std::map<uint32_t, std::string> tables;  // ExtentKind -> rows
    // ExtentKind -> where its rows lie: tables that may be larger than memory stay in the file
    std::map<uint32_t, std::vector<Span>> spans;
    std::vector<std::string> problems;    // what was left out, and where
};

// Statistics leaves out what grows with time: traces, graph, operands, fingerprints, the timeline,
// and the cells of tiles; of the strings it reads those that slots and facts name.
enum class ReadWhat { Everything, Statistics };

// Throws SpoolError when the file is no spool, is of a newer version, or cannot be read.
Snapshot read_spool(const std::string& path, ReadWhat what = ReadWhat::Everything);

}  // namespace brickline
