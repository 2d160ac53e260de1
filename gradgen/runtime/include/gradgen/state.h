// What a manager saves and loads between two micro-steps: numbers, and views of host memory. Padding is never part of
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradgen/tensor.h"

namespace gradgen {

/// Where in a step a state was taken: nothing summed yet, after some micro-steps, or after the last one.
enum class Phase : std::uint8_t { fresh, accumulating, complete };

/// A rank's part of one gradient. `partial`: this rank's own sum, not yet added to the other ranks'; else reduced.
struct SavedGradient {
    std::string name;  // checkpoint name
    std::vector<std::int64_t> global_shape;
    std::int64_t offset = 0, numel = 0;  // elements of the flattened weight
    bool partial = false;
    bool written = false;        // this rank has contributed in this step
    const void* data = nullptr;  // null: zeros, nobody has contributed
    Tensor tensor;               // of `data`, in a state that was saved here
};

/// One rank's state.
struct SavedState {
    int rank = 0, world_size = 1;
    DType accumulator = DType::f32;
    std::uint64_t seed = 0;
    std::int64_t step = 0, skipped_steps = 0;
    Phase phase = Phase::fresh;
    int micro_step = 0;  // finished ones of the step
    int micro_steps = 0;
    double divide = 1;
    bool mean = true;  // `divide` is the number of ranks because nobody said otherwise
    std::optional<double> norm_squared;
    std::int64_t nonfinite = 0;
    bool step_skipped = false;
    std::vector<SavedGradient> gradients;
};

}  // namespace gradgen
