// The calls of a manager and the rules of their order. Every refusal leaves the state as it was.
#include "gradgen/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "engine_guard.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {

// What the sum is multiplied with must be a number in fp32.
bool usable_divisor(double divide) { return std::isfinite(divide) && divide >= 1e-30 && divide <= 1e30; }
}  // namespace

std::string EngineManager::where() const {
    if (stage_ == Stage::inside)
        return "micro-step " + std::to_string(micro_step_) + " of " + std::to_string(micro_steps_);
    return "no micro-step running";
}

void EngineManager::require_inside(const char* call, const std::string& what) const {
    if (stage_ != Stage::inside)
        throw StateError(
            model_.name + ": " + call + " of " + what +
            " outside of a micro-step; call start_micro_step(i, n) first, or use `with grads.micro_step(i, n)`");
}

std::size_t EngineManager::kind_of(int block, std::int64_t layer) const {
    if (block < 0 || block >= static_cast<int>(model_.blocks.size()))
        throw std::out_of_range(model_.name + ": no block kind " + std::to_string(block) + "; there are " +
                                std::to_string(model_.blocks.size()));
    const auto& kinds = block_kind_[static_cast<std::size_t>(block)];
    const auto count = static_cast<std::int64_t>(kinds.size());
    if (layer >= 0 && layer < count && kinds[static_cast<std::size_t>(layer)] >= 0)
        return static_cast<std::size_t>(kinds[static_cast<std::size_t>(layer)]);
    std::vector<std::int64_t> layers;
    for (std::int64_t i = 0; i < count; ++i)
        if (kinds[static_cast<std::size_t>(i)] >= 0) layers.push_back(i);
    const bool all = static_cast<std::int64_t>(layers.size()) == count;
    const std::string has = layers.empty() ? "no layers in this configuration"
                            : all          ? "layers 0 to " + std::to_string(count - 1)
                                           : "layers " + spans(layers);
    throw std::out_of_range(model_.name + ": block '" + model_.blocks[static_cast<std::size_t>(block)].id + "' has " +
                            has + ", got " + std::to_string(layer));
}

const std::vector<WeightDesc>& EngineManager::block_weights(int block, std::int64_t layer) const {
    const std::size_t kind = kind_of(block, layer);
    return model_.blocks[static_cast<std::size_t>(block)].kinds[kind].weights;
}

int EngineManager::unit_of_block(int block, std::int64_t layer) const {
    (void)kind_of(block, layer);
    const int unit = block_unit_[static_cast<std::size_t>(block)][static_cast<std::size_t>(layer)];
    if (unit >= 0) return unit;
    const std::string at = model_.name + ": block '" + model_.blocks[static_cast<std::size_t>(block)].id + "'";
    for (const WeightDesc& desc : block_weights(block, layer))
        if (desc.present && desc.trainable && !desc.tied_to.empty())
            throw StateError(at + " layer " + std::to_string(layer) +
                             " has no buffers of its own: its weights are tied to others; get those, such as '" +
                             desc.tied_to + "'");
    throw StateError(at + " has no trainable weight, so it has no gradients");
}

int EngineManager::unit_of_weight(int weight) const {
    if (weight < 0 || weight >= static_cast<int>(model_.weights.size()))
        throw std::out_of_range(model_.name + ": no weight " + std::to_string(weight) +
                                " outside the blocks; there are " + std::to_string(model_.weights.size()));
    const WeightDesc& desc = model_.weights[static_cast<std::size_t>(weight)];
    if (!desc.present)
        throw StateError(model_.name + ": weight '" + desc.id +
                         "' does not exist in this configuration (its `when` is false)");
    if (!desc.trainable) throw StateError(model_.name + ": weight '" + desc.id + "' is frozen: it has no gradient");
    if (!desc.tied_to.empty() && desc.tied_block >= 0) {
        const std::string& id = model_.blocks[static_cast<std::size_t>(desc.tied_block)].id;
        throw StateError(model_.name + ": weight '" + desc.id + "' is tied to '" + desc.tied_to + "' of block '" + id +
                         "', which hands it out: get layer " + std::to_string(desc.tied_layer) + " of that block");
    }
    return weight_unit_[static_cast<std::size_t>(weight)];
}

