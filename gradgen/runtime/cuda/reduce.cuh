// The one kernel behind reduce and scale: every group of eight elements is loaded, summed, scaled, rounded and stored
// once.
#pragma once

#include <type_traits>

#include "element.cuh"
#include "launch.h"
#include "reduce_params.h"
#include "statistics.cuh"

namespace gradgen::cuda {

/// One launch's view of its parameters for the types at hand.
template <class T, class S, bool kStochastic, bool kWire, bool kMany>
struct Reducer {
    using V = Compute<T>;
    // Eight 16-byte loads in flight of a thread where there are several sources; with one, occupancy does as much.
    static constexpr int kUnroll = kMany ? 2 : 1;
    static constexpr int kBatch = !kMany ? 1 : 8 / static_cast<int>(sizeof(S));

    using Params = ReduceParamsOf<kMany ? kMaxSources : 1>;
    const Params& p;
    RandomStream random, wire_random;
    V factor;
    float device_factor;

    __device__ __forceinline__ explicit Reducer(const Params& params)
        : p(params), random(params.rounding, params.counters), wire_random(params.wire_rounding, params.counters) {
        factor = static_cast<V>(p.scale);
        device_factor = p.device_scale ? *p.device_scale : 1.0f;
    }

    /// In every group anew: moved out of the loop the product would wait for memory before the first loads are issued,
    /// which a small block shows.
    __device__ __forceinline__ V scale() const {
        if constexpr (std::is_same_v<V, float>) {
            float product;
            asm volatile("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(factor), "f"(device_factor));
            return product;
        } else {
            return factor * static_cast<V>(device_factor);
        }
    }

    __device__ __forceinline__ const S* source(int r, const CudaTile& tile) const {
        return static_cast<const S*>(p.sources[r]) + (p.packed >> r & 1 ? tile.shard : tile.source);
    }
    __device__ __forceinline__ T* target(const CudaTile& tile) const {
        return static_cast<T*>(p.target) + (p.target_in_arena ? tile.source : tile.shard);
    }

    /// No fused multiply-add may join the sum with anything: __fadd_rn and __dadd_rn are never contracted.
    static __device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
    static __device__ __forceinline__ double sum(double a, double b) { return __dadd_rn(a, b); }

    /// The values of source `r` as the wire would have carried them.
    __device__ __forceinline__ void through_wire(Compute<S> (&y)[8], int r, std::uint64_t group,
                                                 std::uint32_t weight) const {
        if constexpr (kWire) {
            const bool stochastic = p.wire_rounding.stochastic;
            const uint4 bits = stochastic ? wire_random.for_rank(p.ranks[r]).bits(group, weight) : uint4{};
            if (p.wire == DType::bf16) {
                stochastic ? narrow<bf16, true>(y, bits) : narrow<bf16, false>(y, bits);
            } else {
                stochastic ? narrow<f16, true>(y, bits) : narrow<f16, false>(y, bits);
            }
        }
    }

    __device__ __forceinline__ Group<T> finish(V (&x)[8], std::uint64_t group, std::uint32_t weight) const {
        uint4 bits{};
        if constexpr (kStochastic) bits = random.bits(group, weight);
        const V by = scale();
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= by;
        return narrow<T, kStochastic>(x, bits);
    }

    /// kGroups whole, aligned groups, kThreads apart. All loads of a batch are issued before the first is used.
    template <int kGroups>
    __device__ __forceinline__ void whole_groups(const CudaTile& tile, int first, Statistics& statistics) const {
        T* const to = target(tile) + 8 * first;
        Group<T> old[kGroups];
        if (!p.overwrite) {
#pragma unroll
            for (int u = 0; u < kGroups; ++u) old[u] = load_group(to + 8 * kThreads * u);
        }
        V x[kGroups][8];
#pragma unroll
        for (int u = 0; u < kGroups; ++u) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x[u][j] = static_cast<V>(p.initial);
        }
        const int count = kMany ? p.count : 1;
#pragma unroll 1
        for (int r = 0; r < count; r += kBatch) {
            Group<S> raw[kBatch][kGroups];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                if (b > 0 && r + b >= count) continue;
                const S* const from = source(r + b, tile) + 8 * first;
#pragma unroll
                for (int u = 0; u < kGroups; ++u) raw[b][u] = load_group(from + 8 * kThreads * u);
            }
#pragma unroll
            for (int u = 0; u < kGroups; ++u) {
                const std::uint64_t group = tile.group + first + kThreads * u;
#pragma unroll
                for (int b = 0; b < kBatch; ++b) {
                    if (b > 0 && r + b >= count) continue;
                    Compute<S> y[8];
                    widen(raw[b][u], y);
                    through_wire(y, r + b, group, tile.weight + p.weight_offset);
#pragma unroll
                    for (int j = 0; j < 8; ++j) x[u][j] = sum(x[u][j], static_cast<V>(y[j]));
                }
            }
        }
#pragma unroll
        for (int u = 0; u < kGroups; ++u) {
            if (!p.overwrite) {
                V y[8];
                widen(old[u], y);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[u][j] = sum(x[u][j], y[j]);
            }
            store_group(to + 8 * kThreads * u,
                        finish(x[u], tile.group + first + kThreads * u, tile.weight + p.weight_offset));
            if (p.stats) statistics.add(x[u]);
        }
    }

