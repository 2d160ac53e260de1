// What cuda_reduce hands to a kernel: ReduceArgs without the types, and only the sources that have data.
#pragma once

#include <cstdint>

#include "gradgen/cuda_kernels.h"
#include "launch.h"

namespace gradgen::cuda {

inline constexpr int kMaxSources = 64;

struct ReduceChoices {
    std::uint64_t packed = 0;  // bit r: sources[r] lies at shard offsets
    void* target = nullptr;
    Walk walk;
    CudaStats* stats = nullptr;
    const float* device_scale = nullptr;
    const CudaCounters* counters = nullptr;
    RoundingKey rounding, wire_rounding;
    double scale = 1.0;
    float initial = -0.0f;  // what the sum starts from: -0 + x is x for every x; +0 where there is no term at all
    int count = 0;
    DType wire = DType::f32;  // f32: no rounding of sources
    bool target_in_arena = false;
    bool overwrite = true;
    std::uint32_t weight_offset = 0;
    // For the choice of the path: 7 where some operand lies at arena (shard) offsets, 1 where a pointer is not a
    // multiple of 16 bytes.
    int arena_mask = 0, shard_mask = 0, unaligned = 0;
};

/// A launch copies its parameters: with room for one source they are a quarter as large, which the host's time shows.
template <int kSources>
struct ReduceParamsOf : ReduceChoices {
    const void* sources[kSources];
    std::uint8_t ranks[kSources];  // of the sources, before those without data were left out
};
using ReduceParams = ReduceParamsOf<kMaxSources>;

/// Defined in reduce_*.cu, one file a target type, so that they compile in parallel.
template <class T, class S>
void run_reduce(const ReduceParams& params, CudaStream stream);

}  // namespace gradgen::cuda
