// How the kernels of this folder are launched: a grid that fits the device at once, which walks the tiles.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "check.h"
#include "gradgen/cuda_kernels.h"

#ifndef GT_PDL
#define GT_PDL 1
#endif

#ifndef GT_ROUNDS
#define GT_ROUNDS 4
#endif
namespace gradgen::cuda {

#ifndef GT_THREADS
#define GT_THREADS 256
#endif
inline constexpr int kThreads = GT_THREADS;

/// What a launch must know about the current device and a kernel, asked once each: the questions cost microseconds.
struct Shape {
    int blocks = 0;        // that run at once on the device
    bool overlap = false;  // a launch may be set up while the one before it ends
};

inline Shape ask_shape(const void* kernel, int device) {
    int processors = 0, blocks = 0, major = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0), "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return {std::clamp(processors * blocks, 1, CudaStats::kSlots), major >= 9};
}

template <auto* kKernel>
Shape shape_of() {
    constexpr int kDevices = 64;
    static std::atomic<int> known[kDevices];  // 0: not asked yet, else blocks, negative where launches overlap
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const int found = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
    if (found != 0) return {std::abs(found), found < 0};
    const Shape shape = ask_shape(reinterpret_cast<const void*>(kKernel), device);
    if (device < kDevices) known[device].store(shape.overlap ? -shape.blocks : shape.blocks, std::memory_order_relaxed);
    return shape;
}

/// The tiles that a launch walks, and how: in one contiguous run a block, or with the grid as stride.
struct Walk {
    const CudaTile* tiles = nullptr;
    int count = 0;
    int contiguous = 0;
};

inline Walk walk_of(const CudaSegments& table) { return {table.tiles(), static_cast<int>(table.tile_count()), 0}; }

/// Launches kKernel(params) over the tiles of params.walk: a grid that is resident at once, so that every block has a slot of its own for
/// statistics and loads its next tile while it works on one.
template <auto* kKernel, class Params>
void launch(Params params, CudaStream stream, const char* what) {
    if (params.walk.count == 0) return;
    const Shape shape = shape_of<kKernel>();
    const int rounds = (params.walk.count - 1) / shape.blocks + 1;
    int grid = std::min(params.walk.count, shape.blocks);
    params.walk.contiguous = rounds <= GT_ROUNDS;
#ifndef GT_EVEN
    if (params.walk.contiguous) grid = (params.walk.count - 1) / rounds + 1;
#endif
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = shape.overlap ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kKernel, params), what);
}

#ifdef __CUDACC__
/// Nothing that earlier work on the stream writes may be read before this; lets the next launch be set up meanwhile.
__device__ __forceinline__ void wait_for_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && GT_PDL
#ifndef GT_LATE
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    cudaGridDependencySynchronize();
#endif
}

/// The tiles of this block.
struct Range {
    int begin, end, step;

    __device__ __forceinline__ explicit Range(const Walk& walk) {
        const int self = static_cast<int>(blockIdx.x), grid = static_cast<int>(gridDim.x);
        if (walk.contiguous) {
#ifdef GT_EVEN
            begin = self * walk.count / grid;
            end = (self + 1) * walk.count / grid;
#else
            const int rounds = (walk.count - 1) / grid + 1;
            begin = self * rounds;
            end = min(begin + rounds, walk.count);
#endif
            step = 1;
        } else {
            begin = self;
            end = walk.count;
            step = grid;
        }
    }
};

__device__ __forceinline__ CudaTile load_tile(const CudaTile* from) {
    union {
        CudaTile tile;
        uint4 part[2];
    } value{};
    value.part[0] = __ldg(reinterpret_cast<const uint4*>(from));
    value.part[1] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
    return value.tile;
}
#endif

}  // namespace gradgen::cuda
