// What a model is once its dimensions are known, and where every gradient lies. The compiler's planner computes the
// same numbers from the spec; a manager compares the two when it is constructed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gradgen/kernels.h"

namespace gradgen {

constexpr std::int64_t kAlignment = 64;  // elements; every weight and every shard starts at a multiple

enum class ShardKind : std::uint8_t { flat, rows, whole };

constexpr int kOutside = -1, kSameScope = -2;  // where the owner of a tensor is, when it is not in another block

struct WeightDesc {
    std::string id;
    std::string name;                 // checkpoint name; relative to the block's name inside a block
    std::vector<std::int64_t> shape;  // {} for a scalar
    bool present = true;              // `when`
    bool trainable = true;
    bool zero = false;            // the first touch needs zeros
    std::string tied_to;          // id of the weight that owns the buffer, or ""
    int tied_block = kSameScope;  // that the owner is in
    std::int64_t tied_layer = 0;  // its index there
    std::int64_t uses = 0;        // declared contributions a micro-step, 0: not declared
    bool may_be_absent = false;
    ShardKind shard = ShardKind::flat;
    std::int64_t rows = 1;  // unit of `rows`
    std::string place;      // file:line of the spec
    std::int64_t numel() const;
    bool operator==(const WeightDesc&) const = default;
    bool owns_buffer() const { return present && trainable && tied_to.empty(); }
};

/// Blocks of a stack that have equal weights.
struct BlockKind {
    std::vector<std::int64_t> layers;  // their indices, ascending
    std::vector<WeightDesc> weights;
};

struct BlockDesc {
    std::string id;
    std::string name;  // with {i}
    std::int64_t count = 0;
    std::int64_t uses = 0;
    std::vector<WeightDesc> weights;  // of all its blocks, where they are alike and all of them exist
    std::vector<BlockKind> kinds;     // otherwise
};

/// The kinds of a stack; one of all layers where `kinds` is empty.
std::vector<BlockKind> kinds_of(const BlockDesc& block);
/// "decoder", or "decoder.1" where a stack has several kinds.
std::string kind_name(const BlockDesc& block, std::size_t kind);
/// "0,3-23" of ascending indices.
std::string spans(const std::vector<std::int64_t>& layers);

/// One step of the backward order: a weight, or stacks that are visited together: the highest index first, at one index
/// in the order of `blocks`.
struct BackwardDesc {
    int weight = -1;
    std::vector<int> blocks;
};

enum class Placement : std::uint8_t { full, sharded };
enum class Collective : std::uint8_t { reduce_scatter, all_to_all, all_reduce };

struct StrategyDesc {
    std::string id;
    Placement blocks = Placement::full;
    Placement non_blocks = Placement::full;
    Collective collective = Collective::reduce_scatter;
};

struct ModelDesc {
    std::string name;
    std::string key;  // content hash of the spec
    std::vector<WeightDesc> weights;
    std::vector<BlockDesc> blocks;
    std::vector<BackwardDesc> backward;
};

/// Where one weight lies in its unit's arena and in a rank's shard buffer. Elements.
struct WeightSlot {
    int weight = 0;           // index into the block's (or model's) weights
    std::int64_t offset = 0;  // in the arena
    std::int64_t numel = 0;
    std::int64_t shard_offset = 0;  // in the shard buffer (of this rank's part)
    std::int64_t shard_numel = 0;   // of this rank
    std::int64_t shard_begin = 0;   // first element of the weight that this rank owns
};

/// The arena of one block kind or of one non-block weight, for one world size and rank.
struct ArenaLayout {
    std::int64_t numel = 0;                       // padded; what is allocated
    std::int64_t zero_numel = 0;                  // [0, zero_numel) is zeroed at the first touch
    std::int64_t flat_begin = 0, flat_shard = 0;  // the flat range is [flat_begin, flat_begin + world * flat_shard)
    std::int64_t shard_numel = 0;                 // of the shard buffer, the same on every rank
    bool packed = false;                          // has rows or whole weights: a rank's slice is not one range
    std::vector<WeightSlot> slots;                // in arena order, this rank's shards

    /// Segments that `rank` owns; uids start at `uid_base`.
    std::vector<Segment> segments(int rank, std::uint32_t uid_base) const;
    int world = 1;
    std::vector<std::vector<WeightSlot>> by_rank;  // slots for every rank
};

ArenaLayout layout_block(const BlockDesc& block, int world, int rank);  // of a stack with one kind
ArenaLayout layout_kind(const std::vector<WeightDesc>& weights, int world, int rank);
ArenaLayout layout_weight(const WeightDesc& weight, int index, int world, int rank);

/// Canonical text of a layout, compared with the planner's: one line a unit kind, one a weight.
std::string describe_layout(const ModelDesc& model, int world);

}  // namespace gradgen
