// A lane: what one thread records, on its way from the hot path to the spool. Owns the ring, the
// stack of open bricks and, through LaneStore, the thread's statistics. Only the owning thread
// appends; readers of the mapped file follow the protocol in abi.h.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "fold.h"
#include "spool.h"

namespace brickline {

enum class OpenKind : uint8_t { Block, Timer, Mark, Step, Tile };

// A brick that was entered and not yet left.
struct OpenEntry {
    uint64_t start;
    union {
        struct {
            uint32_t slot;
            OpenKind kind;
            bool timed;
            bool disturbed;  // an outer brick was left first, or depth was exceeded
            bool unused;
        };
        uint64_t word;       // the four above, to be set and compared at once
    };
    void* owner;         // the timer of OpenKind::Timer and Tile, the handle of a Mark that declares
                         // work, both owned by the stack; the step of a Step; else null or unset
    const void* frame;   // the frame of Python's that began it; null where another call may end it
    uint64_t start_event;  // device clocks: the event enqueued at the start
    uint64_t stream;
};

// OpenEntry::word of an entry that is timed and undisturbed.
constexpr uint64_t open_word(uint32_t slot, OpenKind kind) {
    return uint64_t(slot) | uint64_t(kind) << 32 | uint64_t(1) << 40;
}
static_assert(std::endian::native == std::endian::little);

// The step that a thread's entries belong to.
struct StepState {
    uint64_t place = 0;        // phase and step as they stand in a record's last word
    uint32_t step = 0;
    uint8_t phase = 0;
    bool is_open = false;
    bool timed = true;
    bool only_counts = false;  // sampling leaves it out: entries are counted, not timed

    void set(uint8_t new_phase, uint32_t new_step) {
        phase = new_phase;
        step = new_step;
        place = uint64_t(phase) << 8 | uint64_t(step) << 32;
    }
};

struct LaneIdentity {
    uint32_t thread = 0;
    ClockDomain domain = ClockDomain::Host;
    int32_t device = -1;
    uint64_t stream = 0;
    std::string name;
};

// How much a lane holds before it folds.
struct LaneSize {
    uint8_t ring_bits;
    uint64_t journal_bytes;
};
// 16384 records cover some eighty decode steps of 200 bricks. Nodes leave the caches between two folds,
// so the more samples each one brings, the less a sample costs.
constexpr LaneSize THREAD_LANE{14, 256 * 1024};
// There may be hundreds of tasks.
constexpr LaneSize TASK_LANE{9, 32 * 1024};

// Entries of a lane's stack, from the one at `first` on, that code in one context began.
struct Segment {
    const void* context;
    uint32_t first;
};

class Lane final : public LaneStore {
  public:
    static constexpr uint8_t UNKNOWN_DEPTH = 255;

    Lane(Spool& spool, const TickSource& source, uint32_t id, const LaneIdentity& identity,
         uint32_t recent_records, LaneSize size = THREAD_LANE);

    // Appends a finished entry; folds first when the ring is full.
    void append(const BrickRecord& record, const WorkRecord* work) {
        if (m_head + 2 - m_tail > ring_records()) [[unlikely]] {
            fold();
        }
        m_ring[m_head & (ring_records() - 1)] = record;
        if (work) std::memcpy(&m_ring[(m_head + 1) & (ring_records() - 1)], work, sizeof *work);
        m_head += work ? 2 : 1;
        std::atomic_ref<uint64_t>(m_header->head).store(m_head, std::memory_order_release);
    }

    // The same without work, built in place: four stores of a word each. Assembling a BrickRecord byte
    // by byte and copying it would stall on store forwarding.
    void append_words(uint64_t start, uint64_t end, uint64_t slot_and_elements, uint64_t rest) {
        if (m_head + 2 - m_tail > ring_records()) [[unlikely]] {
            fold();
        }
        uint64_t* words = reinterpret_cast<uint64_t*>(&m_ring[m_head & (ring_records() - 1)]);
        words[0] = start;
        words[1] = end;
        words[2] = slot_and_elements;
        words[3] = rest;
        m_head += 1;
        std::atomic_ref<uint64_t>(m_header->head).store(m_head, std::memory_order_release);
    }

