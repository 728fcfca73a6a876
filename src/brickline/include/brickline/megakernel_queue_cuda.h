// megakernel_queue_cuda.h: a queue of a megakernel as blocks of one cooperative launch. For a generated
// unit, which says what an op is.
//
// Block 0 is the intake (megakernel_intake.h), every other one a worker. Its first warp looks for an item,
// a ring in each lane, and claims it; all threads execute it; the first thread finishes it.

#pragma once

#include "brickline/megakernel_device.h"
#include "brickline/megakernel_intake.h"

namespace brickline {
namespace mega_queue {

inline constexpr uint32_t LONGEST_REST_NS = 500;

using M = platform::DeviceAtomics;

using mega::nanoseconds;

// The threads of the intake.
struct Team {
    uint32_t thread = threadIdx.x, threads = blockDim.x;
    uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32;
    uint32_t lane = threadIdx.x % 32, lanes = 32;

    __device__ void sync() const { __syncthreads(); }
    // Before what the host, or another block, is told next.
    __device__ void fence() const { __threadfence_system(); }
    __device__ uint64_t now_ns() const { return nanoseconds(); }
    __device__ uint32_t take(uint32_t* word, uint32_t count) const { return atomicSub(word, count); }
    __device__ uint32_t add(uint32_t* word, uint32_t count) const { return atomicAdd(word, count); }
    __device__ void write(MegaCompletion& to, const MegaCompletion& from) const {
        __stcg(reinterpret_cast<uint4*>(&to), make_uint4(from.word[0], from.word[1], from.word[2], from.word[3]));
    }
    // From memory of the host, whose contents change from one chunk to the next.
    __device__ void copy(unsigned char* to, const unsigned char* from, uint32_t bytes) const {
        const uint4* const source = reinterpret_cast<const uint4*>(from);
        uint4* const target = reinterpret_cast<uint4*>(to);
        const uint32_t words = bytes / 16;
        for (uint32_t first = thread; first < words; first += 8 * threads) {
            uint4 held[8];
            BRICKLINE_UNROLL
            for (uint32_t k = 0; k < 8; ++k)
                if (first + k * threads < words) held[k] = __ldcv(source + first + k * threads);
            BRICKLINE_UNROLL
            for (uint32_t k = 0; k < 8; ++k)
                if (first + k * threads < words) target[first + k * threads] = held[k];
        }
    }
};

// What a worker's threads share. After it lie totals of the ops, the arguments, and the memory of items.
struct Shared {
    uint4 scratch[Place::SCRATCH_BYTES / sizeof(uint4)];
    uint32_t submission[sizeof(MegaSubmission) / 4];
    uint32_t slot, block;
    uint32_t fault;
    uint32_t padding;
};
static_assert(sizeof(Shared) <= MEGA_QUEUE_WORKER_BYTES);

template <class Ops>
class Worker {
  public:
    __device__ Worker(const MegaQueueLaunch& launch, unsigned char* memory)
        : m_launch(launch), m_queue(launch.queue), m_shared(*reinterpret_cast<Shared*>(memory)),
          m_totals(reinterpret_cast<uint64_t*>(memory + MEGA_QUEUE_WORKER_BYTES)),
          m_arguments(m_totals + 2 * launch.ops),
          m_memory(memory + MEGA_QUEUE_WORKER_BYTES + mega_queue_words_bytes(launch.ops, launch.stride)),
          m_number(blockIdx.x - 1), m_thread(threadIdx.x),
          m_worker(launch.queue, blockIdx.x - 1, launch.retry_limit) {}

    __device__ void run() {
        const uint64_t* const totals = m_launch.op_totals + uint64_t{2} * m_launch.ops * m_number;
        for (uint32_t k = m_thread; k < 2 * m_launch.ops; k += blockDim.x) m_totals[k] = totals[k];
        if (m_thread == 0) {
            m_hand = m_launch.hands[m_number];
            m_worker.resume();
        }
        m_free_since = nanoseconds();
        platform::make_barriers_of_parts();
        __syncthreads();
        for (;;) {
            if (m_thread < 32) fetch();
            __syncthreads();
            if (m_shared.slot == MEGA_NOTHING) break;
            const MegaSubmission& submission = *reinterpret_cast<const MegaSubmission*>(m_shared.submission);
            if (m_thread < submission.lanes && submission.op < m_launch.ops) execute(submission);
            __syncthreads();
            if (m_thread == 0) finish(submission);
        }
        if (m_thread == 0) M::add(&m_queue.control->left, 1);
    }

  private:
    // ----------------------------------------------------------------------------- the first warp: an item

