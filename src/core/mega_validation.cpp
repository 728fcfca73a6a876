#include "mega_validation.h"

#include <algorithm>
#include <string>

#include "brickline/megakernel.h"

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;

void require(bool holds, const char* what) {
    if (!holds) throw MegaFaulty(what);
}

// ------------------------------------------------------------------------------- ranges as wholes

// The different ranges of all accesses, and which of them overlap where one is written.
class Ranges {
public:
    explicit Ranges(const MegaTaskTable& tasks) {
        m_of_access.resize(tasks.accesses.size());
        m_ranges.reserve(tasks.accesses.size());
        if (number_in_order(tasks)) return;
        m_ranges.clear();
        number(tasks);
        find_overlaps();
    }

    struct Range {
        uint64_t begin, end;
        uint32_t space;
        bool is_written;
        bool is_shared;  // another access has it, too
    };

    uint32_t size() const { return uint32_t(m_ranges.size()); }
    uint32_t of_access(size_t access) const { return m_of_access[access]; }
    const Range& operator[](uint32_t range) const { return m_ranges[range]; }
    std::span<const uint32_t> overlaps(uint32_t range) const {
        if (m_overlap_begin.empty()) return {};
        return {m_overlaps.data() + m_overlap_begin[range], m_overlap_begin[range + 1] - m_overlap_begin[range]};
    }
    // Whether somebody else may touch its bytes while one access does.
    bool is_alone(uint32_t range) const { return !m_ranges[range].is_shared && overlaps(range).empty(); }
    bool do_overlap(uint32_t a, uint32_t b) const {
        return m_ranges[a].begin < m_ranges[b].end && m_ranges[b].begin < m_ranges[a].end;
    }

private:
    // Where each access of a space comes after all before it, or is the last one again, as those of tasks
    // that have nothing to do with each other: then no two ranges overlap. False: it is not so.
    bool number_in_order(const MegaTaskTable& tasks) {
        uint32_t most = 0;
        for (const MegaAccess& access : tasks.accesses) most = std::max(most, access.space);
        if (most >= tasks.accesses.size() * 4 + 1024) return false;
        MegaVector<uint32_t> last(size_t(most) + 1, NONE);
        for (size_t k = 0; k < tasks.accesses.size(); ++k) {
            const MegaAccess& access = tasks.accesses[k];
            uint32_t& range = last[access.space];
            if (range == NONE || access.begin >= m_ranges[range].end) {
                range = uint32_t(m_ranges.size());
                m_ranges.push_back({access.begin, access.end, access.space, false, false});
            } else if (access.begin == m_ranges[range].begin && access.end == m_ranges[range].end) {
                m_ranges[range].is_shared = true;
            } else {
                return false;
            }
            m_ranges[range].is_written |= (access.mode & MEGA_WRITE) != 0;
            m_of_access[k] = range;
        }
        return true;
    }

    void number(const MegaTaskTable& tasks) {
        size_t size = 64;
        while (size < tasks.accesses.size() * 2) size *= 2;
        MegaVector<uint32_t> table(size, 0);
        const size_t count = tasks.accesses.size();
        const auto place_of = [&](const MegaAccess& access) {
            uint64_t hash = (access.begin * 0x9e3779b97f4a7c15ull) ^ (access.end + (access.end << 21));
            hash = (hash ^ access.space) * 0xd6e8feb86659fd93ull;
            return (hash ^ hash >> 32) & (size - 1);
        };
        for (size_t k = 0; k < count; ++k) {
            const MegaAccess& access = tasks.accesses[k];
            if (k + AHEAD < count) __builtin_prefetch(&table[place_of(tasks.accesses[k + AHEAD])], 1);
            size_t at = place_of(access);
            for (; table[at]; at = (at + 1) & (size - 1)) {
                const Range& range = m_ranges[table[at] - 1];
                if (range.begin == access.begin && range.end == access.end && range.space == access.space) break;
            }
            if (!table[at]) {
                m_ranges.push_back({access.begin, access.end, access.space, false, false});
                table[at] = uint32_t(m_ranges.size());
            } else {
                m_ranges[table[at] - 1].is_shared = true;
            }
            m_of_access[k] = table[at] - 1;
            m_ranges[table[at] - 1].is_written |= (access.mode & MEGA_WRITE) != 0;
        }
    }

