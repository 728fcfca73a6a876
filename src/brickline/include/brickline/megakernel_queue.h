// megakernel_queue.h: a queue of items that is fed while workers execute it. What it is made of and
// every step that anybody takes on it; one text for CPU threads and CUDA blocks.
//
// A submission is one launch; each of its blocks is an item and has a slot. The state of a slot:
//
//     Empty --publish--> Published --claim--> Claimed --> Done -----recycle--> Empty
//                            |                 ^   |----> Faulted --recycle--> Empty
//                            |           claim |   v
//                            |                Requeued --cancel--> Faulted
//                            `--skip, cancel--> Faulted
//
// The publisher fills slots and submissions, ties each submission to those that it waits for, and
// commits a batch with one step: before it nothing of the batch can run, after it all of it will. Any
// worker admits what was committed. A submission that waits for nothing any more goes to the ring of its
// priority, item by item, pushed by whoever finished what it waited for last. Who pops an item claims
// its slot, executes it and finishes it; who finishes the last item of a submission releases those that
// wait for it, and hands the submission back to the publisher, who recycles its slots.
//
// A submission may be joined to one of its batch that it waits for, where block k needs what block k of
// that one writes, and nothing of its other blocks. It waits for nobody else then: who finishes an item
// goes on with the item that follows it. So a chain is one region, which goes through no ring. Every few
// items the next one goes to its ring all the same, because something more urgent may be there.
//
// An item that faults is reported. What reads what it should have written is skipped, and so on; what
// only overwrites it is not. Of submissions that are joined, that is decided item by item.
//
// Rings hold as many entries as there are slots, and a slot is in one ring at most: a push always finds
// room. No step waits for another worker: one that finds nothing says so. A priority may have several
// rings, among which slots are divided, so that many workers do not all want the head of one.
//
// `M` is platform::Atomics, or what explores all orders of its steps. One publisher: it alone publishes,
// commits and recycles; on a device that is the intake (megakernel_intake.h), which admits, too. Knows
// nothing of clocks, threads and ops.

#pragma once

#include "brickline/platform.h"  // integers of fixed width, for NVRTC too

