#pragma once

#include <unistd.h>

#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen {

// Runs `body`. A refusal leaves everything as it was; whatever else ends a call may have lost gradients, an interrupt
// too, and is remembered.
template <class Body>
auto guarded(std::string& failure, Body&& body) {
    try {
        return body();
    } catch (const StateError&) {
        throw;
    } catch (const NonFiniteError&) {
        throw;
    } catch (const std::exception& error) {
        failure = error.what();
        throw;
    } catch (...) {
        failure = "a call was interrupted";
        throw;
    }
}

// Entry of a public call: one thread at a time, in the process that built the manager, not closed, not failed.
class EngineManager::Guard {
  public:
    Guard(EngineManager& manager, const char* call, bool check = true) : lock_(manager.busy_, std::try_to_lock) {
        const std::string at = manager.model_.name + ": " + call;
        if (!lock_.owns_lock())
            throw StateError(
                at + " was called while another thread is inside the manager; make calls from one thread at a time");
        if (manager.process_ != getpid())
            throw StateError(at + " in a forked process: the gradients belong to process " +
                             std::to_string(manager.process_) + "; build a manager after the fork");
        if (manager.closed_) throw StateError(at + " after close(); build a new manager");
        if (manager.resets_ != manager.comm_->resets() && check) {
            if ((manager.accumulating() || !manager.flights_.empty()) && manager.failure_.empty())
                manager.failure_ = "the communicator was reset by another manager in the middle of this one's step";
            manager.resets_ = manager.comm_->resets();
        }
        if (check && !manager.failure_.empty())
            throw CommError(at + ": an earlier call failed: " + manager.failure_ +
                            "\nCall reset() on every rank, then start the step again.");
        device_.emplace(*manager.backend_);
    }

  private:
    std::unique_lock<std::mutex> lock_;
    std::optional<OnDevice> device_;
};

}  // namespace gradgen
