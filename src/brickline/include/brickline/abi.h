// Structs that cross Python, host, device and disk. Nothing here allocates or knows Python.
//
// SPOOL, version 1: one mapped file per profiler and process inside a run's directory.
//
//     offset 0      SpoolHeader            one page
//     offset 4096   extents, back to back, each a multiple of one page:
//                   [ExtentHeader 64 B][payload …]
//
// A reader walks extents from 4096 to SpoolHeader::file_bytes by ExtentHeader::bytes. An extent
// holds either rows of one table (append-only; `used` counts committed payload bytes) or a part of
// one lane. A lane belongs to one recording thread, to a task of one while others of its tasks hold
// entries open, or to one (thread, stream) pair on a device:
//
//     LANE   [LaneHeader one page][BrickRecord × ring_records][JournalEntry area]
//     NODE   [Node × n]        statistics per (slot, phase)
//     BINS   [u64 × 128 × n]   histogram chunks of eight octaves, named by Node::chunk
//     CELL   [TileCell × n]    statistics per tile row and column
//     RECENT [BrickRecord × n] the timeline of the last steps, where one was asked for
//     COUNT  [CountRow × n]    entries of steps that sampling leaves out; `count` grows in place
//
// What is finished is what stands in the ring. Worked example: `with brick:` around 10 µs appends
//     {start=1000, end=26000, slot=3, elements=1, depth=1, phase=2, flags=0, step=7}
// (ticks) and stores LaneHeader::head = head + 1. When the ring is full the owning thread folds
// [tail, head) into nodes. Before a node or bin is changed its old contents go to the journal, so a
// reader that finds `journal_bytes` > 0 puts the old contents back and folds [tail, head) itself.
#pragma once

#include "brickline/platform.h"  // integers of fixed width, for NVRTC too