namespace brickline {

inline constexpr uint32_t MEGA_NOTHING = 0xffffffff;  // no slot, no submission, no edge
inline constexpr uint32_t MEGA_CLOSED = 0xfffffffe;   // a list of dependents that takes no more
inline constexpr uint32_t MEGA_PRIORITIES = 5;        // 0 is the most urgent
inline constexpr uint32_t MEGA_OLDEST_EVERY = 8;      // of so many picks one takes the oldest item
inline constexpr uint32_t MEGA_FOLLOWED_AT_ONCE = 8;  // items of a region, then others have their turn
inline constexpr uint32_t MEGA_MAX_RING_BITS = 3;     // of a priority at most 8 rings
inline constexpr uint32_t MEGA_ADMITTED_AT_ONCE = 64; // submissions, then a worker looks whether to leave
inline constexpr uint32_t MEGA_MAX_SLOTS_OF_QUEUE = 1u << 24;

enum class MegaItem : uint32_t {
    Empty = 0,
    Published = 1,
    Claimed = 2,
    Done = 3,
    Requeued = 4,
    Faulted = 5,
};
inline constexpr uint32_t MEGA_ITEM_STATES = 6;

BRICKLINE_INLINE constexpr bool mega_is_legal(MegaItem from, MegaItem to) {
    switch (from) {
        case MegaItem::Empty: return to == MegaItem::Published;
        case MegaItem::Published: return to == MegaItem::Claimed || to == MegaItem::Faulted;
        case MegaItem::Claimed:
            return to == MegaItem::Done || to == MegaItem::Requeued || to == MegaItem::Faulted;
        case MegaItem::Requeued: return to == MegaItem::Claimed || to == MegaItem::Faulted;
        case MegaItem::Done:
        case MegaItem::Faulted: return to == MegaItem::Empty;
    }
    return false;
}

// Codes of items beside those of Block (kernel.h) and of kernels.
enum MegaFaultCode : uint32_t {
    MEGA_FAULT_UNKNOWN_OP = 8,
    MEGA_FAULT_SKIPPED = 9,     // something that it reads was never written
    MEGA_FAULT_CANCELLED = 10,  // its queue was cleared
};

// Whether workers go on; any other value than the first makes them leave between two items.
enum class MegaQueueMode : uint32_t {
    Running = 0,
    Expired = 1,
    Stopped = 2,
    Resting = 3,  // nothing is open; on a device, which they keep from others
};

enum MegaSubmissionFlag : uint32_t {
    MEGA_IN_ORDER = 1,  // one item after the other: they add to the same memory
    MEGA_PURE = 2,      // equal inputs give equal outputs, which are all that it writes
};

struct alignas(32) MegaSlot {
    uint32_t state;       // MegaItem in the lowest 8 bits, attempts that failed above
    uint32_t submission;
    uint32_t block;
    uint32_t next;        // slot of the submission's next item
    uint32_t code;        // of a fault
    uint32_t follower;    // slot of the item that is executed after it: the same block of what is joined to it
    uint32_t reserved[2];
};
static_assert(sizeof(MegaSlot) == 32);

struct alignas(64) MegaSubmission {
    uint32_t pending;     // submissions that it waits for, and 1 until it is admitted
    uint32_t remaining;   // items that are not finished
    uint32_t dependents;  // the first edge to one that waits for it, or MEGA_CLOSED: it is finished
    uint32_t outcome;     // 0, or why what it writes is not to be read
    uint32_t link;        // the next of a batch, of a list of finished ones
    uint32_t first_slot;
    uint32_t order;       // of submission, for ageing
    uint32_t priority;
    // What to execute; written before it is committed, and read alone from then on.
    uint32_t op;
    uint32_t flags;       // MegaSubmissionFlag
    uint32_t blocks;
    uint32_t grid[3];
    uint32_t lanes;
    uint32_t shared_bytes;
};
static_assert(sizeof(MegaSubmission) == 64);

// One submission waits for another. It belongs to the one that waits.
struct MegaEdge {
    uint32_t next;        // of the same producer
    uint32_t waiter;      // and MEGA_VALUE where it reads what the producer writes
    uint32_t sibling;     // the publisher's own: the next of the same waiter
};
inline constexpr uint32_t MEGA_VALUE = 1u << 31;

struct MegaCell {
    uint32_t turn;        // position of its last entry, plus 1
    uint32_t value;
    uint32_t order;
    uint32_t reserved;
};

// A bounded queue for many writers and readers. Positions count on and on; cells are taken in turn.
struct MegaRing {
    uint32_t* head;       // the next to be popped
    uint32_t* tail;       // the next to be pushed
    MegaCell* cells;
    uint32_t mask;        // cells, a power of two, less 1
};

struct alignas(64) MegaControl {
    uint32_t mode;        // MegaQueueMode
    uint32_t left;        // workers of a device that have left
    uint32_t padding[14];
    uint32_t open;        // submissions that are committed and not finished
    uint32_t more_padding[15];
    uint32_t violations;  // steps that found a state which they must not find; 0 in a sound queue
    uint32_t violated_slot, violated_state;
    uint32_t last_padding[13];
};
static_assert(sizeof(MegaControl) == 192);

// Where everything lies; never changes.
struct MegaQueue {
    MegaControl* control;
    MegaSlot* slots;
    MegaSubmission* submissions;
    MegaEdge* edges;
    uint32_t* finished;       // of each worker, a list of submissions; MEGA_FINISHED_STEP words apart. After
                              // it, how many items it has skipped and put back since it was made
    MegaRing inbox;           // first submissions of batches that are committed
    MegaRing ready[MEGA_PRIORITIES << MEGA_MAX_RING_BITS];  // of a priority 1 << ring_bits, one after the other
    uint32_t slots_count, submissions_count, edges_count, workers;
    uint32_t ring_bits;
};
inline constexpr uint32_t MEGA_FINISHED_STEP = 16;
inline constexpr uint32_t MEGA_SKIPPED_WORD = 1, MEGA_REQUEUED_WORD = 2;

BRICKLINE_INLINE uint32_t mega_rings(const MegaQueue& queue) { return MEGA_PRIORITIES << queue.ring_bits; }
BRICKLINE_INLINE const MegaRing& mega_ring_of(const MegaQueue& queue, uint32_t level, uint32_t slot) {
    return queue.ready[level << queue.ring_bits | (slot & ((1u << queue.ring_bits) - 1))];
}

BRICKLINE_INLINE MegaItem mega_state(uint32_t word) { return static_cast<MegaItem>(word & 0xff); }
BRICKLINE_INLINE uint32_t mega_attempts(uint32_t word) { return word >> 8; }
BRICKLINE_INLINE uint32_t mega_word(MegaItem state, uint32_t attempts) {
    return static_cast<uint32_t>(state) | attempts << 8;
}

// ---------------------------------------------------------------------------------------------- rings

// False where the ring is full, which no sound queue sees.
template <class M>
BRICKLINE_INLINE bool mega_push(const MegaRing& ring, uint32_t value, uint32_t order) {
    for (;;) {
        const uint32_t at = M::load(ring.tail);
        if (static_cast<int32_t>(at - M::load(ring.head)) > static_cast<int32_t>(ring.mask)) return false;
        if (!M::replace(ring.tail, at, at + 1)) continue;
        MegaCell& cell = ring.cells[at & ring.mask];
        M::poke(&cell.value, value);
        M::poke(&cell.order, order);
        M::store(&cell.turn, at + 1);
        return true;
    }
}

// Into a ring that always has room, in one step.
template <class M>
BRICKLINE_INLINE void mega_put(const MegaRing& ring, uint32_t value, uint32_t order) {
    const uint32_t at = M::add(ring.tail, 1);
    MegaCell& cell = ring.cells[at & ring.mask];
    M::poke(&cell.value, value);
    M::poke(&cell.order, order);
    M::store(&cell.turn, at + 1);
}

// MEGA_NOTHING where nothing is there yet. The cell is read before it is taken: what a writer of the next
// lap puts there meanwhile is never used, because the head has moved on by then.
template <class M>
BRICKLINE_INLINE uint32_t mega_pop(const MegaRing& ring) {
    for (;;) {
        const uint32_t at = M::peek(ring.head);
        const MegaCell& cell = ring.cells[at & ring.mask];
        const int32_t ahead = static_cast<int32_t>(M::load(&cell.turn) - (at + 1));
        if (ahead < 0) return MEGA_NOTHING;
        const uint32_t value = M::peek(&cell.value);
        if (ahead == 0 && M::replace(ring.head, at, at + 1)) return value;
    }
}

// Whether something was pushed that nobody has popped; it may be on its way still.
template <class M>
BRICKLINE_INLINE bool mega_has_any(const MegaRing& ring) {
    return M::load(ring.tail) != M::load(ring.head);
}

// ------------------------------------------------------------------------------------------ publishing

template <class M>
BRICKLINE_INLINE void mega_violation(const MegaQueue& queue, uint32_t slot, uint32_t state) {
    if (M::add(&queue.control->violations, 1) != 0) return;
    M::poke(&queue.control->violated_slot, slot);
    M::poke(&queue.control->violated_state, state);
}

// Fills an empty slot; false where it is not empty.
template <class M>
BRICKLINE_INLINE bool mega_publish_item(const MegaQueue& queue, uint32_t slot, uint32_t submission,
                                        uint32_t block, uint32_t next) {
    MegaSlot& item = queue.slots[slot];
    if (M::load(&item.state) != mega_word(MegaItem::Empty, 0)) {
        mega_violation<M>(queue, slot, M::load(&item.state));
        return false;
    }
    M::poke(&item.submission, submission);
    M::poke(&item.block, block);
    M::poke(&item.next, next);
    M::poke(&item.code, 0);
    M::poke(&item.follower, MEGA_NOTHING);
    M::poke(&item.state, mega_word(MegaItem::Published, 0));  // seen by nobody before it is committed
    return true;
}

// The item of a submission that is joined to another one follows the same block of that. Both are of one
// batch and published; the later submission begins with a wait that nobody ends, and is not linked.
template <class M>
BRICKLINE_INLINE void mega_join(const MegaQueue& queue, uint32_t slot, uint32_t follower) {
    M::poke(&queue.slots[slot].follower, follower);
}
inline constexpr uint32_t MEGA_JOINED_WAITS = 1;

// Begins a submission whose items are published; `waits` bounds the calls of mega_follow.
template <class M>
BRICKLINE_INLINE void mega_begin(const MegaQueue& queue, uint32_t submission, uint32_t first_slot,
                                 uint32_t items, uint32_t waits, uint32_t order, uint32_t priority) {
    MegaSubmission& each = queue.submissions[submission];
    M::poke(&each.remaining, items);
    M::poke(&each.dependents, MEGA_NOTHING);
    M::poke(&each.outcome, 0);
    M::poke(&each.link, MEGA_NOTHING);
    M::poke(&each.first_slot, first_slot);
    M::poke(&each.order, order);
    M::poke(&each.priority, priority);
    M::poke(&each.pending, waits + 1);
}

// The submission waits for `producer`, unless that has finished. Whether the edge is in use.
template <class M>
BRICKLINE_INLINE bool mega_follow(const MegaQueue& queue, uint32_t submission, uint32_t edge,
                                  uint32_t producer, bool reads_value) {
    MegaSubmission& first = queue.submissions[producer];
    MegaEdge& tie = queue.edges[edge];
    M::poke(&tie.waiter, submission | (reads_value ? MEGA_VALUE : 0));
    for (;;) {
        const uint32_t dependents = M::load(&first.dependents);
        if (dependents == MEGA_CLOSED) break;
        M::poke(&tie.next, dependents);
        if (M::replace(&first.dependents, dependents, edge)) return true;
    }
    if (reads_value && M::peek(&first.outcome) != 0)
        M::poke(&queue.submissions[submission].outcome, MEGA_FAULT_SKIPPED);
    M::add(&queue.submissions[submission].pending, ~0u);  // not to 0: it is not admitted yet
    return false;
}

// One step makes all of a batch run: submissions linked from `first` on. False leaves nothing behind.
template <class M>
BRICKLINE_INLINE bool mega_commit(const MegaQueue& queue, uint32_t first, uint32_t submissions) {
    M::add(&queue.control->open, submissions);
    if (mega_push<M>(queue.inbox, first, 0)) return true;
    M::add(&queue.control->open, 0u - submissions);
    return false;
}

// Takes the list of what a worker has finished.
template <class M>
BRICKLINE_INLINE uint32_t mega_take_finished(const MegaQueue& queue, uint32_t worker) {
    uint32_t* const list = queue.finished + worker * MEGA_FINISHED_STEP;
    if (M::peek(list) == MEGA_NOTHING) return MEGA_NOTHING;
    return M::exchange(list, MEGA_NOTHING);
}

// Empties the slot of a finished item; false where it is not finished.
template <class M>
BRICKLINE_INLINE bool mega_recycle(const MegaQueue& queue, uint32_t slot) {
    const uint32_t word = M::load(&queue.slots[slot].state);
    if (!mega_is_legal(mega_state(word), MegaItem::Empty)) {
        mega_violation<M>(queue, slot, word);
        return false;
    }
    M::poke(&queue.slots[slot].state, mega_word(MegaItem::Empty, 0));  // the publisher alone looks at it
    return true;
}

// -------------------------------------------------------------------------------------------- working

enum class MegaRound : uint32_t {
    Left,      // the mode says so
    Idle,      // nothing to do was found
    Admitted,  // submissions are ready, or wait for others
    Executed,  // an item
};

// Submissions that were open when a worker closed some: the most before and the fewest after it. Others
// open and close some meanwhile, so neither comes first.
struct MegaOpen {
    uint32_t most, fewest;
};

// One worker. Trivially copied: everything that others see lies in the queue.
template <class M>
class MegaWorker {
public:
    BRICKLINE_INLINE MegaWorker(const MegaQueue& queue, uint32_t number, uint32_t retry_limit)
        : m_queue(&queue), m_number(number), m_retry_limit(retry_limit) {}