    // Ranges by space, then by begin; a space at a time where they come in order already.
    MegaVector<uint32_t> sorted() const {
        const size_t count = m_ranges.size();
        MegaVector<uint32_t> order(count);
        uint32_t most = 0;
        for (const Range& range : m_ranges) most = std::max(most, range.space);
        if (most < count * 4 + 1024) {
            MegaVector<uint32_t> next(size_t(most) + 2, 0);
            for (const Range& range : m_ranges) ++next[range.space + 1];
            for (uint32_t space = 0; space <= most; ++space) next[space + 1] += next[space];
            for (uint32_t k = 0; k < count; ++k) order[next[m_ranges[k].space]++] = k;
        } else {
            for (uint32_t k = 0; k < count; ++k) order[k] = k;
        }
        const auto is_before = [&](uint32_t a, uint32_t b) {
            const Range &x = m_ranges[a], &y = m_ranges[b];
            return x.space != y.space ? x.space < y.space : x.begin < y.begin;
        };
        if (!std::is_sorted(order.begin(), order.end(), is_before)) std::sort(order.begin(), order.end(), is_before);
        return order;
    }

    void find_overlaps() {
        MegaVector<uint32_t> written, read;  // those that have begun
        MegaVector<std::pair<uint32_t, uint32_t>> pairs;
        uint32_t space = 0;
        const auto meet = [&](MegaVector<uint32_t>& open, uint32_t range) {
            for (size_t k = 0; k < open.size();) {
                if (m_ranges[open[k]].end <= m_ranges[range].begin) {
                    open[k] = open.back();
                    open.pop_back();
                } else {
                    pairs.emplace_back(open[k++], range);
                }
            }
        };
        for (const uint32_t range : sorted()) {
            const Range& it = m_ranges[range];
            if (it.begin == it.end) continue;
            if (it.space != space) {
                written.clear();
                read.clear();
                space = it.space;
            }
            meet(written, range);
            if (it.is_written) meet(read, range);
            (it.is_written ? written : read).push_back(range);
        }
        if (pairs.empty()) return;
        m_overlap_begin.assign(m_ranges.size() + 1, 0);
        for (const auto& [a, b] : pairs) ++m_overlap_begin[a + 1], ++m_overlap_begin[b + 1];
        for (size_t k = 0; k < m_ranges.size(); ++k) m_overlap_begin[k + 1] += m_overlap_begin[k];
        m_overlaps.resize(m_overlap_begin.back());
        MegaVector<uint64_t> next(m_overlap_begin.begin(), m_overlap_begin.end() - 1);
        for (const auto& [a, b] : pairs) {
            m_overlaps[next[a]++] = b;
            m_overlaps[next[b]++] = a;
        }
    }

    static constexpr size_t AHEAD = 8;  // accesses whose place is fetched meanwhile
    MegaVector<Range> m_ranges;
    MegaVector<uint32_t> m_of_access;
    MegaVector<uint64_t> m_overlap_begin;  // empty: no two overlap
    MegaVector<uint32_t> m_overlaps;
};

// ---------------------------------------------------------------------------------- the schedule

class Validator {
public:
    explicit Validator(const MegaSchedule& schedule) : m_plan(schedule), m_count(schedule.tasks.size()) {}

    MegaVerdict validate() {
        check_columns();
        if (check_aliases_exist() && check_slots() && check_waits() && check_order() && check_lists() &&
            check_regions()) {
            check_races();
        }
        return m_verdict;
    }

private:
    bool fail(MegaBreach breach, uint32_t task, uint32_t other) {
        if (m_verdict.breach == MegaBreach::None) m_verdict = {breach, task, other};
        return false;
    }

