// megakernel_lists.h: the warps of a CUDA worker that walk its list for the consumers: the clerk reads
// ahead and keeps the books, the watcher waits for other tasks.

#pragma once

#include "brickline/megakernel_entries.h"

namespace brickline {
namespace mega {

// --------------------------------------------------------------------------------------------- clerk

// A warp. It is up to MEGA_DEPTH entries ahead of the consumers, and writes down what became of those
// behind them.
class Clerk {
  public:
    __device__ Clerk(const MegaLaunch& launch, Shared& shared, unsigned char* slots)
        : m_launch(launch), m_shared(shared), m_slots(slots), m_lane(threadIdx.x % 32),
          m_begin(nanoseconds()) {}

    // While the arguments and waits of an entry are on their way, so is the task of the next one, which
    // says where its own are.
    __device__ void run() {
        m_first = m_launch.list_begin[blockIdx.x];
        m_length = m_launch.list_begin[blockIdx.x + 1] - m_first;
        m_even = load_list(0);
        m_odd = load_list(1);
        uint32_t words = load_words(number_at(0));
        Ahead before = {};
        for (uint32_t at = 0; at <= m_length && await_room(at); ++at) {
            const Ahead ahead = place(at, words);
            if (at < m_length) words = load_words(number_at(at + 1));
            if (at > 0) hand_over(at - 1, before);
            before = ahead;
            if (at == m_length) hand_over(at, ahead);
            if (at % 16 == 15) look_around();
        }
        while (!__all_sync(0xffffffff, is_over(m_shared.left))) {
            look_around();
            __nanosleep(500);
        }
        // What is not written yet of what they did, and the watcher before them.
        const uint32_t end = m_shared.progress.position + (m_shared.progress.blocks > 0 ? 1 : 0);
        while (m_written < end) {
            platform::wait_for_phase(&m_shared.taken[m_written % MEGA_DEPTH], (m_written / MEGA_DEPTH) & 1);
            write_down();
        }
        if (m_lane == 0) m_shared.progress.work = m_work;
    }

  private:
    // What is on its way for an entry, a part in each lane.
    struct Ahead {
        uint64_t argument;
        MegaWait wait;
    };

    __device__ uint32_t load_list(uint32_t chunk) const {
        const uint32_t at = chunk * 32 + m_lane;
        return at < m_length ? m_launch.lists[m_first + at] : MEGA_NONE;
    }

    // The task of an entry, each asked for after the other; MEGA_NONE after the last.
    __device__ uint32_t number_at(uint32_t at) {
        const bool is_odd = at / 32 % 2;
        if (at % 32 == 0 && at > 0) (is_odd ? m_even : m_odd) = load_list(at / 32 + 1);
        return __shfl_sync(0xffffffff, is_odd ? m_odd : m_even, at % 32);
    }

    __device__ uint32_t load_words(uint32_t number) {
        m_number = number;
        if (number == MEGA_NONE || m_lane >= sizeof(MegaTask) / 4) return 0;
        return __ldcg(reinterpret_cast<const uint32_t*>(m_launch.tasks + number) + m_lane);
    }

    // Whether there is an entry to write to; otherwise the consumers have left.
    __device__ bool await_room(uint32_t at) {
        if (at < MEGA_DEPTH) return true;
        uint64_t* const barrier = &m_shared.taken[at % MEGA_DEPTH];
        const uint32_t phase = (at / MEGA_DEPTH - 1) & 1;
        for (uint32_t tries = 1; !__all_sync(0xffffffff, platform::is_phase_over(barrier, phase)); ++tries) {
            if (tries % 4 != 0) continue;
            look_around();
            if (__any_sync(0xffffffff, is_over(m_shared.left))) return false;
        }
        write_down();
        __syncwarp();
        return true;
    }

    // Writes the task of an entry where others will find it, and asks for the rest.
    __device__ Ahead place(uint32_t at, uint32_t words) {
        Entry& entry = m_shared.entries[at % MEGA_DEPTH];
        const uint32_t number = m_number;
        Ahead ahead = {0, {MEGA_NONE, 0}};
        if (m_lane == 0) entry.number = number, entry.order = ORDER_RUN;
        if (m_lane < sizeof(MegaTask) / 4) reinterpret_cast<uint32_t*>(&entry.task)[m_lane] = words;
        __syncwarp();
        if (number == MEGA_NONE) return ahead;
        const MegaTask& task = entry.task;
        if (m_lane < task.arguments)
            ahead.argument = __ldcg(reinterpret_cast<const unsigned long long*>(
                m_launch.arguments + task.first_argument + m_lane));
        if (m_lane < MEGA_NEAR_WAITS && m_lane < task.waits)
            ahead.wait = load_wait(m_launch, task.first_wait + m_lane);
        return ahead;
    }

