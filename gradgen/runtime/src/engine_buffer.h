#pragma once

#include "gradgen/engine.h"

namespace gradgen {

// Gives `body` the unit's sums in memory that kernels may use: offloaded ones pass through the device.
template <class Body>
void EngineManager::with_buffer(Unit& unit, bool read, bool write, Lane lane, Body&& body) {
    if (!unit.offloaded) return body(unit.buffer->data);
    Bounce& bounce = bounces_[next_bounce_++ % bounces_.size()];
    if (read) backend_->copy(bounce.memory->data, unit.buffer->data, unit.buffer->bytes, Lane::offload);
    backend_->record(bounce.loaded, Lane::offload);  // also: what was here before has been copied out
    backend_->wait(lane, bounce.loaded.get());
    body(bounce.memory->data);
    backend_->record(bounce.summed, lane);
    backend_->wait(Lane::offload, bounce.summed.get());
    if (write) backend_->copy(unit.buffer->data, bounce.memory->data, unit.buffer->bytes, Lane::offload);
}

}  // namespace gradgen