    bool is_run(uint32_t task) const { return m_plan.alias.empty() || m_plan.alias[task] < 0; }
    uint32_t parts(uint32_t task) const { return std::min(m_plan.tasks.blocks[task], m_plan.workers); }
    std::span<const uint32_t> entries_of(uint32_t task) const {
        return m_plan.entries.subspan(m_plan.entry_begin[task], m_plan.entry_begin[task + 1] - m_plan.entry_begin[task]);
    }
    std::span<const uint32_t> members(uint32_t set) const {
        return m_plan.set_members.subspan(m_plan.set_begin[set], m_plan.set_begin[set + 1] - m_plan.set_begin[set]);
    }
    template <class Call>
    void each_producer(uint32_t task, const Call& call) const {
        for (const uint32_t entry : entries_of(task)) {
            if (!(entry & MEGA_SET)) call(entry);
            else for (const uint32_t member : members(entry & ~MEGA_SET)) call(member);
        }
    }

    // ------------------------------------------------------------------------------- hostile input

    template <class Begin>
    static void check_begins(std::span<const Begin> begins, size_t rows, size_t end, const char* what) {
        require(begins.size() == rows + 1 && begins.front() == 0 && begins.back() == end &&
                    std::is_sorted(begins.begin(), begins.end()), what);
    }

    void check_columns() const {
        m_plan.tasks.check();
        require(m_plan.alias.empty() || m_plan.alias.size() == m_count, "expected as many aliases as tasks");
        require(m_plan.region.empty() || m_plan.region.size() == m_count, "expected as many regions as tasks");
        require(m_plan.signals.empty() || m_plan.signals.size() == m_count, "expected as many signals as tasks");
        check_begins(m_plan.entry_begin, m_count, m_plan.entries.size(), "expected begins of waits that ascend to their number");
        require(!m_plan.set_begin.empty(), "expected begins of sets");
        check_begins(m_plan.set_begin, m_plan.set_begin.size() - 1, m_plan.set_members.size(),
                     "expected begins of sets that ascend to the number of members");
        if (!m_plan.workers) return;
        require(m_plan.workers <= MEGA_MAX_WORKERS, "expected fewer workers");
        require(m_plan.first_worker.size() == m_count, "expected as many first workers as tasks");
        check_begins(m_plan.list_begin, m_plan.workers, m_plan.list_tasks.size(),
                     "expected begins of lists that ascend to the number of their tasks");
    }

    // ---------------------------------------------------------------------- who waits, and in which order

    bool check_aliases_exist() {
        if (m_plan.alias.empty()) return true;
        for (uint32_t task = 0; task < m_count; ++task) {
            const int32_t alias = m_plan.alias[task];
            if (alias >= 0 && (uint32_t(alias) >= task || m_plan.alias[size_t(alias)] >= 0)) {
                return fail(MegaBreach::WrongAlias, task, uint32_t(alias));
            }
        }
        return true;
    }

    bool check_slots() {
        if (m_plan.slots >= m_count) return true;
        uint64_t used = 0;
        for (uint32_t task = 0; task < m_count; ++task) {
            if (is_run(task) && ++used > m_plan.slots) return fail(MegaBreach::TooFewSlots, task, NONE);
        }
        return true;
    }

    bool check_producer(uint32_t task, uint32_t producer) {
        if (producer >= m_count) return fail(MegaBreach::UnknownProducer, task, producer);
        if (!is_run(producer)) return fail(MegaBreach::SkippedProducer, task, producer);
        if (!m_plan.signals.empty() && !m_plan.signals[producer]) return fail(MegaBreach::SilentProducer, task, producer);
        return true;
    }

    bool check_waits() {
        const size_t sets = m_plan.set_begin.size() - 1;
        MegaVector<uint8_t> is_checked(sets, 0);
        for (uint32_t task = 0; task < m_count; ++task) {
            for (const uint32_t entry : entries_of(task)) {
                if (!(entry & MEGA_SET)) {
                    if (!check_producer(task, entry)) return false;
                    continue;
                }
                const uint32_t set = entry & ~MEGA_SET;
                if (set >= sets) return fail(MegaBreach::UnknownProducer, task, entry);
                if (is_checked[set]) continue;
                is_checked[set] = 1;
                const std::span<const uint32_t> held = members(set);
                for (size_t k = 0; k < held.size(); ++k) {
                    if (!check_producer(task, held[k])) return false;
                    require(k == 0 || held[k - 1] < held[k], "expected members of a set in ascending order");
                }
            }
        }
        return true;
    }

