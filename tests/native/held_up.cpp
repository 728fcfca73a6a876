// What holds threads up in native tests, before any step on memory that they share: seldom a sleep, in
// which others come far, and now and then a turn for somebody else. How seldom, the seed decides.
#include <sched.h>
#include <unistd.h>

#include <atomic>

#include "brickline/platform.h"
#include "native_test.h"

namespace brickline::platform {

void hold_up() {
    static std::atomic<uint64_t> threads{0};
    static const uint32_t steps = 1u << (9 + native_test::seed() % 5);  // for each sleep
    thread_local std::minstd_rand random(uint32_t(native_test::seed() + threads.fetch_add(1)));
    const uint32_t draw = uint32_t(random());
    if (draw % steps == 0) ::usleep(draw / steps % 400);
    else if (draw % (steps / 16) == 1) ::sched_yield();
}

}  // namespace brickline::platform
