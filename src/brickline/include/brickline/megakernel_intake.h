// megakernel_intake.h: the publisher's hand on a device: what it decides arrives here as commands and is
// applied to the tables of megakernel_queue.h, and what has finished goes back as completions.
//
//   host                                       device
//   commands   --- ring in the host's memory ---> intake --- tables ---> workers
//   publisher <--- ring in the host's memory ---  intake <-- lists of what has finished
//
// The host never touches the tables, so it never changes a word that others change, too. Each ring has one
// writer and one reader; what is in it counts from the moment at which its tail is stored. A batch is one
// chunk, or several of which the last says so: none of it runs before that one has been taken.
//
//   chunk:  MegaChunk | MegaCommand[jobs] | arguments, `stride` words of 8 bytes a job | ties, a word each
//           in lines of 64 bytes; never around the end of the ring, which a chunk without jobs fills up
//   completions:  MegaCompletion of a submission | one of each of its items that faulted
//
// The intake owns slots and edges that are free, and gives them out. It alone tells workers to leave: when
// the host says so, at the deadline, or when nothing has been open for a while. A launch that waits for
// work for ever would block whoever waits for the device; the host launches again with the next batch.
// Everything but what a launch is told lies in memory that outlives it.
//
// One text for CUDA and for tests on the host. `M` are atomics for the tables, `H` those for words that
// the host sees, `Team` the threads of the intake; on the host it is one.

#pragma once

#include "brickline/megakernel_queue.h"

