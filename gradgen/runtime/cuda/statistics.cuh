// Sum of squares and non-finite count that ride along with a kernel, as src/statistics.h does on the CPU.
//
// A group's eight squares are added in fp32 (at most nine roundings, 5.4e-7), groups in fp64. A group whose sum is not
// finite, or so small that a square may have been flushed, is done again in fp64 and counted: no range in which the
// norm is wrong, and the count costs nothing in the common case.
#pragma once

#include "element.cuh"
#include "launch.h"

namespace gradgen::cuda {

struct Statistics {
    double squares = 0;
    std::uint32_t nonfinite = 0;  // of one thread: fewer than 2^32 elements

    __device__ __forceinline__ void add_exact(double value) {
        squares += value * value;
        nonfinite += !(fabs(value) <= 1.7976931348623157e308);
    }

    __device__ __forceinline__ void add(const double (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) add_exact(x[j]);
    }

    __device__ __forceinline__ void add(const float (&x)[8]) {
        float even = x[0] * x[0], odd = x[1] * x[1];
#pragma unroll
        for (int j = 2; j < 8; j += 2) {
            even = __fmaf_rn(x[j], x[j], even);
            odd = __fmaf_rn(x[j + 1], x[j + 1], odd);
        }
        const float sum = even + odd;
        if (sum >= 0x1p-90f && sum <= 3.402823466e38f) {
            squares += static_cast<double>(sum);
        } else {
#pragma unroll 1
            for (int j = 0; j < 4; ++j) {  // registers cannot be indexed: pick by comparison, the code stays small
                const float a = j == 0 ? x[0] : j == 1 ? x[2] : j == 2 ? x[4] : x[6];
                const float b = j == 0 ? x[1] : j == 1 ? x[3] : j == 2 ? x[5] : x[7];
                add_exact(static_cast<double>(a));
                add_exact(static_cast<double>(b));
            }
        }
    }

    /// Joins the threads of a warp, in a fixed order, and adds the result to the warp's own slot. Every thread of the
    /// block calls it. The additions are atomic only because those are sent off without waiting: at the end of a small
    /// block every wait shows.
    __device__ __forceinline__ void store(CudaStats* stats) const {
        double total = squares;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
        const std::uint32_t count = __reduce_add_sync(0xffffffffu, nonfinite);
        if (threadIdx.x % 32 != 0) return;
        ReduceStats& slot = stats->slots[(blockIdx.x * kThreads + threadIdx.x) / 32];
        atomicAdd(&slot.sum_squares, total);
        if (count > 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(&slot.nonfinite), static_cast<unsigned long long>(count));
    }
};

}  // namespace gradgen::cuda
