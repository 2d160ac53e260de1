// The norm of the reduced gradients, and what multiplies them by it.
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

double EngineManager::norm() {
    if (backend_->on_gpu()) {
        norm_on_device();
        const ReduceStats total = backend_->read_total();
        const bool made_up = total.nonfinite > 0 && std::isfinite(total.sum_squares);
        return made_up ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(total.sum_squares);
    }
    require_readable("the gradient norm");
    if (cleared_) fill_cleared();
    if (!norm_squared_) measure_everything();  // one rank and no check asked for, or no step yet
    return std::sqrt(*norm_squared_);
}

void EngineManager::norm_on_device() {
    require_readable("the gradient norm");
    if (!backend_->on_gpu())
        throw StateError(model_.name + ": the norm is on the host, where the gradients are; use grad_norm()");
    if (cleared_) fill_cleared();
    if (!norm_known_) measure_everything();
}

Tensor EngineManager::grad_norm_tensor() {
    Guard guard(*this, "grad_norm");
    norm_on_device();
    backend_->scale_total(1.0);  // clipping may have changed it since
    return backend_->norm_tensor();
}

Tensor EngineManager::clip_grad_norm_tensor(double max_norm) {
    Guard guard(*this, "clip_grad_norm");
    if (!(max_norm > 0))
        throw std::invalid_argument(model_.name + ": max_norm must be positive, got " + std::to_string(max_norm));
    norm_on_device();
    backend_->prepare_clip(max_norm);
    const bool everything = strategy_.collective == Collective::all_reduce;
    for (Unit& unit : units_)
        with_buffer(unit, true, true, Lane::caller, [&](void* data) {
            const bool in_arena = unit.placement == Placement::full;
            backend_->clip(accumulator_, data, in_arena, everything ? unit.all : unit.mine, Lane::caller);
            if (!everything && !unit.mine_whole.empty())
                backend_->clip(accumulator_, data, in_arena, unit.mine_whole, Lane::caller);
        });
    if (options_.offload) backend_->synchronize();  // the optimizer reads host memory
    return backend_->norm_tensor();
}

void EngineManager::all_gather(void* out, const void* in, std::size_t bytes) {
    Guard guard(*this, "all_gather");
    const auto world = static_cast<std::size_t>(comm_->world_size());
    const auto at = [&](std::size_t rank) { return static_cast<char*>(out) + rank * bytes; };
    if (!backend_->on_gpu()) return comm_->all_gather(out, in, bytes);
    if (world == 1) {
        if (out != in) backend_->copy(out, in, bytes, Lane::caller);
        return;
    }
    guarded(failure_, [&] {
        backend_->join(Lane::exchange, Lane::caller);
        if (comm_->on_device()) {
            comm_->gather_on_device(out, in, bytes, backend_->stream(Lane::exchange));
        } else {
            backend_->record(totals_ready_, Lane::exchange);
            Offer offer;
            offer.data = in;
            offer.event = totals_ready_.get();
            offer.tag = {model_key_, step_, -1, -1, 3, 0, bytes};
            offer.what = "all_gather";
            const Ticket ticket = comm_->post(offer);
            const std::vector<ReduceSource> sources = comm_->sources(ticket);
            for (const void* event : comm_->source_events(ticket)) backend_->wait(Lane::exchange, event);
            for (std::size_t r = 0; r < world; ++r)
                if (at(r) != sources[r].data) backend_->copy(at(r), sources[r].data, bytes, Lane::exchange);
            backend_->record(totals_read_, Lane::exchange);
            comm_->release(ticket, totals_read_.get());
            comm_->wait_drained(ticket);  // the caller may change `in` when this returns
            for (const void* event : comm_->drain_events(ticket)) backend_->wait(Lane::caller, event);
        }
        backend_->join(Lane::caller, Lane::exchange);
    });
}

void EngineManager::multiply(double by) {
    require_readable("scaling");
    if (cleared_) fill_cleared();
    const bool everything = strategy_.collective == Collective::all_reduce;
    for (Unit& unit : units_)
        with_buffer(unit, true, true, Lane::caller, [&](void* data) {
            const bool in_arena = unit.placement == Placement::full;
            backend_->scale(accumulator_, data, in_arena, everything ? unit.all : unit.mine, by, Lane::caller);
            if (!everything && !unit.mine_whole.empty())
                backend_->scale(accumulator_, data, in_arena, unit.mine_whole, by, Lane::caller);
        });
    if (options_.offload) backend_->synchronize();
    if (norm_squared_) *norm_squared_ *= by * by;
    if (norm_known_) backend_->scale_total(by);
}

double EngineManager::grad_norm() {
    Guard guard(*this, "grad_norm");
    return norm();
}

double EngineManager::clip_grad_norm(double max_norm) {
    Guard guard(*this, "clip_grad_norm");
    if (!(max_norm > 0))
        throw std::invalid_argument(model_.name + ": max_norm must be positive, got " + std::to_string(max_norm));
    const double before = norm();
    const double coefficient = max_norm / (before + 1e-6);
    // inf and nan are left for the caller to see: scaling would turn them into zeros or spread them.
    if (coefficient < 1.0 && std::isfinite(before)) multiply(coefficient);
    return before;
}

void EngineManager::scale_gradients(double by) {
    Guard guard(*this, "scale_gradients");
    if (!(by > 0 && std::isfinite(by)))
        throw std::invalid_argument(model_.name + ": a scale must be positive and finite, got " + std::to_string(by));
    multiply(by);
}

}  // namespace gradgen
