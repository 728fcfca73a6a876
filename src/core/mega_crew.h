// MegaCrew: threads of one engine. Who calls them does not work along, so it can wait for them with a
// time limit, and go on without one that never returns. Knows nothing of launches.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "worker_pool.h"

namespace brickline {

class MegaCrew {
  public:
    MegaCrew() = default;
    // Idle threads end by themselves. One that is inside a piece of work stays there, and what it works
    // on has to stay, too.
    ~MegaCrew();
    MegaCrew(const MegaCrew&) = delete;
    MegaCrew& operator=(const MegaCrew&) = delete;

    // Up to so many threads call `work.help(0)`; how many there are, 0 where the machine gives none. The
    // first that returns says by it that nobody else needs to begin.
    uint32_t begin(SharedWork& work, uint32_t threads);
    // Whether all that began have returned, at the latest at that moment of monotonic_ns.
    bool wait(uint64_t until_ns);

  private:
    struct State;
    static void work(std::shared_ptr<State> state, uint32_t number);

    std::shared_ptr<State> m_state;
    uint32_t m_threads = 0;
    pid_t m_process = 0;  // a forked child has none of the threads
};

}  // namespace brickline