    __device__ void hand_over(uint32_t at, const Ahead& ahead) {
        Entry& entry = m_shared.entries[at % MEGA_DEPTH];
        if (entry.number != MEGA_NONE) {
            const MegaTask& task = entry.task;
            if (m_lane < task.arguments) entry.arguments[m_lane] = ahead.argument;
            if (m_lane < MEGA_NEAR_WAITS) entry.waits[m_lane] = ahead.wait;
            const MegaShare share =
                mega_share(task.blocks, task.first_worker, task.parts, blockIdx.x, m_launch.workers);
            if (m_lane == 0) entry.first = share.first, entry.last = share.last;
            __syncwarp();
            if ((task.flags & MEGA_STREAMS) && m_lane == 0) expect_rows(entry);
        }
        __syncwarp();
        platform::arrive_together(&m_shared.loaded[at % MEGA_DEPTH], m_lane == 0);
    }

    // Consumers write nothing but results, and nothing is written of an entry that went well: a signal
    // waits for all that is on its way to memory.
    __device__ void write_down() {
        if (m_lane == 0) {
            const Entry& entry = m_shared.entries[m_written % MEGA_DEPTH];
            m_work += entry.end - entry.ready;
            if (entry.executed != entry.last - entry.first)
                m_launch.executed[m_first + m_written] = entry.executed;
            if (m_launch.records) {
                MegaRecord& record = m_launch.records[m_first + m_written];
                record.begin = entry.begin;
                record.ready = entry.ready;
                record.end = entry.end;
                record.task = entry.number;
                record.blocks = entry.order == ORDER_SKIP ? 0 : entry.blocks;
            }
        }
        ++m_written;
    }

    // The producer comes to the same chunks in the same order.
    __device__ void expect_rows(Entry& entry) {
        const MegaTask& task = entry.task;
        RowSource& rows = entry.rows;
        rows.slots = m_slots;
        rows.full = m_shared.full;
        rows.empty = m_shared.empty;
        rows.matrix = reinterpret_cast<const void*>(entry.arguments[task.stream]);
        rows.slot_count = m_launch.ring_slots;
        rows.slot_bytes = m_launch.slot_bytes;
        rows.row_bytes = task.row_bytes;
        rows.rows = task.rows;
        rows.block_rows = task.block_rows;
        rows.chunk_rows = m_launch.slot_bytes / task.row_bytes;
        rows.block_chunks = (task.block_rows + rows.chunk_rows - 1) / rows.chunk_rows;
        rows.first_block = entry.first;
        rows.first_chunk = m_chunks;
        uint64_t chunks = 0;  // the last block may have fewer
        if (entry.first < entry.last) {
            const uint32_t last_rows = static_cast<uint32_t>(rows.count_of(entry.last - 1));
            chunks = uint64_t{entry.last - 1 - entry.first} * rows.block_chunks +
                     (last_rows + rows.chunk_rows - 1) / rows.chunk_rows;
        }
        m_chunks = static_cast<uint32_t>((m_chunks + chunks) % (2 * m_launch.ring_slots));
    }

    // The deadline, other workers, and the host, whose memory is far away: one worker asks it.
    // Consumers leave between two items. If they do not, the host is told where they are.
    __device__ void look_around() {
        if (m_lane == 0) {
            const uint64_t now = nanoseconds();
            if (m_stopped) {
                if (m_launch.grace_ns && now - m_stopped > m_launch.grace_ns && !m_is_hung) report_hung();
                __nanosleep(500);
            } else {
                uint32_t stops = load_relaxed(m_launch.stopped);
                if (m_launch.max_ns && now - m_begin > m_launch.max_ns) stops = 1;
                if (blockIdx.x == 0 && now - m_asked > 10000) {
                    m_asked = now;
                    stops |= load_of_host(m_launch.stop);
                }
                if (stops) {
                    if (blockIdx.x == 0) atomicExch(m_launch.stopped, 1u);
                    platform::arrive(&m_shared.stopped, 1);
                    m_stopped = now;
                }
            }
        }
        __syncwarp();
    }

    __device__ void report_hung() {
        MegaProgress& to = m_launch.progress[blockIdx.x];
        volatile uint32_t* const words = reinterpret_cast<volatile uint32_t*>(&to);
        words[2] = peek(m_shared.task);
        words[3] = peek(m_shared.block);
        __threadfence_system();
        words[0] = static_cast<uint32_t>(MegaState::Hung);
        __threadfence_system();
        m_is_hung = true;
    }

    const MegaLaunch& m_launch;
    Shared& m_shared;
    unsigned char* m_slots;
    uint32_t m_lane;
    uint32_t m_first = 0, m_length = 0;   // of the list
    uint32_t m_even = 0, m_odd = 0;       // two pieces of it, an entry in each lane
    uint32_t m_number = MEGA_NONE;        // the task whose words were asked for last
    uint32_t m_chunks = 0;   // that have passed through the ring, modulo two rounds
    uint32_t m_written = 0;  // entries of which it is known what was done
    uint64_t m_work = 0;
    uint64_t m_begin, m_asked = 0;
    uint64_t m_stopped = 0;  // when
    bool m_is_hung = false;
};

// -------------------------------------------------------------------------------------------- watcher

// A warp. It waits for other tasks, entry by entry, and does nothing else: while it is busy, an entry
// may wait that could begin.
class Watcher {
  public:
    __device__ Watcher(const MegaLaunch& launch, Shared& shared)
        : m_launch(launch), m_shared(shared), m_lane(threadIdx.x % 32),
          m_counters(peek_pointer(shared.counters)) {}

