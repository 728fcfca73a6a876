// What the native tests share: counted checks, a scratch directory, whole files as bytes, seeded
// randomness, and what must hold of every snapshot. Knows no Python and no test framework.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "snapshot.h"

namespace native_test {

#if defined(__SANITIZE_THREAD__)
constexpr bool UNDER_TSAN = true;
#elif defined(__has_feature)
constexpr bool UNDER_TSAN = __has_feature(thread_sanitizer);
#else
constexpr bool UNDER_TSAN = false;
#endif

inline int g_passed = 0;
inline int g_failed = 0;

// Each kind of failure is printed a few times: a broken invariant would else fill the screen.
inline bool check(bool ok, const std::string& what) {
    static std::mutex mutex;
    static std::map<std::string, int> printed;
    const std::lock_guard guard(mutex);
    ok ? ++g_passed : ++g_failed;
    if (!ok && ++printed[what] <= 3) std::printf("FAILED: %s\n", what.c_str());
    return ok;
}

template <class A, class B>
bool check_equal(const A& found, const B& expected, const std::string& what) {
    const bool ok = found == A(expected);
    if (!check(ok, what)) {
        std::printf("        found %s, expected %s\n", std::to_string(found).c_str(),
                    std::to_string(A(expected)).c_str());
    }
    return ok;
}

inline void check_fault(brickline::SpoolFault fault, const std::function<void()>& call,
                        const std::string& what) {
    try {
        call();
        check(false, what + ": nothing was thrown");
    } catch (const brickline::SpoolError& error) {
        check(error.fault() == fault, what + ": " + error.what());
    }
}

inline int finish() {
    std::printf("%d passed, %d failed\n", g_passed, g_failed);
    return g_failed != 0;
}

// A directory that goes away with the test.
class Scratch {
  public:
    Scratch() {
        std::string pattern = (std::filesystem::temp_directory_path() / "brickline-XXXXXX").string();
        if (!::mkdtemp(pattern.data())) std::abort();
        m_directory = pattern;
    }
    ~Scratch() {
        if (::getpid() != m_owner) return;  // a forked child that ended by exit()
        std::error_code ignored;
        std::filesystem::remove_all(m_directory, ignored);
    }
    std::string path(const std::string& name) const { return (m_directory / name).string(); }
    std::string fresh() { return path("spool-" + std::to_string(++m_count)); }

  private:
    std::filesystem::path m_directory;
    int m_count = 0;
    pid_t m_owner = ::getpid();
};

inline std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// BRICKLINE_SEED repeats a run.
inline uint64_t seed() {
    static const uint64_t value = [] {
        const char* given = std::getenv("BRICKLINE_SEED");
        const uint64_t chosen = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
        std::printf("seed %llu\n", static_cast<unsigned long long>(chosen));
        return chosen;
    }();
    return value;
}

class Random {
  public:
    explicit Random(uint64_t stream = 0) : m_engine(seed() * 0x9e3779b97f4a7c15ull + stream) {}
    uint64_t bits() { return m_engine(); }
    uint64_t below(uint64_t limit) { return m_engine() % limit; }
    bool one_in(uint64_t times) { return below(times) == 0; }

  private:
    std::mt19937_64 m_engine;
};

// Ends a test that hangs, with a word.
inline void watchdog(unsigned seconds) { ::alarm(seconds); }

// Whether there is time for more rounds of what is random; `make test-long` sets it.
inline bool has_time() { return std::getenv("BRICKLINE_LONG") != nullptr; }

// Holds of every snapshot of an undamaged spool, live, killed or closed.
inline void check_consistent(const brickline::Snapshot& snapshot, const std::string& where) {
    check(snapshot.problems.empty(),
          where + ": no problems" + (snapshot.problems.empty() ? "" : ": " + snapshot.problems[0]));
    std::vector<uint64_t> in_bins(snapshot.nodes.size());
    for (const brickline::BinRow& bin : snapshot.bins) in_bins[bin.node] += bin.count;
    for (size_t i = 0; i < snapshot.nodes.size(); ++i) {
        const brickline::Node& node = snapshot.nodes[i];
        check(in_bins[i] + node.zero_count == node.timed, where + ": bins and zeros are all entries");
        check(node.timed <= node.count, where + ": timed entries are counted");
        check(node.exclusive_ns <= node.total_ns, where + ": exclusive within inclusive time");
        check(node.timed == 0 || (node.min_ns <= node.max_ns && node.shift_ns <= node.max_ns &&
                                  node.shift_ns >= node.min_ns),
              where + ": smallest and largest");
    }
    check(snapshot.node_lanes.size() == snapshot.nodes.size(), where + ": every node has a lane");
}

inline uint64_t total_count(const brickline::Snapshot& snapshot) {
    uint64_t count = 0;
    for (const brickline::Node& node : snapshot.nodes) count += node.count;
    return count;
}

}  // namespace native_test
