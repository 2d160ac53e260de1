// Sleeping on a word of memory that threads or processes share. A sleeper names the value it last saw, so a change
// between its look and its sleep is never missed.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace gradgen {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4,
              "a futex word is 4 plain bytes");

/// Sleeps while `word` holds `seen`, at most `limit`. True when a signal ended the sleep. Without FUTEX_PRIVATE_FLAG:
/// the kernel finds the word by its page, so that processes that map it at other addresses meet.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds limit) {
    timespec time{};
    time.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
    time.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0) != 0 &&
           errno == EINTR;
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace gradgen