    // An order in which everything comes after what it waits for proves that there is no cycle.
    bool check_order() {
        m_rank.assign(m_count, NONE);
        if (m_plan.order.empty()) {
            for (uint32_t task = 0; task < m_count; ++task) m_rank[task] = task;
        } else {
            uint32_t rank = 0;
            for (const uint32_t task : m_plan.order) {
                require(task < m_count && m_rank[task] == NONE, "expected each task once in the order");
                m_rank[task] = rank++;
            }
        }
        const size_t sets = m_plan.set_begin.size() - 1;
        MegaVector<uint32_t> last(sets, NONE);  // the member with the highest rank
        for (uint32_t task = 0; task < m_count; ++task) {
            if (!is_run(task)) continue;
            if (m_rank[task] == NONE) return fail(MegaBreach::WrongList, task, NONE);
            for (const uint32_t entry : entries_of(task)) {
                uint32_t producer = entry;
                if (entry & MEGA_SET) {
                    uint32_t& found = last[entry & ~MEGA_SET];
                    if (found == NONE) {
                        for (const uint32_t member : members(entry & ~MEGA_SET)) {
                            if (found == NONE || m_rank[member] > m_rank[found]) found = member;
                        }
                    }
                    if (found == NONE) continue;
                    producer = found;
                }
                if (m_rank[producer] >= m_rank[task]) return fail(MegaBreach::Cycle, task, producer);
            }
        }
        return true;
    }

    // Each part is once in its worker's list, and lists are in the order that was proved.
    bool check_lists() {
        if (!m_plan.workers) return true;
        MegaVector<uint32_t> seen(m_count, 0);
        for (uint32_t worker = 0; worker < m_plan.workers; ++worker) {
            uint32_t before = NONE;
            for (uint64_t k = m_plan.list_begin[worker]; k < m_plan.list_begin[worker + 1]; ++k) {
                const uint32_t task = m_plan.list_tasks[k];
                if (task >= m_count || !is_run(task)) return fail(MegaBreach::WrongList, task, worker);
                const uint32_t first = m_plan.first_worker[task];
                if (first >= m_plan.workers) return fail(MegaBreach::WrongList, task, worker);
                const uint32_t part = worker >= first ? worker - first : worker + m_plan.workers - first;
                if (part >= parts(task)) return fail(MegaBreach::WrongList, task, worker);
                if (before != NONE && m_rank[before] == m_rank[task]) return fail(MegaBreach::WrongList, task, worker);
                if (before != NONE && m_rank[before] > m_rank[task]) return fail(MegaBreach::Cycle, task, before);
                ++seen[task];
                before = task;
            }
        }
        for (uint32_t task = 0; task < m_count; ++task) {
            if (seen[task] != (is_run(task) ? parts(task) : 0)) return fail(MegaBreach::WrongList, task, NONE);
        }
        return true;
    }

    bool check_regions() {
        if (m_plan.region.empty()) return true;
        m_previous.assign(m_count, NONE);
        MegaVector<uint32_t> last(m_count, NONE);
        for (uint32_t task = 0; task < m_count; ++task) {
            if (!is_run(task)) continue;
            const uint32_t region = m_plan.region[task];
            require(region < m_count, "expected a region below the number of tasks");
            const uint32_t before = last[region];
            last[region] = task;
            if (before == NONE) continue;
            m_previous[task] = before;
            if (m_plan.tasks.blocks[before] != m_plan.tasks.blocks[task] ||
                (m_plan.workers && m_plan.first_worker[before] != m_plan.first_worker[task]) ||
                m_rank[before] >= m_rank[task]) {
                return fail(MegaBreach::WrongRegion, task, before);
            }
        }
        return true;
    }

    // ------------------------------------------------------------------------------------ races