    // One round: admits, or executes one item. `execute(slot, item)` returns the item's code, 0 where all
    // is well; `is_retried(code)` says whether the item is to be tried again; `prepare()` is called
    // between taking an item and executing it.
    template <class Execute, class IsRetried, class Prepare>
    BRICKLINE_INLINE MegaRound round(Execute execute, IsRetried is_retried, Prepare prepare) {
        m_open = {0, MEGA_NOTHING};
        // All that was committed comes first: something urgent may be behind what is not.
        bool is_admitted = false, is_cut = false;
        do {
            if (M::load(&m_queue->control->mode) != static_cast<uint32_t>(MegaQueueMode::Running)) {
                put_back(m_follower);
                m_follower = MEGA_NOTHING;
                return MegaRound::Left;
            }
            is_cut = admit(is_admitted);
        } while (is_cut);
        uint32_t slot = follow(m_follower);
        m_follower = MEGA_NOTHING;
        if (slot == MEGA_NOTHING) slot = take();
        if (slot == MEGA_NOTHING) return is_admitted ? MegaRound::Admitted : MegaRound::Idle;
        const uint32_t attempts = claim(slot);
        if (attempts == MEGA_NOTHING) return MegaRound::Admitted;
        prepare();
        const uint32_t code = execute(slot, m_queue->slots[slot]);
        m_follower = finish(slot, attempts, code, code != 0 && is_retried(code));
        return MegaRound::Executed;
    }