void EngineManager::start_micro_step(int micro_step, int micro_steps, std::optional<double> divide) {
    Guard guard(*this, "start_micro_step");
    const std::string name =
        model_.name + ": start_micro_step(" + std::to_string(micro_step) + ", " + std::to_string(micro_steps) + ")";
    if (micro_steps < 1) throw StateError(name + ": a step has at least one micro-step");
    if (stage_ == Stage::inside)
        throw StateError(name + ": " + where() + " has not ended; call end_micro_step() first");
    const int want = stage_ == Stage::between ? micro_step_ + 1 : 0;
    if (micro_step != want || micro_step >= micro_steps)
        throw StateError(name + ": expected micro-step " + std::to_string(want) +
                         (stage_ == Stage::between ? " of " + std::to_string(micro_steps_) : "") +
                         "; to drop the step and start again call zero_grad()");
    if (stage_ == Stage::between && micro_steps != micro_steps_)
        throw StateError(name + ": the step began with " + std::to_string(micro_steps_) +
                         " micro-steps; the number cannot change inside a step");
    if (divide && !usable_divisor(*divide))
        throw std::invalid_argument(name + ": divide must lie between 1e-30 and 1e30, got " + std::to_string(*divide));
    if (comm_->world_size() > 1 && !comm_->on_device() && backend_->capturing())
        throw StateError(name +
                         ": ranks that are threads meet on the host in every step, which a CUDA graph cannot "
                         "replay; capture with NCCL ranks or one rank");
    if (micro_step == 0) {
        clear_step();
        divide_ = options_.divide.value_or(comm_->world_size());
        device_divide_ = false;
        divide_given_ = divide_fixed_ = false;
        trace_.clear();
        on_first_micro_step();
    }
    if (divide) require_free_divisor(), divide_ = *divide, divide_given_ = true;
    for (Unit& unit : units_) unit.status = Status::idle, unit.visits = 0;
    std::fill(weight_visits_.begin(), weight_visits_.end(), 0);
    next_ = 0;
    stage_ = Stage::inside;
    micro_step_ = micro_step;
    micro_steps_ = micro_steps;
    if (!backend_->on_gpu()) return;
    if (backend_->capturing()) captured_ = true;  // refused above where ranks meet on the host
    backend_->count_micro_step(micro_step == 0);
    if (micro_step == micro_steps - 1 && comm_->world_size() > 1) {
        backend_->join(Lane::exchange, Lane::caller);  // whoever asked for the last norm has read it
        backend_->clear_stats(Lane::exchange);
    }
}

void EngineManager::set_divide(double divide) {
    Guard guard(*this, "set_divide");
    if (!usable_divisor(divide))
        throw std::invalid_argument(model_.name + ": divide must lie between 1e-30 and 1e30, got " +
                                    std::to_string(divide));
    if (!accumulating()) throw StateError(model_.name + ": the divisor belongs to a step; set it inside one");
    for (const Unit& unit : units_)
        if (unit.scaled || (micro_step_ == micro_steps_ - 1 && unit.status == Status::done))
            throw StateError(model_.name + ": " + unit.name +
                             " has been reduced with the old divisor already; set it before the first gradient of the "
                             "last micro-step");
    require_free_divisor();
    divide_ = divide;
    divide_given_ = true;
    device_divide_ = false;
}

void EngineManager::set_divide(const void* number, DType type) {
    Guard guard(*this, "set_divide");
    if (!backend_->on_gpu()) throw std::invalid_argument(model_.name + ": a divisor on a GPU needs a manager on a GPU");
    if (accumulator_ == DType::f64)
        throw std::invalid_argument(model_.name +
                                    ": a divisor on the GPU acts in fp32; pass a number where sums are fp64");
    if (!accumulating()) throw StateError(model_.name + ": the divisor belongs to a step; set it inside one");
    for (const Unit& unit : units_)
        if (unit.scaled || (micro_step_ == micro_steps_ - 1 && unit.status == Status::done))
            throw StateError(model_.name + ": " + unit.name +
                             " has been reduced with the old divisor already; set it before the first gradient of the "
                             "last micro-step");
    require_free_divisor();
    backend_->divide_by(number, type);
    divide_given_ = true;
    device_divide_ = true;
}

