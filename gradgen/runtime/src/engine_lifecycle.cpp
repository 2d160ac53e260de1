// What ends or begins a step from outside: zero_grad, reset, close, the step's number, the caller's stream.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "engine_buffer.h"
#include "engine_guard.h"
#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {
constexpr std::int64_t kLastStep = std::int64_t{1} << 62;
}  // namespace

void EngineManager::clear_step() {
    resolve_nonfinite();
    for (Unit& unit : units_) {
        unit.status = Status::idle;
        unit.visits = 0;
        unit.touched = unit.scaled = false;
        unit.stats = {};
        std::fill(unit.written.begin(), unit.written.end(), false);
    }
    norm_squared_.reset();
    norm_known_ = unresolved_ = false;
    nonfinite_ = 0;
    step_skipped_ = false;
    cleared_ = false;
    micro_step_ = -1;
}

void EngineManager::zero_grad() {
    Guard guard(*this, "zero_grad");
    if (stage_ == Stage::inside)
        throw StateError(model_.name + ": zero_grad inside " + where() + "; end it first, or reset() to drop it");
    guarded(failure_, [&] { drain(); });
    clear_step();
    cleared_ = true;
    stage_ = Stage::fresh;
}

void EngineManager::reset() {
    Guard guard(*this, "reset", false);
    if (failure_.empty()) failure_ = "reset() did not complete on every rank";  // until it has
    flights_.clear();
    unresolved_ = false;
    for (Slot& slot : slots_) slot.draining = false, slot.owner = -1;
    full_exchange_.draining = false;
    for (Unit& unit : units_)
        if (unit.block >= 0) unit.slot = -1;
    comm_->reset();
    comm_->count_reset();
    backend_->synchronize();  // after reset(): an aborted collective holds its stream until then
    resets_ = comm_->resets();
    if (comm_->world_size() > 1)  // one rank may have finished the step that another has not
        for (const std::string& step : comm_->gather_objects(std::to_string(step_)))
            step_ = std::max<std::int64_t>(step_, std::stoll(step));
    failure_.clear();
    clear_step();
    cleared_ = true;
    stage_ = Stage::fresh;
}

void EngineManager::fail(const std::string& why) {
    if (closed_ || !failure_.empty()) return;
    failure_ = why;
    if (comm_->world_size() > 1) comm_->abort(why);
}

void EngineManager::close() {
    if (closed_) return;
    Guard guard(*this, "close", false);
    leave_in_flight();
    closed_ = true;
}

void EngineManager::set_step(std::int64_t step) {
    Guard guard(*this, "set_step");
    if (step < 0 || step > kLastStep)
        throw std::invalid_argument(model_.name + ": a step number lies between 0 and 2^62, got " +
                                    std::to_string(step));
    if (accumulating()) throw StateError(model_.name + ": the step number cannot change inside a step");
    step_ = step;
    backend_->set_counters(step, 0);
}

std::int64_t EngineManager::step() {
    if (!captured_ || accumulating()) return step_;
    Guard guard(*this, "step", false);
    return step_ = backend_->read_step();
}

void EngineManager::use_stream(void* stream) {
    const std::unique_lock lock(busy_, std::try_to_lock);
    if (!lock.owns_lock() || closed_ || process_ != getpid()) return;  // the call that follows says what is wrong
    const OnDevice device(*backend_);
    backend_->use_stream(stream);
}

}  // namespace gradgen
