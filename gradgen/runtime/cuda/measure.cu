// Sum of squares and non-finite count of data that is only read, and the sum over the slots of a CudaStats.
#include <stdexcept>

#include "launch.h"
#include "statistics.cuh"

namespace gradgen {

namespace cuda {
namespace {

struct MeasureParams {
    const void* data = nullptr;
    bool in_arena = false;
    Walk walk;
    CudaStats* stats = nullptr;
};

template <class T>
__global__ void __launch_bounds__(kThreads) measure_kernel(const __grid_constant__ MeasureParams p) {
    constexpr int kUnroll = 4;
    wait_for_stream();
    Statistics statistics;
    for (int t = static_cast<int>(blockIdx.x); t < p.walk.count; t += static_cast<int>(gridDim.x)) {
        const CudaTile tile = load_tile(p.walk.tiles + t);
        const T* const data = static_cast<const T*>(p.data) + (p.in_arena ? tile.source : tile.shard);
        const bool aligned = reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
        const auto whole = [&](int first) { return aligned && first >= tile.begin && first + 8 <= tile.end; };
        for (int i = static_cast<int>(threadIdx.x); 8 * i < tile.end; i += kThreads * kUnroll) {
            Group<T> group[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int first = 8 * (i + kThreads * u);
                if (whole(first)) group[u] = load_group(data + first);
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int first = 8 * (i + kThreads * u);
                if (whole(first)) {
                    Compute<T> x[8];
                    widen(group[u], x);
                    statistics.add(x);
                } else {
                    const int end = min(first + 8, static_cast<int>(tile.end));
                    for (int at = max(first, static_cast<int>(tile.begin)); at < end; ++at)
                        statistics.add_exact(to_compute(data[at]));
                }
            }
        }
    }
    statistics.store(p.stats);
}

struct TotalParams {
    Walk walk{nullptr, 1};  // one block
    const CudaStats* stats = nullptr;
    ReduceStats* total = nullptr;
};

/// One block; every thread adds its slots in order, then a tree whose shape is fixed.
__global__ void __launch_bounds__(kThreads) total_kernel(const __grid_constant__ TotalParams p) {
    __shared__ double squares[kThreads];
    __shared__ std::int64_t nonfinite[kThreads];
    wait_for_stream();
    const int self = static_cast<int>(threadIdx.x);
    double my_squares = 0;
    std::int64_t my_nonfinite = 0;
    for (int i = self; i < CudaStats::kSlots; i += kThreads) {
        my_squares += p.stats->slots[i].sum_squares;
        my_nonfinite += p.stats->slots[i].nonfinite;
    }
    squares[self] = my_squares;
    nonfinite[self] = my_nonfinite;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (self < half) {
            squares[self] += squares[self + half];
            nonfinite[self] += nonfinite[self + half];
        }
    }
    if (self == 0) *p.total = {squares[0], nonfinite[0]};
}

}  // namespace
}  // namespace cuda

void cuda_measure(DType type, const void* data, bool in_arena, const CudaSegments& table, CudaStats* device_stats,
                  CudaStream stream) {
    const cuda::MeasureParams p{data, in_arena, cuda::walk_of(table), device_stats};
    switch (type) {
        case DType::f32:
            return cuda::launch<cuda::measure_kernel<float>>(p, stream, "cuda_measure");
        case DType::f64:
            return cuda::launch<cuda::measure_kernel<double>>(p, stream, "cuda_measure");
        case DType::bf16:
            return cuda::launch<cuda::measure_kernel<bf16>>(p, stream, "cuda_measure");
        case DType::f16:
            return cuda::launch<cuda::measure_kernel<f16>>(p, stream, "cuda_measure");
    }
    throw std::invalid_argument("cuda_measure: not a DType");
}

void cuda_total(const CudaStats* device_stats, ReduceStats* device_total, CudaStream stream) {
    const cuda::TotalParams p{{nullptr, 1}, device_stats, device_total};
    cuda::launch<cuda::total_kernel>(p, stream, "cuda_total");
}

}  // namespace gradgen
