// mega_sets.h: sets of tasks, each kept once. Knows nothing of what the tasks have in common.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "mega_memory.h"

namespace brickline {

// Sets of tasks, each kept once: equal sets have equal numbers.
class MegaSets {
public:
    MegaSets();
    // The number of a set; members are ascending, each once.
    uint32_t of(std::span<const uint32_t> members);
    std::span<const uint32_t> operator[](uint32_t set) const {
        return {m_members.data() + m_begin[set], m_begin[set + 1] - m_begin[set]};
    }
    uint32_t size() const { return uint32_t(m_begin.size() - 1); }
    const MegaVector<uint64_t>& begins() const { return m_begin; }
    const MegaVector<uint32_t>& members() const { return m_members; }
    void clear();
    // Begins and members; it is empty afterwards.
    std::pair<MegaVector<uint64_t>, MegaVector<uint32_t>> take();

private:
    MegaVector<uint64_t> m_begin;
    MegaVector<uint32_t> m_members;
    MegaVector<uint32_t> m_table;  // set + 1, open addressing
    MegaVector<uint32_t> m_hashes;
    void grow();
};

// Makes numbers ascending, each once.
void mega_sort_each_once(std::vector<uint32_t>& numbers);
inline void mega_each_once(std::vector<uint32_t>& numbers) {
    if (numbers.size() < 2) return;
    if (numbers.size() > 2) return mega_sort_each_once(numbers);
    if (numbers[0] == numbers[1]) numbers.pop_back();
    else if (numbers[0] > numbers[1]) std::swap(numbers[0], numbers[1]);
}

}  // namespace brickline
