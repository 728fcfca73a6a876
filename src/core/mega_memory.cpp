#include "mega_memory.h"

#include <array>
#include <bit>
#include <mutex>
#include <new>

namespace brickline {
namespace {

constexpr size_t SMALLEST = size_t(1) << 15;  // below, the allocator of the system is as good
#ifdef __SANITIZE_ADDRESS__
constexpr size_t MOST_KEPT = 0;  // so that a use after it was freed is seen
#else
constexpr size_t MOST_KEPT = size_t(1) << 27;
#endif
constexpr unsigned KINDS = 13;                // 32 KiB to 128 MiB, by powers of two

struct Kept {
    std::mutex mutex;
    std::array<std::vector<void*>, KINDS> blocks;
    size_t bytes = 0;
};

// Lives as long as the process: vectors of other statics may be freed after main.
Kept& kept() {
    static Kept* const made = new Kept;
    return *made;
}

unsigned kind_of(size_t bytes) { return unsigned(std::bit_width((bytes - 1) / SMALLEST)); }

}  // namespace

void* mega_allocate(size_t bytes) {
    if (bytes < SMALLEST || bytes > MOST_KEPT) return ::operator new(bytes);
    const unsigned kind = kind_of(bytes);
    Kept& all = kept();
    {
        const std::lock_guard guard(all.mutex);
        if (!all.blocks[kind].empty()) {
            void* const found = all.blocks[kind].back();
            all.blocks[kind].pop_back();
            all.bytes -= SMALLEST << kind;
            return found;
        }
    }
    return ::operator new(SMALLEST << kind);
}

void mega_free(void* memory, size_t bytes) noexcept {
    if (memory && bytes >= SMALLEST && bytes <= MOST_KEPT) {
        const unsigned kind = kind_of(bytes);
        Kept& all = kept();
        const std::lock_guard guard(all.mutex);
        if (all.bytes + (SMALLEST << kind) <= MOST_KEPT) {
            try {
                all.blocks[kind].push_back(memory);
                all.bytes += SMALLEST << kind;
                return;
            } catch (const std::bad_alloc&) {  // not kept, then
            }
        }
    }
    ::operator delete(memory);
}

}  // namespace brickline