    // Who has touched a range since it was last written.
    struct History {
        uint32_t writer = NONE;
        uint32_t readers = 0;     // the newest in m_readers
        uint32_t writes = 0;      // to anything that overlaps it
        // Proved already, for tasks that wait for a set: all writers up to a number of writes ...
        uint32_t writers_set = NONE, writers_upto = 0;
        // ... and the readers from one down to those of a task that is older.
        uint32_t readers_set = NONE, readers_from = 0, readers_downto = 0;
    };
    struct Reader {
        uint32_t task, previous;
    };

    bool waits_for_set(uint32_t task, uint32_t set) const {
        if (set == NONE) return false;
        for (const uint32_t entry : entries_of(task)) {
            if (entry == (MEGA_SET | set)) return true;
        }
        return false;
    }

    // A set that a task waits for and that has another one as a member; NONE: it waits otherwise, or not.
    uint32_t set_with(uint32_t task, uint32_t producer) const {
        for (const uint32_t entry : entries_of(task)) {
            if (!(entry & MEGA_SET)) continue;
            const std::span<const uint32_t> held = members(entry & ~MEGA_SET);
            if (std::binary_search(held.begin(), held.end(), producer)) return entry & ~MEGA_SET;
        }
        return NONE;
    }

    bool waits_directly(uint32_t task, uint32_t producer) const {
        for (const uint32_t entry : entries_of(task)) {
            if (entry == producer) return true;
        }
        return set_with(task, producer) != NONE;
    }

    // Whether the blocks that two tasks give to one worker touch nothing that another worker's do, but for
    // what both only read. Blocks are shared out alike, so block i may meet block i alone.
    bool are_apart(uint32_t a, uint32_t b) const {
        const uint32_t blocks = m_plan.tasks.blocks[a];
        if (blocks <= 1) return true;
        for (const MegaAccess& x : m_plan.tasks.accesses_of(a)) {
            for (const MegaAccess& y : m_plan.tasks.accesses_of(b)) {
                if (x.space != y.space || !((x.mode | y.mode) & MEGA_WRITE)) continue;
                for (uint32_t block = 0; block < blocks; ++block) {
                    const auto [from, to] = touched(x, block);
                    if (from >= to) continue;
                    if (block > 0 && meets(y, 0, block, from, to)) return false;
                    if (block + 1 < blocks && meets(y, block + 1, blocks, from, to)) return false;
                }
            }
        }
        return true;
    }

    static std::pair<uint64_t, uint64_t> touched(const MegaAccess& access, uint32_t block) {
        if (access.per_block == 0) return {access.begin, access.end};
        const unsigned __int128 from = access.begin + static_cast<unsigned __int128>(access.per_block) * block;
        const unsigned __int128 to = from + uint64_t(access.per_block);
        return {uint64_t(std::min<unsigned __int128>(from, access.end)),
                uint64_t(std::min<unsigned __int128>(to, access.end))};
    }

    // Whether blocks [first, last) of an access, which follow each other, touch something of a range.
    static bool meets(const MegaAccess& access, uint32_t first, uint32_t last, uint64_t from, uint64_t to) {
        return std::max(touched(access, first).first, from) < std::min(touched(access, last - 1).second, to);
    }

    // Whether one worker runs a part of both, in this order, and does so for each part.
    bool is_shared_alike(uint32_t earlier, uint32_t task) const {
        if (m_plan.tasks.blocks[earlier] != m_plan.tasks.blocks[task] || m_rank[earlier] >= m_rank[task]) return false;
        if (m_plan.workers) return m_plan.first_worker[earlier] == m_plan.first_worker[task];
        return !m_plan.region.empty() && m_plan.region[earlier] == m_plan.region[task];
    }

    // Whether an earlier task, or its part in what a worker does, is over when a later one begins.
    bool is_before(uint32_t earlier, uint32_t task) {
        return waits_directly(task, earlier) ||
               (is_shared_alike(earlier, task) && are_apart(earlier, task)) || is_reached(earlier, task);
    }

