// Every order of the steps of a small queue. Workers, the publisher, a deadline, a stop and the death of a
// worker between any two steps take turns in all possible ways, over the very functions of
// megakernel_queue.h: `Model` stands in for the platform's atomics and makes each of them one step.
//
// A thread is inside one operation at a time (a round of a worker, an action of the publisher). To take a
// step, its operation is executed again from its beginning: accesses that it has made return what they
// returned before, the next one is made for real, and the one after that ends the execution. So the state
// of a thread is the list of what its accesses returned, and a whole system is a few thousand bytes that
// can be copied, compared and gone back to.
//
// Holds in every state: a slot changes state legally, no item is executed by two at once, nothing runs
// before what it waits for, no worker touches what it has handed back, and no step finds what it must
// not. Holds where nobody can go on: all is finished unless somebody died or said stop; and however it
// ended, what the slots say is what happened: nothing is lost, and nothing was executed too often.
#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <unordered_set>

#include "brickline/megakernel_queue.h"
#include "native_test.h"

using namespace brickline;
using namespace native_test;

namespace {

constexpr uint32_t SLOTS = 4, SUBMISSIONS = 3, EDGES = 4, CELLS = 4, WORKERS = 2;
constexpr uint32_t THREADS = WORKERS + 1, HOST = WORKERS, LOG = 96;

// All that is shared, and what the checks note beside it.
struct Arena {
    MegaControl control;
    MegaSlot slots[SLOTS];
    MegaSubmission submissions[SUBMISSIONS];
    MegaEdge edges[EDGES];
    MegaCell cells[(MEGA_PRIORITIES + 1) * CELLS];
    uint32_t positions[2 * (MEGA_PRIORITIES + 1)];
    uint32_t finished[WORKERS * MEGA_FINISHED_STEP];
    // Notes.
    uint8_t inside[SLOTS];            // workers that execute its item
    uint8_t runs[SLOTS];              // executions that ended, since it was published
    uint8_t successes[SLOTS];
    uint8_t is_handed_back[SUBMISSIONS];
    uint8_t is_begun[SUBMISSIONS];    // a name of a submission in the script, + 1
    uint8_t tries[SUBMISSIONS];       // of all of its items, for `fails`
};

struct Locals {  // of the publisher, between two actions
    uint8_t action = 0;
    uint8_t is_collected[8] = {};     // by name: 1 done, 2 faulted or skipped
};

struct Thread {
    uint32_t length = 0;              // of the log; 0: between two operations
    uint32_t log[LOG] = {};
    bool is_alive = true;
    bool has_left = false;
};

struct State {
    Arena arena;
    Thread threads[THREADS];
    alignas(MegaWorker<void>) unsigned char workers[WORKERS][64];
    Locals locals;
    uint8_t deaths_left = 0, stops_left = 0, deadlines_left = 0;
};

State g;         // the one that is executed in
MegaQueue g_queue;
bool g_is_used[MEGA_PRIORITIES];
bool g_every_access = true;  // is a step; else those that order nothing go with the one before

// One submission of a script.
struct Named {
    uint32_t place;
    std::vector<uint32_t> slots;
    std::vector<std::pair<uint32_t, bool>> waits;  // names of producers; whether it reads their values
    uint32_t fails = 0;      // so many executions report a fault
    uint32_t flags = 0;
    uint32_t priority = 2;
    uint32_t follows = MEGA_NOTHING;  // the name of the one that it is joined to
};

struct Action {
    enum class Kind { Publish, Collect } kind;
    std::vector<uint32_t> names;  // a batch; or those that must be collected before it goes on
};

struct Script {
    std::string title;
    std::vector<Named> named;
    std::vector<Action> actions;
    uint32_t retry_limit = 0;
    uint8_t deaths = 1, stops = 0, deadlines = 0;
    uint32_t cells = CELLS;   // of a ring, as few as there are slots in use
    bool every_access = true;
    // A mistake of the publisher, and what must then be found, "": anything. So the search can fail.
    enum class Mistake { None, ForgetsToWait, CommitsTwice, TakesFullSlot, LinksJoined } mistake = Mistake::None;
    std::string expected = "";
};
using Mistake = Script::Mistake;

const Script* g_script;
uint64_t g_complaints;
bool g_is_expected_found;

void complain(const std::string& what) {
    ++g_complaints;
    g_is_expected_found |= g_script->expected.empty() || what == g_script->expected;
    if (g_script->mistake == Mistake::None) check(false, g_script->title + ": " + what);
}

// ------------------------------------------------------------------------------------------ the model

struct Stepper {
    Thread* thread = nullptr;
    uint32_t number = 0;   // of the thread
    uint32_t cursor = 0;
    uint32_t budget = 0;
    std::jmp_buf pause;
} g_step;

uint32_t slot_of_state(const uint32_t* word) {
    for (uint32_t slot = 0; slot < SLOTS; ++slot) {
        if (word == &g.arena.slots[slot].state) return slot;
    }
    return MEGA_NOTHING;
}

// Workers leave a submission alone once it is the publisher's again, and so the edges that are its.
void check_owner(const uint32_t* word) {
    if (g_step.number == HOST) return;
    const auto* byte = reinterpret_cast<const char*>(word);
    for (uint32_t place = 0; place < SUBMISSIONS; ++place) {
        const auto* begin = reinterpret_cast<const char*>(&g.arena.submissions[place]);
        if (byte >= begin && byte < begin + sizeof(MegaSubmission) && g.arena.is_handed_back[place])
            complain("a worker touches a submission that is handed back");
    }
    const ptrdiff_t offset = byte - reinterpret_cast<const char*>(g.arena.edges);
    if (offset < 0 || offset >= ptrdiff_t(sizeof g.arena.edges)) return;
    const uint32_t waiter = g.arena.edges[size_t(offset) / sizeof(MegaEdge)].waiter & ~MEGA_VALUE;
    if (g.arena.is_handed_back[waiter]) complain("a worker touches an edge whose waiter is handed back");
}

void note_write(uint32_t* word, uint32_t before, uint32_t after) {
    const uint32_t slot = slot_of_state(word);
    if (slot != MEGA_NOTHING) {
        if (!mega_is_legal(mega_state(before), mega_state(after))) complain("an illegal transition");
        if (mega_state(after) == MegaItem::Empty && g.arena.inside[slot]) complain("recycled while it is executed");
        if (mega_state(after) == MegaItem::Published) g.arena.runs[slot] = g.arena.successes[slot] = 0;
    }
    for (uint32_t worker = 0; worker < WORKERS; ++worker) {
        if (word == &g.arena.finished[worker * MEGA_FINISHED_STEP] && g_step.number == worker)
            g.arena.is_handed_back[after] = 1;
    }
}

// Rings of priorities that a script does not use: nobody ever writes there, so it makes no difference who
// reads when.
bool is_constant(const uint32_t* word) {
    const ptrdiff_t cell = reinterpret_cast<const char*>(word) - reinterpret_cast<const char*>(g.arena.cells);
    const ptrdiff_t position = word - g.arena.positions;
    size_t ring = MEGA_PRIORITIES;
    if (cell >= 0 && cell < ptrdiff_t(sizeof g.arena.cells)) ring = size_t(cell) / (CELLS * sizeof(MegaCell));
    if (position >= 0 && position < ptrdiff_t(std::size(g.arena.positions))) ring = size_t(position) / 2;
    return ring < MEGA_PRIORITIES && !g_is_used[ring];
}

// One access. `is_step`: others may come in between this one and the one before.
template <class Do>
uint32_t access(bool is_step, const uint32_t* word, Do act) {
    if (word && is_constant(word)) return act();  // now as at any other time
    Thread& thread = *g_step.thread;
    if (g_step.cursor < thread.length) return thread.log[g_step.cursor++];
    if (is_step || g_every_access) {
        if (g_step.budget == 0) std::longjmp(g_step.pause, 1);
        --g_step.budget;
    }
    const uint32_t result = act();
    if (thread.length == LOG) {
        complain("an operation without an end");
        std::longjmp(g_step.pause, 1);
    }
    thread.log[thread.length++] = result;
    ++g_step.cursor;
    return result;
}

struct Model {
    static uint32_t load(const uint32_t* word) {
        return access(true, word, [&] { return check_owner(word), *word; });
    }
    static uint32_t peek(const uint32_t* word) {
        return access(false, word, [&] { return check_owner(word), *word; });
    }
    static void write(bool is_step, uint32_t* word, uint32_t value) {
        access(is_step, word, [&] {
            check_owner(word);
            const uint32_t before = *word;
            *word = value;
            note_write(word, before, value);
            return 0u;
        });
    }
    static void store(uint32_t* word, uint32_t value) { write(true, word, value); }
    static void poke(uint32_t* word, uint32_t value) { write(false, word, value); }
    static bool replace(uint32_t* word, uint32_t expected, uint32_t value) {
        return access(true, word, [&] {
            check_owner(word);
            if (*word != expected) return 0u;
            *word = value;
            note_write(word, expected, value);
            return 1u;
        });
    }
    static uint32_t add(uint32_t* word, uint32_t value) {
        return access(true, word, [&] {
            check_owner(word);
            const uint32_t before = *word;
            *word = before + value;
            return before;
        });
    }
    static uint32_t exchange(uint32_t* word, uint32_t value) {
        return access(true, word, [&] {
            check_owner(word);
            const uint32_t before = *word;
            *word = value;
            return before;
        });
    }
};

using Worker = MegaWorker<Model>;
static_assert(sizeof(Worker) <= 64);

// --------------------------------------------------------------------------------------- the operations

const Named& named_at(uint32_t place) { return g_script->named[g.arena.is_begun[place] - 1u]; }

// Executing takes two steps: it begins, and it ends.
uint32_t execute(uint32_t slot, const MegaSlot& item) {
    access(true, nullptr, [&] {
        if (++g.arena.inside[slot] > 1) complain("an item is executed by two at once");
        const Named& own = named_at(item.submission);
        for (const auto& [producer, reads_value] : own.waits) {
            const uint32_t place = g_script->named[producer].place;
            const bool is_in_place = g.arena.is_begun[place] == producer + 1;
            const uint8_t collected = g.locals.is_collected[producer];
            const bool is_finished =
                collected || (is_in_place && g.arena.submissions[place].dependents == MEGA_CLOSED);
            if (!is_finished) complain("it runs before what it waits for");
            const bool is_missing = collected ? collected == 2 : g.arena.submissions[place].outcome != 0;
            if (reads_value && is_finished && is_missing) complain("it reads what was never written");
        }
        if (own.follows != MEGA_NOTHING) {
            const Named& before = g_script->named[own.follows];
            const bool is_in_place = g.arena.is_begun[before.place] == own.follows + 1;
            if (is_in_place && !g.locals.is_collected[own.follows] && g.arena.successes[before.slots[item.block]] != 1)
                complain("it runs before the item that it follows");
        }
        if (own.flags & MEGA_IN_ORDER) {
            for (const uint32_t other : own.slots) {
                if (other != slot && g.arena.inside[other]) complain("two items of one that runs in order");
            }
        }
        return 0u;
    });
    return access(true, nullptr, [&] {
        --g.arena.inside[slot];
        const bool is_fault = g.arena.tries[item.submission]++ < named_at(item.submission).fails;
        ++g.arena.runs[slot];
        g.arena.successes[slot] += !is_fault;
        return is_fault ? 17u : 0u;
    });
}

MegaRound round(Worker& worker) {
    return worker.round([](uint32_t slot, const MegaSlot& item) { return execute(slot, item); },
                        [](uint32_t) { return true; }, [] {});
}

void publish(const Action& action, Locals& locals) {
    uint32_t first = MEGA_NOTHING, last = MEGA_NOTHING, edge = 0;
    for (const uint32_t name : action.names) {
        const Named& each = g_script->named[name];
        uint32_t next = MEGA_NOTHING;
        for (uint32_t k = uint32_t(each.slots.size()); k-- > 0;) {
            mega_publish_item<Model>(g_queue, each.slots[k], each.place, k, next);
            next = each.slots[k];
        }
        access(false, nullptr, [&] {  // what is written plainly, before anybody can see it
            MegaSubmission& submission = g.arena.submissions[each.place];
            submission.flags = each.flags;
            submission.op = name;
            g.arena.is_begun[each.place] = uint8_t(name + 1);
            g.arena.is_handed_back[each.place] = g.arena.tries[each.place] = 0;
            return 0u;
        });
        // Edges are the waiter's: two for each place.
        uint32_t waits = 0;
        for (const auto& [producer, reads_value] : each.waits) waits += !locals.is_collected[producer];
        const bool is_joined = each.follows != MEGA_NOTHING;
        if (is_joined) waits = MEGA_JOINED_WAITS;
        mega_begin<Model>(g_queue, each.place, next, uint32_t(each.slots.size()), waits, name, each.priority);
        for (uint32_t k = 0; is_joined && k < each.slots.size(); ++k)
            mega_join<Model>(g_queue, g_script->named[each.follows].slots[k], each.slots[k]);
        if (is_joined && g_script->mistake != Mistake::LinksJoined) continue;
        for (const auto& [producer, reads_value] : each.waits) {
            if (locals.is_collected[producer]) {
                if (reads_value && locals.is_collected[producer] == 2)
                    Model::poke(&g_queue.submissions[each.place].outcome, MEGA_FAULT_SKIPPED);
                continue;
            }
            if (g_script->mistake == Mistake::ForgetsToWait) {
                Model::add(&g_queue.submissions[each.place].pending, ~0u);
                continue;
            }
            mega_follow<Model>(g_queue, each.place, edge++, g_script->named[producer].place, reads_value);
        }
        if (last == MEGA_NOTHING) first = each.place;
        else Model::poke(&g_queue.submissions[last].link, each.place);
        last = each.place;
    }
    if (!mega_commit<Model>(g_queue, first, uint32_t(action.names.size()))) complain("a commit found no room");
    if (g_script->mistake == Mistake::CommitsTwice) mega_commit<Model>(g_queue, first, 1);
    ++locals.action;
}

void collect(const Action& action, Locals& locals) {
    for (uint32_t worker = 0; worker < WORKERS; ++worker) {
        uint32_t place = mega_take_finished<Model>(g_queue, worker);
        while (place != MEGA_NOTHING) {
            const uint32_t next = Model::peek(&g_queue.submissions[place].link);
            const uint32_t name = Model::peek(&g_queue.submissions[place].op);
            locals.is_collected[name] = Model::peek(&g_queue.submissions[place].outcome) ? 2 : 1;
            for (uint32_t slot = Model::peek(&g_queue.submissions[place].first_slot); slot != MEGA_NOTHING;) {
                const uint32_t later = Model::peek(&g_queue.slots[slot].next);
                if (!mega_recycle<Model>(g_queue, slot)) complain("a slot of a finished submission is not finished");
                slot = later;
            }
            place = next;
        }
    }
    bool is_enough = true;
    for (const uint32_t name : action.names) is_enough &= locals.is_collected[name] != 0;
    locals.action += is_enough;
}

bool can_move(const State& state, uint32_t number) {
    const Thread& thread = state.threads[number];
    if (!thread.is_alive || thread.has_left) return false;
    return number != HOST || state.locals.action < g_script->actions.size();
}

// Executes a thread's operation anew, up to its next step or, with a large budget, to its end. Whether the
// operation came to its end; `found` is how a round ended.
bool advance(uint32_t number, uint32_t budget, MegaRound* found = nullptr) {
    Thread& thread = g.threads[number];
    g_step.thread = &thread;
    g_step.number = number;
    g_step.cursor = 0;
    g_step.budget = budget;
    // Copies: an operation that does not end leaves nothing but its log.
    static Locals locals;
    static unsigned char bytes[64];
    if (setjmp(g_step.pause)) return false;
    if (number == HOST) {
        locals = g.locals;
        const Action& action = g_script->actions[locals.action];
        if (action.kind == Action::Kind::Publish) publish(action, locals);
        else collect(action, locals);
        g.locals = locals;
    } else {
        std::memcpy(bytes, g.workers[number], sizeof bytes);
        Worker& worker = *reinterpret_cast<Worker*>(bytes);
        const MegaRound ended = round(worker);
        std::memcpy(g.workers[number], bytes, sizeof bytes);
        thread.has_left = ended == MegaRound::Left;
        if (found) *found = ended;
    }
    thread.length = 0;
    std::memset(thread.log, 0, sizeof thread.log);
    return true;
}

// -------------------------------------------------------------------------------------- what must hold

// However it ended: what the slots say is what happened.
void check_account(bool is_over) {
    for (uint32_t slot = 0; slot < SLOTS; ++slot) {
        const MegaSlot& item = g.arena.slots[slot];
        const MegaItem state = mega_state(item.state);
        const uint32_t runs = g.arena.runs[slot], successes = g.arena.successes[slot];
        if (runs > g_script->retry_limit + 1) complain("an item is tried too often");
        if (successes > 1) complain("an item succeeds twice");
        switch (state) {
            case MegaItem::Published:
                if (runs) complain("a published item was executed");
                break;
            case MegaItem::Done:
                if (successes != 1) complain("a done item did not succeed");
                break;
            case MegaItem::Requeued:
                if (successes || runs != mega_attempts(item.state)) complain("a requeued item is miscounted");
                break;
            case MegaItem::Faulted:
                if (successes) complain("a faulted item succeeded");
                if ((item.code == MEGA_FAULT_SKIPPED) != (runs == 0)) complain("a skipped item was executed");
                break;
            case MegaItem::Claimed:
                // Somebody is at it, or died there, with or without having executed it.
                if (is_over && g.deaths_left == g_script->deaths) complain("an item is claimed by nobody");
                break;
            default: break;
        }
    }
    if (g.arena.control.violations) complain("a step found what it must not find");
}

bool is_between_operations() {
    for (const Thread& thread : g.threads) {
        if (thread.length) return false;
    }
    return true;
}

// Nobody is inside an operation. If no worker finds anything to do, all must be finished.
void check_rest() {
    const bool has_host_ended = !can_move(g, HOST);
    const State before = g;
    bool is_idle = true;
    for (uint32_t number = 0; number < WORKERS && is_idle; ++number) {
        if (!can_move(g, number)) continue;
        MegaRound ended = MegaRound::Left;
        if (!advance(number, 1000, &ended)) complain("a round without an end");
        is_idle = ended == MegaRound::Idle || ended == MegaRound::Left;
    }
    g = before;
    if (!is_idle) return;
    check_account(true);
    const bool has_ended_early =
        g.deaths_left != g_script->deaths || g.arena.control.mode != uint32_t(MegaQueueMode::Running);
    if (has_ended_early) return;
    // The publisher still waits for something, or all is done.
    if (!has_host_ended && g_script->actions[g.locals.action].kind == Action::Kind::Publish) return;
    if (g.arena.control.open != 0) complain("workers rest while something is open");
    for (const MegaSlot& item : g.arena.slots) {
        const MegaItem state = mega_state(item.state);
        if (state != MegaItem::Done && state != MegaItem::Faulted && state != MegaItem::Empty)
            complain("workers rest while an item is not finished");
    }
}

// ------------------------------------------------------------------------------------------- exploring

struct Print {
    uint64_t a, b;
    bool operator==(const Print&) const = default;
};
struct Hash {
    size_t operator()(const Print& print) const { return print.a; }
};

void mix(Print& print, const void* bytes, size_t length) {
    const auto* at = static_cast<const char*>(bytes);
    for (size_t k = 0; k < length; k += 8) {
        uint64_t word = 0;
        std::memcpy(&word, at + k, std::min<size_t>(8, length - k));
        print.a = (print.a ^ word) * 0x9e3779b97f4a7c15ull;
        print.a ^= print.a >> 29;
        print.b = (print.b + word + 0x7f4a7c15u) * 0xc2b2ae3d27d4eb4full;
        print.b ^= print.b >> 31;
    }
}

// 128 bits over everything that what follows depends on.
Print print_of(const State& state) {
    Print print = {1, 2};
    mix(print, &state.arena, sizeof(Arena));
    for (uint32_t number = 0; number < THREADS; ++number) {
        const Thread& thread = state.threads[number];
        const uint32_t facts[2] = {thread.length, uint32_t(thread.is_alive) | uint32_t(thread.has_left) << 1};
        mix(print, facts, sizeof facts);
        mix(print, thread.log, thread.length * 4);
    }
    mix(print, state.workers, sizeof state.workers);
    uint32_t locals[4] = {};
    std::memcpy(locals, &state.locals, sizeof state.locals);
    locals[3] = state.deaths_left | state.stops_left << 8 | state.deadlines_left << 16;
    mix(print, locals, sizeof locals);
    return print;
}

void begin(const Script& script) {
    g_script = &script;
    g_every_access = script.every_access;
    std::fill(std::begin(g_is_used), std::end(g_is_used), false);
    for (const Named& each : script.named) g_is_used[each.priority] = true;
    std::memset(static_cast<void*>(&g), 0, sizeof g);
    for (Thread& thread : g.threads) thread.is_alive = true;
    g_queue = {};
    g_queue.control = &g.arena.control;
    g_queue.slots = g.arena.slots;
    g_queue.submissions = g.arena.submissions;
    g_queue.edges = g.arena.edges;
    g_queue.finished = g.arena.finished;
    for (uint32_t k = 0; k <= MEGA_PRIORITIES; ++k) {
        MegaRing& ring = k < MEGA_PRIORITIES ? g_queue.ready[k] : g_queue.inbox;
        ring = {&g.arena.positions[2 * k], &g.arena.positions[2 * k + 1], &g.arena.cells[k * CELLS], script.cells - 1};
    }
    for (uint32_t worker = 0; worker < WORKERS; ++worker) {
        g.arena.finished[worker * MEGA_FINISHED_STEP] = MEGA_NOTHING;
        new (g.workers[worker]) Worker(g_queue, worker, script.retry_limit);
    }
    g.deaths_left = script.deaths;
    g.stops_left = script.stops;
    g.deadlines_left = script.deadlines;
}

struct Explored {
    uint64_t states = 0, rests = 0, finished = 0;
};

// Depth first; a state that was seen is not gone into again.
Explored explore(const Script& script) {
    begin(script);
    Explored found;
    std::unordered_set<Print, Hash> seen;
    std::vector<State> stack = {g};
    seen.insert(print_of(g));
    while (!stack.empty() && g_complaints < 3) {
        const State here = std::move(stack.back());
        stack.pop_back();
        ++found.states;
        g = here;
        check_account(false);
        if (is_between_operations()) {
            ++found.rests;
            found.finished += g.arena.control.open == 0 && !can_move(g, HOST);
            check_rest();
        }
        const auto go_on = [&] {
            if (seen.insert(print_of(g)).second) stack.push_back(g);
        };
        for (uint32_t number = 0; number < THREADS; ++number) {
            if (!can_move(here, number)) continue;
            g = here;
            advance(number, 1);
            go_on();
            if (!here.deaths_left || number == HOST) continue;
            g = here;
            --g.deaths_left;
            g.threads[number] = {};
            g.threads[number].is_alive = false;
            go_on();
        }
        const auto say = [&](uint8_t State::*left, MegaQueueMode mode) {
            if (!(here.*left)) return;
            g = here;
            --(g.*left);
            if (mode == MegaQueueMode::Stopped || g.arena.control.mode == uint32_t(MegaQueueMode::Running))
                g.arena.control.mode = uint32_t(mode);
            go_on();
        };
        say(&State::stops_left, MegaQueueMode::Stopped);
        say(&State::deadlines_left, MegaQueueMode::Expired);
    }
    return found;
}

void explore_and_check(const Script& script) {
    g_complaints = 0;
    g_is_expected_found = false;
    const Explored found = explore(script);
    std::printf("%-58s %9llu states, %7llu at rest\n", script.title.c_str(),
                static_cast<unsigned long long>(found.states), static_cast<unsigned long long>(found.rests));
    if (script.mistake != Mistake::None) {
        check(g_is_expected_found, script.title + ": it is found");
        return;
    }
    check(found.states > 100, script.title + ": states were explored");
    check(found.finished > 0, script.title + ": some of them have finished");
}

using Kind = Action::Kind;

std::vector<Script> scripts() {
    std::vector<Script> all;
    // A single item, two workers, and whoever may come in between; every access is a step.
    all.push_back({"one item, every access, a death", {{0, {0}, {}}}, {{Kind::Publish, {0}}, {Kind::Collect, {0}}}});
    all.push_back({"one item, every access, stop and deadline", {{0, {0}, {}}}, {{Kind::Publish, {0}}, {Kind::Collect, {0}}},
                   0, 0, 1, 1});
    all.push_back({"two that wait for one another, every access", {{0, {0}, {}}, {1, {1}, {{0, true}}}},
                   {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 0, 0});
    // From here on accesses that order nothing go with the one before.
    const auto add = [&](Script script) {
        script.every_access = false;
        all.push_back(std::move(script));
    };
    add({"two items of one submission, a death", {{0, {0, 1}, {}}}, {{Kind::Publish, {0}}, {Kind::Collect, {0}}}});
    add({"two that wait for one another, a death", {{0, {0}, {}}, {1, {1}, {{0, true}}}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}});
    add({"a second batch follows while the first runs", {{0, {0}, {}}, {1, {1}, {{0, true}}}},
         {{Kind::Publish, {0}}, {Kind::Publish, {1}}, {Kind::Collect, {0, 1}}}});
    add({"the same with a deadline", {{0, {0}, {}}, {1, {1}, {{0, true}}}},
         {{Kind::Publish, {0}}, {Kind::Publish, {1}}, {Kind::Collect, {0, 1}}}, 0, 0, 0, 1});
    add({"a fault, and a reader that comes before or after it", {{0, {0}, {}, 1}, {1, {1}, {{0, true}}}},
         {{Kind::Publish, {0}}, {Kind::Publish, {1}}, {Kind::Collect, {0, 1}}}, 0, 0});
    add({"a fault: its reader is skipped, what overwrites it is not",
         {{0, {0}, {}, 1}, {1, {1}, {{0, true}}}, {2, {2}, {{0, false}, {1, false}}}},
         {{Kind::Publish, {0, 1, 2}}, {Kind::Collect, {0, 1, 2}}}});
    add({"an item that succeeds when it is tried again", {{0, {0}, {}, 1}, {1, {1}, {{0, true}}}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 1});
    add({"an item that fails as often as it may", {{0, {0}, {}, 9}, {1, {1}, {{0, true}}}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 1});
    add({"two items in order, and one of another priority",
         {{0, {0, 1}, {}, 0, MEGA_IN_ORDER}, {1, {2}, {}, 0, 0, 0}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 0, 0});
    // Places and slots are used again as soon as they can be.
    add({"slots are recycled while the other worker runs",
         {{0, {0}, {}}, {1, {1}, {}}, {0, {0}, {{1, true}}}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0}}, {Kind::Publish, {2}}, {Kind::Collect, {1, 2}}}, 0, 0, 0, 0, 2});
    add({"a ring comes round while a worker pops from it", {{0, {0}, {}}, {1, {1}, {}}, {1, {1}, {}}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {1}}, {Kind::Publish, {2}}, {Kind::Collect, {0, 2}}}, 0, 0, 0, 0, 2});
    // Submissions that are joined: {place, slots, waits, fails, flags, priority, follows}.
    const Named second = {1, {1}, {}, 0, 0, 2, 0};
    all.push_back({"two that are joined, every access", {{0, {0}, {}}, second},
                   {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 0, 0});
    add({"two that are joined, a death", {{0, {0}, {}}, second}, {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}});
    add({"the same with a stop and a deadline", {{0, {0}, {}}, second},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 0, 0, 1, 1});
    add({"two blocks that are joined to two", {{0, {0, 1}, {}}, {1, {2, 3}, {}, 0, 0, 2, 0}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 0, 0});
    add({"the same, and one of the first faults", {{0, {0, 1}, {}, 1}, {1, {2, 3}, {}, 0, 0, 2, 0}},
         {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}, 0, 0});
    add({"three that are joined, of which the second faults",
         {{0, {0}, {}}, {1, {1}, {}, 1, 0, 2, 0}, {2, {2}, {}, 0, 0, 2, 1}},
         {{Kind::Publish, {0, 1, 2}}, {Kind::Collect, {0, 1, 2}}}});
    add({"the second is tried again", {{0, {0}, {}}, {1, {1}, {}, 1, 0, 2, 0}, {2, {2}, {}, 0, 0, 2, 1}},
         {{Kind::Publish, {0, 1, 2}}, {Kind::Collect, {0, 1, 2}}}, 1});
    add({"what reads a fault is skipped with what is joined to it",
         {{0, {0}, {}, 1}, {1, {1}, {{0, true}}}, {2, {2}, {}, 0, 0, 2, 1}},
         {{Kind::Publish, {0, 1, 2}}, {Kind::Collect, {0, 1, 2}}}});
    add({"one that waits for what is joined, in the next batch",
         {{0, {0}, {}}, second, {2, {2}, {{1, true}}}},
         {{Kind::Publish, {0, 1}}, {Kind::Publish, {2}}, {Kind::Collect, {0, 1, 2}}}, 0, 0});
    const auto mistaken = [&](Mistake mistake, const char* expected, Script script) {
        script.mistake = mistake;
        script.expected = expected;
        add(std::move(script));
    };
    mistaken(Mistake::ForgetsToWait, "it runs before what it waits for",
             {"a publisher that forgets an edge", {{0, {0}, {}}, {1, {1}, {{0, true}}}},
              {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}});
    mistaken(Mistake::CommitsTwice, "",
             {"a batch that is committed twice", {{0, {0}, {}}}, {{Kind::Publish, {0}}, {Kind::Collect, {0}}}});
    mistaken(Mistake::LinksJoined, "",
             {"one that is joined and linked", {{0, {0}, {}}, second}, {{Kind::Publish, {0, 1}}, {Kind::Collect, {0, 1}}}});
    mistaken(Mistake::TakesFullSlot, "a step found what it must not find",
             {"a slot that is not free", {{0, {0}, {}}, {1, {0}, {}}},
              {{Kind::Publish, {0}}, {Kind::Publish, {1}}, {Kind::Collect, {0, 1}}}});
    return all;
}

// The transitions, one by one.
void check_transitions() {
    uint32_t legal = 0;
    for (uint32_t from = 0; from < MEGA_ITEM_STATES; ++from) {
        for (uint32_t to = 0; to < MEGA_ITEM_STATES; ++to)
            legal += mega_is_legal(MegaItem(from), MegaItem(to));
        check(!mega_is_legal(MegaItem(from), MegaItem(from)), "no state follows itself");
        check(!mega_is_legal(MegaItem(from), MegaItem(77)) && !mega_is_legal(MegaItem(77), MegaItem(from)),
              "no transition leads to or from a state that there is not");
    }
    check_equal(legal, 10u, "legal transitions");
    check(!mega_is_legal(MegaItem::Done, MegaItem::Published), "a slot is recycled before it is published");
    check(!mega_is_legal(MegaItem::Done, MegaItem::Claimed), "what is done is not claimed");
}

}  // namespace

// Half of all states.
bool is_long(const Script& script) {
    return script.title == "the same with a deadline" ||
           script.title == "slots are recycled while the other worker runs";
}

int main() {
    watchdog(1200);
    check_transitions();
    for (const Script& script : scripts()) {
        if (has_time() || !is_long(script)) explore_and_check(script);
    }
    return finish();
}
