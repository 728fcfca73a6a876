// Compiled host code, loaded from memory: what is executed is what was checked, whatever happens to
// the file that it came from. Unloaded when the object goes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace brickline {

class HostLibrary {
  public:
    // Throws std::runtime_error with the loader's words.
    HostLibrary(std::string_view code, const std::string& name);
    ~HostLibrary();
    HostLibrary(const HostLibrary&) = delete;
    HostLibrary& operator=(const HostLibrary&) = delete;

    // Throws std::runtime_error when there is no such symbol.
    uint64_t address(const std::string& symbol) const;

  private:
    void* m_handle = nullptr;
    int m_fd = -1;  // kept open: the loader knows a library by its path, which holds this number
};

}  // namespace brickline
