// The layout of arenas and shards. gradgen/layout.py is the same algorithm in Python, step by step; a test compares the
// two.
#include "gradgen/layout.h"

#include <algorithm>
#include <locale>
#include <sstream>
#include <stdexcept>

#include "gradgen/error.h"

namespace gradgen {
namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 60;  // 2^63 bytes of the widest type

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t value, std::int64_t unit) { return ceil_div(value, unit) * unit; }

/// The range of a weight's elements that a rank owns.
struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
};

bool is_flat(const WeightDesc& weight) { return weight.shard == ShardKind::flat; }
bool is_zeroed(const WeightDesc& weight) { return weight.zero || weight.may_be_absent; }

/// Group of the arena order: A zeroed rows|whole, B zeroed flat, C other flat, D other rows|whole.
int group_of(const WeightDesc& weight) {
    if (is_zeroed(weight)) return is_flat(weight) ? 1 : 0;
    return is_flat(weight) ? 2 : 3;
}

/// What `rank` owns of a weight that is sharded by rows, or whole on every rank.
Range range_of(const WeightDesc& weight, std::int64_t numel, int world, int rank) {
    if (weight.shard == ShardKind::whole || weight.shape.empty()) return {0, numel};
    const std::int64_t rows = weight.shape.front();
    if (weight.rows < 1 || rows % weight.rows != 0) {
        throw ConfigError("weight '" + weight.id + "' (" + weight.place + "): " + std::to_string(rows) +
                          " rows are not a multiple of rows(" + std::to_string(weight.rows) + ")");
    }
    if (numel == 0) return {0, 0};
    const std::int64_t units = rows / weight.rows, unit = numel / units, share = ceil_div(units, world);
    return {std::min(rank * share, units) * unit, std::min((rank + 1) * share, units) * unit};
}

void check_world(int world, int rank) {
    if (world < 1) throw std::invalid_argument("world size " + std::to_string(world) + " is not positive");
    if (rank < 0 || rank >= world) {
        throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world));
    }
}

/// Adds up sizes and throws before they leave what a machine can address.
std::int64_t advance(std::int64_t offset, std::int64_t numel, const WeightDesc& weight) {
    if (numel >= kMaxElements - offset)
        throw std::length_error("weight '" + weight.id + "' (" + weight.place + ") is too large");
    return offset + round_up(numel, kAlignment);
}

/// Fills the arena side of `out`: order, offsets, zero range and flat range.
void place_in_arena(ArenaLayout& out, const std::vector<WeightDesc>& weights, const std::vector<int>& indices) {
    std::int64_t cursor = 0;
    for (int group = 0; group < 4; ++group) {
        if (group == 1) out.flat_begin = cursor;
        for (int index : indices) {
            const WeightDesc& weight = weights[static_cast<std::size_t>(index)];
            if (group_of(weight) != group) continue;
            const std::int64_t numel = weight.numel();
            out.slots.push_back({.weight = index, .offset = cursor, .numel = numel});
            out.packed = out.packed || !is_flat(weight);
            cursor = advance(cursor, numel, weight);
        }
        if (group == 1) out.zero_numel = cursor;
        if (group == 2) {
            out.flat_shard = round_up(cursor - out.flat_begin, kAlignment * out.world) / out.world;
            cursor = out.flat_begin + out.world * out.flat_shard;
        }
    }
    out.numel = cursor;
}

/// The slots with `rank`'s shards, and the size of the shard buffer.
std::vector<WeightSlot> place_shards(const ArenaLayout& arena, const std::vector<WeightDesc>& weights, int rank,
                                     std::int64_t& shard_numel) {
    std::vector<WeightSlot> slots = arena.slots;
    const std::int64_t begin = arena.flat_begin + rank * arena.flat_shard, end = begin + arena.flat_shard;
    std::int64_t cursor = 0, flat_base = -1;
    for (WeightSlot& slot : slots) {
        const WeightDesc& weight = weights[static_cast<std::size_t>(slot.weight)];
        if (is_flat(weight)) {
            if (flat_base < 0) {
                flat_base = cursor;
                cursor += arena.flat_shard;
            }
            const std::int64_t first = std::max(slot.offset, begin), last = std::min(slot.offset + slot.numel, end);
            if (first >= last) continue;
            slot.shard_offset = flat_base + first - begin;
            slot.shard_begin = first - slot.offset;
            slot.shard_numel = last - first;
        } else {
            const Range mine = range_of(weight, slot.numel, arena.world, rank),
                        largest = range_of(weight, slot.numel, arena.world, 0);
            slot.shard_offset = cursor;
            slot.shard_begin = mine.begin;
            slot.shard_numel = mine.end - mine.begin;
            cursor += round_up(largest.end - largest.begin, kAlignment);
        }
    }
    shard_numel = cursor;
    return slots;
}

