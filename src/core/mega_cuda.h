// MegaCuda: runs a MegaProgram as one cooperative launch. Copies tables that changed to the device, in
// the stream of the run. Owns no memory of the device: addresses are handed to it.
#pragma once

#include "mega_program.h"

namespace brickline {

// Where things lie on the device, and how a worker is made.
struct MegaPlace {
    uint64_t function = 0;
    uint32_t threads = 0;          // of a worker, all kinds
    uint32_t dynamic_bytes = 0;    // of shared memory
    uint32_t ring_slots = 0, slot_bytes = 0;
    uint32_t item_bytes = 0;       // of shared memory for an item
    uint64_t tables = 0, tables_bytes = 0;
    uint64_t counters = 0;         // two sets, zero
    uint64_t faults = 0;           // zero
    uint64_t progress = 0;         // of the host, as the device sees it
    uint64_t stop = 0;             // of the host, as the device sees it
    uint64_t stopped = 0;          // zero
    uint64_t records = 0;          // 0: none are taken
    uint64_t executed = 0;         // a word for each entry of the lists
};

struct MegaLimits {
    uint64_t max_ns = 0, grace_ns = 0;
    uint32_t delay_seed = 0;
};

class MegaCuda {
  public:
    explicit MegaCuda(MegaProgram& program) : m_program(program) {}

    void place(const MegaPlace& place);
    // Bytes of tables that the next run copies to.
    uint64_t tables_bytes() const;
    // Enqueues a run.
    PlanOutcome run(uint64_t stream, const MegaLimits& limits);
    // Before the first run, and after one that was stopped or faulted: counters, faults and the workers'
    // word are zero, and nothing is known of entries.
    PlanOutcome clear(uint64_t stream);
    uint64_t uploaded_bytes() const { return m_uploaded; }
    uint64_t launches() const { return m_launches; }

  private:
    struct Offsets {
        uint64_t tasks, list_begin, lists, waits, arguments, end;
    };
    Offsets offsets() const;
    CUresult copy(uint64_t stream, uint64_t to, const void* from, uint64_t bytes);
    PlanOutcome upload(uint64_t stream);

    MegaProgram& m_program;
    MegaPlace m_place;
    uint64_t m_structure = 0, m_arguments = 0;  // versions on the device
    uint64_t m_uploaded = 0, m_launches = 0;
    uint32_t m_set = 0;  // of counters, for the next run
};

}  // namespace brickline