// Checks and counts a visit; true when the buffer already holds a contribution of this visit's sum.
bool EngineManager::visit(Unit& unit, int weight) {
    const std::string at = model_.name + ": " + unit.name + ", " + where();
    if (unit.status == Status::out) throw StateError(at + ": handed out already; notify it before getting it again");
    const std::int64_t declared = weight >= 0 ? weight_uses_[static_cast<std::size_t>(weight)] : unit.uses;
    const int count = weight >= 0 ? weight_visits_[static_cast<std::size_t>(weight)] : unit.visits;
    if (declared > 0 && count >= declared)
        throw StateError(at + ": use " + std::to_string(count + 1) +
                         ", but the spec declares uses: " + std::to_string(declared) + "; raise it");
    if (unit.status == Status::done && unit.visits == 0)
        throw StateError(at +
                         ": it was taken as not visited, because blocks behind it came first and every buffer was in "
                         "use; raise block_buffers (now " +
                         std::to_string(options_.block_buffers) + ") or mend the order under `backward`");
    if (unit.status == Status::done && unit.visits < unit.expected && unit.strict)
        throw StateError(at + ": visit " + std::to_string(unit.visits + 1) + " of " + std::to_string(unit.expected) +
                         " comes after its gradients were summed, because every buffer was in use; raise block_buffers "
                         "(now " +
                         std::to_string(options_.block_buffers) + ")");
    if (unit.status == Status::sent || unit.status == Status::done)
        throw StateError(at + ": visit " + std::to_string(unit.visits + 1) +
                         " comes after its gradients were summed; run one backward pass in a micro-step, or declare "
                         "the number of visits in the spec (uses: " +
                         std::to_string(std::max(2, unit.visits + 1)) + ")");
    return unit.status == Status::written;
}

WeightGradient EngineManager::get_non_block_full(int weight) {
    Guard guard(*this, "non_block_full");
    const int u = unit_of_weight(weight);
    Unit& unit = units_[static_cast<std::size_t>(u)];
    require_inside("non_block_full", unit.name);
    return guarded(failure_, [&] {
        const Range range(*backend_, "hand out", unit.name);
        bool holds = visit(unit, weight);
        settle(u);
        progress();
        if (!holds && staged(unit)) acquire_slot(unit);
        if (!staged(unit)) holds = unit.touched;
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        const WeightDesc& desc = model_.weights[static_cast<std::size_t>(unit.index)];
        const DType type = staged(unit) ? options_.dtype : accumulator_;
        const std::shared_ptr<Storage>& storage =
            staged(unit) ? slots_[static_cast<std::size_t>(unit.slot)].arena : unit.buffer;
        const std::int64_t offset = layout.slots.empty() ? 0 : layout.slots.front().offset;
        WeightGradient out{Tensor(storage, offset, desc.shape, type), holds};
        if (!holds) {
            // Of tied weights the first in backward order may be told to overwrite; any other order is made safe by
            // zeros.
            const bool early = weight_order_[static_cast<std::size_t>(weight)] != 0;
            if (layout.zero_numel > 0 || early)
                backend_->fill(out.tensor.data(), 0, out.tensor.bytes(), Lane::caller);
            else if (options_.poison)
                backend_->fill(out.tensor.data(), 0xff, out.tensor.bytes(), Lane::caller);
            out.accumulate = early;
            unit.touched |= !staged(unit);
        }
        unit.status = Status::out;
        ++unit.visits;
        ++weight_visits_[static_cast<std::size_t>(weight)];
        return out;
    });
}

// The tensors of a block in a buffer: made once, since a block's names and shapes do not change.
const TensorContainer& EngineManager::views(const Unit& unit, const std::shared_ptr<Storage>& storage, DType type) {
    TensorContainer& out = views_[{unit.kind, storage.get()}];
    if (out.size() > 0) return out;
    for (const WeightSlot& slot : layouts_[static_cast<std::size_t>(unit.kind)].slots) {
        const WeightDesc& desc = weight_desc(unit, slot);
        out.add(desc.id, {Tensor(storage, slot.offset, desc.shape, type), 0, desc.shape});
    }
    return out;
}