    __device__ void run() {
        uint64_t waited = 0;
        for (uint32_t turn = 0;; ++turn) {
            Entry& entry = m_shared.entries[turn % MEGA_DEPTH];
            const uint32_t phase = (turn / MEGA_DEPTH) & 1;
            bool is_loaded = platform::is_phase_over(&m_shared.loaded[turn % MEGA_DEPTH], phase);
            while (!__all_sync(0xffffffff, is_loaded)) {
                if (has_stopped()) break;  // the clerk may have ended
                is_loaded = platform::is_phase_over(&m_shared.loaded[turn % MEGA_DEPTH], phase);
            }
            if (!__all_sync(0xffffffff, is_loaded) || entry.number == MEGA_NONE) break;
            const uint64_t begin = clock64();
            const bool has_waited = await(entry, turn);
            const uint64_t ready = clock64();
            if (has_waited) waited += ready - begin;
            if (m_lane == 0) {
                entry.begin = begin;
                entry.ready = ready;
            }
            __syncwarp();
            platform::arrive_together(&m_shared.taken[turn % MEGA_DEPTH], m_lane == 0);
            if (m_leaves) break;
        }
        if (m_lane == 0) m_shared.progress.dependency_wait = waited;
    }

  private:
    // Says what is to be done with the entry, and that it is known. Returns whether any task was waited for.
    __device__ bool await(Entry& entry, uint32_t turn) {
        const uint32_t waits = entry.task.waits;
        uint64_t* const ready = &m_shared.ready[turn % MEGA_DEPTH];
        const bool stops = has_stopped();
        uint32_t order = ORDER_RUN;
        bool has_waited = false;
        for (uint32_t first = 0; first < waits && order != ORDER_LEAVE; first += 32) {
            const bool decides = first + 32 >= waits && order == ORDER_RUN && !stops;
            const uint32_t said = watch(wait_of(entry, first), turn, stops, has_waited, decides ? ready : nullptr);
            if (decides && said == ORDER_RUN) return has_waited;
            if (said != ORDER_RUN) order = said;
        }
        if (stops) order = ORDER_LEAVE;
        m_leaves = order == ORDER_LEAVE;
        if (m_lane == 0) {
            entry.order = order;
            platform::arrive(ready, 1);
        }
        return has_waited;
    }

    // Each lane watches one task; those beyond the last, the last.
    __device__ MegaWait wait_of(const Entry& entry, uint32_t first) const {
        const uint32_t waits = entry.task.waits, at = minimum(first + m_lane, waits - 1);
        return waits <= MEGA_NEAR_WAITS ? entry.waits[at] : load_wait(m_launch, entry.task.first_wait + at);
    }

    // Says at once that nothing is missing, where there is a barrier to say it: others wait for it. Where all
    // end, looks once, to know what is missing.
    __device__ uint32_t watch(const MegaWait& wait, uint32_t turn, bool stops, bool& has_waited, uint64_t* ready) {
        const uint32_t* const counter = m_counters + uint64_t{wait.task} * MEGA_COUNTER_STEP;
        for (uint32_t tries = 1;; ++tries) {
            // All lanes look, whether they have seen enough or not: a branch takes longer.
            const uint32_t value = load_acquire(counter);
            const bool is_ready = value - wait.parts < MEGA_FAULT_SIGNAL - wait.parts;  // and without a fault
            if (__all_sync(0xffffffff, is_ready)) {
                if (ready && m_lane == 0) platform::arrive(ready, 1);
                return ORDER_RUN;
            }
            if (__all_sync(0xffffffff, mega_arrivals(value) >= wait.parts)) return ORDER_SKIP;
            has_waited = true;
            if (tries > 64) rest(turn);
            if (stops || (tries % 8 == 0 && has_stopped())) {
                if (m_lane + 1 == static_cast<uint32_t>(__ffs(__ballot_sync(0xffffffff, !is_ready)))) {
                    m_shared.missing = wait.task;
                    m_shared.arrived = mega_arrivals(value);
                }
                __syncwarp();
                return ORDER_LEAVE;
            }
        }
    }

    __device__ bool has_stopped() const { return __any_sync(0xffffffff, is_over(m_shared.stopped)); }

    // As long as consumers are at the entry before, nobody is in a hurry.
    __device__ void rest(uint32_t turn) {
        if (turn == 0) return;
        const uint32_t before = turn - 1;
        platform::is_phase_over(&m_shared.taken[before % MEGA_DEPTH], (before / MEGA_DEPTH) & 1);
        __syncwarp();
    }

    const MegaLaunch& m_launch;
    Shared& m_shared;
    uint32_t m_lane;
    const uint32_t* m_counters;
    bool m_leaves = false;
};

}  // namespace mega
}  // namespace brickline