    // Waits for an item and makes it this worker's; or for the word to leave.
    __device__ void fetch() {
        uint32_t slot, attempts, follower = m_follower;
        m_follower = MEGA_NOTHING;
        do {
            slot = follow(follower);
            follower = MEGA_NOTHING;
            if (slot == MEGA_NOTHING) slot = find();
            attempts = 0;
            if (slot != MEGA_NOTHING && m_thread == 0) attempts = m_worker.claim(slot);
            attempts = __shfl_sync(0xffffffff, attempts, 0);
        } while (slot != MEGA_NOTHING && attempts == MEGA_NOTHING);
        if (m_thread == 0) {
            m_shared.slot = slot;
            m_shared.fault = 0;
        }
        if (slot == MEGA_NOTHING) return;
        m_attempts = attempts;
        const MegaSlot& item = m_queue.slots[slot];
        const uint32_t place = M::peek(&item.submission);
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(m_queue.submissions + place);
        const uint64_t* const arguments = m_launch.arguments + uint64_t{place} * m_launch.stride;
        if (m_thread < sizeof(MegaSubmission) / 4) m_shared.submission[m_thread] = M::peek(words + m_thread);
        for (uint32_t k = m_thread; k < m_launch.stride; k += 32)
            m_arguments[k] = __ldcg(reinterpret_cast<const unsigned long long*>(arguments + k));
        __syncwarp();
        const MegaSubmission& submission = *reinterpret_cast<const MegaSubmission*>(m_shared.submission);
        m_order = submission.order;
        if (m_thread != 0) return;
        m_shared.block = M::peek(&item.block);
        delay(m_shared.block);
        m_hand.slot = slot, m_hand.order = submission.order, m_hand.block = m_shared.block;
        m_hand.since = nanoseconds();
        MegaDeviceHand& hand = m_launch.hands[m_number];
        hand.slot = slot, hand.order = submission.order, hand.block = m_shared.block;
        hand.since = m_hand.since;
        M::poke(&hand.inside, 1);
    }

    // The item that follows the last one, of which the first lane knows, where it is executed at once.
    __device__ uint32_t follow(uint32_t slot) {
        if (m_thread == 0 && slot != MEGA_NOTHING) {
            if (M::peek(&m_queue.control->mode) == static_cast<uint32_t>(MegaQueueMode::Running)) {
                slot = m_worker.follow(slot);
            } else {
                m_worker.put_back(slot);
                slot = MEGA_NOTHING;
            }
        }
        __syncwarp();  // what the first lane has read of the last item may be overwritten
        return __shfl_sync(0xffffffff, slot, 0);
    }

    // A slot that was popped, the same in all lanes; MEGA_NOTHING: leave.
    __device__ uint32_t find() {
        uint64_t from = 0;
        bool is_waiting = false;
        uint32_t slot = MEGA_NOTHING, rest_ns = 32;
        for (;;) {
            const uint32_t mode = m_thread == 0 ? M::peek(&m_queue.control->mode) : 0;
            uint32_t at = 0, value = 0, ring = 0;
            const uint32_t key = probe(at, value, ring);
            if (__shfl_sync(0xffffffff, mode, 0) != static_cast<uint32_t>(MegaQueueMode::Running)) break;
            const uint32_t best = __reduce_min_sync(0xffffffff, key);
            if (best != MEGA_NOTHING) {
                const uint32_t lane = __ffs(__ballot_sync(0xffffffff, key == best)) - 1;
                bool is_taken = false;
                if (m_thread == lane) is_taken = M::replace(m_queue.ready[ring].head, at, at + 1);
                if (__shfl_sync(0xffffffff, is_taken, lane)) {
                    slot = __shfl_sync(0xffffffff, value, lane);
                    ++m_picks;
                    break;
                }
                continue;
            }
            if (m_thread == 0 && from == 0) {
                from = nanoseconds();
                is_waiting = M::peek(&m_queue.control->open) != 0;
            }
            __nanosleep(rest_ns);
            rest_ns = rest_ns < LONGEST_REST_NS ? 2 * rest_ns : LONGEST_REST_NS;
        }
        if (m_thread == 0 && from != 0) note_rest(from, is_waiting);
        __syncwarp();
        return slot;
    }

    // Looks at the rings of this lane: how much the first item of one is wanted, the least is most.
    __device__ uint32_t probe(uint32_t& at, uint32_t& value, uint32_t& ring) const {
        const bool takes_oldest = (m_picks + 1) % MEGA_OLDEST_EVERY == 0;
        const uint32_t bits = m_queue.ring_bits, mask = (1u << bits) - 1;
        uint32_t key = MEGA_NOTHING;
        for (uint32_t each = m_thread; each < mega_rings(m_queue); each += 32) {
            const uint32_t head = M::peek(m_queue.ready[each].head);
            const MegaCell& cell = m_queue.ready[each].cells[head & m_queue.ready[each].mask];
            if (M::load(&cell.turn) != head + 1) continue;
            // Workers begin at different rings of a priority.
            const uint32_t found = takes_oldest ? M::peek(&cell.order) - m_order + (1u << 30)
                                                : (each >> bits) << bits | ((each + m_number) & mask);
            if (found >= key) continue;
            key = found, at = head, value = M::peek(&cell.value), ring = each;
        }
        return key;
    }

