// The gradient manager's interface: what it promises, for every strategy. Algorithms live in engine.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradgen/communicator.h"
#include "gradgen/layout.h"
#include "gradgen/tensor.h"

namespace gradgen {

enum class Rounding : std::uint8_t { nearest, stochastic };
enum class NonFinite : std::uint8_t { ignore, skip, raise };

/// How a manager is built. Three dtypes, none implied: what backward writes, what sums are kept in, what travels.
struct Options {
    DType dtype = DType::f32;               // of produced gradients
    std::optional<DType> accumulator;       // unset: the same as dtype
    std::optional<DType> wire;              // unset: dtype for sharded blocks, the accumulator's for full ones
    Rounding rounding = Rounding::nearest;  // of the accumulator
    Rounding wire_rounding = Rounding::nearest;
    std::uint64_t seed = 0;
    std::optional<double> divide;  // unset: the mean over ranks
    int block_buffers = 2;
    NonFinite nonfinite = NonFinite::ignore;
    Device device;         // where gradients lie
    bool offload = false;  // GPU: keep block shards in pinned host memory
    bool poison = false;   // debugging: fill handed-out memory that must be overwritten with NaN
};

/// A block handed out for writing. `accumulate` false: overwrite (zeroed weights hold zeros, others anything); true:
/// add.
struct BlockGradients {
    TensorContainer tensors;
    bool accumulate = false;
};
struct WeightGradient {
    Tensor tensor;
    bool accumulate = false;
};

class GradientManager {
  public:
    virtual ~GradientManager() = default;

    virtual void start_micro_step(int micro_step, int micro_steps, std::optional<double> divide = {}) = 0;
    virtual void end_micro_step() = 0;

    virtual WeightGradient get_non_block_full(int weight) = 0;
    virtual BlockGradients get_block_full(int block, std::int64_t layer) = 0;
    virtual void notify_non_block(int weight) = 0;
    virtual void notify_block(int block, std::int64_t layer) = 0;

    virtual TensorShard get_non_block_shard(int weight) = 0;
    virtual TensorContainer get_block_shard(int block, std::int64_t layer) = 0;
};

}  // namespace gradgen