    // Goes on where another worker of its number has left.
    BRICKLINE_INLINE void resume() {
        m_skipped = M::peek(own_words() + MEGA_SKIPPED_WORD);
        m_requeued = M::peek(own_words() + MEGA_REQUEUED_WORD);
    }

    // Of the last round; { 0, MEGA_NOTHING } where it closed none.
    BRICKLINE_INLINE MegaOpen open() const { return m_open; }

    // The steps of a round, for those who put it together themselves.
    //
    // Makes an item that was popped this worker's own. Attempts that failed, or MEGA_NOTHING: it is
    // not to be executed.
    BRICKLINE_INLINE uint32_t claim(uint32_t slot) {
        MegaSlot& item = m_queue->slots[slot];
        const uint32_t word = M::load(&item.state);
        if (mega_is_legal(mega_state(word), MegaItem::Claimed) &&
            M::replace(&item.state, word, mega_word(MegaItem::Claimed, mega_attempts(word))))
            return mega_attempts(word);
        mega_violation<M>(*m_queue, slot, word);
        return MEGA_NOTHING;
    }

    // What to do with the item that follows the last one, MEGA_NOTHING: none. Returns it where it is
    // executed at once.
    BRICKLINE_INLINE uint32_t follow(uint32_t slot) {
        if (slot == MEGA_NOTHING || ++m_followed % MEGA_FOLLOWED_AT_ONCE != 0) return slot;
        put_back(slot);
        return MEGA_NOTHING;
    }
    // For another worker, or this one later.
    BRICKLINE_INLINE void put_back(uint32_t slot) {
        if (slot != MEGA_NOTHING) push_item(slot, m_queue->submissions[M::peek(&m_queue->slots[slot].submission)]);
    }

