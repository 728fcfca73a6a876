#include "spool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace brickline {
namespace {

constexpr uint64_t FIRST_TABLE_BYTES = 16 * 1024;
constexpr uint64_t LARGEST_TABLE_BYTES = 1024 * 1024;

[[noreturn]] void fail(const std::string& what, const std::string& path, int error) {
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    throw SpoolError(full ? SpoolFault::NoSpace : SpoolFault::Io,
                     what + " " + path + ": " + std::strerror(error) +
                         (full ? "; free some space, or record to another disk with path=" : ""));
}

template <class T>
void publish(T& field, T value) {
    std::atomic_ref<T>(field).store(value, std::memory_order_release);
}

}  // namespace

Spool::Spool(const std::string& path, uint32_t rank, const TickSource& source) : m_path(path) {
    m_fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (m_fd < 0) fail("cannot create", path, errno);
    try {
        begin(rank, source);
    } catch (...) {
        unmap();
        ::unlink(path.c_str());
        throw;
    }
}

void Spool::begin(uint32_t rank, const TickSource& source) {
    if (const int error = ::posix_fallocate(m_fd, 0, PAGE_BYTES)) fail("cannot allocate", m_path, error);
    void* page = ::mmap(nullptr, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, m_fd, 0);
    if (page == MAP_FAILED) fail("cannot map", m_path, errno);
    m_mappings.emplace_back(page, PAGE_BYTES);
    m_header = static_cast<SpoolHeader*>(page);
    m_header->header_bytes = PAGE_BYTES;
    m_header->process = uint32_t(::getpid());
    m_header->rank = rank;
    m_header->created_unix_ns = unix_ns();
    m_header->clock_kind = uint32_t(source.kind());
    m_header->ns_per_tick = measure_ns_per_tick(source);
    const Anchor anchor = take_anchor(source);
    m_header->anchor_tick = source.kind() == ClockKind::Manual ? 0 : anchor.tick;
    m_header->anchor_ns = source.kind() == ClockKind::Manual ? 0 : anchor.ns;
    m_header->anchor_unix_ns = unix_ns();
    m_header->file_bytes = PAGE_BYTES;
    std::memcpy(m_header->magic, SPOOL_MAGIC, sizeof SPOOL_MAGIC);
    publish(m_header->version, SPOOL_VERSION);
    intern("");  // id 0 is the empty string
}

Spool::~Spool() {
    close();
}

void Spool::close() {
    std::lock_guard guard(m_mutex);
    if (m_header) publish(m_header->closed, 1u);
    unmap();
}

void Spool::abandon() {
    unmap();
}

void Spool::unmap() {
    for (auto& [address, bytes] : m_mappings) ::munmap(address, bytes);
    m_mappings.clear();
    m_open_extents.clear();
    m_header = nullptr;
    if (m_fd >= 0) ::close(m_fd);
    m_fd = -1;
}

Extent Spool::add_extent(ExtentKind kind, uint32_t lane, uint32_t ordinal, uint64_t payload_bytes) {
    std::lock_guard guard(m_mutex);
    return add_extent_locked(kind, lane, ordinal, payload_bytes);
}

Extent Spool::add_extent_locked(ExtentKind kind, uint32_t lane, uint32_t ordinal,
                                uint64_t payload_bytes) {
    if (!m_header) throw SpoolError(SpoolFault::Io, "the spool " + m_path + " is closed");
    const uint64_t bytes = round_up(payload_bytes + sizeof(ExtentHeader), PAGE_BYTES);
    const uint64_t offset = m_header->file_bytes;
    if (const int error = ::posix_fallocate(m_fd, off_t(offset), off_t(bytes))) {
        // Part of the range may have been allocated; readers stop at file_bytes.
        fail("cannot grow", m_path, error);
    }
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m_fd, off_t(offset));
    if (address == MAP_FAILED) fail("cannot map", m_path, errno);
    m_mappings.emplace_back(address, bytes);
    Extent extent{static_cast<ExtentHeader*>(address), offset};
    extent.header->kind = uint32_t(kind);
    extent.header->lane = lane;
    extent.header->ordinal = ordinal;
    extent.header->bytes = bytes;
    publish(extent.header->magic, EXTENT_MAGIC);
    publish(m_header->file_bytes, offset + bytes);
    return extent;
}

void Spool::append(ExtentKind table, const void* row, uint64_t bytes) {
    std::lock_guard guard(m_mutex);
    append_locked(table, row, bytes);
}

void Spool::append_locked(ExtentKind table, const void* row, uint64_t bytes) {
    Extent& extent = m_open_extents[table];
    if (!extent.header || extent.capacity() - extent.header->used < bytes) {
        // Each new extent of a table is twice the last, so the number of mappings stays small.
        const uint32_t ordinal = m_ordinals[table];
        const uint64_t grown = std::min(FIRST_TABLE_BYTES << std::min(ordinal, 6u),
                                        LARGEST_TABLE_BYTES) - sizeof(ExtentHeader);
        extent = add_extent_locked(table, 0, ordinal, std::max(grown, bytes));
        m_ordinals[table] = ordinal + 1;
    }
    std::memcpy(extent.payload() + extent.header->used, row, bytes);
    publish(extent.header->used, extent.header->used + bytes);
}

uint32_t Spool::intern(std::string_view text) {
    std::lock_guard guard(m_mutex);
    const auto found = m_strings.find(std::string(text));
    if (found != m_strings.end()) return found->second;
    const uint32_t id = uint32_t(m_strings.size());
    std::vector<char> row(sizeof(StringRow) + round_up(text.size(), 8));
    const StringRow head{id, uint32_t(text.size())};
    std::memcpy(row.data(), &head, sizeof head);
    std::memcpy(row.data() + sizeof head, text.data(), text.size());
    append_locked(ExtentKind::String, row.data(), row.size());
    m_strings.emplace(text, id);
    return id;
}

void Spool::refine_clock(const TickSource& source) {
    if (source.kind() != ClockKind::Tsc && source.kind() != ClockKind::Cntvct) return;
    const Anchor now = take_anchor(source);
    const uint64_t baseline = now.ns - m_header->anchor_ns;
    if (baseline < 10000000) return;
    const double rate = double(baseline) / double(now.tick - m_header->anchor_tick);
    std::atomic_ref<double>(m_header->ns_per_tick).store(rate, std::memory_order_relaxed);
}

}  // namespace brickline