namespace brickline {

inline constexpr uint32_t MEGA_LINE_BYTES = 64;
inline constexpr uint32_t MEGA_WAVE = 256;        // jobs that are applied at once
inline constexpr uint32_t MEGA_ALONE = 4;         // items or ties of a job that one thread deals with

// Written by the host alone.
struct alignas(64) MegaHostWords {
    uint32_t tail;           // lines of commands that are there, counted from the beginning
    uint32_t mode;           // MegaQueueMode that is wanted
    uint32_t stop;           // other than 0: Stopped, whoever says so
    uint32_t deadlines;      // counts deadlines that were set
    uint32_t left[2][2];     // ns until the last one, low half first; all ones: there is none. Even and
                             // odd ones in turn: who reads the last one may do so while the next is written
    uint32_t padding[8];
};

// Written by the intake alone.
struct alignas(64) MegaIntakeWords {
    uint32_t head;           // lines of commands that were taken
    uint32_t completions;    // that are there
    uint32_t mode;           // why workers leave: MegaQueueMode, and above 2 bits the number of the launch
    uint32_t resting;        // number of a launch that ends because nothing is open
    uint32_t begin[2];       // ns of the device's clock at the first batch of a report
    uint32_t now[2];         // the same, while workers are leaving
    uint32_t padding[8];
};

enum MegaChunkFlag : uint32_t {
    MEGA_LAST_CHUNK = 1,     // of its batch
    MEGA_FIRST_BATCH = 2,    // of a report
};

struct alignas(64) MegaChunk {
    uint32_t lines, jobs, flags, ties;
    uint32_t padding[12];
};

struct alignas(64) MegaCommand {
    uint32_t place, order, op, flags;
    uint32_t blocks, grid[3];
    uint32_t lanes, shared_bytes, priority;
    uint32_t outcome;        // other than 0: it is skipped
    uint32_t first_tie, ties;
    uint32_t follows;        // place of the submission that it is joined to, MEGA_NOTHING: none
    uint32_t padding[1];
};
static_assert(sizeof(MegaCommand) == MEGA_LINE_BYTES && sizeof(MegaChunk) == MEGA_LINE_BYTES);

// Of a submission: place, items done, faulted, skipped. Of an item that faulted: place, block, code, attempts.
struct alignas(16) MegaCompletion {
    uint32_t word[4];
};

// What a worker of a device has done; written by it alone.
struct alignas(64) MegaDeviceHand {
    uint64_t items, work_ns, wait_ns, idle_ns;
    uint64_t since;          // when its item began
    uint32_t inside;         // 1 while it executes one
    uint32_t slot, order, block;
    uint64_t records;        // of items, also those that found no room
};
static_assert(sizeof(MegaDeviceHand) == 64);

struct MegaItemRecord {
    uint64_t begin, ready, end;  // ns: nothing to do before, began, ended
    uint64_t order;
    uint32_t block, worker;
};

// What of the intake outlives a launch.
struct MegaIntakeState {
    uint32_t head, completions;
    uint32_t free_slots, free_edges;  // how many
    uint32_t staged;                  // submissions of a batch that is not complete
};

// What a launch is told. Pointers are the device's.
struct MegaQueueLaunch {
    MegaQueue queue;
    MegaIntakeState* intake;
    uint64_t* arguments;             // of each place
    uint32_t* free_slots;            // stacks
    uint32_t* free_edges;
    uint32_t* first_edge;            // of each place
    uint32_t* first_free;            // of each place: where its slots lay in the stack
    uint32_t* staged;                // places
    unsigned char* staging;          // one chunk
    MegaDeviceHand* hands;
    uint64_t* op_totals;             // of each worker and op: items, ns
    MegaItemRecord* records;         // null: none are taken
    const uint32_t* retry_codes;
    const MegaHostWords* host;       // in the host's memory, from here on
    MegaIntakeWords* words;
    const unsigned char* commands;
    MegaCompletion* completions;
    uint64_t rest_ns;                // so long nothing is open before workers leave
    uint32_t run;                    // number of this launch, from 1 on
    uint32_t is_fresh;               // the first since everything was made empty
    uint32_t command_lines, completion_mask;  // both powers of two; the second less 1
    uint32_t stride, ops, retry_limit, retry_count;
    uint32_t records_count;          // of each worker
    uint32_t delay_seed;
};

// What the threads of the intake share.
struct MegaIntakeShared {
    uint32_t free_slots, free_edges, completions;
    uint32_t tail, found;
    uint32_t is_over;
    uint32_t large;                  // jobs of a wave with more items, or ties, than one thread deals with:
    uint32_t place[MEGA_WAVE], first[MEGA_WAVE], count[MEGA_WAVE], more[MEGA_WAVE];
};

// Shared memory of a block: of a worker its own words, totals of the ops, the arguments of an item and the
// memory of an item, one after the other; of the intake what its threads share.
inline constexpr uint32_t MEGA_QUEUE_WORKER_BYTES = 1152;
BRICKLINE_INLINE constexpr uint32_t mega_queue_words_bytes(uint32_t ops, uint32_t stride) {
    return (16 * ops + 8 * stride + 127) / 128 * 128;
}
BRICKLINE_INLINE constexpr uint32_t mega_queue_shared_bytes(uint32_t ops, uint32_t stride, uint32_t item_bytes) {
    const uint32_t worker = MEGA_QUEUE_WORKER_BYTES + mega_queue_words_bytes(ops, stride) + item_bytes;
    return worker < sizeof(MegaIntakeShared) ? static_cast<uint32_t>(sizeof(MegaIntakeShared)) : worker;
}

template <class M, class H, class Team>
class MegaIntake {
public:
    BRICKLINE_INLINE MegaIntake(const MegaQueueLaunch& launch, MegaIntakeShared& shared, const Team& team)
        : m_launch(launch), m_queue(launch.queue), m_shared(shared), m_team(team),
          m_worker(launch.queue, launch.queue.workers, 0) {}

    // Until all workers have left.
    BRICKLINE_INLINE void run() {
        begin();
        for (;;) {
            if (m_team.thread == 0) look();
            m_team.sync();
            const uint32_t tail = m_shared.tail;
            const bool is_over = m_shared.is_over;
            const bool is_new = tail != m_head;
            m_team.sync();
            while (m_head != tail) take_chunk();
            // Slots of a batch that is not complete are known by where they lay among the free ones.
            if (m_staged == 0) collect();
            if (is_new && m_team.thread == 0) m_idle_since = 0;
            if (is_over) break;
        }
        if (m_team.thread == 0) {
            m_launch.intake->head = m_head;
            m_launch.intake->staged = m_staged;
            m_launch.intake->completions = m_shared.completions;
            m_launch.intake->free_slots = m_shared.free_slots;
            m_launch.intake->free_edges = m_shared.free_edges;
        }
    }

private:
    BRICKLINE_INLINE void begin() {
        const MegaIntakeState& state = *m_launch.intake;
        const bool is_fresh = m_launch.is_fresh;
        m_head = state.head;
        m_staged = state.staged;
        if (m_team.thread == 0) {
            m_shared.completions = state.completions;
            m_shared.free_slots = is_fresh ? m_queue.slots_count : state.free_slots;
            m_shared.free_edges = is_fresh ? m_queue.edges_count : state.free_edges;
            m_shared.is_over = m_shared.found = 0;
        }
        if (!is_fresh) return;
        for (uint32_t k = m_team.thread; k < m_queue.slots_count; k += m_team.threads) m_launch.free_slots[k] = k;
        for (uint32_t k = m_team.thread; k < m_queue.edges_count; k += m_team.threads) m_launch.free_edges[k] = k;
    }

