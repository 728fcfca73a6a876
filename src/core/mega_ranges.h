// mega_ranges.h: the different ranges of all accesses of a table, and which of them overlap where one is
// written. For the proof in mega_validation.h, which knows ranges as wholes; cuts nothing.
#pragma once

#include <cstdint>
#include <span>

#include "mega_planning.h"

namespace brickline {

class MegaRanges {
public:
    // Throws MegaFaulty for an access that does not fit; the table's other columns have been checked.
    explicit MegaRanges(const MegaTaskTable& tasks);

    struct Range {
        uint64_t begin, end;
        uint32_t space;
        bool is_written;
        bool is_shared;  // another access has it, too
    };

    uint32_t size() const { return uint32_t(m_ranges.size()); }
    std::span<const uint32_t> of_accesses() const { return m_of_access; }
    uint32_t of_access(size_t access) const { return m_of_access[access]; }
    const Range& operator[](uint32_t range) const { return m_ranges[range]; }
    std::span<const uint32_t> overlaps(uint32_t range) const {
        if (m_overlap_begin.empty()) return {};
        return {m_overlaps.data() + m_overlap_begin[range], m_overlap_begin[range + 1] - m_overlap_begin[range]};
    }
    // Whether nobody else may touch the bytes of any access while it does.
    bool are_all_alone() const { return !m_is_shared && m_overlap_begin.empty(); }
    bool do_overlap(uint32_t a, uint32_t b) const {
        return m_ranges[a].begin < m_ranges[b].end && m_ranges[b].begin < m_ranges[a].end;
    }

private:
    bool number_in_order(const MegaTaskTable& tasks);
    void number(const MegaTaskTable& tasks);
    void number_some(std::span<const MegaAccess> accesses, const uint32_t* hashes, size_t first);
    void add(const MegaAccess& access, size_t at);
    void grow();
    MegaVector<uint32_t> sorted() const;
    void find_overlaps();

    MegaVector<Range> m_ranges;
    MegaVector<uint32_t> m_of_access;
    bool m_is_shared = false;              // a range of several accesses
    MegaVector<uint64_t> m_overlap_begin;  // empty: no two overlap
    MegaVector<uint32_t> m_overlaps;
    MegaVector<uint32_t> m_table;          // range + 1, open addressing
    unsigned m_shift = 0;                  // bits of a hash that are not a place in it
};

}  // namespace brickline
