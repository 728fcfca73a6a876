#include "mega_sets.h"

#include <algorithm>

namespace brickline {

void mega_sort_each_once(std::vector<uint32_t>& numbers) {
    if (numbers.size() > 16) {
        // Who wrote the pieces of a range in their order is in order already.
        if (!std::is_sorted(numbers.begin(), numbers.end())) std::sort(numbers.begin(), numbers.end());
        numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
        return;
    }
    size_t kept = 1;
    for (size_t k = 1; k < numbers.size(); ++k) {
        const uint32_t number = numbers[k];
        size_t at = kept;
        while (at > 0 && numbers[at - 1] > number) --at;
        if (at > 0 && numbers[at - 1] == number) continue;
        for (size_t j = kept++; j > at; --j) numbers[j] = numbers[j - 1];
        numbers[at] = number;
    }
    numbers.resize(kept);
}

namespace {

// A sum, as members come in one order: none waits for the hash of those before it.
uint32_t hash_of(std::span<const uint32_t> members) {
    uint64_t hash = 0;
    for (const uint32_t member : members) {
        const uint64_t mixed = (member + 1) * 0xff51afd7ed558ccdull;
        hash += (mixed ^ (mixed >> 32)) * 0x9e3779b97f4a7c15ull;
    }
    return uint32_t(hash >> 32);
}

}  // namespace

MegaSets::MegaSets() { clear(); }

void MegaSets::clear() {
    m_begin.assign(1, 0);
    m_members.clear();
    m_hashes.clear();
    m_table.assign(64, 0);
}

std::pair<MegaVector<uint64_t>, MegaVector<uint32_t>> MegaSets::take() {
    auto taken = std::make_pair(std::move(m_begin), std::move(m_members));
    clear();
    return taken;
}

void MegaSets::grow() {
    const size_t mask = m_table.size() * 2 - 1;
    m_table.assign(mask + 1, 0);
    for (uint32_t set = 0; set < size(); ++set) {
        size_t at = m_hashes[set] & mask;
        while (m_table[at]) at = (at + 1) & mask;
        m_table[at] = set + 1;
    }
}

uint32_t MegaSets::of(std::span<const uint32_t> members) {
    if (size_t(size()) * 2 >= m_table.size()) grow();
    const uint32_t hash = hash_of(members);
    const size_t mask = m_table.size() - 1;
    size_t at = hash & mask;
    for (; m_table[at]; at = (at + 1) & mask) {
        const uint32_t set = m_table[at] - 1;
        if (m_hashes[set] != hash) continue;
        const std::span<const uint32_t> found = (*this)[set];
        if (found.size() == members.size() &&
            std::equal(members.begin(), members.end(), found.begin())) {
            return set;
        }
    }
    const uint32_t made = size();
    m_table[at] = made + 1;
    m_hashes.push_back(hash);
    m_members.insert(m_members.end(), members.begin(), members.end());
    m_begin.push_back(m_members.size());
    return made;
}

}  // namespace brickline