    // After `attempts` that failed another one ended with `code`, 0 where all is well. Returns the item
    // that follows it and may be executed, or MEGA_NOTHING.
    BRICKLINE_INLINE uint32_t finish(uint32_t slot, uint32_t attempts, uint32_t code, bool is_retried) {
        MegaSlot& item = m_queue->slots[slot];
        const uint32_t number = M::peek(&item.submission);
        MegaSubmission& submission = m_queue->submissions[number];
        if (code != 0 && is_retried && attempts < m_retry_limit) {
            M::poke(own_words() + MEGA_REQUEUED_WORD, ++m_requeued);
            M::store(&item.state, mega_word(MegaItem::Requeued, attempts + 1));
            push_item(slot, submission);
            return MEGA_NOTHING;
        }
        const uint32_t next = M::peek(&item.next), follower = M::peek(&item.follower);
        if (code != 0) {
            M::poke(&item.code, code);
            M::poke(&submission.outcome, code);
        }
        M::store(&item.state, mega_word(code != 0 ? MegaItem::Faulted : MegaItem::Done, attempts));
        if ((submission.flags & MEGA_IN_ORDER) && next != MEGA_NOTHING) push_item(next, submission);
        // Who is not the last touches nothing of the submission from here on.
        if (M::add(&submission.remaining, ~0u) == 1) complete(number, false);
        if (code == 0) return follower;
        skip_followers(follower);
        return MEGA_NOTHING;
    }

