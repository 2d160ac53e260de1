#pragma once

#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen {

// Entry of a public call: one thread at a time, not closed, not failed. A communication error marks the manager failed.
class EngineManager::Guard {
  public:
    Guard(EngineManager& manager, const char* call, bool check = true) : lock_(manager.busy_, std::try_to_lock) {
        if (!lock_.owns_lock())
            throw StateError(
                manager.model_.name + ": " + call +
                " was called while another thread is inside the manager; make calls from one thread at a time");
        if (manager.closed_)
            throw StateError(manager.model_.name + ": " + call + " after close(); build a new manager");
        if (check && !manager.failure_.empty())
            throw CommError(manager.model_.name + ": " + call + ": an earlier call failed: " + manager.failure_ +
                            "\nCall reset() on every rank, then start the step again.");
    }

  private:
    std::unique_lock<std::mutex> lock_;
};

}  // namespace gradgen
