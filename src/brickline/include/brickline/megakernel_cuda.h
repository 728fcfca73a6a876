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

#include "brickline/kernel.h"
#include "brickline/megakernel.h"

namespace brickline {

inline constexpr uint32_t MEGA_DEPTH = 4;         // entries that the clerk is ahead
inline constexpr uint32_t MEGA_NEAR_WAITS = 8;    // of an entry that are read ahead
inline constexpr uint32_t MEGA_OP_BARRIER = 1;    // of the lanes of an item
inline constexpr uint32_t MEGA_ALL_BARRIER = 2;   // of all consumers
inline constexpr uint32_t MEGA_MAX_SLOTS = 32;

namespace mega {

// What consumers do with an entry.
enum Order : uint32_t { ORDER_RUN = 0, ORDER_SKIP = 1, ORDER_LEAVE = 2 };

// One entry of the list. Consumers are given it twice: when it is there, so that they know what comes,
// and when nothing is missing any more.
struct Entry {
    MegaTask task;
    uint32_t number;   // of the task; MEGA_NONE ends the list
    uint32_t first, last;
    uint32_t order;    // Order; what is said last
    uint64_t begin, ready, end;  // ticks: its turn came; nothing was missing any more; its items were done
    uint32_t blocks, executed;  // items that were come to, and those that were executed without a fault
    uint64_t arguments[MEGA_MAX_ARGUMENTS];
    MegaWait waits[MEGA_NEAR_WAITS];  // where it has no more
    RowSource rows;
};

struct Shared {
    uint4 scratch[Place::SCRATCH_BYTES / sizeof(uint4)];
    Entry entries[MEGA_DEPTH];
    uint64_t loaded[MEGA_DEPTH], ready[MEGA_DEPTH], taken[MEGA_DEPTH];
    uint64_t full[MEGA_MAX_SLOTS], empty[MEGA_MAX_SLOTS];
    uint32_t fault[3];          // of an item; take turns
    uint32_t stop;              // the clerk's word
    uint32_t leaves[2];         // what consumers agree on; take turns
    uint32_t have_left;         // consumers are done
    uint32_t task, block;       // where consumers are: items that are done of which task
    uint32_t missing, arrived;  // what the watcher waited for when it left
    uint64_t ring_wait;
    uint64_t counters;          // as in MegaLaunch
    MegaFault* faults;
    uint32_t delay_seed;
    MegaProgress progress;
};

// An argument of an op, from the word that holds its bits.
template <class T>
__device__ __forceinline__ T argument(uint64_t word) {
    T value;
    memcpy(&value, &word, sizeof(T));
    return value;
}
static_assert(sizeof(Shared) <= MEGA_WORKER_BYTES);

__device__ __forceinline__ uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ void make_barrier(uint64_t* barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t size_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
                 "r"(size_bytes)
                 : "memory");
}
// Reads by the threads of the block end before a copy overwrites what they read.
__device__ __forceinline__ void end_reads_before_copy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void copy_rows(void* to, const void* from, uint32_t size_bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(size_bytes), "r"(address(barrier))
        : "memory");
}
__device__ __forceinline__ void ask_for(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_of_host(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ MegaWait load_wait(const MegaLaunch& launch, uint32_t at) {
    const uint2 both = __ldcg(reinterpret_cast<const uint2*>(launch.waits + at));
    return {both.x, both.y};
}
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ uint32_t peek(const uint32_t& word) {
    return *reinterpret_cast<const volatile uint32_t*>(&word);
}
__device__ __forceinline__ uint32_t* peek_pointer(const uint64_t& word) {
    return reinterpret_cast<uint32_t*>(*reinterpret_cast<const volatile uint64_t*>(&word));
}
__device__ __forceinline__ void poke(uint32_t& word, uint32_t value) {
    *reinterpret_cast<volatile uint32_t*>(&word) = value;
}
// What seldom happens is not inlined: what others wait for stays short.

// For tests: now and then a worker takes its time.
__device__ __noinline__ void dawdle(uint32_t seed, uint32_t at, uint32_t block) {
    uint32_t bits = (seed ^ (at * 31 + block) * 0x9e3779b9u ^ (blockIdx.x + 1) * 0x85ebca6bu) * 0xc2b2ae35u;
    bits ^= bits >> 15;
    if (bits % 4 == 0) __nanosleep(bits % 4000);
}

// Of several blocks that fault, the first is reported.
__device__ __noinline__ void report_fault(uint32_t number, uint32_t block, uint32_t code) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    atomicMax(reinterpret_cast<unsigned long long*>(reinterpret_cast<Shared*>(dynamic)->faults + number),
              static_cast<unsigned long long>(~block) << 32 | code);
}

// Rows that an item of an entry did not ask for, but that are there. By the first group.
__device__ __noinline__ uint64_t drop_rows(uint32_t entry, uint32_t block) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const RowSource& rows = reinterpret_cast<Shared*>(dynamic)->entries[entry].rows;
    return rows.each_row(block, 0, 1, threadIdx.x, [](uint32_t, unsigned char*) {});
}

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
        while (!peek(m_shared.have_left)) {
            look_around();
            __nanosleep(500);
        }
        __syncwarp();
        // What is not written yet of what they did.
        const uint32_t end = m_shared.progress.position + (m_shared.progress.blocks > 0 ? 1 : 0);
        while (m_written < end) write_down();
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
            if (__any_sync(0xffffffff, peek(m_shared.have_left))) return false;
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
        if (m_lane == 0) platform::arrive(&m_shared.loaded[at % MEGA_DEPTH], 1);
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
                    poke(m_shared.stop, 1);
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
                if (__any_sync(0xffffffff, peek(m_shared.stop))) break;  // the clerk may have ended
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
                platform::arrive(&m_shared.taken[turn % MEGA_DEPTH], 1);
            }
            if (m_leaves) break;
        }
        if (m_lane == 0) m_shared.progress.dependency_wait = waited;
    }

  private:
    // Each lane watches one task. Returns whether any was waited for. Says what is to be done with the entry,
    // and that it is known: what follows the last look is as short as can be.
    __device__ bool await(Entry& entry, uint32_t turn) {
        const uint32_t waits = entry.task.waits;
        uint64_t* const ready = &m_shared.ready[turn % MEGA_DEPTH];
        uint32_t order = ORDER_RUN;
        bool has_waited = false;
        for (uint32_t first = 0; first == 0 || first < waits; first += 32) {
            const bool watches = first + m_lane < waits;
            MegaWait wait = {0, 0};
            if (watches)
                wait = waits <= MEGA_NEAR_WAITS ? entry.waits[m_lane]
                                                : load_wait(m_launch, entry.task.first_wait + first + m_lane);
            const uint32_t* const counter = m_counters + uint64_t{wait.task} * MEGA_COUNTER_STEP;
            const bool is_last = first + 32 >= waits && order == ORDER_RUN;
            uint32_t value = 0;
            bool is_ready = !watches;  // and without a fault
            if (peek(m_shared.stop)) order = ORDER_LEAVE;
            for (uint32_t tries = 1; !__any_sync(0xffffffff, order == ORDER_LEAVE); ++tries) {
                if (!is_ready) {
                    value = load_acquire(counter);
                    is_ready = value - wait.parts < MEGA_FAULT_SIGNAL - wait.parts;
                }
                if (__all_sync(0xffffffff, is_ready)) {
                    if (!is_last) break;
                    if (m_lane == 0) platform::arrive(ready, 1);
                    return has_waited;
                }
                if (__all_sync(0xffffffff, !watches || mega_arrivals(value) >= wait.parts)) {
                    order = ORDER_SKIP;
                    break;
                }
                has_waited = true;
                if (tries > 64) rest(turn);
                if (peek(m_shared.stop)) order = ORDER_LEAVE;
            }
            if (__any_sync(0xffffffff, order == ORDER_LEAVE)) {
                if (!is_ready) {
                    m_shared.missing = wait.task;
                    m_shared.arrived = mega_arrivals(value);
                }
                order = ORDER_LEAVE;
                m_leaves = true;
                break;
            }
        }
        __syncwarp();
        if (m_lane == 0) {
            entry.order = order;
            platform::arrive(ready, 1);
        }
        return has_waited;
    }

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
                        if (peek(shared.stop)) {
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
                const uint32_t code = peek(m_shared.fault[m_turn]);
                if (signals) add_release(counter, code ? 1 + MEGA_FAULT_SIGNAL : 1);
                faulted = note_fault(number, block, code);
                ++block;
                break;
            }
            const bool is_last = block + 1 >= last;
            if (!is_last && m_thread == 0) m_shared.leaves[block % 2] = peek(m_shared.stop);
            wait_all();
            faulted += note_fault(number, block, peek(m_shared.fault[m_turn]));
            if (m_delay_seed) dawdle(m_delay_seed, at, block);
            if (is_last && signals) add_release(counter, m_has_fault ? 1 + MEGA_FAULT_SIGNAL : 1);
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
            platform::arrive(&m_shared.taken[turn % MEGA_DEPTH], 1);
        }
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
        place.barrier = MEGA_OP_BARRIER;
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

    __device__ void wait_all() { platform::wait_at(MEGA_ALL_BARRIER, CONSUMERS); }

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
        __threadfence_block();
        poke(m_shared.have_left, 1);
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
    if (thread == 0) {
        for (uint32_t k = 0; k < MEGA_DEPTH; ++k) {
            make_barrier(&shared.loaded[k], 1);
            make_barrier(&shared.ready[k], 1);
            make_barrier(&shared.taken[k], 2);
        }
        for (uint32_t k = 0; k < launch.ring_slots; ++k) {
            make_barrier(&shared.full[k], 1);
            make_barrier(&shared.empty[k], RowSource::ARRIVALS);
        }
        shared.fault[0] = shared.fault[1] = shared.fault[2] = shared.stop = shared.have_left = 0;
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
