// Shared memory of host blocks: one piece for each thread, grown as needed and kept.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace brickline {

class HostScratch {
  public:
    // Memory of at least so many bytes, aligned to 64; null where none is left, or none was asked for.
    void* of(uint64_t bytes) {
        if (bytes > m_bytes) {
            m_memory.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
            m_bytes = m_memory ? bytes : 0;
        }
        return m_memory.get();
    }

  private:
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> m_memory;
    uint64_t m_bytes = 0;
};

// The calling thread's.
inline HostScratch& host_scratch() {
    static thread_local HostScratch scratch;
    return scratch;
}

}  // namespace brickline
