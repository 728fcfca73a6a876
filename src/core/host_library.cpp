#include "host_library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace brickline {
namespace {

std::runtime_error failure(const std::string& what) {
    return std::runtime_error(what + ": " + std::strerror(errno));
}

void write_all(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd, bytes.data(), bytes.size());
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) throw failure("cannot write compiled code");
        bytes.remove_prefix(size_t(written));
    }
}

std::string path_of(int fd) { return "/proc/self/fd/" + std::to_string(fd); }

// An unnamed file that can be executed: in memory, or where that is forbidden in the temporary
// directory.
int executable_file(const std::string& name) {
    const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
    if (fd >= 0) return fd;
    const char* directory = std::getenv("TMPDIR");
    std::string path = std::string(directory && *directory ? directory : "/tmp") + "/brickline-XXXXXX";
    const int file = ::mkostemp(path.data(), O_CLOEXEC);
    if (file < 0) throw failure("cannot make a file for compiled code");
    ::unlink(path.c_str());
    return file;
}

}  // namespace

HostLibrary::HostLibrary(std::string_view code, const std::string& name)
    : m_fd(executable_file(name)) {
    try {
        write_all(m_fd, code);
        m_handle = ::dlopen(path_of(m_fd).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!m_handle) throw std::runtime_error(std::string("cannot load compiled code: ") + ::dlerror());
    } catch (...) {
        ::close(m_fd);
        throw;
    }
}

HostLibrary::~HostLibrary() {
    ::dlclose(m_handle);
    // Code with unique symbols or destructors of threads stays loaded. Its number stays taken then, or
    // the next library of this number would be taken for it.
    void* const left = ::dlopen(path_of(m_fd).c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (left) ::dlclose(left);
    else ::close(m_fd);
}

uint64_t HostLibrary::address(const std::string& symbol) const {
    void* found = ::dlsym(m_handle, symbol.c_str());
    if (!found) throw std::runtime_error("compiled code has no function " + symbol);
    return reinterpret_cast<uint64_t>(found);
}

}  // namespace brickline
