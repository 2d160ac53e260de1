// Units of reduction in plan order: every buffer once, at the place of its last use.
#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

#include "engine_buffer.h"
#include "engine_guard.h"
#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {

std::vector<Segment> segments_of(const ArenaLayout& layout, int rank, std::uint32_t uid_base, auto keep) {
    std::vector<Segment> out;
    for (const WeightSlot& slot : layout.by_rank.at(static_cast<std::size_t>(rank))) {
        if (slot.shard_numel == 0 || !keep(slot)) continue;
        out.push_back({slot.offset + slot.shard_begin, slot.shard_offset, slot.shard_numel, slot.shard_begin,
                       uid_base + static_cast<std::uint32_t>(slot.weight)});
    }
    return out;
}

}  // namespace

void EngineManager::make_units() {
    const int world = comm_->world_size(), rank = comm_->rank();
    std::vector<std::uint32_t> uid(model_.blocks.size()), stride(model_.blocks.size(), 0);
    std::vector<std::size_t> first_kind(model_.blocks.size());  // in layouts_
    auto next_uid = static_cast<std::uint32_t>(model_.weights.size());
    for (std::size_t w = 0; w < model_.weights.size(); ++w) {
        layouts_.push_back(layout_weight(model_.weights[w], static_cast<int>(w), world, rank));
    }
    for (std::size_t b = 0; b < model_.blocks.size(); ++b) {
        BlockDesc& block = model_.blocks[b];
        block.kinds = kinds_of(block);
        first_kind[b] = layouts_.size();
        block_unit_.emplace_back(static_cast<std::size_t>(block.count), -1);
        block_kind_.emplace_back(static_cast<std::size_t>(block.count), -1);
        for (std::size_t k = 0; k < block.kinds.size(); ++k) {
            layouts_.push_back(layout_kind(block.kinds[k].weights, world, rank));
            stride[b] = std::max(stride[b], static_cast<std::uint32_t>(block.kinds[k].weights.size()));
            for (const std::int64_t layer : block.kinds[k].layers)
                block_kind_[b][static_cast<std::size_t>(layer)] = static_cast<int>(k);
        }
        uid[b] = next_uid;
        next_uid += static_cast<std::uint32_t>(block.count) * stride[b];
    }
    const auto add = [&](int block, std::size_t variant, std::int64_t index, int kind, Placement placement,
                         std::uint32_t uid_base, const std::string& name) {
        Unit unit;
        unit.block = block, unit.variant = variant, unit.index = index, unit.kind = kind, unit.name = name,
        unit.uid_base = uid_base;
        unit.placement = world == 1 ? Placement::full : placement;
        const auto whole = [&](const WeightSlot& s) {
            return world > 1 && weight_desc(unit, s).shard == ShardKind::whole;
        };
        unit.mine = segments_of(layouts_[static_cast<std::size_t>(kind)], rank, uid_base,
                                [&](const WeightSlot& s) { return !whole(s); });
        unit.mine_whole = segments_of(layouts_[static_cast<std::size_t>(kind)], rank, uid_base, whole);
        unit.whole_piece = whole_pieces(unit, rank);
        // Offsets of the arena of `world` ranks, every element.
        for (const WeightSlot& s : layouts_[static_cast<std::size_t>(kind)].slots)
            if (s.numel)
                unit.all.push_back({s.offset, s.offset, s.numel, 0, uid_base + static_cast<std::uint32_t>(s.weight)});
        unit.written.assign(layouts_[static_cast<std::size_t>(kind)].slots.size(), false);
        units_.push_back(std::move(unit));
        return static_cast<int>(units_.size()) - 1;
    };

    const std::vector<BufferUse> uses = buffer_uses();
    std::map<BufferKey, std::size_t> last;
    std::map<BufferKey, std::int64_t> extra;  // uses by weights of blocks, and by weights outside of one in a block
    for (std::size_t n = 0; n < uses.size(); ++n) {
        last[uses[n].key] = n;
        extra[uses[n].key] += uses[n].extra;
    }
    const std::size_t count = model_.weights.size();
    weight_unit_.assign(count, -1), weight_order_.assign(count, 0);
    weight_visits_.assign(count, 0), weight_uses_.assign(count, 0);
    std::vector<int> seen(count, 0);
    for (std::size_t w = 0; w < count; ++w) {
        const std::int64_t declared = model_.weights[w].uses, more = extra[{-1, static_cast<std::int64_t>(w)}];
        weight_uses_[w] = declared > 0 ? declared + more : 0;
        seen[w] = more > 0 ? 1 : 0;  // a block may come first: nobody may be told to overwrite without zeros
    }
    for (std::size_t n = 0; n < uses.size(); ++n) {
        const BufferKey key = uses[n].key;
        if (uses[n].weight >= 0 && key.block < 0)
            weight_order_[static_cast<std::size_t>(uses[n].weight)] = seen[static_cast<std::size_t>(key.index)]++;
        if (last[key] != n) continue;  // a buffer with several uses is one unit, at the place of the last
        std::int64_t own = 0, expected = extra[key];
        bool declared = false;
        if (key.block >= 0) {
            const auto b = static_cast<std::size_t>(key.block), at = static_cast<std::size_t>(key.index);
            const auto variant = static_cast<std::size_t>(block_kind_[b][at]);
            const int u = add(key.block, variant, key.index, static_cast<int>(first_kind[b] + variant),
                              strategy_.blocks, uid[b] + static_cast<std::uint32_t>(key.index) * stride[b],
                              "block '" + model_.blocks[b].id + "' layer " + std::to_string(key.index));
            block_unit_[b][at] = u;
            own = model_.blocks[b].uses;
            for (const WeightDesc& desc : model_.blocks[b].kinds[variant].weights)
                if (desc.owns_buffer()) own = std::max(own, desc.uses);
            declared = own > 0;
            if (declared) units_.back().uses = own + expected;
            expected += std::max<std::int64_t>(1, own);
        } else {
            const auto o = static_cast<std::size_t>(key.index);
            const int u = add(-1, 0, key.index, static_cast<int>(o), strategy_.non_blocks, 0,
                              "weight '" + model_.weights[o].id + "'");
            for (std::size_t w = 0; w < count; ++w) {
                const WeightDesc& desc = model_.weights[w];
                if (!desc.present || !desc.trainable || owner_of(-1, static_cast<std::int64_t>(w), desc) != key)
                    continue;
                weight_unit_[w] = u;
                expected += std::max<std::int64_t>(1, desc.uses);
                declared |= desc.uses > 0;
            }
        }
        units_.back().expected = std::max<std::int64_t>(1, expected);
        units_.back().strict = declared || expected > 1;
    }
}