    // ------------------------------------------------------------------------------- one thread: what to do

    BRICKLINE_INLINE void look() {
        const MegaHostWords& host = *m_launch.host;
        m_shared.tail = H::load(&host.tail);
        const bool found = m_shared.found;
        m_shared.found = 0;
        if (m_mode != MegaQueueMode::Running) {
            // What has finished was collected after the last of them left, and every command was taken.
            const bool have_left = M::load(&m_queue.control->left) == m_queue.workers;
            m_shared.is_over = m_have_left && !found && m_staged == 0 && m_shared.tail == m_head;
            m_have_left = have_left;
            tell_time(m_launch.words->now);
            return;
        }
        if (m_staged) return;  // the host is in the middle of a batch
        const uint64_t now = m_team.now_ns();
        if (H::load(&host.deadlines) != m_deadlines) read_deadline();
        const MegaQueueMode wanted = static_cast<MegaQueueMode>(H::load(&host.mode));
        if (H::load(&host.stop)) leave(MegaQueueMode::Stopped);
        else if (now >= m_deadline || wanted == MegaQueueMode::Expired) leave(MegaQueueMode::Expired);
        else if (found || m_shared.tail != m_head || M::load(&m_queue.control->open) != 0) m_idle_since = 0;
        else if (m_idle_since == 0) m_idle_since = now;
        else if (wanted == MegaQueueMode::Resting || now - m_idle_since >= m_launch.rest_ns) rest();
    }

    // Where another one comes meanwhile, that is read with the next look.
    BRICKLINE_INLINE void read_deadline() {
        const MegaHostWords& host = *m_launch.host;
        const uint32_t deadlines = H::load(&host.deadlines);
        const uint32_t* const words = host.left[deadlines & 1];
        const uint32_t low = H::load(words), high = H::load(words + 1);
        if (H::load(&host.deadlines) != deadlines) return;
        const uint64_t left = low | uint64_t{high} << 32, now = m_team.now_ns();
        m_deadline = left > ~now ? ~uint64_t{0} : now + left;
        m_deadlines = deadlines;
    }

    BRICKLINE_INLINE void leave(MegaQueueMode mode) {
        m_mode = mode;
        M::store(&m_queue.control->mode, static_cast<uint32_t>(mode));
        H::store(&m_launch.words->mode, m_launch.run << 2 | static_cast<uint32_t>(mode));
    }

    BRICKLINE_INLINE void tell_time(uint32_t* to) {
        const uint64_t now = m_team.now_ns();
        H::poke(to, static_cast<uint32_t>(now));
        H::poke(to + 1, static_cast<uint32_t>(now >> 32));
    }

    // The host stores its tail before it looks here; here it is the other way round. One sees the other.
    BRICKLINE_INLINE void rest() {
        H::store(&m_launch.words->resting, m_launch.run);
        m_team.fence();
        m_shared.tail = H::load(&m_launch.host->tail);
        if (m_shared.tail == m_head) {
            m_mode = MegaQueueMode::Resting;
            M::store(&m_queue.control->mode, static_cast<uint32_t>(m_mode));
        } else {
            H::store(&m_launch.words->resting, 0);
            m_idle_since = 0;
        }
    }

    // ------------------------------------------------------------------------------------------- commands

    struct View {  // of a chunk
        const MegaChunk* chunk;
        const MegaCommand* jobs;
        const uint64_t* arguments;
        const uint32_t* ties;
    };