BlockGradients EngineManager::get_block_full(int block, std::int64_t layer) {
    Guard guard(*this, "block_full");
    const int u = unit_of_block(block, layer);
    Unit& unit = units_[static_cast<std::size_t>(u)];
    require_inside("block_full", unit.name);
    return guarded(failure_, [&] {
        const Range range(*backend_, "hand out", unit.name);
        bool holds = visit(unit, -1);
        settle(u);
        progress();
        if (!holds && staged(unit)) acquire_slot(unit);
        if (!staged(unit)) holds = unit.touched;
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        const DType type = staged(unit) ? options_.dtype : accumulator_;
        const std::shared_ptr<Storage>& storage =
            staged(unit) ? slots_[static_cast<std::size_t>(unit.slot)].arena : unit.buffer;
        BlockGradients out{views(unit, storage, type), holds};
        // One launch for the zero range of a block; on the CPU weight by weight, padding is nobody's business.
        const bool at_once = backend_->on_gpu();
        if (!holds && at_once)
            backend_->fill(storage->data, 0, static_cast<std::size_t>(layout.zero_numel) * size_of(type), Lane::caller);
        for (std::size_t s = 0; s < layout.slots.size() && !holds; ++s) {
            const Tensor& tensor = out.tensors.tensor(s);
            const bool zero = layout.slots[s].offset < layout.zero_numel;
            if (zero && !at_once)
                backend_->fill(tensor.data(), 0, tensor.bytes(), Lane::caller);
            else if (!zero && options_.poison)
                backend_->fill(tensor.data(), 0xff, tensor.bytes(), Lane::caller);
        }
        unit.touched |= !staged(unit);
        unit.status = Status::out;
        ++unit.visits;
        on_get_block(block, layer);
        return out;
    });
}

void EngineManager::notify(Unit& unit, const std::vector<int>* written) {
    if (unit.status != Status::out)
        throw StateError(model_.name + ": " + unit.name + ", " + where() +
                         ": notified without having been handed out; get it first");
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    const bool fresh = staged(unit) ? unit.visits == 1
                                    : std::none_of(unit.written.begin(), unit.written.end(), [](bool w) { return w; });
    for (std::size_t s = 0; s < layout.slots.size(); ++s) {
        const WeightSlot& slot = layout.slots[s];
        if (!written || std::find(written->begin(), written->end(), slot.weight) != written->end()) {
            unit.written[s] = true;
        } else if (fresh && slot.offset >= layout.zero_numel) {
            // Nobody wrote it and nothing zeroed it: without this it would hold whatever was there before.
            const std::size_t size = size_of(staged(unit) ? options_.dtype : accumulator_);
            backend_->fill(static_cast<char*>(arena_of(unit)) + static_cast<std::size_t>(slot.offset) * size, 0,
                           static_cast<std::size_t>(slot.numel) * size, Lane::caller);
        }
    }
    unit.status = Status::written;
    if (comm_->world_size() > 1 || unit.offloaded) backend_->record(unit.ready, Lane::caller);
    if (unit.strict && unit.visits >= unit.expected) settle(kOnlyFinished);
    progress();
}

void EngineManager::notify_non_block(int weight) {
    Guard guard(*this, "notify_non_block");
    Unit& unit = units_[static_cast<std::size_t>(unit_of_weight(weight))];
    require_inside("notify_non_block", unit.name);
    guarded(failure_, [&] { notify(unit, nullptr); });
}

void EngineManager::notify_block(int block, std::int64_t layer) {
    Guard guard(*this, "notify_block");
    Unit& unit = units_[static_cast<std::size_t>(unit_of_block(block, layer))];
    require_inside("notify_block", unit.name);
    guarded(failure_, [&] {
        notify(unit, nullptr);
        on_notify_block(block, layer);
    });
}

void EngineManager::notify_block(int block, std::int64_t layer, const std::vector<int>& written) {
    Guard guard(*this, "notify_block");
    Unit& unit = units_[static_cast<std::size_t>(unit_of_block(block, layer))];
    require_inside("notify_block", unit.name);
    guarded(failure_, [&] {
        notify(unit, &written);
        on_notify_block(block, layer);
    });
}

void EngineManager::end_micro_step() {
    Guard guard(*this, "end_micro_step");
    if (stage_ != Stage::inside) throw StateError(model_.name + ": end_micro_step without start_micro_step");
    for (const Unit& unit : units_)
        if (unit.status == Status::out)
            throw StateError(model_.name + ": " + unit.name + ", " + where() +
                             ": handed out but not notified; notify it, or reset() to drop the step");
    guarded(failure_, [&] {
        settle(kEverything);
        issue(true);
        // Whatever a capture forks must join before it ends; and a replay, which the host does not see, starts where the
        // caller's stream is.
        if (captured_) {
            progress();
            backend_->join(Lane::caller, Lane::exchange);
            backend_->join(Lane::caller, Lane::offload);
        }
        if (micro_step_ == micro_steps_ - 1) {
            finish_step();
        } else {
            progress();
            stage_ = Stage::between;
        }
    });
}

std::vector<TraceEntry> EngineManager::trace() {
    Guard guard(*this, "trace", false);
    return trace_;
}

}  // namespace gradgen