// Where the gradient of a weight lies: its own buffer, or that of the weight it is tied to.
EngineManager::BufferKey EngineManager::owner_of(int block, std::int64_t index, const WeightDesc& desc) const {
    if (desc.tied_to.empty() || (block >= 0 && desc.tied_block == kSameScope)) return {block, index};
    if (desc.tied_block >= 0) return {desc.tied_block, desc.tied_layer};
    for (std::size_t o = 0; o < model_.weights.size(); ++o)
        if (model_.weights[o].id == desc.tied_to) return {-1, static_cast<std::int64_t>(o)};
    throw ConfigError(model_.name + ": weight '" + desc.id + "' is tied to '" + desc.tied_to +
                      "', which does not exist");
}

// Every use of a buffer in backward order.
std::vector<EngineManager::BufferUse> EngineManager::buffer_uses() const {
    std::vector<BufferUse> out;
    const auto visit_block = [&](int number, std::int64_t layer) {
        const auto b = static_cast<std::size_t>(number);
        if (layer >= model_.blocks[b].count || block_kind_[b][static_cast<std::size_t>(layer)] < 0) return;
        const std::vector<WeightDesc>& weights = block_weights(number, layer);
        const auto own = [](const WeightDesc& desc) { return desc.owns_buffer(); };
        if (std::any_of(weights.begin(), weights.end(), own)) out.push_back({{number, layer}, -1, 0});
        std::vector<BufferUse> shared;
        for (const WeightDesc& desc : weights) {
            if (!desc.present || !desc.trainable || desc.tied_to.empty()) continue;
            const BufferKey key = owner_of(number, layer, desc);
            if (desc.tied_block == kSameScope) continue;
            const auto same = [&](const BufferUse& use) { return use.key == key; };
            const auto found = std::find_if(shared.begin(), shared.end(), same);
            if (found == shared.end())
                shared.push_back({key, -1, 1});
            else if (key.block < 0)
                ++found->extra;  // a weight outside is handed out for each, a block once for all
        }
        out.insert(out.end(), shared.begin(), shared.end());
    };
    for (const BackwardDesc& item : model_.backward) {
        if (item.weight >= 0) {
            const WeightDesc& desc = model_.weights[static_cast<std::size_t>(item.weight)];
            if (!desc.present || !desc.trainable) continue;
            const BufferKey key = owner_of(-1, item.weight, desc);
            out.push_back({key, item.weight, key.block >= 0 ? 1 : 0});
            continue;
        }
        std::int64_t count = 0;
        for (const int b : item.blocks) count = std::max(count, model_.blocks[static_cast<std::size_t>(b)].count);
        for (std::int64_t layer = count - 1; layer >= 0; --layer)
            for (const int b : item.blocks) visit_block(b, layer);
    }
    return out;
}

}  // namespace gradgen
