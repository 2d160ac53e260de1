// What the optimizer reads: shards by name, and every buffer for those who look closer.
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

void EngineManager::require_readable(const std::string& what) const {
    if (closed_) throw StateError(model_.name + ": " + what + " was asked for after close()");
    if (!failure_.empty())
        throw CommError(model_.name + ": " + what + ": an earlier call failed: " + failure_ +
                        "\nCall reset() on every rank, then start the step again.");
    if (accumulating())
        throw StateError(model_.name + ": " + what + " was asked for in the middle of a step (" + where() +
                         "); gradients are reduced when the last micro-step ends");
    if (options_.offload) backend_->synchronize();  // whoever reads host memory must find the final values
}

TensorShard EngineManager::shard_of(const Unit& unit, const WeightDesc& weight, const WeightSlot& slot) const {
    const bool full = unit.placement == Placement::full;
    if (full && (comm_->world_size() == 1 || strategy_.collective == Collective::all_reduce))
        return {Tensor(unit.buffer, slot.offset, weight.shape, accumulator_), 0, weight.shape};
    const std::int64_t offset = full ? slot.offset + slot.shard_begin : slot.shard_offset;
    std::vector<std::int64_t> shape{slot.shard_numel};
    if (weight.shard == ShardKind::whole) shape = weight.shape;
    if (weight.shard == ShardKind::rows && !weight.shape.empty()) {
        shape = weight.shape;
        const std::int64_t row = weight.shape[0] > 0 ? weight.numel() / weight.shape[0] : 0;
        shape[0] = row > 0 ? slot.shard_numel / row : 0;
    }
    return {Tensor(unit.buffer, slot.shard_numel > 0 ? offset : 0, shape, accumulator_), slot.shard_begin,
            weight.shape};
}

TensorShard EngineManager::get_non_block_shard(int weight) {
    Guard guard(*this, "non_block_shard");
    return weight_shard(weight);
}

TensorShard EngineManager::weight_shard(int weight) {
    const Unit& unit = units_[static_cast<std::size_t>(unit_of_weight(weight))];
    require_readable("the shard of " + unit.name);
    const WeightDesc& desc = model_.weights[static_cast<std::size_t>(unit.index)];
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    if (cleared_) fill_cleared();
    return layout.slots.empty() ? TensorShard{Tensor(unit.buffer, 0, desc.shape, accumulator_), 0, desc.shape}
                                : shard_of(unit, desc, layout.slots.front());
}

TensorContainer EngineManager::get_block_shard(int block, std::int64_t layer) {
    Guard guard(*this, "block_shard");
    return block_shard(block, layer);
}

TensorContainer EngineManager::block_shard(int block, std::int64_t layer) {
    const Unit& unit = units_[static_cast<std::size_t>(unit_of_block(block, layer))];
    require_readable("the shard of " + unit.name);
    if (cleared_) fill_cleared();
    TensorContainer out;
    for (const WeightSlot& slot : layouts_[static_cast<std::size_t>(unit.kind)].slots) {
        const WeightDesc& desc = weight_desc(unit, slot);
        out.add(desc.id, shard_of(unit, desc, slot));
    }
    return out;
}

// zero_grad() writes nothing; whoever looks before the next step finds zeros all the same.
void EngineManager::fill_cleared() {
    cleared_ = false;
    for (Unit& unit : units_)
        with_buffer(unit, false, true, Lane::caller,
                    [&](void* data) { backend_->fill(data, 0, unit.buffer->bytes, Lane::caller); });
    if (options_.offload) backend_->synchronize();  // the host reads next
}

std::vector<std::pair<std::string, TensorShard>> EngineManager::named_gradients() {
    Guard guard(*this, "named_gradients");
    require_readable("named_gradients");
    std::vector<std::pair<std::string, TensorShard>> out;
    for (std::size_t w = 0; w < model_.weights.size(); ++w)
        if (model_.weights[w].owns_buffer())
            out.emplace_back(model_.weights[w].name, weight_shard(static_cast<int>(w)));
    for (std::size_t b = 0; b < model_.blocks.size(); ++b)
        for (std::int64_t layer = 0; layer < model_.blocks[b].count; ++layer) {
            if (block_unit_[b][static_cast<std::size_t>(layer)] < 0) continue;
            const TensorContainer shards = block_shard(static_cast<int>(b), layer);
            for (const WeightDesc& desc : block_weights(static_cast<int>(b), layer))
                if (const TensorShard* shard = shards.find(desc.id))
                    out.emplace_back(full_name(static_cast<int>(b), layer, desc), *shard);
        }
    return out;
}

std::vector<WeightRecord> EngineManager::weights() const {
    std::vector<WeightRecord> out;
    const auto add = [&](int block, std::int64_t layer, const WeightDesc& d, const std::vector<WeightDesc>& family) {
        if (!d.present) return;
        WeightRecord record{
            full_name(block, layer, d), d.id, block, layer, d.shape, d.trainable, d.zero, d.may_be_absent, ""};
        if (!d.tied_to.empty()) {
            const bool same = d.tied_block == kSameScope;
            const int scope = same ? block : d.tied_block;
            const std::int64_t at = same ? layer : d.tied_layer;
            const auto& owners = same ? family : scope < 0 ? model_.weights : block_weights(scope, at);
            for (const WeightDesc& other : owners)
                if (other.id == d.tied_to) record.tied_to = full_name(scope, at, other);
        }
        out.push_back(std::move(record));
    };
    for (const WeightDesc& d : model_.weights) add(-1, -1, d, model_.weights);
    for (std::size_t b = 0; b < model_.blocks.size(); ++b)
        for (std::int64_t layer = 0; layer < model_.blocks[b].count; ++layer) {
            if (block_kind_[b][static_cast<std::size_t>(layer)] < 0) continue;
            const std::vector<WeightDesc>& family = block_weights(static_cast<int>(b), layer);
            for (const WeightDesc& d : family) add(static_cast<int>(b), layer, d, family);
        }
    return out;
}

std::vector<NamedBuffer> EngineManager::buffers() const {
    std::vector<NamedBuffer> out;
    const auto add = [&](const std::string& name, const std::shared_ptr<Storage>& s, DType type) {
        out.push_back({name, Tensor(s, 0, {static_cast<std::int64_t>(s->bytes / size_of(type))}, type)});
    };
    for (const Unit& unit : units_) add(unit.name, unit.buffer, accumulator_);
    for (std::size_t s = 0; s < slots_.size(); ++s)
        add("staging " + std::to_string(s), slots_[s].arena, options_.dtype);
    return out;
}

void EngineManager::poison() {
    Guard guard(*this, "poison");
    require_readable("poison");
    backend_->synchronize();
    for (const NamedBuffer& buffer : buffers()) {
        if (buffer.tensor.device().kind == DeviceKind::cpu)
            std::memset(buffer.tensor.data(), 0xff, buffer.tensor.bytes());
        else
            backend_->fill(buffer.tensor.data(), 0xff, buffer.tensor.bytes(), Lane::caller);
    }
}

}  // namespace gradgen
