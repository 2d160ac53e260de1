// Waiting, and the ways in which a wait ends badly.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "futex.h"
#include "host_world.h"

namespace gradgen {

namespace {

using Clock = std::chrono::steady_clock;  // a clock that is set back must not make a wait longer
constexpr std::chrono::milliseconds kSlice{50};

[[noreturn]] void raise(Failure failure, const std::string& why) {
    switch (failure) {
        case Failure::peer_lost:
            throw PeerLost(why);
        case Failure::timeout:
            throw CommTimeout(why);
        case Failure::mismatch:
            throw MismatchError(why);
        case Failure::comm:
            break;
    }
    throw CommError(why);
}

std::string seconds(std::chrono::milliseconds time) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(time.count()) / 1000.0);
    return text;
}

/// Counts this rank among the sleepers for its lifetime.
class Sleeper {
  public:
    explicit Sleeper(Control& control) : control_(control) { control_.sleepers.fetch_add(1); }
    ~Sleeper() { control_.sleepers.fetch_sub(1); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

  private:
    Control& control_;
};

}  // namespace

// Called after something was published. Sequentially consistent on purpose: either this rank sees the sleeper's count
// and wakes it, or the sleeper's later load of `events` sees this increment (and with it what was published before).
void HostWorld::notify() {
    control_->events.fetch_add(1);
    if (control_->sleepers.load() > 0) futex_wake_all(control_->events);
}

void HostWorld::wait(const Arrived& arrived, const Describe& describe, bool resetting) {
    const auto all_arrived = [&] {
        for (int r = 0; r < world_; ++r)
            if (!arrived(r)) return false;
        return true;
    };
    for (int spin = 0;; ++spin) {  // most waits are short; a sleep costs two switches of context
        // Arrived is arrived: a rank that failed afterwards must not spoil what all ranks have completed.
        if (all_arrived()) return;
        if (!resetting) raise_if_failed();
        if (spin >= spins_) break;
        cpu_pause();
    }
    const auto start = Clock::now(), deadline = start + timeout_;
    auto next_look = start + kSlice;
    const Sleeper sleeper(*control_);
    bool signalled = false;
    for (;;) {
        const std::uint32_t seen = control_->events.load();
        if (all_arrived()) return;
        if (!resetting) raise_if_failed();
        const auto now = Clock::now();
        const bool look = now >= next_look;
        look_at_missing(arrived, describe, resetting, look);
        if (now >= deadline) {
            const std::string why =
                name(rank_) + " waited " + seconds(timeout_) + " in " + describe() + " for " + missing(arrived);
            if (resetting) throw CommTimeout(why);
            fail(Failure::timeout, why);
        }
        if (look || signalled) interruptible(describe, resetting);
        if (look) next_look = now + kSlice;
        signalled = futex_wait(control_->events, seen, std::min<Clock::duration>(kSlice, deadline - now));
    }
}

void HostWorld::interruptible(const Describe& describe, bool resetting) {
    try {
        check_interrupt();
    } catch (...) {
        // The others cannot go on without this rank, which will not come back to this wait.
        if (!resetting)
            record_failure(Failure::comm, name(rank_) + " was interrupted while it waited in " + describe());
        throw;
    }
}

void HostWorld::look_at_missing(const Arrived& arrived, const Describe& describe, bool resetting, bool liveness) {
    for (int r = 0; r < world_; ++r) {
        if (r == rank_ || arrived(r)) continue;
        // Not the world's failure: this rank can still join the reset, where the other waits for it.
        if (!resetting && in_reset(r) && !arrived(r)) {
            raise_if_failed();  // it aborted between this rank's last look and this one, and went on to its reset
            throw CommError(name(r) + " is in reset() but " + name(rank_) + " waits for it in " + describe() +
                            ": every rank must call reset()");
        }
        const bool left = control_->rank(r).left.load(std::memory_order_acquire) != 0;
        if (!left && (!liveness || alive(r))) continue;
        if (arrived(r)) continue;  // its last act before it went
        const std::string why = name(r) +
                                (left ? " closed its communicator" : " ended without closing its communicator") +
                                " after " + count_text(r) + "; " + name(rank_) + " is at " + describe();
        if (resetting) throw PeerLost(why);
        fail(Failure::peer_lost, why);
    }
}

std::string HostWorld::count_text(int rank) {
    const auto count = control_->rank(rank).exchanges.load(std::memory_order_acquire);
    return std::to_string(count) + (count == 1 ? " exchange" : " exchanges");
}

std::string HostWorld::missing(const Arrived& arrived) {
    std::string text;
    for (int r = 0; r < world_; ++r)
        if (!arrived(r)) text += (text.empty() ? "" : ", ") + name(r) + " (which has posted " + count_text(r) + ")";
    return text.empty() ? "a rank that arrived at the last moment" : text;
}

void HostWorld::record_failure(Failure failure, const std::string& why) {
    {
        const std::lock_guard lock(failure_mutex_);
        if (control_->failed.load(std::memory_order_acquire) != 0) return;
        // Own text first, then the flag: who sees the flag sees a whole text, even if this process dies in between.
        const std::size_t count = std::min(why.size(), kWhyBytes - 1);
        std::memcpy(mine_.why, why.data(), count);
        mine_.why[count] = '\0';
        mine_.failure.store(static_cast<std::uint32_t>(failure), std::memory_order_relaxed);
        std::uint32_t none = 0;
        control_->failed.compare_exchange_strong(none, static_cast<std::uint32_t>(rank_) + 1,
                                                 std::memory_order_acq_rel);
    }
    notify();
}

void HostWorld::fail(Failure failure, const std::string& why) {
    record_failure(failure, why);
    raise_if_failed();
    raise(failure, why);  // another rank's reset was faster
}

std::string HostWorld::failure() {
    const std::uint32_t failed = control_->failed.load(std::memory_order_acquire);
    return failed == 0 ? "" : std::string(control_->rank(static_cast<int>(failed) - 1).why);
}

void HostWorld::raise_if_failed() {
    const std::uint32_t failed = control_->failed.load(std::memory_order_acquire);
    if (failed == 0) return;
    RankBlock& source = control_->rank(static_cast<int>(failed) - 1);
    raise(static_cast<Failure>(source.failure.load(std::memory_order_relaxed)), std::string(source.why));
}

bool HostWorld::in_reset(int rank) const {
    return control_->rank(rank).reset_phase.load(std::memory_order_acquire) >
           mine_.reset_phase.load(std::memory_order_relaxed);
}

bool HostWorld::in_owner_process() const { return getpid() == pid_; }

void HostWorld::check_usable(const char* call) {
    if (!in_owner_process())
        throw StateError(std::string("communicator: ") + call + " in process " + std::to_string(getpid()) +
                         ", but process " + std::to_string(pid_) +
                         " made it: a forked child must make its own communicator");
    if (closed_) throw StateError(std::string("communicator: ") + call + " after close()");
    raise_if_failed();
    if (reset_pending_)
        throw CommError(std::string(call) + ": the last reset() did not complete; every rank must call reset() again");
}

void HostWorld::abort(const std::string& why) {
    if (in_owner_process() && !closed_) record_failure(Failure::comm, why);
}

}  // namespace gradgen