    // Admits one submission: nothing is pushed where it waits for others still.
    BRICKLINE_INLINE void release(uint32_t number) {
        if (M::add(&m_queue->submissions[number].pending, ~0u) == 1) begin(number);
    }
    // It waits for nothing any more.
    BRICKLINE_INLINE void begin(uint32_t number) {
        if (start(number)) complete(number, true);
    }

private:
    // Makes what was committed ready. Part of a long batch goes back, for whoever is next to admit it;
    // returns whether it does.
    BRICKLINE_INLINE bool admit(bool& is_admitted) {
        for (uint32_t count = 0;;) {
            if (!mega_has_any<M>(m_queue->inbox)) return false;
            uint32_t next = mega_pop<M>(m_queue->inbox);
            if (next == MEGA_NOTHING) return false;
            is_admitted = true;
            while (next != MEGA_NOTHING) {
                if (count++ == MEGA_ADMITTED_AT_ONCE) {
                    if (!mega_push<M>(m_queue->inbox, next, 0))
                        mega_violation<M>(*m_queue, MEGA_NOTHING, next);
                    return true;
                }
                const uint32_t submission = next;
                next = M::peek(&m_queue->submissions[submission].link);
                release(submission);
            }
        }
    }

    // An item: of the most urgent priority that has any, and now and then the oldest of all.
    BRICKLINE_INLINE uint32_t take() {
        if (++m_picks % MEGA_OLDEST_EVERY == 0) {
            const uint32_t ring = oldest();
            if (ring != MEGA_NOTHING) {
                const uint32_t slot = mega_pop<M>(m_queue->ready[ring]);
                if (slot != MEGA_NOTHING) return slot;
            }
        }
        for (uint32_t ring = 0; ring < mega_rings(*m_queue); ++ring) {
            const uint32_t slot = mega_pop<M>(m_queue->ready[ring]);
            if (slot != MEGA_NOTHING) return slot;
        }
        --m_picks;
        return MEGA_NOTHING;
    }

    // The ring whose first item was submitted first. What is read may be on its way out already.
    BRICKLINE_INLINE uint32_t oldest() const {
        uint32_t found = MEGA_NOTHING, found_order = 0;
        for (uint32_t number = 0; number < mega_rings(*m_queue); ++number) {
            const MegaRing& ring = m_queue->ready[number];
            const uint32_t at = M::peek(ring.head);
            const MegaCell& cell = ring.cells[at & ring.mask];
            if (M::load(&cell.turn) != at + 1) continue;
            const uint32_t order = M::peek(&cell.order);
            if (found != MEGA_NOTHING && static_cast<int32_t>(order - found_order) >= 0) continue;
            found = number;
            found_order = order;
        }
        return found;
    }

    BRICKLINE_INLINE void push_item(uint32_t slot, const MegaSubmission& submission) {
        const uint32_t level = M::peek(&submission.priority);
        mega_put<M>(mega_ring_of(*m_queue, level, slot), slot, M::peek(&submission.order));
    }

    // Whether it is over already: nothing of it may run.
    BRICKLINE_INLINE bool start(uint32_t number) {
        MegaSubmission& submission = m_queue->submissions[number];
        if (M::peek(&submission.outcome) != 0) {
            skip(submission);
            return true;
        }
        uint32_t slot = M::peek(&submission.first_slot);
        const bool is_in_order = submission.flags & MEGA_IN_ORDER;
        while (slot != MEGA_NOTHING) {
            const uint32_t next = is_in_order ? MEGA_NOTHING : M::peek(&m_queue->slots[slot].next);
            push_item(slot, submission);
            slot = next;
        }
        return false;
    }

    // What it notes goes before what makes it known that something has ended, so counts are exact then.
    BRICKLINE_INLINE uint32_t* own_words() const { return m_queue->finished + m_number * MEGA_FINISHED_STEP; }

    BRICKLINE_INLINE void skip(const MegaSubmission& submission) {
        for (uint32_t slot = M::peek(&submission.first_slot); slot != MEGA_NOTHING;) {
            const uint32_t next = M::peek(&m_queue->slots[slot].next);
            skip_item(slot);
            slot = next;
        }
    }

