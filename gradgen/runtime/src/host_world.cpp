// Life of a host world: construction, reset, close.
#include "host_world.h"

#include <unistd.h>

#include <thread>

namespace gradgen {

HostWorld::HostWorld(int rank, int world, Timeout timeout, std::shared_ptr<void> owner, Control* control)
    : Communicator(rank, world),
      owner_(std::move(owner)),
      control_(control),
      mine_(control->rank(rank)),
      timeout_(timeout),
      pid_(getpid()),
      // Spinning pays only where the rank that is waited for runs at the same time.
      spins_(world <= static_cast<int>(std::thread::hardware_concurrency()) ? 300 : 0) {}

HostWorld::~HostWorld() {
    try {
        HostWorld::close();
    } catch (...) {  // a destructor must not end the process
    }
}

void HostWorld::close() {
    if (closed_) return;
    closed_ = true;
    if (!in_owner_process()) return;  // a forked child leaves nothing: the parent is still there
    // Release: whoever sees that this rank left also sees everything it posted and read before.
    mine_.left.store(1, std::memory_order_release);
    notify();
}

// Two phases, each a barrier. After the first no rank is inside an operation, so each clears its own side; after the
// second every side is clear. A rank that got an error here calls again and goes on where it was: phases only rise.
void HostWorld::reset() {
    if (!in_owner_process() || closed_) check_usable("reset");
    const auto reached = [&](std::uint64_t phase) {
        return [this, phase](int r) { return control_->rank(r).reset_phase.load(std::memory_order_acquire) >= phase; };
    };
    const auto enter = [&](std::uint64_t phase) {
        mine_.reset_phase.store(phase, std::memory_order_release);
        notify();
        wait(reached(phase), [] { return std::string("reset()"); }, true);
    };
    std::uint64_t phase = mine_.reset_phase.load(std::memory_order_relaxed);
    const bool cleared = reset_pending_ && phase % 2 == 0;
    reset_pending_ = true;
    if (!cleared) {
        phase |= 1;
        enter(phase);
        for (Local& local : local_) local = Local{};
        for (auto& consumed : mine_.consumed) consumed.store(0, std::memory_order_relaxed);
        mine_.posted.store(0, std::memory_order_relaxed);
        mine_.exchanges.store(0, std::memory_order_relaxed);
        next_ = exchanges_ = 0;
        half_used_ = {};
        half_ = 0;
        ++epoch_;
        if (rank_ == 0) control_->failed.store(0, std::memory_order_relaxed);
        ++phase;
    }
    enter(phase);
    reset_pending_ = false;
    sweep();
}

}  // namespace gradgen
