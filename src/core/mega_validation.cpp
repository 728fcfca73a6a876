#include "mega_validation.h"

#include <algorithm>
#include <string>

#include "brickline/megakernel.h"
#include "mega_ranges.h"

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;

void require(bool holds, const char* what) {
    if (!holds) throw MegaFaulty(what);
}

class Validator {
public:
    explicit Validator(const MegaSchedule& schedule) : m_plan(schedule), m_count(schedule.tasks.size()) {}

    MegaVerdict validate() {
        check_columns();
        const MegaRanges ranges(m_plan.tasks);
        if (check_aliases_exist() && check_slots() && check_waits() && check_order() && check_lists() &&
            check_regions()) {
            check_races(ranges);
        }
        return m_verdict;
    }

private:
    bool fail(MegaBreach breach, uint32_t task, uint32_t other) {
        if (m_verdict.breach == MegaBreach::None) m_verdict = {breach, task, other};
        return false;
    }

    bool is_run(uint32_t task) const { return m_are_all_run || m_plan.alias[task] < 0; }
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
        m_plan.tasks.check_columns();
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
        int32_t are_none = -1;
        for (const int32_t alias : m_plan.alias) are_none &= alias;
        m_are_all_run = are_none < 0;
        if (m_are_all_run) return true;
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

    // Whether every producer is there and signals, all sets ascend, and all tasks are run: the same for any
    // task that waits, so nobody needs to be asked whom it waits for.
    bool are_waits_plain() const {
        if (!m_are_all_run || !m_plan.signals.empty()) return false;
        const uint32_t sets = uint32_t(m_plan.set_begin.size() - 1);
        uint32_t wrong = 0;
        for (const uint32_t entry : m_plan.entries) {
            wrong |= (entry & ~MEGA_SET) >= ((entry & MEGA_SET) ? sets : m_count);
        }
        for (const uint32_t member : m_plan.set_members) wrong |= member >= m_count;
        for (uint32_t set = 0; set < sets; ++set) {
            const std::span<const uint32_t> held = members(set);
            for (size_t k = 1; k < held.size(); ++k) wrong |= held[k - 1] >= held[k];
        }
        return !wrong;
    }