namespace brickline {

constexpr char SPOOL_MAGIC[8] = {'B', 'R', 'K', 'S', 'P', 'O', 'O', 'L'};
constexpr uint32_t SPOOL_VERSION = 1;
constexpr uint32_t EXTENT_MAGIC = 0x54584542;  // "BEXT"
constexpr uint64_t PAGE_BYTES = 4096;
constexpr uint32_t MAX_DEPTH = 64;
constexpr uint32_t MAX_PHASES = 16;
constexpr uint64_t MAX_ELEMENTS = (1ull << 40) - 1;

// Histogram: base-2 exponential, scale 4: bucket i holds (2^(i/16), 2^((i+1)/16)] nanoseconds.
constexpr int HIST_SCALE = 4;
constexpr uint32_t HIST_CHUNKS = 6;          // 6 × 8 octaves: up to 2^48 ns, 3.2 days
constexpr uint32_t HIST_CHUNK_BINS = 128;    // 8 octaves × 16
constexpr uint32_t HIST_BINS = HIST_CHUNKS * HIST_CHUNK_BINS;
constexpr uint32_t NO_CHUNK = 0xffffffffu;

enum class ClockKind : uint32_t { Monotonic = 0, Tsc = 1, Cntvct = 2, Manual = 3 };
enum class ClockDomain : uint32_t { Host = 0, Cuda = 1, Manual = 2 };

enum class ExtentKind : uint32_t {
    Lane = 1, Node = 2, Bins = 3, Cell = 4, Recent = 5, Count = 6,
    // tables
    String = 16, Slot = 17, Trace = 18, Operand = 19, Fingerprint = 20,
    GraphNode = 21, GraphEdge = 22, GraphDetail = 23, GraphString = 24, Fact = 25,
    TraceTime = 26,
};

enum class SlotKind : uint32_t { Brick = 0, Step = 1, Tile = 2 };

enum RecordFlag : uint8_t {
    RECORD_OUT_OF_ORDER = 1,   // left while an inner brick was open, or on another thread
    RECORD_APPROXIMATE = 2,    // the caller supplied the span; its place in time is not known
    RECORD_UNTIMED = 4,        // counted, not timed (sampling, or a replay that was overtaken)
    RECORD_TILE = 8,           // a part of a brick: no exclusive time is taken from the brick
    RECORD_WORK = 16,          // a WorkRecord follows in the ring
    RECORD_HOST_BOUND = 32,    // the stop was enqueued after the start had executed
    RECORD_IS_WORK = 64,       // this entry is a WorkRecord; alone, a fence: what is open is forgotten
    RECORD_EXACT = 128,        // `end` is a duration in ns that the caller supplied
};
constexpr uint8_t WORK_OF_STEP = 1;  // of a WorkRecord: `detail` is a step's

struct SpoolHeader {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint32_t process;
    uint32_t rank;
    uint64_t created_unix_ns;
    uint32_t clock_kind;        // ClockKind of host lanes
    uint32_t closed;            // 1 after a clean close
    uint64_t file_bytes;        // committed length; extents end here
    // ns = anchor_ns + (tick - anchor_tick) * ns_per_tick; written once at creation, and ns_per_tick
    // refined while the baseline is short.
    uint64_t anchor_tick;
    uint64_t anchor_ns;         // CLOCK_MONOTONIC
    uint64_t anchor_unix_ns;
    double ns_per_tick;
    uint64_t lost_records;      // samples that found no space
    uint64_t orphan_exits;      // a brick left that was never entered in this process
    uint64_t abandoned_timers;  // a timer dropped without a stop
    double overhead_ns;         // calibrated cost of one measurement …
    uint64_t pending_device_spans;
    uint64_t observing_ns;      // the host's time for what is recorded beside bricks: tensors, traces, ops, events
    uint64_t waiting_ns;        // the host's time in waits for a device that a sync mode asks for
    double counting_ns;         // … and of an entry that is only counted
    uint64_t reserved[5];
};
static_assert(sizeof(SpoolHeader) <= PAGE_BYTES);

struct ExtentHeader {
    uint32_t magic;
    uint32_t kind;       // ExtentKind
    uint32_t lane;       // owner of lane extents, else 0
    uint32_t ordinal;    // position among the extents of this kind and lane
    uint64_t bytes;      // whole extent, header included
    uint64_t used;       // committed payload bytes
    uint64_t reserved[4];
};
static_assert(sizeof(ExtentHeader) == 64);

struct BrickRecord {
    uint64_t start;      // ticks on host lanes, ns on device lanes
    uint64_t end;
    uint32_t slot;
    uint32_t elements_low;
    uint8_t depth;
    uint8_t phase;
    uint8_t flags;       // RecordFlag
    uint8_t elements_high;
    uint32_t step;
};
static_assert(sizeof(BrickRecord) == 32);

struct WorkRecord {      // follows a BrickRecord whose flags hold RECORD_WORK
    uint64_t bytes_in;
    double flops;
    uint64_t detail;     // bricks: bytes_out; tiles: row << 32 | column; device lanes: host ns;
                         // steps: ns since a pass of the phase began or ended, or since none ran
    uint32_t cycles_low; // bricks: cycles
    uint8_t cycles_high; // up to 2^48 cycles in all
    uint8_t cycles_top;
    uint8_t flags;       // RECORD_IS_WORK, WORK_OF_STEP
    uint8_t reserved;
};
static_assert(sizeof(WorkRecord) == 32);

// Operations of one entry at most. No sum of fewer than 2^64 such entries overflows a double.
inline constexpr double MAX_FLOPS = 1e30;

struct Node {
    uint32_t slot;
    uint16_t phase;
    uint16_t reserved16;
    uint64_t count;            // entries counted
    uint64_t timed;            // entries timed
    uint64_t total_ns;
    uint64_t min_ns;
    uint64_t max_ns;
    uint64_t shift_ns;         // first duration; sum_squares is about it
    double sum_squares;        // sum of (duration - shift)^2
    uint64_t exclusive_ns;
    uint64_t exclusive_count;
    uint64_t elements;         // of all counted entries
    uint64_t timed_elements;
    uint64_t bytes_in;         // of timed entries, as are bytes_out and flops
    uint64_t bytes_out;
    double flops;
    uint64_t cycles;
    uint64_t min_cycles;
    uint64_t max_cycles;
    uint64_t cycles_count;
    uint64_t host_ns;          // device lanes: host time between the two enqueues; steps: time in which
                               // any pass of the phase ran, each moment counted once
    uint64_t host_bound;
    uint64_t out_of_order;
    uint64_t approximate;
    uint64_t first_ns;         // start of the first and end of the last, on the lane's clock
    uint64_t last_ns;
    uint64_t zero_count;       // durations of 0 ns
    uint32_t chunk[HIST_CHUNKS];
    uint64_t batch;            // the fold in which this node was last journaled
    uint64_t reserved;
};
static_assert(sizeof(Node) == 248);

struct TileCell {
    uint32_t slot;
    uint32_t row;              // 0xffffffff in both: cells past the bound
    uint32_t column;
    uint32_t reserved32;
    uint64_t count;
    uint64_t total_ns;
    uint64_t min_ns;
    uint64_t max_ns;
    double flops;
    uint64_t batch;
};
static_assert(sizeof(TileCell) == 64);

// Entries of one brick and phase that were counted and not timed; a reader adds them to its node.
struct CountRow {
    uint32_t slot;
    uint32_t phase;
    uint64_t elements;         // of each entry
    uint64_t count;
    uint64_t reserved;
};
static_assert(sizeof(CountRow) == 32);

struct LaneHeader {
    uint32_t lane;
    uint32_t thread;           // kernel thread id of the (latest) owner
    uint32_t threads;          // how many threads have owned it, one after the other
    uint32_t clock_domain;     // ClockDomain
    int32_t device;            // -1: host
    uint32_t closed;
    uint64_t stream;
    char name[64];
    uint32_t ring_records;
    uint32_t recent_records;   // capacity of the timeline, 0: none
    uint64_t head;             // entries ever appended
    uint64_t tail;             // entries folded; [tail, head) stand in the ring
    uint64_t sequence;         // odd while a fold is under way
    uint64_t journal_bytes;    // bytes of the journal in force
    uint64_t journal_capacity;
    uint64_t batch;
    uint64_t recent_head;      // entries ever appended to the timeline
    uint64_t fold_ns;          // time spent folding
    uint64_t folded;           // records folded
    uint64_t lost;             // records that found no space for a node
    uint64_t deepest;          // largest depth with unclaimed time
    uint64_t child_ns[MAX_DEPTH];  // finished time at each depth not yet claimed by a parent
};
static_assert(sizeof(LaneHeader) <= PAGE_BYTES);

// A journal entry is {offset, bytes} and then `bytes` of old contents, padded to 8.
struct JournalEntry {
    uint64_t offset;           // from the start of the file
    uint64_t bytes;
};

struct SlotRow {               // one brick in one layer (or a step, or a tile level of a brick)
    uint32_t slot;
    uint32_t kind;             // SlotKind
    uint32_t name;             // string id
    int32_t brick;             // BrickId, -1: dynamic
    int32_t layer;             // -1: none
    uint32_t category;
    uint32_t level;            // tiles: 0 macro, 1 midi, 2 micro
    uint32_t owner;            // tiles: slot of the brick, 0xffffffff: none
};
static_assert(sizeof(SlotRow) == 32);

struct TraceRow {              // one kernel launch as it happened
    uint64_t trace;
    uint64_t parent;
    uint64_t kernel_hash;
    uint64_t stream;
    uint64_t entries;
    uint64_t timed;
    int64_t enqueue_ns;
    int64_t start_ns;
    int64_t end_ns;
    int64_t item;
    uint64_t input_checksum;
    uint64_t output_checksum;
    uint32_t name;
    uint32_t slot;             // 0xffffffff: none
    int32_t layer;
    uint32_t position;
    uint32_t ordinal;
    uint32_t rank;
    uint32_t process;
    uint32_t thread;
    int32_t device;
    uint32_t step;
    uint32_t clock_domain;
    int32_t worker;
    int32_t region;
    uint32_t params;           // string id
    uint32_t backend;          // string id
    uint8_t phase;
    uint8_t direction;         // 0 forward, 1 backward
    uint8_t has_checksums;     // bit 0 input, bit 1 output
    uint8_t reserved;
};
static_assert(sizeof(TraceRow) == 160);

// How long a launch took, where its caller said so. TraceRow has whole ns between two moments of the
// run's clock, so it cannot hold a part of a ns, nor a beginning before the clock's zero.
struct TraceTimeRow {          // written before the trace
    uint64_t trace;
    double time_us;
};
static_assert(sizeof(TraceTimeRow) == 16);

struct OperandRow {            // one tensor of one trace
    uint64_t trace;
    uint64_t tensor;
    uint64_t fingerprint;      // row of the fingerprint table + 1, 0: none
    uint32_t role;             // 0 input, 1 output, 2 both
    uint32_t index;
    uint32_t version;
    uint32_t dtype;            // string id
    uint32_t dimensions;
    uint32_t reserved;
    int64_t shape[8];
    int64_t strides[8];        // in elements
};
static_assert(sizeof(OperandRow) == 176);

// What is kept of one tensor: the table `Fingerprint`, and what a device writes. fingerprint.h says
// what each field is.
constexpr uint32_t SKETCH_BUCKETS = 64;
constexpr uint32_t STRIPES = 32;
constexpr uint32_t FINGERPRINT_DIMENSIONS = 12;
constexpr uint32_t FINGERPRINT_VERSION = 1;

struct FingerprintRow {
    uint64_t hash[2];
    double sketch[SKETCH_BUCKETS];
    float rows[STRIPES];
    float columns[STRIPES];
    double l1;
    double l2;
    double total;
    double absmax;
    double minimum;
    double maximum;
    uint64_t elements;
    uint64_t nan_count;
    uint64_t inf_count;
    int64_t first_nan;         // -1: none
    int64_t first_inf;
    uint64_t nonfinite_hash;
    uint64_t zeros;
    uint64_t subnormals;
    uint64_t saturated;
    uint32_t dtype;            // code of the element type, 0: no fingerprint
    uint32_t dimensions;
    int64_t shape[FINGERPRINT_DIMENSIONS];
    uint32_t version;
    uint32_t reserved;
};
static_assert(sizeof(FingerprintRow) == 1016);

struct StringRow {             // followed by `bytes` of UTF-8, padded to 8
    uint32_t id;
    uint32_t bytes;
};

struct FactRow {               // a named number noted during the run; the last one counts
    uint32_t name;
    uint32_t reserved;
    double value;
};
static_assert(sizeof(FactRow) == 16);

}  // namespace brickline