    BRICKLINE_INLINE void take_chunk() {
        const uint32_t at = m_head % m_launch.command_lines;
        const unsigned char* const from = m_launch.commands + uint64_t{at} * MEGA_LINE_BYTES;
        m_team.copy(m_launch.staging, from, MEGA_LINE_BYTES);
        m_team.sync();
        const MegaChunk chunk = *reinterpret_cast<const MegaChunk*>(m_launch.staging);
        m_team.copy(m_launch.staging + MEGA_LINE_BYTES, from + MEGA_LINE_BYTES,
                    chunk.jobs ? (chunk.lines - 1) * MEGA_LINE_BYTES : 0);
        m_team.sync();
        m_head += chunk.lines;
        if (m_team.thread == 0) H::store(&m_launch.words->head, m_head);
        View view;
        view.chunk = &chunk;
        view.jobs = reinterpret_cast<const MegaCommand*>(m_launch.staging + MEGA_LINE_BYTES);
        view.arguments = reinterpret_cast<const uint64_t*>(view.jobs + chunk.jobs);
        view.ties = reinterpret_cast<const uint32_t*>(view.arguments + uint64_t{chunk.jobs} * m_launch.stride);
        for (uint32_t first = 0; first < chunk.jobs; first += wave()) apply(view, first);
        m_staged += chunk.jobs;
        if (chunk.jobs && (chunk.flags & MEGA_LAST_CHUNK)) commit(chunk.flags & MEGA_FIRST_BATCH);
    }

    BRICKLINE_INLINE uint32_t wave() const { return m_team.threads < MEGA_WAVE ? m_team.threads : MEGA_WAVE; }

    // Jobs of a wave: first all begin, then each is tied to those that it waits for, which began before it
    // or with it.
    BRICKLINE_INLINE void apply(const View& view, uint32_t first) {
        const uint32_t at = first + m_team.thread;
        const bool is_mine = m_team.thread < wave() && at < view.chunk->jobs;
        if (m_team.thread == 0) m_shared.large = 0;
        m_team.sync();
        uint32_t edges = 0;
        if (is_mine) {
            const MegaCommand& job = view.jobs[at];
            begin_job(job, view.arguments + uint64_t{at} * m_launch.stride);
            m_launch.staged[m_staged + at] = job.follows == MEGA_NOTHING ? job.place : MEGA_NOTHING;
            edges = m_team.take(&m_shared.free_edges, job.ties) - job.ties;
        }
        m_team.sync();
        for (uint32_t k = m_team.warp; k < m_shared.large; k += m_team.warps)
            for (uint32_t block = m_team.lane; block < m_shared.count[k]; block += m_team.lanes)
                publish(m_shared.place[k], m_shared.first[k], m_shared.count[k], block);
        m_team.sync();
        if (m_team.thread == 0) m_shared.large = 0;
        m_team.sync();
        if (is_mine) {
            const MegaCommand& job = view.jobs[at];
            const uint32_t* const ties = view.ties + job.first_tie;
            if (job.ties > MEGA_ALONE) {
                const uint32_t k = m_team.add(&m_shared.large, 1);
                m_shared.place[k] = at, m_shared.first[k] = edges;
            } else if (job.follows != MEGA_NOTHING && job.blocks > MEGA_ALONE) {
                m_shared.place[m_team.add(&m_shared.large, 1)] = at;
            } else {
                for (uint32_t k = 0; k < job.ties; ++k) follow(job, ties, edges, k);
                for (uint32_t k = 0; job.follows != MEGA_NOTHING && k < job.blocks; ++k) join(job, k);
            }
        }
        m_team.sync();
        for (uint32_t k = m_team.warp; k < m_shared.large; k += m_team.warps) {
            const MegaCommand& job = view.jobs[m_shared.place[k]];
            for (uint32_t each = m_team.lane; each < job.ties; each += m_team.lanes)
                follow(job, view.ties + job.first_tie, m_shared.first[k], each);
            for (uint32_t each = m_team.lane; job.follows != MEGA_NOTHING && each < job.blocks; each += m_team.lanes)
                join(job, each);
        }
        m_team.sync();
    }

