#include "mega_histories.h"

namespace brickline {

uint32_t MegaHistories::readers_entry(uint32_t list) {
    if (!list) return NOBODY;
    Reader& reader = readers[list];
    if (reader.entry != UNKNOWN) return reader.entry;
    scratch.clear();
    for (uint32_t each = list; each; each = readers[each].previous) scratch.push_back(readers[each].task);
    std::reverse(scratch.begin(), scratch.end());
    return reader.entry = entry_of(scratch);
}

void MegaHistories::collect_tasks(const Segment& segment, std::vector<uint32_t>& tasks) const {
    if (segment.what & COMPOSITE) {
        each_child(segment, [&](const Segment& child) { collect_tasks(child, tasks); });
    } else if (segment.what >= 2 && segment.what - 2 >= first) {
        tasks.push_back(segment.what - 2);
    }
}

uint32_t MegaHistories::composite_entry(const Segment& segment) {
    Composite& composite = composites[segment.what & ~COMPOSITE];
    if (composite.entry != UNKNOWN) return composite.entry;
    scratch.clear();
    collect_tasks(segment, scratch);
    mega_each_once(scratch);
    return composite.entry = entry_of(scratch);
}

MegaVersion MegaHistories::held_by_children(const Composite& composite, uint64_t begin, uint64_t end) const {
    MegaVersion all{};
    const size_t last = composite.first + composite.count;
    for (size_t k = child_at(composite, begin); k < last && children[k].begin < end; ++k) {
        const Segment& child = children[k];
        all = both(all, held(child, std::max(child.begin, begin), std::min(child.end, end)));
    }
    return all;
}

void MegaHistories::push_writers(const Segment& segment, uint32_t self, std::vector<uint32_t>& to) {
    if (!(segment.what & COMPOSITE)) {
        push_writer(segment.what, self, to);
    } else if (is_whole(segment)) {
        push(to, composite_entry(segment));
    } else {
        each_child(segment, [&](const Segment& child) { push_writers(child, self, to); });
    }
}

void MegaHistories::push_all_blockers(const Segment& segment, uint32_t self, bool is_covered) {
    if (segment.readers) {
        is_covered = true;
        const Reader& newest = readers[segment.readers];
        push(entries, readers_entry(newest.task == self ? newest.previous : segment.readers));
    }
    if ((segment.what & COMPOSITE) && composites[segment.what & ~COMPOSITE].has_readers) {
        each_child(segment, [&](const Segment& child) { push_all_blockers(child, self, is_covered); });
    } else if (!is_covered) {
        push_writers(segment, self, entries);
    }
}

Segment MegaHistories::composite_of(std::span<const Segment> parts) {
    Composite made{parts.front().begin, parts.back().end, children.size(), uint32_t(parts.size()),
                   0, ~0u, UNKNOWN, 0, false, 0};
    made.density = 2 * double(made.count) / double(made.end - made.begin);
    made.depth = 1;
    for (const Segment& part : parts) {
        const MegaVersion version = held(part);
        made.newest = std::max(made.newest, version.newest);
        made.oldest = std::min(made.oldest, version.has_unwritten ? 0 : version.newest);
        made.has_readers |= part.readers != 0;
        if (!(part.what & COMPOSITE)) continue;
        made.depth = std::max(made.depth, depth_of(part) + 1);
        made.has_readers |= composites[part.what & ~COMPOSITE].has_readers;
    }
    children.insert(children.end(), parts.begin(), parts.end());
    composites.push_back(made);
    return {made.begin, made.end, parts.front().space, COMPOSITE | uint32_t(composites.size() - 1), 0, 0};
}

void MegaHistories::narrow(Segment& segment) {
    if (!(segment.what & COMPOSITE) || is_whole(segment)) return;
    if (uint64_t(++segment.reads) * 8 < composites[segment.what & ~COMPOSITE].count) return;
    std::vector<Segment> parts;
    each_child(segment, [&](const Segment& child) { parts.push_back(child); });
    if (parts.size() == 1 && !parts[0].readers) {
        segment.what = parts[0].what;
    } else {
        segment.what = composite_of(parts).what;
    }
    segment.reads = 0;
}

// -------------------------------------------------------------------------------------- forgetting

namespace {

constexpr uint32_t NONE = ~0u;

// A copy without what is forgotten: readers below `first` go, lists and composites stay shared.
class Kept {
public:
    using Reader = MegaHistories::Reader;
    using Composite = MegaHistories::Composite;
    static constexpr uint32_t COMPOSITE = MegaHistories::COMPOSITE, UNKNOWN = MegaHistories::UNKNOWN;

    Kept(const MegaVector<Reader>& old_readers, const MegaVector<Composite>& old_composites,
         const MegaVector<Segment>& old_children, uint32_t first)
        : m_old_readers(old_readers), m_old_composites(old_composites), m_old_children(old_children), m_first(first),
          m_reader_of(old_readers.size(), NONE), m_composite_of(old_composites.size(), NONE) {}

    Segment of(Segment segment) {
        segment.readers = list_of(segment.readers);
        if (segment.what & COMPOSITE) segment.what = COMPOSITE | composite_of(segment.what & ~COMPOSITE);
        return segment;
    }

    MegaVector<Reader> readers{Reader{}};
    MegaVector<Composite> composites;
    MegaVector<Segment> children;

private:
    uint32_t list_of(uint32_t list) {
        m_path.clear();
        uint32_t at = list;
        while (at && m_old_readers[at].task >= m_first && m_reader_of[at] == NONE) {
            m_path.push_back(at);
            at = m_old_readers[at].previous;
        }
        uint32_t made = at && m_old_readers[at].task >= m_first ? m_reader_of[at] : 0;
        for (size_t k = m_path.size(); k-- > 0;) {
            const uint32_t task = m_old_readers[m_path[k]].task;
            readers.push_back({task, made, made ? UNKNOWN : task});
            made = m_reader_of[m_path[k]] = uint32_t(readers.size() - 1);
        }
        return made;
    }

    uint32_t composite_of(uint32_t number) {  // as deep as composites are
        if (m_composite_of[number] != NONE) return m_composite_of[number];
        Composite made = m_old_composites[number];
        std::vector<Segment> parts(m_old_children.begin() + std::ptrdiff_t(made.first),
                                   m_old_children.begin() + std::ptrdiff_t(made.first + made.count));
        made.has_readers = false;
        made.entry = UNKNOWN;
        for (Segment& part : parts) {
            part = of(part);
            made.has_readers |= part.readers != 0 ||
                                ((part.what & COMPOSITE) && composites[part.what & ~COMPOSITE].has_readers);
        }
        made.first = children.size();
        children.insert(children.end(), parts.begin(), parts.end());
        composites.push_back(made);
        return m_composite_of[number] = uint32_t(composites.size() - 1);
    }

    const MegaVector<Reader>& m_old_readers;
    const MegaVector<Composite>& m_old_composites;
    const MegaVector<Segment>& m_old_children;
    const uint32_t m_first;
    std::vector<uint32_t> m_reader_of, m_composite_of, m_path;
};

}  // namespace

void MegaHistories::forget(uint32_t below, std::vector<Segment>& segments) {
    Kept kept(readers, composites, children, below);
    for (Segment& segment : segments) segment = kept.of(segment);
    readers = std::move(kept.readers);
    composites = std::move(kept.composites);
    children = std::move(kept.children);
    sets.clear();
    first = std::max(first, below);
}

}  // namespace brickline
