// The spool: one mapped file that holds all that a profiler has finished. Owns the file, its extents
// and the append-only tables. Knows the layout in abi.h; does not know what a brick is or how
// records are folded. Space is allocated before it is mapped: a full disk is a SpoolError, never a
// SIGBUS.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "brickline/abi.h"
#include "clock.h"

namespace brickline {

enum class SpoolFault { NotASpool, Version, Damaged, Io, NoSpace };

class SpoolError : public std::runtime_error {
  public:
    SpoolError(SpoolFault fault, const std::string& text) : std::runtime_error(text), m_fault(fault) {}
    SpoolFault fault() const { return m_fault; }

  private:
    SpoolFault m_fault;
};

// A mapped extent; `payload` follows the header.
struct Extent {
    ExtentHeader* header = nullptr;
    uint64_t offset = 0;  // of the header, from the start of the file

    uint8_t* payload() const { return reinterpret_cast<uint8_t*>(header + 1); }
    uint64_t payload_offset() const { return offset + sizeof(ExtentHeader); }
    uint64_t capacity() const { return header->bytes - sizeof(ExtentHeader); }
};

class Spool {
  public:
    // Creates the file (mode 0600) and refuses an existing one.
    Spool(const std::string& path, uint32_t rank, const TickSource& source);
    ~Spool();
    Spool(const Spool&) = delete;
    Spool& operator=(const Spool&) = delete;

    SpoolHeader& header() { return *m_header; }
    const std::string& path() const { return m_path; }

    // Appends an extent of at least `payload_bytes`; throws SpoolError on a full disk.
    Extent add_extent(ExtentKind kind, uint32_t lane, uint32_t ordinal, uint64_t payload_bytes);

    // Appends one row; it is committed when this returns.
    void append(ExtentKind table, const void* row, uint64_t bytes);

    // The id of a string, written once.
    uint32_t intern(std::string_view text);

    // A longer baseline gives a better rate; called at folds, cheap.
    void refine_clock(const TickSource& source);
    // Other threads refine it meanwhile.
    double ns_per_tick() {
        return std::atomic_ref<double>(m_header->ns_per_tick).load(std::memory_order_relaxed);
    }

    void close();
    // In a forked child: forget the mapping of the parent's file without writing to it.
    void abandon();

  private:
    void begin(uint32_t rank, const TickSource& source);
    Extent add_extent_locked(ExtentKind kind, uint32_t lane, uint32_t ordinal,
                             uint64_t payload_bytes);
    void append_locked(ExtentKind table, const void* row, uint64_t bytes);
    void unmap();

    std::string m_path;
    int m_fd = -1;
    SpoolHeader* m_header = nullptr;
    std::vector<std::pair<void*, uint64_t>> m_mappings;
    std::mutex m_mutex;
    std::map<ExtentKind, Extent> m_open_extents;
    std::map<ExtentKind, uint32_t> m_ordinals;
    std::unordered_map<std::string, uint32_t> m_strings;
};

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace brickline