    // One that is joined has no ties. Its slots and those of the other are where they lay among the free ones.
    BRICKLINE_INLINE void join(const MegaCommand& job, uint32_t block) {
        mega_join<M>(m_queue, m_launch.free_slots[m_launch.first_free[job.follows] + block],
                     m_launch.free_slots[m_launch.first_free[job.place] + block]);
    }

    BRICKLINE_INLINE void begin_job(const MegaCommand& job, const uint64_t* arguments) {
        MegaSubmission& submission = m_queue.submissions[job.place];
        submission.op = job.op;
        submission.flags = job.flags;
        submission.blocks = job.blocks;
        submission.grid[0] = job.grid[0], submission.grid[1] = job.grid[1], submission.grid[2] = job.grid[2];
        submission.lanes = job.lanes;
        submission.shared_bytes = job.shared_bytes;
        uint64_t* const to = m_launch.arguments + uint64_t{job.place} * m_launch.stride;
        for (uint32_t k = 0; k < m_launch.stride; ++k) to[k] = arguments[k];
        const uint32_t first = m_team.take(&m_shared.free_slots, job.blocks) - job.blocks;
        m_launch.first_free[job.place] = first;
        M::poke(m_launch.first_edge + job.place, MEGA_NOTHING);
        if (job.blocks <= MEGA_ALONE) {
            for (uint32_t block = 0; block < job.blocks; ++block) publish(job.place, first, job.blocks, block);
        } else {
            const uint32_t k = m_team.add(&m_shared.large, 1);
            m_shared.place[k] = job.place, m_shared.first[k] = first, m_shared.count[k] = job.blocks;
        }
        const uint32_t waits = job.follows == MEGA_NOTHING ? job.ties : MEGA_JOINED_WAITS;
        mega_begin<M>(m_queue, job.place, m_launch.free_slots[first], job.blocks, waits, job.order, job.priority);
        M::poke(&submission.outcome, job.outcome);
    }

    BRICKLINE_INLINE void publish(uint32_t place, uint32_t first, uint32_t blocks, uint32_t block) {
        const uint32_t next = block + 1 < blocks ? m_launch.free_slots[first + block + 1] : MEGA_NOTHING;
        mega_publish_item<M>(m_queue, m_launch.free_slots[first + block], place, block, next);
    }

    BRICKLINE_INLINE void follow(const MegaCommand& job, const uint32_t* ties, uint32_t edges, uint32_t number) {
        const uint32_t edge = m_launch.free_edges[edges + number], tie = ties[number];
        M::poke(&m_queue.edges[edge].sibling, M::exchange(m_launch.first_edge + job.place, edge));
        mega_follow<M>(m_queue, job.place, edge, tie & ~MEGA_VALUE, tie & MEGA_VALUE);
    }

    // From here on all of a batch runs. Workers admit nothing here: there are enough threads.
    BRICKLINE_INLINE void commit(bool is_first) {
        if (m_team.thread == 0) {
            if (is_first) tell_time(m_launch.words->begin);
            M::add(&m_queue.control->open, m_staged);
        }
        m_team.sync();
        for (uint32_t first = 0; first < m_staged; first += wave()) {
            if (m_team.thread == 0) m_shared.large = 0;
            m_team.sync();
            if (m_team.thread < wave() && first + m_team.thread < m_staged) {
                const uint32_t place = m_launch.staged[first + m_team.thread];
                if (place != MEGA_NOTHING) release(place);
            }
            m_team.sync();
            for (uint32_t k = m_team.warp; k < m_shared.large; k += m_team.warps)
                for (uint32_t block = m_team.lane; block < m_shared.count[k]; block += m_team.lanes)
                    put(m_launch.free_slots[m_shared.first[k] + block], m_shared.place[k], m_shared.more[k]);
            m_team.sync();
        }
        m_staged = 0;
    }

    BRICKLINE_INLINE void release(uint32_t place) {
        MegaSubmission& submission = m_queue.submissions[place];
        if (M::add(&submission.pending, ~0u) != 1) return;
        const uint32_t blocks = submission.blocks;
        if (blocks <= MEGA_ALONE || (submission.flags & MEGA_IN_ORDER) || M::peek(&submission.outcome) != 0) {
            m_worker.begin(place);
            return;
        }
        const uint32_t k = m_team.add(&m_shared.large, 1);
        m_shared.place[k] = M::peek(&submission.priority);
        m_shared.more[k] = M::peek(&submission.order);
        m_shared.first[k] = m_launch.first_free[place];
        m_shared.count[k] = blocks;
    }