    BRICKLINE_INLINE void skip_item(uint32_t slot) {
        MegaSlot& item = m_queue->slots[slot];
        const uint32_t word = M::load(&item.state);
        if (mega_state(word) != MegaItem::Published) mega_violation<M>(*m_queue, slot, word);
        M::poke(&item.code, MEGA_FAULT_SKIPPED);
        M::poke(own_words() + MEGA_SKIPPED_WORD, ++m_skipped);
        M::store(&item.state, mega_word(MegaItem::Faulted, 0));
    }

    // Of an item that faulted: what would have been executed after it, one after the other.
    BRICKLINE_INLINE void skip_followers(uint32_t slot) {
        while (slot != MEGA_NOTHING) {
            const uint32_t number = M::peek(&m_queue->slots[slot].submission);
            const uint32_t next = M::peek(&m_queue->slots[slot].follower);
            MegaSubmission& submission = m_queue->submissions[number];
            M::poke(&submission.outcome, MEGA_FAULT_SKIPPED);
            skip_item(slot);
            if (M::add(&submission.remaining, ~0u) == 1) complete(number, false);
            slot = next;
        }
    }

    // The submission that is joined to one, or MEGA_NOTHING.
    BRICKLINE_INLINE uint32_t joined_to(const MegaSubmission& submission) const {
        const uint32_t follower = M::peek(&m_queue->slots[M::peek(&submission.first_slot)].follower);
        return follower == MEGA_NOTHING ? follower : M::peek(&m_queue->slots[follower].submission);
    }

    // A submission is finished: those that wait for it are released, and what they must not run is
    // finished, too. Then it is the publisher's again. Of one that was skipped as a whole, so is what is
    // joined to it.
    BRICKLINE_INLINE void complete(uint32_t number, bool is_skipped) {
        M::poke(&m_queue->submissions[number].link, MEGA_NOTHING);
        uint32_t count = 0;
        while (number != MEGA_NOTHING) {
            MegaSubmission& submission = m_queue->submissions[number];
            uint32_t todo = M::peek(&submission.link);
            uint32_t edge = M::exchange(&submission.dependents, MEGA_CLOSED);
            const bool is_missing = M::peek(&submission.outcome) != 0;
            while (edge != MEGA_NOTHING) {
                const uint32_t word = M::peek(&m_queue->edges[edge].waiter);
                edge = M::peek(&m_queue->edges[edge].next);  // the edge goes with its waiter
                const uint32_t waiter = word & ~MEGA_VALUE;
                MegaSubmission& later = m_queue->submissions[waiter];
                if (is_missing && (word & MEGA_VALUE)) M::poke(&later.outcome, MEGA_FAULT_SKIPPED);
                if (M::add(&later.pending, ~0u) != 1 || !start(waiter)) continue;
                M::poke(&later.link, todo);
                todo = waiter;
            }
            if (const uint32_t joined = is_skipped ? joined_to(submission) : MEGA_NOTHING; joined != MEGA_NOTHING) {
                MegaSubmission& later = m_queue->submissions[joined];
                M::poke(&later.outcome, MEGA_FAULT_SKIPPED);
                skip(later);
                M::poke(&later.link, todo);
                todo = joined;
            }
            hand_back(number);
            ++count;
            number = todo;
            is_skipped = true;
        }
        const uint32_t before = M::add(&m_queue->control->open, 0u - count);
        if (before > m_open.most) m_open.most = before;
        if (before - count < m_open.fewest) m_open.fewest = before - count;
    }

    BRICKLINE_INLINE void hand_back(uint32_t number) {
        uint32_t* const list = own_words();
        for (;;) {
            const uint32_t first = M::peek(list);
            M::poke(&m_queue->submissions[number].link, first);
            if (M::replace(list, first, number)) return;
        }
    }

    const MegaQueue* m_queue;
    uint32_t m_number, m_retry_limit;
    uint32_t m_picks = 0, m_skipped = 0, m_requeued = 0;
    uint32_t m_follower = MEGA_NOTHING, m_followed = 0;
    MegaOpen m_open = {0, MEGA_NOTHING};
};

}  // namespace brickline
