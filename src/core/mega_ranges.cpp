#include "mega_ranges.h"

#include <algorithm>
#include <array>

namespace brickline {
namespace {

constexpr uint32_t NONE = ~0u;
constexpr size_t TOGETHER = 256;  // accesses that are looked at twice, and then lie in a cache
constexpr size_t AHEAD = 64;      // accesses that are fetched meanwhile: beyond a page, where the processor stops

// Whether accesses fit, all that were shown: a mode of 1 to 3, a range that ends no earlier than it begins,
// and 0 or more bytes of a block. Kept as bits that stay, so that it takes no branch.
class Fitting {
public:
    void show(const MegaAccess& access) {
        m_modes |= access.mode | (access.mode - 1);
        m_falls |= access.begin > access.end;
        m_signs |= access.per_block;
    }
    bool do_all() const { return !(m_modes & ~3u) && !m_falls && m_signs >= 0; }

private:
    uint32_t m_modes = 0;
    bool m_falls = false;
    int64_t m_signs = 0;
};

uint32_t hash_of(uint32_t space, uint64_t begin, uint64_t end) {
    const uint64_t hash = begin + end * 0x9e3779b97f4a7c15ull + space * 0xff51afd7ed558ccdull;
    return uint32_t(hash * 0xd6e8feb86659fd93ull >> 32);
}

bool is_range_of(const MegaAccess& access, const MegaRanges::Range& range) {
    return !((range.begin ^ access.begin) | (range.end ^ access.end) | (range.space ^ access.space));
}

}  // namespace

MegaRanges::MegaRanges(const MegaTaskTable& tasks) {
    m_of_access.resize(tasks.accesses.size());
    m_ranges.reserve(tasks.accesses.size());
    if (number_in_order(tasks)) return;
    m_ranges.clear();
    m_is_shared = false;
    number(tasks);
    find_overlaps();
}

// Where each access of a space comes after all before it, or is the last one again, as those of tasks
// that have nothing to do with each other: then no two ranges overlap. False: it is not so.
bool MegaRanges::number_in_order(const MegaTaskTable& tasks) {
    const size_t most = tasks.accesses.size() * 4 + 1024;
    MegaVector<uint32_t> last;  // by space
    Fitting fitting;
    for (size_t k = 0; k < tasks.accesses.size(); ++k) {
        const MegaAccess& access = tasks.accesses[k];
        __builtin_prefetch(&access + AHEAD);
        fitting.show(access);
        if (access.space >= last.size()) {
            if (access.space >= most) return false;
            last.resize(std::max<size_t>(size_t(access.space) + 1, last.size() * 2), NONE);
        }
        uint32_t& range = last[access.space];
        const bool is_written = (access.mode & MEGA_WRITE) != 0;
        if (range == NONE || access.begin >= m_ranges[range].end) {
            range = uint32_t(m_ranges.size());
            m_ranges.push_back({access.begin, access.end, access.space, is_written, false});
        } else if (access.begin == m_ranges[range].begin && access.end == m_ranges[range].end) {
            m_ranges[range].is_shared = m_is_shared = true;
            m_ranges[range].is_written |= is_written;
        } else {
            return false;
        }
        m_of_access[k] = range;
    }
    if (!fitting.do_all()) tasks.check();
    return true;
}

// Any others, by a table of those that were met.
void MegaRanges::number(const MegaTaskTable& tasks) {
    m_shift = 32 - 10;
    m_table.assign(1024, 0);
    std::array<uint32_t, TOGETHER> hashes;
    const size_t count = tasks.accesses.size();
    for (size_t first = 0; first < count; first += TOGETHER) {
        const std::span<const MegaAccess> accesses = tasks.accesses.subspan(first, std::min(count - first, TOGETHER));
        const uint32_t* const table = m_table.data();
        const unsigned shift = m_shift;
        Fitting fitting;
        for (size_t k = 0; k < accesses.size(); ++k) {
            const MegaAccess& access = accesses[k];
            __builtin_prefetch(&access + AHEAD);
            fitting.show(access);
            hashes[k] = hash_of(access.space, access.begin, access.end);
            __builtin_prefetch(table + (hashes[k] >> shift), 1);
        }
        if (!fitting.do_all()) tasks.check();
        number_some(accesses, hashes.data(), first);
    }
    m_is_shared = m_ranges.size() < count;
}

// What a table holds is kept in registers from one access to the next, until a range is added.
void MegaRanges::number_some(std::span<const MegaAccess> accesses, const uint32_t* hashes, size_t first) {
    uint32_t* const numbers = m_of_access.data() + first;
    size_t k = 0;
    while (k < accesses.size()) {
        const uint32_t* const table = m_table.data();
        Range* const ranges = m_ranges.data();
        const size_t mask = m_table.size() - 1;
        const unsigned shift = m_shift;
        for (; k < accesses.size(); ++k) {
            const MegaAccess& access = accesses[k];
            size_t at = hashes[k] >> shift;
            while (table[at] && !is_range_of(access, ranges[table[at] - 1])) at = (at + 1) & mask;
            if (!table[at]) {
                add(access, at);
                numbers[k++] = uint32_t(m_ranges.size() - 1);
                break;
            }
            const uint32_t number = table[at] - 1;
            ranges[number].is_shared = true;
            ranges[number].is_written |= (access.mode & MEGA_WRITE) != 0;
            numbers[k] = number;
        }
    }
}

void MegaRanges::add(const MegaAccess& access, size_t at) {
    m_ranges.push_back({access.begin, access.end, access.space, (access.mode & MEGA_WRITE) != 0, false});
    m_table[at] = uint32_t(m_ranges.size());
    if (m_ranges.size() * 2 > m_table.size() && m_shift) grow();
}

void MegaRanges::grow() {
    const unsigned more = std::min(m_shift, 2u);
    m_shift -= more;
    const size_t mask = (m_table.size() << more) - 1;
    m_table.assign(mask + 1, 0);
    for (uint32_t range = 0; range < m_ranges.size(); ++range) {
        const Range& it = m_ranges[range];
        size_t at = hash_of(it.space, it.begin, it.end) >> m_shift;
        while (m_table[at]) at = (at + 1) & mask;
        m_table[at] = range + 1;
    }
}

// Ranges by space, then by begin; a space at a time where they come in order already.
MegaVector<uint32_t> MegaRanges::sorted() const {
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

void MegaRanges::find_overlaps() {
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

}  // namespace brickline
