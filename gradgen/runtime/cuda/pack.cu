// pack: a plain copy where the types agree (NaN payloads included), else a reduction of one source.
#include <stdexcept>
#include <string>

#include "element.cuh"
#include "launch.h"

namespace gradgen {

namespace cuda {
namespace {

struct CopyParams {
    const void* from = nullptr;
    void* to = nullptr;
    Walk walk;
};

/// T only stands for a size.
template <class T>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyParams p) {
    constexpr int kUnroll = 2;
    wait_for_stream();
    for (int t = static_cast<int>(blockIdx.x); t < p.walk.count; t += static_cast<int>(gridDim.x)) {
        const CudaTile tile = load_tile(p.walk.tiles + t);
        const T* const from = static_cast<const T*>(p.from) + tile.source;
        T* const to = static_cast<T*>(p.to) + tile.shard;
        const bool aligned = (reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to)) % 16 == 0;
        for (int i = static_cast<int>(threadIdx.x); 8 * i < tile.end; i += kThreads * kUnroll) {
            Group<T> group[kUnroll];
            const auto whole = [&](int index) {
                return aligned && 8 * index >= tile.begin && 8 * index + 8 <= tile.end;
            };
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (whole(i + kThreads * u)) group[u] = load_group(from + 8 * (i + kThreads * u));
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int index = i + kThreads * u;
                if (whole(index)) {
                    store_group(to + 8 * index, group[u]);
                } else {
                    for (int at = max(8 * index, static_cast<int>(tile.begin));
                         at < min(8 * index + 8, static_cast<int>(tile.end)); ++at) {
                        to[at] = from[at];
                    }
                }
            }
        }
    }
}

}  // namespace
}  // namespace cuda

void cuda_pack(DType out_type, void* out, DType in_type, const void* in, const CudaSegments& table,
               const RoundingKey& rounding, CudaStream stream, const CudaCounters* counters,
               std::uint32_t weight_offset) {
    if (out_type == in_type) {
        const cuda::CopyParams p{in, out, cuda::walk_of(table)};
        switch (size_of(out_type)) {
            case 2:
                return cuda::launch<cuda::copy_kernel<bf16>>(p, stream, "cuda_pack");
            case 4:
                return cuda::launch<cuda::copy_kernel<float>>(p, stream, "cuda_pack");
            default:
                return cuda::launch<cuda::copy_kernel<double>>(p, stream, "cuda_pack");
        }
    }
    ReduceArgs args;
    args.target_type = out_type;
    args.target = out;
    args.source_type = args.wire_type = in_type;
    args.rounding = rounding;
    const ReduceSource source{in, false};
    cuda_reduce(args, std::span(&source, 1), table, nullptr, nullptr, stream, counters, weight_offset);
}

}  // namespace gradgen
