#include "mega_queue_layout.h"

#include <algorithm>
#include <bit>
#include <type_traits>

namespace brickline {
namespace {

constexpr uint64_t ALIGNED = 256;
constexpr uint64_t MIN_COMMAND_BYTES = 4 << 20;
constexpr uint64_t ALL_RECORDS = 2u << 20;  // of all workers
constexpr uint64_t LINE_BYTES = MEGA_FINISHED_STEP * sizeof(uint32_t);

// Gives out pieces of memory, one after the other.
struct Cursor {
    uint64_t end = 0;

    uint64_t next(uint64_t bytes) {
        const uint64_t begin = end;
        end += (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        return begin;
    }
};

template <class T>
void point(T*& pointer, uint64_t address) {
    pointer = reinterpret_cast<T*>(address);
}

}  // namespace

MegaQueueLayout MegaQueueLayout::of(const MegaQueueOptions& options, uint32_t stride, uint32_t ops,
                                    uint32_t ring_bits) {
    MegaQueueLayout at = {};
    const uint64_t slots = options.slots, workers = options.workers;
    at.stride = stride;
    at.ops = ops;
    at.ring_bits = ring_bits;
    at.ring_cells = std::bit_ceil(std::max((options.slots >> ring_bits) + 1, 2u));
    // One submission that waits for all others fits into half of the ring.
    const uint64_t command_bytes = std::max(MIN_COMMAND_BYTES, 2 * (4 * slots + 8 * uint64_t{stride} + 4096));
    at.command_lines = uint32_t(std::bit_ceil(command_bytes) / MEGA_LINE_BYTES);
    at.completions_count = std::bit_ceil(2 * options.slots);
    at.records_count = options.is_recorded ? uint32_t(std::max(ALL_RECORDS / workers, uint64_t{1})) : 0;
    const uint64_t rings = (MEGA_PRIORITIES << ring_bits) + 1;  // and the inbox

    Cursor tables;
    at.control = tables.next(sizeof(MegaControl));
    at.slots = tables.next(slots * sizeof(MegaSlot));
    at.submissions = tables.next(slots * sizeof(MegaSubmission));
    at.cells = tables.next(rings * at.ring_cells * sizeof(MegaCell));
    at.words = tables.next(2 * rings * LINE_BYTES);
    at.finished = tables.next((workers + 1) * LINE_BYTES);  // from here to `arguments`: what workers count
    at.hands = tables.next(workers * sizeof(MegaDeviceHand));
    at.op_totals = tables.next(workers * ops * 2 * sizeof(uint64_t));
    at.arguments = tables.next(slots * stride * sizeof(uint64_t));
    at.intake = tables.next(sizeof(MegaIntakeState));
    at.free_slots = tables.next(slots * sizeof(uint32_t));
    at.first_edge = tables.next(slots * sizeof(uint32_t));
    at.first_free = tables.next(slots * sizeof(uint32_t));
    at.staged = tables.next(slots * sizeof(uint32_t));
    at.staging = tables.next(uint64_t{at.command_lines} * MEGA_LINE_BYTES / 2);
    at.retry_codes = tables.next(options.retry_codes.size() * sizeof(uint32_t));
    at.records = tables.next(workers * at.records_count * sizeof(MegaItemRecord));
    at.end = tables.end;

    Cursor shared;
    at.host_words = shared.next(sizeof(MegaHostWords));
    at.intake_words = shared.next(sizeof(MegaIntakeWords));
    at.commands = shared.next(uint64_t{at.command_lines} * MEGA_LINE_BYTES);
    at.completions = shared.next(uint64_t{at.completions_count} * sizeof(MegaCompletion));
    at.shared_end = shared.end;
    return at;
}

MegaQueueLaunch MegaQueueLayout::launch(const MegaQueueOptions& options, const MegaQueueRoom& room) const {
    MegaQueueLaunch made = {};
    MegaQueue& queue = made.queue;
    point(queue.control, room.tables + control);
    point(queue.slots, room.tables + slots);
    point(queue.submissions, room.tables + submissions);
    point(queue.edges, room.edges);
    point(queue.finished, room.tables + finished);
    queue.slots_count = queue.submissions_count = options.slots;
    queue.edges_count = uint32_t(room.edges_count);
    queue.workers = options.workers;
    queue.ring_bits = ring_bits;
    const uint32_t rings = mega_rings(queue);
    for (uint32_t number = 0; number <= rings; ++number) {
        MegaRing& ring = number < rings ? queue.ready[number] : queue.inbox;
        point(ring.head, room.tables + words + 2 * number * LINE_BYTES);
        point(ring.tail, room.tables + words + (2 * number + 1) * LINE_BYTES);
        point(ring.cells, room.tables + cells + uint64_t{number} * ring_cells * sizeof(MegaCell));
        ring.mask = ring_cells - 1;
    }
    point(made.intake, room.tables + intake);
    point(made.arguments, room.tables + arguments);
    point(made.free_slots, room.tables + free_slots);
    point(made.free_edges, room.edges + room.edges_count * sizeof(MegaEdge));
    point(made.first_edge, room.tables + first_edge);
    point(made.first_free, room.tables + first_free);
    point(made.staged, room.tables + staged);
    point(made.staging, room.tables + staging);
    point(made.hands, room.tables + hands);
    point(made.op_totals, room.tables + op_totals);
    if (records_count) point(made.records, room.tables + records);
    point(made.retry_codes, room.tables + retry_codes);
    point(made.host, room.shared + host_words);
    point(made.words, room.shared + intake_words);
    point(made.commands, room.shared + commands);
    point(made.completions, room.shared + completions);
    made.command_lines = command_lines;
    made.completion_mask = completions_count - 1;
    made.stride = stride;
    made.ops = ops;
    made.retry_limit = options.retry_limit;
    made.retry_count = uint32_t(options.retry_codes.size());
    made.records_count = records_count;
    made.delay_seed = uint32_t(options.delay_seed);
    return made;
}

}  // namespace brickline
