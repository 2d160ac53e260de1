// How the kernels of this folder are launched: a grid that fits the device at once, which walks the tiles.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "check.h"
#include "gradgen/cuda_kernels.h"

namespace gradgen::cuda {

inline constexpr int kThreads = 256;  // of a block

/// What a launch must know about the current device and a kernel, asked once each: the questions cost microseconds.
struct Shape {
    int blocks = 0;        // that run at once on the device
    bool overlap = false;  // a launch may be set up while the one before it ends
};

inline Shape ask_shape(const void* kernel, int device) {
    int processors = 0, blocks = 0, major = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return {std::clamp(processors * blocks, 1, CudaStats::kSlots / (kThreads / 32)), major >= 9};
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

/// The tiles that a launch works on: block b takes b, b + grid, b + 2 * grid, ...
struct Walk {
    const CudaTile* tiles = nullptr;
    int count = 0;
};

inline Walk walk_of(const CudaSegments& table) { return {table.tiles(), static_cast<int>(table.tile_count())}; }

/// Launches kKernel(params) over the tiles of params.walk: a grid that is resident at once, so that every warp has a
/// slot of its own for statistics. Where the device can, the launch is set up while the work before it on the stream
/// drains (wait_for_stream).
template <auto* kKernel, class Params>
void launch(const Params& params, CudaStream stream, const char* what) {
    if (params.walk.count == 0) return;
    const Shape shape = shape_of<kKernel>();
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min(params.walk.count, shape.blocks)));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = shape.overlap ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kKernel, params), what);
}

#ifdef __CUDACC__
/// Nothing that earlier work on the stream writes may be read before this; the table of tiles may. Blocks trigger the
/// next launch only by ending: an early trigger lets its blocks settle unevenly on the multiprocessors that have room
/// first.
__device__ __forceinline__ void wait_for_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

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
