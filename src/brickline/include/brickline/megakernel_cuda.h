// megakernel_cuda.h: the loop of a CUDA block that is a worker of a megakernel. For a generated unit,
// which says what an op is.
//
// A worker has four kinds of threads. Consumers execute items. One warp, the clerk, reads the list ahead
// and keeps the books, so that consumers never look at memory that is not theirs. One warp, the watcher,
// waits for other tasks and tells consumers when nothing is missing. One warp produces: its first lane
// copies rows ahead of the items that read them, in the order of the list, and waits for nothing but
// room. What it copies is written by nobody during a run, so it may run ahead of every wait: data are on
// their way while a worker waits for its turn.

#pragma once

#include "brickline/megakernel_lists.h"

namespace brickline {
namespace mega {

// ------------------------------------------------------------------------------------------- producer

// One thread. A chunk has a slot to itself and is never more than one block's.
__device__ inline void produce(const MegaLaunch& launch, Shared& shared, unsigned char* slots) {
    const uint32_t begin = launch.list_begin[blockIdx.x], end = launch.list_begin[blockIdx.x + 1];
    uint32_t slot = 0, phase = 1, used = 0;  // the first round finds every slot empty
    uint64_t waited = 0;
    bool stops = false;
    for (uint32_t at = begin; at < end && !stops; ++at) {
        const MegaTask& task = launch.tasks[launch.lists[at]];
        if (!(task.flags & MEGA_STREAMS)) continue;
        const MegaShare share =
            mega_share(task.blocks, task.first_worker, task.parts, blockIdx.x, launch.workers);
        const unsigned char* const matrix =
            reinterpret_cast<const unsigned char*>(launch.arguments[task.first_argument + task.stream]);
        const uint32_t chunk_rows = launch.slot_bytes / task.row_bytes;
        for (uint32_t block = share.first; block < share.last && !stops; ++block) {
            const uint64_t first = uint64_t{block} * task.block_rows;
            const uint64_t last = minimum(first + task.block_rows, uint64_t{task.rows});
            for (uint64_t row = first; row < last; row += chunk_rows) {
                if (!platform::is_phase_over(&shared.empty[slot], phase)) {
                    const uint64_t before = clock64();
                    while (!platform::is_phase_over(&shared.empty[slot], phase)) {
                        if (is_over(shared.stopped)) {
                            stops = true;
                            break;
                        }
                    }
                    waited += clock64() - before;
                }
                if (stops) break;
                const uint32_t bytes =
                    static_cast<uint32_t>(minimum(last - row, uint64_t{chunk_rows})) * task.row_bytes;
                end_reads_before_copy();
                expect_bytes(&shared.full[slot], bytes);
                copy_rows(slots + slot * launch.slot_bytes, matrix + row * task.row_bytes, bytes,
                          &shared.full[slot]);
                if (++slot == launch.ring_slots) slot = 0, phase ^= 1;
                ++used;
            }
        }
    }
    // A copy ends before its block does, whether somebody waits for it or not.
    const uint32_t open = used < launch.ring_slots ? used : launch.ring_slots;
    for (uint32_t k = 0; k < open; ++k) {
        if (slot == 0) slot = launch.ring_slots, phase ^= 1;
        --slot;
        platform::wait_for_phase(&shared.full[slot], phase ^ 1);
    }
    shared.ring_wait = waited;
}

// ------------------------------------------------------------------------------------------ consumers

template <uint32_t CONSUMERS, class Ops>
class Consumer {
  public:
    __device__ Consumer(const MegaLaunch& launch, Shared& shared, unsigned char* memory)
        : m_launch(launch), m_shared(shared), m_memory(memory), m_thread(threadIdx.x),
          m_counters(peek_pointer(shared.counters)), m_delay_seed(peek(shared.delay_seed)) {}

    __device__ void run() {
        const uint32_t begin = m_launch.list_begin[blockIdx.x];
        uint32_t turn = 0;
        for (;; ++turn) {
            platform::wait_for_phase(&m_shared.loaded[turn % MEGA_DEPTH], (turn / MEGA_DEPTH) & 1);
            Entry& entry = m_shared.entries[turn % MEGA_DEPTH];
            if (entry.number == MEGA_NONE || !execute(entry, begin + turn, turn)) break;
        }
        if (m_thread == 0) note(begin, turn);
    }