    // Whether it is enough that somebody came after one task and before the other. Where a worker runs
    // parts of both, that says nothing of another worker's.
    bool may_follow(uint32_t earlier, uint32_t task) const {
        return !is_shared_alike(earlier, task) || are_apart(earlier, task);
    }

    // The same from all that must be over when a task begins, step by step; for what is not seen at once.
    bool is_reached(uint32_t earlier, uint32_t task) {
        if (m_rank[earlier] >= m_rank[task]) return false;
        if (m_visited.empty()) m_visited.assign(m_count, 0), m_arrived.assign(m_count, {0, 0});
        ++m_visit;
        m_finished.clear();
        m_reached.assign(m_plan.workers, 0);
        m_floor = m_rank[earlier];
        each_producer(task, [&](uint32_t each) { finish(each); });
        for (uint32_t each = task; !m_previous.empty() && m_previous[each] != NONE;) {
            each = m_previous[each];  // its own part of it is over, and what that waited for
            if (m_plan.tasks.blocks[each] <= 1) finish(each);
            each_producer(each, [&](uint32_t producer) { finish(producer); });
        }
        if (m_plan.workers && parts(task) == 1) pass(m_plan.first_worker[task], m_rank[task]);
        while (!m_finished.empty()) {
            const uint32_t done = m_finished.back();
            m_finished.pop_back();
            if (done == earlier) return true;
            each_producer(done, [&](uint32_t each) { finish(each); });
            if (!m_plan.workers) {
                if (!m_previous.empty() && m_previous[done] != NONE) finish(m_previous[done]);
                continue;
            }
            for (uint32_t part = 0, worker = m_plan.first_worker[done]; part < parts(done); ++part) {
                pass(worker, m_rank[done] + 1);
                worker = worker + 1 == m_plan.workers ? 0 : worker + 1;
            }
        }
        return false;
    }

    void finish(uint32_t task) {
        if (m_rank[task] < m_floor || m_visited[task] == m_visit) return;
        m_visited[task] = m_visit;
        m_finished.push_back(task);
    }

    // A worker is past all that it has below a rank.
    void pass(uint32_t worker, uint32_t rank) {
        const auto begin = m_plan.list_tasks.begin() + std::ptrdiff_t(m_plan.list_begin[worker]);
        const auto end = m_plan.list_tasks.begin() + std::ptrdiff_t(m_plan.list_begin[worker + 1]);
        auto at = std::partition_point(begin, end, [&](uint32_t each) { return m_rank[each] < rank; });
        const uint64_t upto = uint64_t(at - begin);
        const uint64_t from = m_reached[worker];
        while (uint64_t(at - begin) > from) {
            const uint32_t each = *--at;
            if (m_rank[each] < m_floor) break;
            if (m_arrived[each].visit != m_visit) m_arrived[each] = {m_visit, 0};
            if (++m_arrived[each].parts == parts(each)) finish(each);
            each_producer(each, [&](uint32_t producer) { finish(producer); });
        }
        m_reached[worker] = std::max(from, upto);
    }

    History& history_of(uint32_t range) { return m_histories[m_place[range]]; }

    bool check_races() {
        const Ranges ranges(m_plan.tasks);
        m_place.assign(ranges.size(), NONE);
        uint32_t places = 0;
        for (uint32_t range = 0; range < ranges.size(); ++range) {
            if (!ranges.is_alone(range)) m_place[range] = places++;
        }
        m_histories.assign(places, {});
        m_readers.assign(1, {});
        for (uint32_t task = 0; task < m_count; ++task) {
            const uint32_t first = m_plan.tasks.access_begin[task], last = m_plan.tasks.access_begin[task + 1];
            if (!is_run(task)) {
                if (!check_alias(ranges, task)) return false;
                continue;
            }
            for (uint32_t k = first; k < last; ++k) {
                if (m_place[ranges.of_access(k)] == NONE) continue;
                if ((m_plan.tasks.accesses[k].mode & MEGA_READ) && !read(ranges, ranges.of_access(k), task)) return false;
            }
            for (uint32_t k = first; k < last; ++k) {
                if (m_place[ranges.of_access(k)] == NONE) continue;
                if ((m_plan.tasks.accesses[k].mode & MEGA_WRITE) && !write(ranges, ranges.of_access(k), task)) return false;
            }
        }
        return true;
    }