ArenaLayout layout(const std::vector<WeightDesc>& weights, const std::vector<int>& indices, int world, int rank) {
    check_world(world, rank);
    ArenaLayout out;
    out.world = world;
    place_in_arena(out, weights, indices);
    for (int r = 0; r < world; ++r) out.by_rank.push_back(place_shards(out, weights, r, out.shard_numel));
    out.slots = out.by_rank[static_cast<std::size_t>(rank)];
    return out;
}

void describe_arena(std::ostream& out, const ArenaLayout& arena, const std::vector<WeightDesc>& weights) {
    out << " arena " << arena.numel << " zero " << arena.zero_numel << " flat " << arena.flat_begin << ' '
        << arena.flat_shard << " shard " << arena.shard_numel << '\n';
    for (const WeightSlot& slot : arena.slots) {
        out << "  " << weights[static_cast<std::size_t>(slot.weight)].id << ' ' << slot.offset << ' ' << slot.numel
            << '\n';
    }
}

}  // namespace

std::int64_t WeightDesc::numel() const {
    std::int64_t total = 1;
    bool large = false;
    for (std::int64_t dim : shape) {
        if (dim < 0)
            throw std::invalid_argument("weight '" + id + "' (" + place + ") has the negative dimension " +
                                        std::to_string(dim));
        if (dim == 0) return 0;
        large = large || __builtin_mul_overflow(total, dim, &total) || total >= kMaxElements;
    }
    if (large) throw std::length_error("weight '" + id + "' (" + place + ") is too large");
    return total;
}

std::vector<Segment> ArenaLayout::segments(int rank, std::uint32_t uid_base) const {
    std::vector<Segment> out;
    for (const WeightSlot& slot : by_rank.at(static_cast<std::size_t>(rank))) {
        if (slot.shard_numel == 0) continue;
        out.push_back({.source = slot.offset + slot.shard_begin,
                       .shard = slot.shard_offset,
                       .numel = slot.shard_numel,
                       .element = slot.shard_begin,
                       .weight = uid_base + static_cast<std::uint32_t>(slot.weight)});
    }
    return out;
}

std::vector<BlockKind> kinds_of(const BlockDesc& block) {
    if (!block.kinds.empty()) return block.kinds;
    BlockKind all{{}, block.weights};
    for (std::int64_t layer = 0; layer < block.count; ++layer) all.layers.push_back(layer);
    return {all};
}

std::string kind_name(const BlockDesc& block, std::size_t kind) {
    return block.kinds.size() < 2 ? block.id : block.id + "." + std::to_string(kind);
}

std::string spans(const std::vector<std::int64_t>& layers) {
    std::string out;
    for (std::size_t i = 0; i < layers.size();) {
        std::size_t end = i + 1;
        while (end < layers.size() && layers[end] == layers[end - 1] + 1) ++end;
        out += (out.empty() ? "" : ",") + std::to_string(layers[i]);
        if (end - i > 1) out += "-" + std::to_string(layers[end - 1]);
        i = end;
    }
    return out;
}

ArenaLayout layout_kind(const std::vector<WeightDesc>& weights, int world, int rank) {
    std::vector<int> indices;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        if (weights[i].owns_buffer()) indices.push_back(static_cast<int>(i));
    }
    return layout(weights, indices, world, rank);
}

ArenaLayout layout_block(const BlockDesc& block, int world, int rank) {
    return layout_kind(block.weights, world, rank);
}

ArenaLayout layout_weight(const WeightDesc& weight, int index, int world, int rank) {
    ArenaLayout out = layout({weight}, {0}, world, rank);
    for (WeightSlot& slot : out.slots) slot.weight = index;
    for (auto& slots : out.by_rank) {
        for (WeightSlot& slot : slots) slot.weight = index;
    }
    return out;
}

std::string describe_layout(const ModelDesc& model, int world) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << "world " << world << '\n';
    for (const WeightDesc& weight : model.weights) {
        if (!weight.owns_buffer()) continue;
        out << "weight " << weight.id;
        describe_arena(out, layout_weight(weight, 0, world, 0), {weight});
    }
    for (const BlockDesc& block : model.blocks) {
        if (block.kinds.empty()) {
            const ArenaLayout arena = layout_block(block, world, 0);
            if (arena.slots.empty() || block.count < 1) continue;
            out << "block " << block.id << " count " << block.count;
            describe_arena(out, arena, block.weights);
        }
        for (std::size_t k = 0; k < block.kinds.size(); ++k) {
            const BlockKind& kind = block.kinds[k];
            const ArenaLayout arena = layout_kind(kind.weights, world, 0);
            if (arena.slots.empty() || kind.layers.empty()) continue;
            const auto count = static_cast<std::int64_t>(kind.layers.size());
            const bool leading = kind.layers.back() == count - 1;  // all from the first on
            out << "block " << kind_name(block, k)
                << (leading ? " count " + std::to_string(count) : " layers " + spans(kind.layers));
            describe_arena(out, arena, kind.weights);
        }
    }
    return out.str();
}

}  // namespace gradgen