    BRICKLINE_INLINE void put(uint32_t slot, uint32_t level, uint32_t order) {
        mega_put<M>(mega_ring_of(m_queue, level, slot), slot, order);
    }

    // -------------------------------------------------------------------------------------- what is finished

    BRICKLINE_INLINE void collect() {
        const uint32_t before = m_shared.completions;
        m_team.sync();
        for (uint32_t list = m_team.thread; list <= m_queue.workers; list += m_team.threads) {
            uint32_t place = mega_take_finished<M>(m_queue, list);
            if (place == MEGA_NOTHING) continue;
            while (place != MEGA_NOTHING) {
                const uint32_t next = M::peek(&m_queue.submissions[place].link);
                collect_one(place);
                place = next;
            }
            m_team.fence();
        }
        m_team.sync();
        if (m_shared.completions == before) return;
        if (m_team.thread == 0) {
            m_shared.found = 1;
            H::store(&m_launch.words->completions, m_shared.completions);
        }
    }

    BRICKLINE_INLINE void collect_one(uint32_t place) {
        const MegaSubmission& submission = m_queue.submissions[place];
        const uint32_t first = M::peek(&submission.first_slot);
        MegaCompletion found = {{place, submission.blocks, 0, 0}};
        if (M::peek(&submission.outcome) != 0) count(first, found);
        const uint32_t at = m_team.add(&m_shared.completions, 1 + found.word[2]);
        complete(at, found);
        if (found.word[2]) tell_faults(first, place, at + 1);
        for (uint32_t slot = first; slot != MEGA_NOTHING;) {
            const uint32_t next = M::peek(&m_queue.slots[slot].next);
            mega_recycle<M>(m_queue, slot);
            m_launch.free_slots[m_team.add(&m_shared.free_slots, 1)] = slot;
            slot = next;
        }
        for (uint32_t edge = M::peek(m_launch.first_edge + place); edge != MEGA_NOTHING;) {
            const uint32_t next = M::peek(&m_queue.edges[edge].sibling);
            m_launch.free_edges[m_team.add(&m_shared.free_edges, 1)] = edge;
            edge = next;
        }
    }

    BRICKLINE_INLINE void complete(uint32_t at, const MegaCompletion& found) {
        MegaCompletion& to = m_launch.completions[at & m_launch.completion_mask];
        m_team.write(to, found);
    }

    BRICKLINE_INLINE void count(uint32_t first, MegaCompletion& found) {
        found.word[1] = 0;
        for (uint32_t slot = first; slot != MEGA_NOTHING; slot = M::peek(&m_queue.slots[slot].next)) {
            const MegaSlot& item = m_queue.slots[slot];
            if (mega_state(M::load(&item.state)) == MegaItem::Done) ++found.word[1];
            else if (M::peek(&item.code) == MEGA_FAULT_SKIPPED) ++found.word[3];
            else ++found.word[2];
        }
    }

    BRICKLINE_INLINE void tell_faults(uint32_t first, uint32_t place, uint32_t at) {
        for (uint32_t slot = first; slot != MEGA_NOTHING; slot = M::peek(&m_queue.slots[slot].next)) {
            const MegaSlot& item = m_queue.slots[slot];
            const uint32_t word = M::load(&item.state), code = M::peek(&item.code);
            if (mega_state(word) == MegaItem::Done || code == MEGA_FAULT_SKIPPED) continue;
            complete(at++, {{place, M::peek(&item.block), code, mega_attempts(word)}});
        }
    }

    const MegaQueueLaunch& m_launch;
    const MegaQueue& m_queue;
    MegaIntakeShared& m_shared;
    const Team m_team;
    MegaWorker<M> m_worker;   // for what is over before it begins
    uint32_t m_head = 0, m_staged = 0;
    // Of one thread.
    MegaQueueMode m_mode = MegaQueueMode::Running;
    bool m_have_left = false;
    uint32_t m_deadlines = 0;
    uint64_t m_deadline = ~uint64_t{0}, m_idle_since = 0;
};

}  // namespace brickline