    bool check_waits() {
        if (are_waits_plain()) return true;
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

    // Of a task, what tells whether one worker runs it and another one in the same way.
    struct Seat {
        uint32_t rank;  // in the order that was proved
        uint32_t blocks;
        uint32_t with;  // its first worker, or its region where there are none
    };
    uint32_t rank_of(uint32_t task) const { return m_seats[task].rank; }

    // An order in which everything comes after what it waits for proves that there is no cycle.
    bool check_order() {
        m_seats.resize(m_count);
        const bool has_regions = !m_plan.region.empty();
        for (uint32_t task = 0; task < m_count; ++task) {
            m_seats[task] = {m_plan.order.empty() ? task : NONE, m_plan.tasks.blocks[task],
                             m_plan.workers ? m_plan.first_worker[task] : has_regions ? m_plan.region[task] : task};
        }
        uint32_t rank = 0;
        for (const uint32_t task : m_plan.order) {
            require(task < m_count && m_seats[task].rank == NONE, "expected each task once in the order");
            m_seats[task].rank = rank++;
        }
        const size_t sets = m_plan.set_begin.size() - 1;
        MegaVector<uint32_t> last(sets, NONE);  // the member with the highest rank
        const uint32_t* entry = m_plan.entries.data();
        for (uint32_t task = 0; task < m_count; ++task) {
            const uint32_t* const end = m_plan.entries.data() + m_plan.entry_begin[task + 1];
            if (!is_run(task)) {
                entry = end;
                continue;
            }
            if (rank_of(task) == NONE) return fail(MegaBreach::WrongList, task, NONE);
            for (; entry < end; ++entry) {
                uint32_t producer = *entry;
                if (*entry & MEGA_SET) {
                    uint32_t& found = last[*entry & ~MEGA_SET];
                    if (found == NONE) found = last_of(members(*entry & ~MEGA_SET));
                    if (found == NONE) continue;
                    producer = found;
                }
                if (rank_of(producer) >= rank_of(task)) return fail(MegaBreach::Cycle, task, producer);
            }
        }
        return true;
    }

    uint32_t last_of(std::span<const uint32_t> tasks) const {
        uint32_t last = NONE, rank = 0;
        for (const uint32_t task : tasks) {
            if (last == NONE || rank_of(task) > rank) last = task, rank = rank_of(task);
        }
        return last;
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
                if (before != NONE && rank_of(before) == rank_of(task)) return fail(MegaBreach::WrongList, task, worker);
                if (before != NONE && rank_of(before) > rank_of(task)) return fail(MegaBreach::Cycle, task, before);
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
                rank_of(before) >= rank_of(task)) {
                return fail(MegaBreach::WrongRegion, task, before);
            }
        }
        return true;
    }

    // ------------------------------------------------------------------------------------ races

    // Who has touched a range since it was last written.
    struct Site {
        uint32_t writer = NONE;
        uint32_t readers = 0;     // the newest in m_readers
        uint32_t writes = 0;      // to anything that overlaps it
        // Proved already, for tasks that wait for a set: all writers up to a number of writes ...
        uint32_t writers_set = NONE, writers_upto = 0;
        // ... and the readers from one down to those of a task that is older.
        uint32_t readers_set = NONE, readers_from = 0, readers_downto = 0;
        std::span<const uint32_t> overlaps;
        bool is_read_alone = false;  // nobody writes what it has: whoever reads it need not wait
        bool is_left_alone = false;  // or it has no bytes, or one access alone touches them
    };
    struct Reader {
        uint32_t task, previous;
    };

    // Of the task that is looked at:
    bool waits_for_set(uint32_t set) const {
        if (set == NONE) return false;
        for (const uint32_t entry : m_waits) {
            if (entry == (MEGA_SET | set)) return true;
        }
        return false;
    }

    // Whether a set has a member. Whoever asks for one often asks for its neighbours next.
    bool has_member(uint32_t set, uint32_t producer) {
        const std::span<const uint32_t> held = members(set);
        const size_t near = m_near;
        for (const size_t at : {near + 1, near - 1, near}) {
            if (at < held.size() && held[at] == producer) {
                m_near = at;
                return true;
            }
        }
        const auto found = std::lower_bound(held.begin(), held.end(), producer);
        m_near = size_t(found - held.begin());
        return found != held.end() && *found == producer;
    }

    // A set that it waits for and that has another task as a member; NONE: it waits otherwise, or not.
    uint32_t set_with(uint32_t producer) {
        for (const uint32_t entry : m_waits) {
            if ((entry & MEGA_SET) && has_member(entry & ~MEGA_SET, producer)) return entry & ~MEGA_SET;
        }
        return NONE;
    }

    bool waits_for_task(uint32_t producer) const {
        for (const uint32_t entry : m_waits) {
            if (entry == producer) return true;
        }
        return false;
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
        const Seat &one = m_seats[earlier], &other = m_seats[task];
        return one.with == other.with && one.blocks == other.blocks && one.rank < other.rank;
    }

    // Whether an earlier task, or its part in what a worker does, is over when a later one begins.
    bool is_before(uint32_t earlier, uint32_t task) {
        return waits_for_task(earlier) || (is_shared_alike(earlier, task) && are_apart(earlier, task)) ||
               set_with(earlier) != NONE || is_reached(earlier, task);
    }

    // Whether it is enough that somebody came after one task and before the other. Where a worker runs
    // parts of both, that says nothing of another worker's.
    bool may_follow(uint32_t earlier, uint32_t task) const {
        return m_seats[earlier].blocks <= 1 || !is_shared_alike(earlier, task) || are_apart(earlier, task);
    }

    // The same from all that must be over when a task begins, step by step; for what is not seen at once.
    bool is_reached(uint32_t earlier, uint32_t task) {
        if (rank_of(earlier) >= rank_of(task)) return false;
        if (m_visited.empty()) m_visited.assign(m_count, 0), m_arrived.assign(m_count, {0, 0});
        ++m_visit;
        m_finished.clear();
        m_reached.assign(m_plan.workers, 0);
        m_floor = rank_of(earlier);
        each_producer(task, [&](uint32_t each) { finish(each); });
        for (uint32_t each = task; !m_previous.empty() && m_previous[each] != NONE;) {
            each = m_previous[each];  // its own part of it is over, and what that waited for
            if (m_plan.tasks.blocks[each] <= 1) finish(each);
            each_producer(each, [&](uint32_t producer) { finish(producer); });
        }
        if (m_plan.workers && parts(task) == 1) pass(m_plan.first_worker[task], rank_of(task));
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
                pass(worker, rank_of(done) + 1);
                worker = worker + 1 == m_plan.workers ? 0 : worker + 1;
            }
        }
        return false;
    }

    void finish(uint32_t task) {
        if (rank_of(task) < m_floor || m_visited[task] == m_visit) return;
        m_visited[task] = m_visit;
        m_finished.push_back(task);
    }

    // A worker is past all that it has below a rank.
    void pass(uint32_t worker, uint32_t rank) {
        const auto begin = m_plan.list_tasks.begin() + std::ptrdiff_t(m_plan.list_begin[worker]);
        const auto end = m_plan.list_tasks.begin() + std::ptrdiff_t(m_plan.list_begin[worker + 1]);
        auto at = std::partition_point(begin, end, [&](uint32_t each) { return rank_of(each) < rank; });
        const uint64_t upto = uint64_t(at - begin);
        const uint64_t from = m_reached[worker];
        while (uint64_t(at - begin) > from) {
            const uint32_t each = *--at;
            if (rank_of(each) < m_floor) break;
            if (m_arrived[each].visit != m_visit) m_arrived[each] = {m_visit, 0};
            if (++m_arrived[each].parts == parts(each)) finish(each);
            each_producer(each, [&](uint32_t producer) { finish(producer); });
        }
        m_reached[worker] = std::max(from, upto);
    }

    void make_sites(const MegaRanges& ranges) {
        m_sites.assign(ranges.size(), {});
        for (uint32_t range = 0; range < ranges.size(); ++range) {
            const MegaRanges::Range& it = ranges[range];
            Site& site = m_sites[range];
            site.overlaps = ranges.overlaps(range);
            site.is_read_alone = site.overlaps.empty() && !it.is_written;
            site.is_left_alone = it.begin == it.end || (site.overlaps.empty() && !(it.is_shared && it.is_written));
        }
    }

    bool check_races(const MegaRanges& ranges) {
        if (m_are_all_run && ranges.are_all_alone()) return true;
        make_sites(ranges);
        m_readers.reserve(m_plan.tasks.accesses.size() + 1);
        m_readers.assign(1, {});
        const MegaAccess* const accesses = m_plan.tasks.accesses.data();
        const uint32_t* const numbers = ranges.of_accesses().data();
        for (uint32_t task = 0, first = 0, last = 0; task < m_count; ++task, first = last) {
            last = m_plan.tasks.access_begin[task + 1];
            if (!is_run(task)) {
                if (!check_alias(ranges, task)) return false;
                continue;
            }
            m_waits = entries_of(task);
            for (uint32_t k = first; k < last; ++k) {
                if (!(accesses[k].mode & MEGA_READ)) continue;
                Site& site = m_sites[numbers[k]];
                if (!site.is_left_alone && !read(ranges, site, task)) return false;
            }
            for (uint32_t k = first; k < last; ++k) {
                if (!(accesses[k].mode & MEGA_WRITE)) continue;
                Site& site = m_sites[numbers[k]];
                if (!site.is_left_alone && !write(ranges, site, task)) return false;
            }
        }
        return true;
    }

    bool read(const MegaRanges& ranges, Site& site, uint32_t task) {
        if (site.is_read_alone) return true;
        if (site.overlaps.size() < FEW) {
            if (!check_writer(ranges, site, site, task)) return false;
            for (const uint32_t other : site.overlaps) {
                if (!check_writer(ranges, site, m_sites[other], task)) return false;
            }
        } else if (site.writers_upto != site.writes || !waits_for_set(site.writers_set)) {
            if (!check_writers(ranges, site, task)) return false;
        }
        if (!site.readers || m_readers[site.readers].task != task) {
            m_readers.push_back({task, site.readers});
            site.readers = uint32_t(m_readers.size() - 1);
        }
        return true;
    }

    // Whoever wrote something that overlaps what a task reads is before it.
    bool check_writer(const MegaRanges& ranges, const Site& site, const Site& other, uint32_t task) {
        return other.writer == NONE || other.writer == task || is_before(other.writer, task) ||
               is_overwritten(ranges, site, other, task) || fail(MegaBreach::Race, task, other.writer);
    }

    // The same of all that overlap it; where one set has them, it is noted for the next task.
    bool check_writers(const MegaRanges& ranges, Site& site, uint32_t task) {
        uint32_t set = NONE;
        bool is_one_set = true;
        const auto check = [&](const Site& other) {
            if (other.writer == NONE || other.writer == task) return true;
            const uint32_t found = set_with(other.writer);
            if (found == NONE || (set != NONE && found != set)) is_one_set = false;
            set = found;
            return found != NONE || check_writer(ranges, site, other, task);
        };
        if (!check(site)) return false;
        for (const uint32_t other : site.overlaps) {
            if (!check(m_sites[other])) return false;
        }
        if (is_one_set && set != NONE) {
            site.writers_set = set;
            site.writers_upto = site.writes;
        }
        return true;
    }

    uint32_t number_of(const Site& site) const { return uint32_t(&site - m_sites.data()); }

    // Whether somebody whom the task waits for wrote after the writer of a range, who is then before it.
    bool is_overwritten(const MegaRanges& ranges, const Site& site, const Site& other, uint32_t task) {
        const auto covers = [&](const Site& third) {
            return &third != &other && third.writer != NONE && third.writer != task && third.writer > other.writer &&
                   ranges.do_overlap(number_of(third), number_of(other)) && is_before(third.writer, task);
        };
        if (!may_follow(other.writer, task)) return false;
        return covers(site) || std::ranges::any_of(site.overlaps, [&](uint32_t third) { return covers(m_sites[third]); });
    }

    bool write(const MegaRanges& ranges, Site& site, uint32_t task) {
        bool has_readers = false;
        if (site.readers && !check_readers(site, site.writer, task, has_readers)) return false;
        for (const uint32_t other : site.overlaps) {
            Site& there = m_sites[other];
            if (there.readers && !check_readers(there, site.writer, task, has_readers)) return false;
        }
        // Whoever has read it since its last write has waited for that.
        if (site.writer != NONE && site.writer != task &&
            !(has_readers && may_follow(site.writer, task)) && !is_before(site.writer, task)) {
            return fail(MegaBreach::Race, task, site.writer);
        }
        ++site.writes;
        for (const uint32_t other : site.overlaps) {
            Site& there = m_sites[other];
            ++there.writes;
            const uint32_t writer = there.writer;
            if (writer == NONE || writer == task) continue;
            if (((site.writer != NONE && site.writer > writer) || has_read_since(there, writer, task) ||
                 has_read_since(site, writer, task)) && may_follow(writer, task)) {
                continue;
            }
            if (is_before(writer, task)) continue;
            if (!is_implied(ranges, site, there, task)) return fail(MegaBreach::Race, task, writer);
        }
        site.writer = task;
        return true;
    }

    bool has_read_since(const Site& site, uint32_t writer, uint32_t task) const {
        return site.readers && m_readers[site.readers].task > writer && m_readers[site.readers].task <= task;
    }

    // Whether a reader or writer of something else that overlaps both came after the writer of a range.
    bool is_implied(const MegaRanges& ranges, const Site& site, const Site& other, uint32_t task) {
        const uint32_t writer = other.writer;
        return may_follow(writer, task) && std::ranges::any_of(site.overlaps, [&](uint32_t third) {
            const Site& there = m_sites[third];
            if (!ranges.do_overlap(third, number_of(other))) return false;
            return has_read_since(there, writer, task) ||
                   (there.writer != NONE && there.writer > writer && there.writer != task &&
                    is_before(there.writer, task));
        });
    }

    // All who have read a range since a task wrote what is now written again.
    bool check_readers(Site& site, uint32_t floor, uint32_t task, bool& has_readers) {
        uint32_t at = site.readers;
        if (m_readers[at].task == task) {
            has_readers = true;  // itself: it has waited for the writers
            at = m_readers[at].previous;
        }
        const auto is_since = [&](uint32_t reader) { return reader && (floor == NONE || m_readers[reader].task > floor); };
        if (!is_since(at)) return true;
        has_readers = true;
        if (site.readers_from == at && waits_for_set(site.readers_set) &&
            (site.readers_downto == 0 || (floor != NONE && m_readers[site.readers_downto].task <= floor))) {
            return true;
        }
        return check_each_reader(site, at, floor, task);
    }

    bool check_each_reader(Site& site, uint32_t at, uint32_t floor, uint32_t task) {
        const uint32_t from = at;
        uint32_t set = NONE;
        bool is_one_set = true;
        for (; at && (floor == NONE || m_readers[at].task > floor); at = m_readers[at].previous) {
            const uint32_t reader = m_readers[at].task;
            const uint32_t found = set_with(reader);
            if (found == NONE || (set != NONE && found != set)) is_one_set = false;
            set = found;
            if (found == NONE && !is_before(reader, task)) return fail(MegaBreach::Race, task, reader);
        }
        if (is_one_set) {
            site.readers_set = set;
            site.readers_from = from;
            site.readers_downto = at;
        }
        return true;
    }

    // A task that is not run would have computed what is there.
    bool check_alias(const MegaRanges& ranges, uint32_t task) {
        const uint32_t alias = uint32_t(m_plan.alias[task]);
        const MegaTaskTable& tasks = m_plan.tasks;
        const std::span<const MegaAccess> mine = tasks.accesses_of(task), its = tasks.accesses_of(alias);
        bool is_right = tasks.op[task] == tasks.op[alias] && tasks.blocks[task] == tasks.blocks[alias] &&
                        (tasks.flags[task] & tasks.flags[alias] & MEGA_TASK_PURE) &&
                        !((tasks.flags[task] | tasks.flags[alias]) & MEGA_TASK_ATOMIC) &&
                        std::ranges::equal(tasks.params_of(task), tasks.params_of(alias)) && mine.size() == its.size();
        for (size_t k = 0; is_right && k < mine.size(); ++k) {
            is_right = mine[k].mode == its[k].mode && mine[k].per_block == its[k].per_block &&
                       mine[k].begin == its[k].begin && mine[k].end == its[k].end && mine[k].space == its[k].space;
            if (!is_right || mine[k].begin == mine[k].end) continue;
            // Nobody has written there since, but for the outputs that it wrote itself.
            const uint32_t range = ranges.of_access(tasks.access_begin[task] + k);
            const bool is_input = mine[k].mode & MEGA_READ;
            const auto is_old = [&](uint32_t other) {
                const uint32_t writer = m_sites[other].writer;
                return writer == NONE || writer < alias || (writer == alias && !is_input);
            };
            is_right = is_old(range) && std::ranges::all_of(ranges.overlaps(range), is_old);
        }
        return is_right || fail(MegaBreach::WrongAlias, task, alias);
    }

    struct Arrived {
        uint32_t visit, parts;
    };

    static constexpr size_t FEW = 4;  // overlaps of a range, which are proved one by one
    const MegaSchedule& m_plan;
    const uint32_t m_count;
    MegaVerdict m_verdict;
    bool m_are_all_run = true;
    MegaVector<Seat> m_seats;
    MegaVector<uint32_t> m_previous;  // in the region
    MegaVector<Site> m_sites;         // by range
    std::span<const uint32_t> m_waits;  // of the task that is looked at
    MegaVector<Reader> m_readers;     // [0] is none
    MegaVector<uint32_t> m_visited, m_finished;
    MegaVector<Arrived> m_arrived;
    MegaVector<uint64_t> m_reached;   // of each worker's list
    uint32_t m_visit = 0, m_floor = 0;
    size_t m_near = 0;  // where the last member lay that was asked for
};

}  // namespace

MegaVerdict mega_validate(const MegaSchedule& schedule) { return Validator(schedule).validate(); }

}  // namespace brickline
