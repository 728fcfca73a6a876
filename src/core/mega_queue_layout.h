// MegaQueueLayout: where the tables of a queue lie on a device, and what it shares with the host. Sizes and
// addresses alone; owns no memory.
#pragma once

#include "brickline/megakernel_intake.h"
#include "mega_queue_types.h"

namespace brickline {

// Memory of a queue, by where it begins.
struct MegaQueueRoom {
    uint64_t tables = 0;           // of the device
    uint64_t edges = 0;            // of the device: edges, and the stack of those that are free
    uint64_t edges_count = 0;
    uint64_t shared = 0;           // of the host, as the device sees it
};

struct MegaQueueLayout {
    static MegaQueueLayout of(const MegaQueueOptions& options, uint32_t stride, uint32_t ops, uint32_t ring_bits);

    static constexpr uint64_t EDGE_BYTES = sizeof(MegaEdge) + sizeof(uint32_t);

    // Everything that a launch is told, but for its number and how long it waits for work.
    MegaQueueLaunch launch(const MegaQueueOptions& options, const MegaQueueRoom& room) const;

    // Offsets of tables.
    uint64_t control, slots, submissions, cells, words, finished, hands, op_totals, arguments, intake, free_slots,
        first_edge, first_free, staged, staging, retry_codes, records, end;
    // Offsets of what is shared.
    uint64_t host_words, intake_words, commands, completions, shared_end;
    uint32_t ring_cells, command_lines, completions_count, records_count;
    uint32_t stride, ops, ring_bits;
};

}  // namespace brickline