  private:
    // Returns whether all of its items are done.
    __device__ bool execute(Entry& entry, uint32_t at, uint32_t turn) {
        const uint32_t number = entry.number, first = entry.first, last = entry.last;
        const uint32_t lanes = entry.task.lanes, flags = entry.task.flags, op = entry.task.op;
        uint32_t* const counter = m_counters + uint64_t{number} * MEGA_COUNTER_STEP;
        const Place place = place_of(entry);
        const bool has_fault = (flags & MEGA_JOINED) && m_has_fault;
        const bool signals = m_thread == 0 && (flags & MEGA_SIGNALS);
        const bool is_single = first + 1 == last && !has_fault && !m_delay_seed;
        if (m_thread == 0) m_shared.task = number, m_shared.block = 0;
        platform::wait_for_phase(&m_shared.ready[turn % MEGA_DEPTH], (turn / MEGA_DEPTH) & 1);
        // From here to the signal others wait. One item and nothing unusual: the shortest way.
        uint32_t order = entry.order, block = first, faulted = 0;
        const bool is_plain = is_single && order == ORDER_RUN;
        bool leaves = false;
        m_has_fault = has_fault;
        if (!is_plain) {
            if (order == ORDER_LEAVE) {
                m_blocks = 0;
                return false;
            }
            if (has_fault || order == ORDER_SKIP) {
                m_has_fault = true;
                order = ORDER_SKIP;
            }
            if (m_delay_seed) dawdle(m_delay_seed, at, last);
        }
        for (;;) {
            if (m_thread < lanes && block < last) run_item(entry, op, flags, place, block, order, turn % MEGA_DEPTH);
            if (is_plain) {
                wait_all();
                if (signals) signal(counter, peek(m_shared.fault[m_turn]));
                faulted = note_fault(number, block, peek(m_shared.fault[m_turn]));
                ++block;
                break;
            }
            const bool is_last = block + 1 >= last;
            if (!is_last && m_thread == 0) m_shared.leaves[block % 2] = is_over(m_shared.stopped);
            wait_all();
            faulted += note_fault(number, block, peek(m_shared.fault[m_turn]));
            if (m_delay_seed) dawdle(m_delay_seed, at, block);
            if (is_last && signals) signal(counter, m_has_fault);
            leaves = !is_last && m_shared.leaves[block % 2];
            if (first < last) ++block;
            if (is_last || leaves) break;
            if (m_thread == 0) m_shared.block = block - first;
            take_turns();
        }
        take_turns();
        if (m_thread == 0) {
            const uint64_t end = clock64();
            (order == ORDER_SKIP ? m_skipped : m_items) += block - first;
            m_blocks = block - first;
            entry.end = end;
            entry.blocks = block - first;
            entry.executed = order == ORDER_SKIP ? 0 : block - first - faulted;
        }
        platform::arrive_together(&m_shared.taken[turn % MEGA_DEPTH], m_thread == 0);
        return !leaves;
    }

    // After the barrier behind an item.
    __device__ uint32_t note_fault(uint32_t number, uint32_t block, uint32_t code) {
        if (code == 0) return 0;
        m_has_fault = true;
        if (m_thread == 0) report_fault(number, block, code);
        return 1;
    }

    // Whoever is ahead of this thread is at the next item and its word, and not at the one after it.
    __device__ void take_turns() {
        m_turn = m_turn == 2 ? 0 : m_turn + 1;
        if (m_thread == 0) m_shared.fault[m_turn == 2 ? 0 : m_turn + 1] = 0;
    }

    // All that the items of an entry have in common.
    __device__ Place place_of(const Entry& entry) const {
        const MegaTask& task = entry.task;
        Place place = {};
        place.blocks[0] = task.grid[0], place.blocks[1] = task.grid[1], place.blocks[2] = task.grid[2];
        place.lanes = task.lanes;
        place.lane = m_thread;
        place.barrier = platform::ITEM_BARRIER;
        place.shared = m_memory;
        place.shared_bytes = task.shared_bytes;
        place.scratch = m_shared.scratch;
        place.rows = task.flags & MEGA_STREAMS ? &entry.rows : nullptr;
        return place;
    }

    __device__ void run_item(const Entry& entry, uint32_t op, uint32_t flags, const Place& common, uint32_t block,
                             uint32_t order, uint32_t place_of_entry) {
        bool has_rows = false;
        if (order == ORDER_RUN) {
            Place place = common;
            place.fault = &m_shared.fault[m_turn];
            place.index[0] = block;
            if (place.blocks[1] * place.blocks[2] != 1) {
                place.index[0] = block % place.blocks[0];
                place.index[1] = block / place.blocks[0] % place.blocks[1];
                place.index[2] = block / place.blocks[0] / place.blocks[1];
            }
            Block inside(place);
            Ops::run(op, inside, entry.arguments);
            has_rows = inside.has_rows();
            m_data_wait += inside.waited();
        }
        if ((flags & MEGA_STREAMS) && !has_rows && m_thread < GROUP_LANES) m_data_wait += drop_rows(place_of_entry, block);
    }

