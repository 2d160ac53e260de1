// The numbers of a step that live on the device, and the one-thread kernels that work on them.
#pragma once

#include <cstdint>

#include "gradgen/cuda_kernels.h"

namespace gradgen::cuda {

inline constexpr int kMaxRanks = 64;

struct Scalars {
    CudaCounters counters;
    ReduceStats mine;              // what this rank's kernels counted
    ReduceStats all;               // over all ranks
    ReduceStats ranks[kMaxRanks];  // gathered
    float divide = 1.0f;           // 1 / the divisor that lies on the device
    float clip = 1.0f;
    float norm = 0.0f;  // before clipping
};

struct Totals {
    const ReduceStats* of[kMaxRanks];
    int count = 0;
};

enum class Count : int { first_micro_step, next_micro_step, step };

void set_counters(Scalars* scalars, const CudaCounters& counters, CudaStream stream);
void count(Scalars* scalars, Count what, CudaStream stream);
/// scalars->divide = 1 / *number, computed in fp64.
void set_divide(Scalars* scalars, const void* number, bool is_double, CudaStream stream);
/// scalars->all = the sum in rank order; scalars->norm from it.
void sum_totals(Scalars* scalars, const Totals& totals, CudaStream stream);
void prepare_clip(Scalars* scalars, double max_norm, CudaStream stream);
void scale_total(Scalars* scalars, double factor, CudaStream stream);

}  // namespace gradgen::cuda