    // Counts an entry that is not timed; false where it must go through the ring.
    bool count(uint32_t slot, uint64_t elements) {
        CountRow* row = slot < m_counter_count ? m_counters[slot] : nullptr;
        if (!row) [[unlikely]] row = add_counter(slot, elements);
        if (!row || row->elements != elements) [[unlikely]] return false;
        std::atomic_ref<uint64_t>(row->count).store(row->count + 1, std::memory_order_relaxed);
        return true;
    }

    // Everything open is forgotten: finished inner entries have no outer one any more.
    void fence() { append_words(0, 0, 0, uint64_t(RECORD_IS_WORK) << 16); }

    void fold();
    // Forgets the statistics of some slots; what is still open of them counts when it is left.
    void forget(const std::vector<bool>& slots);
    void set_observer(FoldObserver* observer) { m_observer = observer; }
    FoldObserver* observer() const { return m_observer; }
    LaneHeader& header() { return *m_header; }
    // A thread has ended and another takes the lane over.
    void adopt(const LaneIdentity& identity);
    bool is_full_disk() const { return m_out_of_space; }
    uint64_t ring_records() const { return uint64_t(1) << m_ring_bits; }

    // Entries of this lane count for `state` from now on.
    void set_step(const StepState* state) {
        step = state;
        place = state->place;
        only_counts = state->only_counts;
        counting_depth = UNKNOWN_DEPTH;
        if (only_counts) use_counters(state->phase);
    }

    // What every measurement touches, in one cache line.
    alignas(64) uint32_t depth = 0;
    uint32_t too_deep = 0;    // bricks entered beyond MAX_DEPTH and not yet left
    uint64_t place = 0;       // copies of step->place and step->only_counts
    bool only_counts = false;

    // The depth inside the step that began last: at this depth no brick of an earlier step is open.
    // UNKNOWN_DEPTH where the step is another thread's.
    uint8_t counting_depth = UNKNOWN_DEPTH;

  private:
    uint8_t m_ring_bits;
    uint32_t m_counter_count = 0;
    CountRow** m_counters = nullptr;  // of the step's phase, by slot
    uint64_t m_head = 0;
    uint64_t m_tail = 0;
    BrickRecord* m_ring;
    LaneHeader* m_header;

  public:
    OpenEntry stack[MAX_DEPTH];

    // Tasks of one thread that hold entries open at the same time have a lane each: the first takes the
    // thread's own, which is the home of the others and lists them all, itself first.
    Lane* home = this;
    std::vector<Lane*> of_thread{this};
    std::vector<Segment> segments;  // of the stack, outermost first

    int32_t last_layer = -2;
    const StepState* step = nullptr;  // its own while it is in a step, else its profiler's
    StepState own_step;

  private:
    void remember(const BrickRecord& record) override;
    Placed<Node> new_node() override;
    Placed<uint64_t> new_chunk() override;
    Placed<TileCell> new_cell() override;
    void begin_change();
    void end_change();
    CountRow* add_counter(uint32_t slot, uint64_t elements);
    void use_counters(uint8_t phase) {
        m_counters = m_phase_counters[phase].data();
        m_counter_count = uint32_t(m_phase_counters[phase].size());
    }
    template <class T>
    Placed<T> take(ExtentKind kind, Extent& extent, uint32_t& ordinal, uint64_t bytes);

    Spool& m_spool;
    const TickSource& m_source;
    uint8_t* m_journal_area;
    uint64_t m_header_offset;
    FoldObserver* m_observer = nullptr;
    BrickRecord* m_recent = nullptr;
    std::vector<CountRow*> m_phase_counters[MAX_PHASES];
    Extent m_node_extent, m_bins_extent, m_cell_extent, m_count_extent;
    uint32_t m_node_ordinal = 0, m_bins_ordinal = 0, m_cell_ordinal = 0, m_count_ordinal = 0;
    std::atomic<bool> m_out_of_space{false};
};

}  // namespace brickline
