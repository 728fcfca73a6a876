// mega_memory.h: vectors whose memory is used again. A plan of 100,000 tasks takes 20 MB for a few
// milliseconds; to get that from the system page by page takes longer than to plan.
#pragma once

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

namespace brickline {

// Memory of the size asked for, at least; from what was freed before, where there is some. What is kept
// is at most 128 MiB in all. Thread-safe.
void* mega_allocate(size_t bytes);
void mega_free(void* memory, size_t bytes) noexcept;

template <class T>
struct MegaAllocator {
    using value_type = T;
    MegaAllocator() = default;
    template <class Other>
    MegaAllocator(const MegaAllocator<Other>&) noexcept {}  // NOLINT: allocators convert
    T* allocate(size_t count) { return static_cast<T*>(mega_allocate(count * sizeof(T))); }
    void deallocate(T* memory, size_t count) noexcept { mega_free(memory, count * sizeof(T)); }
    // `resize` leaves numbers as they are in memory, for whoever fills them; `assign` gives them a value.
    template <class Other>
    void construct(Other* place) noexcept(noexcept(::new (place) Other)) {
        ::new (static_cast<void*>(place)) Other;
    }
    template <class Other, class... Arguments>
    void construct(Other* place, Arguments&&... arguments) {
        ::new (static_cast<void*>(place)) Other(std::forward<Arguments>(arguments)...);
    }
    friend bool operator==(const MegaAllocator&, const MegaAllocator&) { return true; }
};

template <class T>
using MegaVector = std::vector<T, MegaAllocator<T>>;

}  // namespace brickline