    /// Part of a group, or one that some operand does not have at a multiple of 16 bytes: element by element. Sources
    /// are loaded in batches here too: one after the other they would cost a memory latency each, longer than the rest
    /// of a small block takes.
    __device__ __forceinline__ void any_group(const CudaTile& tile, int index, Statistics& statistics) const {
        constexpr int kTogether = kMany ? 4 : 1;
        const int begin = max(tile.begin - 8 * index, 0), end = min(tile.end - 8 * index, 8);
        const std::uint64_t group = tile.group + index;
        const std::uint32_t weight = tile.weight + p.weight_offset;
        T* const to = target(tile) + 8 * index;
        V x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = static_cast<V>(p.initial);
#pragma unroll 1
        for (int r = 0; r < p.count; r += kTogether) {
            S raw[kTogether][8];
#pragma unroll
            for (int b = 0; b < kTogether; ++b) {
                const S* const from = source(min(r + b, p.count - 1), tile) + 8 * index;
#pragma unroll
                for (int j = 0; j < 8; ++j) raw[b][j] = j >= begin && j < end ? from[j] : S{};
            }
#pragma unroll
            for (int b = 0; b < kTogether; ++b) {
                if (r + b >= p.count) continue;
                Compute<S> y[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) y[j] = to_compute(raw[b][j]);
                through_wire(y, r + b, group, weight);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = sum(x[j], static_cast<V>(y[j]));
            }
        }
        if (!p.overwrite) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (j >= begin && j < end) x[j] = sum(x[j], to_compute(to[j]));
            }
        }
        const Group<T> result = finish(x, group, weight);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const bool mine = j >= begin && j < end;
            if (mine) to[j] = element_of(result, j);
            if (!mine) x[j] = 0;
        }
        if (p.stats) statistics.add(x);
    }

    __device__ __forceinline__ void tile(const CudaTile& tile, Statistics& statistics) const {
        const int misaligned =
            (static_cast<int>(tile.source) & p.arena_mask) | (static_cast<int>(tile.shard) & p.shard_mask);
        const bool aligned = (misaligned | p.unaligned) == 0;
        if constexpr (kUnroll > 1) {
            static_assert(kCudaTile % (8 * kThreads * kUnroll) == 0);
            if (aligned && tile.begin == 0 && tile.end == kCudaTile) {
#pragma unroll 1
                for (int i = static_cast<int>(threadIdx.x); i < kCudaTile / 8; i += kThreads * kUnroll) {
                    whole_groups<kUnroll>(tile, i, statistics);
                }
                return;
            }
        }
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); 8 * i < tile.end; i += kThreads) {
            if (aligned && 8 * i >= tile.begin && 8 * i + 8 <= tile.end) {
                whole_groups<1>(tile, i, statistics);
            } else {
                any_group(tile, i, statistics);
            }
        }
    }
};

template <class T, class S, bool kStochastic, bool kWire, bool kMany>
__global__ void __launch_bounds__(kThreads, kMany            ? 2
                                            : sizeof(S) == 2 ? 5
                                                             : 4)
    reduce_kernel(const __grid_constant__ ReduceParamsOf<kMany ? kMaxSources : 1> p) {
    const int step = static_cast<int>(gridDim.x), last = p.walk.count - 1;
    CudaTile next = load_tile(p.walk.tiles + blockIdx.x);
    wait_for_stream();
    const Reducer<T, S, kStochastic, kWire, kMany> reducer(p);
    Statistics statistics;
#pragma unroll 1
    for (int t = static_cast<int>(blockIdx.x); t <= last; t += step) {
        const CudaTile tile = next;
        next =
            load_tile(p.walk.tiles + min(t + step, last));  // not conditional: the loop's end is where it is waited for
        reducer.tile(tile, statistics);
    }
    if (p.stats) statistics.store(p.stats);
}

template <class T, class S, bool kStochastic, bool kWire>
void launch_reduce(const ReduceParams& p, CudaStream stream) {
    if (p.count == 1) {
        const ReduceParamsOf<1> one{p, {p.sources[0]}, {p.ranks[0]}};
        return launch<reduce_kernel<T, S, kStochastic, kWire, false>>(one, stream, "cuda_reduce");
    }
    launch<reduce_kernel<T, S, kStochastic, kWire, true>>(p, stream, "cuda_reduce");
}

/// The kernel for the types; rounding and wire as `p` says.
template <class T, class S>
void run_reduce(const ReduceParams& p, CudaStream stream) {
    constexpr bool kCanRound = sizeof(T) == 2, kCanNarrow = std::is_same_v<S, float>;
    const bool stochastic = kCanRound && p.rounding.stochastic, wire = kCanNarrow && p.wire != DType::f32;
    if (stochastic) {
        return wire ? launch_reduce<T, S, kCanRound, kCanNarrow>(p, stream)
                    : launch_reduce<T, S, kCanRound, false>(p, stream);
    }
    return wire ? launch_reduce<T, S, false, kCanNarrow>(p, stream) : launch_reduce<T, S, false, false>(p, stream);
}

}  // namespace gradgen::cuda
