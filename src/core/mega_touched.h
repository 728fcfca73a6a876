// mega_touched.h: what the blocks of a region touch, and whether those of another task keep to themselves
// there. For the planner and for queues.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "mega_hazards.h"

namespace brickline {

class MegaTouched {
public:
    bool is_empty() const { return m_accesses.empty(); }

    // Each range is kept once.
    void add(std::span<const MegaAccess> accesses) {
        for (const MegaAccess& access : accesses) {
            const auto is_same = [&](const MegaAccess& each) {
                return each.space == access.space && each.begin == access.begin && each.end == access.end &&
                       each.per_block == access.per_block && each.mode == access.mode;
            };
            if (std::none_of(m_accesses.begin(), m_accesses.end(), is_same)) m_accesses.push_back(access);
        }
    }

    // Whether block b of a task touches nothing that another block of the region does, but for what both
    // only read. Of a region that touches too much to look through, it is not known.
    bool are_apart(std::span<const MegaAccess> accesses) const {
        if (m_accesses.size() > MOST) return false;
        for (const MegaAccess& x : m_accesses) {
            for (const MegaAccess& y : accesses) {
                if (x.space != y.space || !((x.mode | y.mode) & MEGA_WRITE)) continue;
                if (x.begin >= y.end || y.begin >= x.end || x.begin == x.end || y.begin == y.end) continue;
                if (x.per_block <= 0 || x.per_block != y.per_block || x.begin != y.begin) return false;
            }
        }
        return true;
    }

private:
    static constexpr size_t MOST = 64;
    std::vector<MegaAccess> m_accesses;
};

}  // namespace brickline