    // Others wait for what follows it: where all are one warp, a named barrier takes too long.
    __device__ void wait_all() {
        if constexpr (CONSUMERS == 32) {
            platform::wait_in_group();
        } else {
            platform::wait_at(platform::CONSUMER_BARRIER, CONSUMERS);
        }
    }

    __device__ void note(uint32_t begin, uint32_t position) {
        MegaProgress& to = m_shared.progress;
        const uint32_t length = m_launch.list_begin[blockIdx.x + 1] - begin;
        to.state = static_cast<uint32_t>(position < length ? MegaState::Stopped : MegaState::Finished);
        to.position = position;
        to.task = position < length ? m_launch.lists[begin + position] : MEGA_NONE;
        to.blocks = position < length ? m_blocks : 0;
        to.items = m_items;
        to.skipped = m_skipped;
        to.data_wait = m_data_wait;
        platform::arrive(&m_shared.left, 1);
    }

    const MegaLaunch& m_launch;
    Shared& m_shared;
    unsigned char* m_memory;
    uint32_t m_thread;
    uint32_t* m_counters;
    uint32_t m_delay_seed;
    uint64_t m_items = 0, m_skipped = 0, m_data_wait = 0;
    uint32_t m_turn = 0;       // of the words for faults
    bool m_has_fault = false;  // an item of this entry, or of an earlier one of its region
    uint32_t m_blocks = 0;
};

// The whole worker: CONSUMERS threads that execute, 96 that do not.
template <uint32_t CONSUMERS, class Ops>
__device__ void work(const MegaLaunch& launch) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    unsigned char* const memory = dynamic + MEGA_WORKER_BYTES;
    unsigned char* const slots = memory + (launch.shared_bytes + 127) / 128 * 128;
    const uint32_t thread = threadIdx.x;
    // Tables are asked for at once: in the lists, one look leads to the next.
    const uint64_t line = (uint64_t{blockIdx.x} * blockDim.x + thread) * 128;
    if (line < launch.tables_bytes) ask_for(reinterpret_cast<const unsigned char*>(launch.tasks) + line);
    platform::make_barriers_of_parts();
    if (thread == 0) {
        for (uint32_t k = 0; k < MEGA_DEPTH; ++k) {
            platform::make_barrier(&shared.loaded[k], platform::arrivals_of(32));
            platform::make_barrier(&shared.ready[k], 1);
            platform::make_barrier(&shared.taken[k], platform::arrivals_of(32) + platform::arrivals_of(CONSUMERS));
        }
        for (uint32_t k = 0; k < launch.ring_slots; ++k) {
            platform::make_barrier(&shared.full[k], 1);
            platform::make_barrier(&shared.empty[k], RowSource::ARRIVALS * platform::arrivals_of(32));
        }
        platform::make_barrier(&shared.stopped, 1);
        platform::make_barrier(&shared.left, 1);
        shared.fault[0] = shared.fault[1] = shared.fault[2] = 0;
        shared.leaves[0] = shared.leaves[1] = 0;
        shared.missing = shared.task = MEGA_NONE;
        shared.block = shared.arrived = 0;
        shared.ring_wait = 0;
        shared.counters = reinterpret_cast<uint64_t>(launch.counters);
        shared.delay_seed = launch.delay_seed;
        shared.faults = launch.faults;
        shared.progress = {};
        shared.progress.begin_ns = nanoseconds();
        shared.progress.begin = clock64();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    for (uint32_t i = blockIdx.x * blockDim.x + thread; i < launch.tasks_count; i += gridDim.x * blockDim.x)
        launch.next_counters[uint64_t{i} * MEGA_COUNTER_STEP] = 0;
    __syncthreads();
    if (thread < CONSUMERS) {
        Consumer<CONSUMERS, Ops>(launch, shared, memory).run();
    } else if (thread < CONSUMERS + 32) {
        Watcher(launch, shared).run();
    } else if (thread < CONSUMERS + 64) {
        Clerk(launch, shared, slots).run();
    } else if (thread == CONSUMERS + 64 && launch.ring_slots) {
        produce(launch, shared, slots);
    }
    __syncwarp();
    __syncthreads();
    if (thread == 0) {
        MegaProgress& progress = shared.progress;
        progress.end = clock64();
        progress.end_ns = nanoseconds();
        progress.ring_wait = shared.ring_wait;
        progress.missing = shared.missing;
        progress.arrived = shared.arrived;
        launch.progress[blockIdx.x] = progress;
    }
}

}  // namespace mega
}  // namespace brickline
