// What generated models are made of: rows of their tables, how rows become descriptions, and managers that know ids by
// enum.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "gradgen/config.h"
#include "gradgen/engine.h"

namespace gradgen {

/// One weight of a spec, as far as it does not depend on the configuration. `Id` is the model's enum of weights.
template <class Id>
struct WeightRow {
    Id id{};
    std::string_view name;        // as in the spec
    std::string_view checkpoint;  // relative to the block's name inside a block
    std::string_view zero;        // when the first touch needs zeros: "always", "never" or a condition
    std::string_view place;       // file:line of the spec
};

/// Row i describes the weight with number i.
template <class Id, std::size_t N>
constexpr bool in_order(const std::array<WeightRow<Id>, N>& rows) {
    for (std::size_t i = 0; i < N; ++i) {
        if (static_cast<std::size_t>(rows[i].id) != i) return false;
    }
    return true;
}

/// What a configuration decides about a weight, besides its shape.
struct WeightFacts {
    bool present = true;
    bool trainable = true;
    bool zero = false;
    std::string_view tied_to = {};
    int tied_block = kSameScope;
    std::int64_t tied_layer = 0;
    std::int64_t uses = 0;
    bool may_be_absent = false;
    ShardKind shard = ShardKind::flat;
    std::int64_t rows = 1;
};

/// Appends the description of one weight; called in the order of the rows.
template <class Id, std::size_t N>
void add(std::vector<WeightDesc>& out, const std::array<WeightRow<Id>, N>& rows, Id id,
         std::initializer_list<std::int64_t> shape, const WeightFacts& facts = {}) {
    const WeightRow<Id>& row = rows[static_cast<std::size_t>(id)];
    WeightDesc& desc = out.emplace_back();
    desc.id = row.name;
    desc.name = row.checkpoint;
    desc.place = row.place;
    desc.present = facts.present;
    if (!facts.present) {
        desc.shape = {0};  // no storage, whatever its dimensions would be
        return;
    }
    desc.shape = shape;
    desc.trainable = facts.trainable;
    desc.zero = facts.zero;
    desc.tied_to = facts.tied_to;
    if (!facts.tied_to.empty()) desc.tied_block = facts.tied_block, desc.tied_layer = facts.tied_layer;
    desc.uses = facts.uses;
    desc.may_be_absent = facts.may_be_absent;
    desc.shard = facts.shard;
    desc.rows = facts.rows;
}

/// Describes a weight that the configuration leaves out and whose shape cannot be computed then.
template <class Id, std::size_t N>
void add_absent(std::vector<WeightDesc>& out, const std::array<WeightRow<Id>, N>& rows, Id id) {
    add(out, rows, id, {}, {.present = false});
}

/// Appends `weight` once for each expert. Throws ConfigError for a number of experts that cannot be.
void for_experts(const WeightDesc& weight, std::int64_t experts, std::vector<WeightDesc>& out);

/// Appends one weight an expert: "id.3", with the expert for {e} in its checkpoint name.
template <class Id, std::size_t N>
void add_experts(std::vector<WeightDesc>& out, const std::array<WeightRow<Id>, N>& rows, Id id, std::int64_t experts,
                 std::initializer_list<std::int64_t> shape, const WeightFacts& facts = {}) {
    add(out, rows, id, shape, facts);
    if (!facts.present) return;
    const WeightDesc desc = std::move(out.back());
    out.pop_back();
    for_experts(desc, experts, out);
}

constexpr std::int64_t kMaxLayers = std::int64_t{1} << 20;  // of a stack whose blocks are told apart one by one

/// The indices of a stack: all, some, or those for which a condition holds. They ascend.
std::vector<std::int64_t> all_layers(const BlockDesc& block);
std::vector<std::int64_t> layers_of(const BlockDesc& block, std::vector<std::int64_t> layers);
template <class Condition>
std::vector<std::int64_t> layers_where(const BlockDesc& block, const Condition& condition) {
    std::vector<std::int64_t> out = all_layers(block);
    std::erase_if(out, [&](std::int64_t i) { return !condition(i); });
    return out;
}

/// Only these blocks of a stack exist; all have the weights that were added.
inline void keep_layers(BlockDesc& block, std::vector<std::int64_t> layers) {
    block.kinds = {{std::move(layers), block.weights}};
}

/// Groups blocks with equal weights, in the order of their first layers. `weights_of(i)` describes those of one block.
template <class Describe>
void add_kinds(BlockDesc& block, const std::vector<std::int64_t>& layers, const Describe& weights_of) {
    for (const std::int64_t i : layers) {
        std::vector<WeightDesc> weights = weights_of(i);
        const auto same = std::find_if(block.kinds.begin(), block.kinds.end(),
                                       [&](const BlockKind& k) { return k.weights == weights; });
        if (same != block.kinds.end())
            same->layers.push_back(i);
        else
            block.kinds.push_back({{i}, std::move(weights)});
    }
    if (block.kinds.empty()) block.kinds.emplace_back();
}

/// Throws ConfigError for a tie to a weight that the configuration leaves out, and for sizes that cannot be.
void check_model(const ModelDesc& model);

/// `uses` that the spec computes. Throws ConfigError for what is no number of uses.
std::int64_t declared_uses(std::int64_t uses);

/// Tensors of a block's weight that is one weight an expert, by expert.
std::vector<Tensor> tensors_of(const TensorContainer& tensors, std::string_view id);

// One step of the backward order.
template <class Id>
BackwardDesc after_weight(Id id) {
    return {.weight = static_cast<int>(id), .blocks = {}};
}
template <class Id>
BackwardDesc after_blocks(std::initializer_list<Id> ids) {
    BackwardDesc out;
    for (const Id id : ids) out.blocks.push_back(static_cast<int>(id));
    return out;
}

/// Tensor of a block's weight; empty when the configuration leaves the weight out.
inline Tensor tensor_of(const TensorContainer& tensors, std::string_view id) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (tensors.id(i) == id) return tensors.tensor(i);
    }
    return {};
}

/// A manager whose weights and blocks are named by the model's enums instead of numbers.
template <class Base, class Weight, class Block>
class TypedManager : public Base {
  public:
    using Base::Base;
    using Base::get_block_full, Base::get_block_shard, Base::get_non_block_full, Base::get_non_block_shard;
    using Base::notify_block, Base::notify_non_block;

    WeightGradient get_non_block_full(Weight weight) { return Base::get_non_block_full(static_cast<int>(weight)); }
    TensorShard get_non_block_shard(Weight weight) { return Base::get_non_block_shard(static_cast<int>(weight)); }
    void notify_non_block(Weight weight) { Base::notify_non_block(static_cast<int>(weight)); }
    BlockGradients get_block_full(Block block, std::int64_t layer) {
        return Base::get_block_full(static_cast<int>(block), layer);
    }
    TensorContainer get_block_shard(Block block, std::int64_t layer) {
        return Base::get_block_shard(static_cast<int>(block), layer);
    }
    void notify_block(Block block, std::int64_t layer) { Base::notify_block(static_cast<int>(block), layer); }
};

}  // namespace gradgen