    __device__ void note_rest(uint64_t from, bool is_waiting) {
        const uint64_t now = nanoseconds();
        MegaDeviceHand& hand = m_launch.hands[m_number];
        if (is_waiting) hand.wait_ns = m_hand.wait_ns += now - from;
        else hand.idle_ns = m_hand.idle_ns += now - from, m_free_since = now;
    }

    // --------------------------------------------------------------------------------------- all: execution

    __device__ void execute(const MegaSubmission& submission) {
        Place place = {};
        const uint32_t block = m_shared.block;
        place.blocks[0] = submission.grid[0], place.blocks[1] = submission.grid[1], place.blocks[2] = submission.grid[2];
        place.index[0] = block % place.blocks[0];
        place.index[1] = block / place.blocks[0] % place.blocks[1];
        place.index[2] = block / place.blocks[0] / place.blocks[1];
        place.lanes = submission.lanes;
        place.lane = m_thread;
        place.barrier = submission.lanes < 32 ? platform::PART_OF_WARP : platform::ITEM_BARRIER;
        place.shared = m_memory;
        place.shared_bytes = submission.shared_bytes;
        place.scratch = m_shared.scratch;
        place.fault = &m_shared.fault;
        Block inside(place);
        Ops::run(submission.op, inside, m_arguments);
    }

    // ------------------------------------------------------------------------------------- the first thread

    __device__ void finish(const MegaSubmission& submission) {
        const uint64_t now = nanoseconds(), ns = now - m_hand.since;
        const bool is_known = submission.op < m_launch.ops;
        const uint32_t code = is_known ? m_shared.fault : uint32_t{MEGA_FAULT_UNKNOWN_OP};
        MegaDeviceHand& hand = m_launch.hands[m_number];
        M::poke(&hand.inside, 0);
        hand.items = ++m_hand.items;
        hand.work_ns = m_hand.work_ns += ns;
        if (is_known) {
            uint64_t* const totals = m_launch.op_totals + uint64_t{2} * (m_launch.ops * m_number + submission.op);
            totals[0] = ++m_totals[2 * submission.op];
            totals[1] = m_totals[2 * submission.op + 1] += ns;
        }
        if (m_launch.records) {
            const uint64_t at = m_hand.records++;
            hand.records = m_hand.records;
            if (at < m_launch.records_count)
                m_launch.records[uint64_t{m_number} * m_launch.records_count + at] = {
                    m_free_since, m_hand.since, now, submission.order, m_shared.block, m_number};
        }
        m_free_since = now;
        delay(m_shared.block + 7);
        m_follower = m_worker.finish(m_shared.slot, m_attempts, code, code != 0 && is_retried(code));
    }

    __device__ bool is_retried(uint32_t code) const {
        for (uint32_t k = 0; k < m_launch.retry_count; ++k)
            if (m_launch.retry_codes[k] == code) return true;
        return false;
    }

    __device__ void delay(uint32_t salt) const {
        if (m_launch.delay_seed == 0) return;
        uint32_t bits = (m_launch.delay_seed ^ salt * 0x9e3779b9u ^ (m_number + 1) * 0x85ebca6bu) + m_picks;
        bits *= 0xc2b2ae35u;
        bits ^= bits >> 15;
        if (bits % 4 == 0) __nanosleep(bits % 4000);
    }

    const MegaQueueLaunch& m_launch;
    const MegaQueue& m_queue;
    Shared& m_shared;
    uint64_t* m_totals;
    uint64_t* m_arguments;
    unsigned char* m_memory;
    const uint32_t m_number, m_thread;
    MegaWorker<M> m_worker;
    MegaDeviceHand m_hand = {};  // of the first thread, as it was written last
    uint64_t m_free_since = 0;
    uint32_t m_picks = 0, m_order = 0, m_attempts = 0;
    uint32_t m_follower = MEGA_NOTHING;  // of the first thread
};

template <class Ops>
__device__ void serve(const MegaQueueLaunch& launch) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    if (blockIdx.x == 0) {
        MegaIntakeShared& shared = *reinterpret_cast<MegaIntakeShared*>(dynamic);
        MegaIntake<M, platform::Atomics, Team>(launch, shared, Team()).run();
    } else {
        Worker<Ops>(launch, dynamic).run();
    }
}

}  // namespace mega_queue
}  // namespace brickline