    bool read(const Ranges& ranges, uint32_t range, uint32_t task) {
        const std::span<const uint32_t> overlaps = ranges.overlaps(range);
        if (overlaps.empty() && !ranges[range].is_written) return true;  // whoever reads it, nobody writes
        History& history = history_of(range);
        if (history.writers_upto != history.writes || !waits_for_set(task, history.writers_set)) {
            uint32_t set = NONE;
            bool is_one_set = true;
            const auto check = [&](uint32_t other) {
                const uint32_t writer = history_of(other).writer;
                if (writer == NONE || writer == task) return true;
                const uint32_t found = set_with(task, writer);
                if (found == NONE || (set != NONE && found != set)) is_one_set = false;
                set = found;
                return found != NONE || is_before(writer, task) || is_overwritten(ranges, range, other, task) ||
                       fail(MegaBreach::Race, task, writer);
            };
            if (!check(range)) return false;
            for (const uint32_t other : overlaps) {
                if (!check(other)) return false;
            }
            if (is_one_set && set != NONE) {
                history.writers_set = set;
                history.writers_upto = history.writes;
            }
        }
        if (!history.readers || m_readers[history.readers].task != task) {
            m_readers.push_back({task, history.readers});
            history.readers = uint32_t(m_readers.size() - 1);
        }
        return true;
    }

    // Whether somebody whom the task waits for wrote after the writer of a range, who is then before it.
    bool is_overwritten(const Ranges& ranges, uint32_t range, uint32_t other, uint32_t task) {
        const uint32_t writer = history_of(other).writer;
        const auto covers = [&](uint32_t third) {
            const uint32_t newer = history_of(third).writer;
            return third != other && newer != NONE && newer != task && newer > writer &&
                   ranges.do_overlap(third, other) && is_before(newer, task);
        };
        if (!may_follow(writer, task)) return false;
        return covers(range) || std::ranges::any_of(ranges.overlaps(range), covers);
    }

    bool write(const Ranges& ranges, uint32_t range, uint32_t task) {
        const std::span<const uint32_t> overlaps = ranges.overlaps(range);
        History& history = history_of(range);
        if (ranges[range].begin == ranges[range].end) return true;
        bool has_readers = false;
        if (!check_readers(range, history.writer, task, has_readers)) return false;
        for (const uint32_t other : overlaps) {
            if (!check_readers(other, history.writer, task, has_readers)) return false;
        }
        // Whoever has read it since its last write has waited for that.
        if (history.writer != NONE && history.writer != task &&
            !(has_readers && may_follow(history.writer, task)) && !is_before(history.writer, task)) {
            return fail(MegaBreach::Race, task, history.writer);
        }
        ++history.writes;
        for (const uint32_t other : overlaps) {
            History& there = history_of(other);
            ++there.writes;
            const uint32_t writer = there.writer;
            if (writer == NONE || writer == task) continue;
            if (((history.writer != NONE && history.writer > writer) || has_read_since(there, writer, task) ||
                 has_read_since(history, writer, task)) && may_follow(writer, task)) {
                continue;
            }
            if (is_before(writer, task)) continue;
            if (!is_implied(ranges, range, other, task)) return fail(MegaBreach::Race, task, writer);
        }
        history.writer = task;
        return true;
    }

    bool has_read_since(const History& history, uint32_t writer, uint32_t task) const {
        return history.readers && m_readers[history.readers].task > writer && m_readers[history.readers].task <= task;
    }

    // Whether a reader or writer of something else that overlaps both came after the writer of a range.
    bool is_implied(const Ranges& ranges, uint32_t range, uint32_t other, uint32_t task) {
        const uint32_t writer = history_of(other).writer;
        return may_follow(writer, task) && std::ranges::any_of(ranges.overlaps(range), [&](uint32_t third) {
            const History& there = history_of(third);
            if (!ranges.do_overlap(third, other)) return false;
            return has_read_since(there, writer, task) ||
                   (there.writer != NONE && there.writer > writer && there.writer != task &&
                    is_before(there.writer, task));
        });
    }

    // All who have read a range since a task wrote what is now written again.
    bool check_readers(uint32_t range, uint32_t floor, uint32_t task, bool& has_readers) {
        History& history = history_of(range);
        uint32_t at = history.readers;
        if (at && m_readers[at].task == task) {
            has_readers = true;  // itself: it has waited for the writers
            at = m_readers[at].previous;
        }
        const auto is_since = [&](uint32_t reader) { return reader && (floor == NONE || m_readers[reader].task > floor); };
        if (!is_since(at)) return true;
        has_readers = true;
        if (history.readers_from == at && waits_for_set(task, history.readers_set) &&
            (history.readers_downto == 0 || (floor != NONE && m_readers[history.readers_downto].task <= floor))) {
            return true;
        }
        const uint32_t from = at;
        uint32_t set = NONE;
        bool is_one_set = true;
        for (; is_since(at); at = m_readers[at].previous) {
            const uint32_t found = set_with(task, m_readers[at].task);
            if (found == NONE || (set != NONE && found != set)) is_one_set = false;
            set = found;
            if (found == NONE && !is_before(m_readers[at].task, task)) {
                return fail(MegaBreach::Race, task, m_readers[at].task);
            }
        }
        if (is_one_set) {
            history.readers_set = set;
            history.readers_from = from;
            history.readers_downto = at;
        }
        return true;
    }

    // A task that is not run would have computed what is there.
    bool check_alias(const Ranges& ranges, uint32_t task) {
        const uint32_t alias = uint32_t(m_plan.alias[task]);
        const MegaTaskTable& tasks = m_plan.tasks;
        const std::span<const MegaAccess> mine = tasks.accesses_of(task), its = tasks.accesses_of(alias);
        bool is_right = tasks.op[task] == tasks.op[alias] && tasks.blocks[task] == tasks.blocks[alias] &&
                        (tasks.flags[task] & tasks.flags[alias] & MEGA_PURE) && !(tasks.flags[task] & MEGA_ATOMIC) &&
                        std::ranges::equal(tasks.params_of(task), tasks.params_of(alias)) && mine.size() == its.size();
        for (size_t k = 0; is_right && k < mine.size(); ++k) {
            is_right = mine[k].mode == its[k].mode && mine[k].per_block == its[k].per_block &&
                       ranges.of_access(tasks.access_begin[task] + k) == ranges.of_access(tasks.access_begin[alias] + k);
            if (!is_right || mine[k].begin == mine[k].end) continue;
            // Nobody has written there since, but for the outputs that it wrote itself.
            const uint32_t range = ranges.of_access(tasks.access_begin[task] + k);
            const bool is_input = mine[k].mode & MEGA_READ;
            const auto is_old = [&](uint32_t other) {
                const uint32_t writer = history_of(other).writer;
                return writer == NONE || writer < alias || (writer == alias && !is_input);
            };
            is_right = is_old(range) && std::ranges::all_of(ranges.overlaps(range), is_old);
        }
        return is_right || fail(MegaBreach::WrongAlias, task, alias);
    }

    struct Arrived {
        uint32_t visit, parts;
    };

    const MegaSchedule& m_plan;
    const uint32_t m_count;
    MegaVerdict m_verdict;
    MegaVector<uint32_t> m_rank;      // in the order that was proved
    MegaVector<uint32_t> m_previous;  // in the region
    MegaVector<uint32_t> m_place;     // of a range in m_histories; NONE: one access alone touches it
    MegaVector<History> m_histories;
    MegaVector<Reader> m_readers;     // [0] is none
    MegaVector<uint32_t> m_visited, m_finished;
    MegaVector<Arrived> m_arrived;
    MegaVector<uint64_t> m_reached;   // of each worker's list
    uint32_t m_visit = 0, m_floor = 0;
};

}  // namespace

MegaVerdict mega_validate(const MegaSchedule& schedule) { return Validator(schedule).validate(); }

}  // namespace brickline
