// The CUDA twins of kernels.h: the same results, bit for bit, one launch for a whole block whatever its number of
// weights.
//
// Only NaN payloads may differ from the CPU's: a NaN that passed through arithmetic is the hardware's own. All
// functions are asynchronous on `stream`, allocate nothing, and may be captured into a CUDA graph. They throw
// std::invalid_argument where their CPU twins do, and gradgen::Error with CUDA's own words. This header needs no CUDA
// headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradgen/cuda_segments.h"
#include "gradgen/kernels.h"

struct CUstream_st;

namespace gradgen {

using CudaStream = CUstream_st*;  // cudaStream_t

/// In device memory: where given, step and micro-step of a random counter come from here instead of from the
/// RoundingKey, so that replaying a captured graph draws fresh bits.
struct CudaCounters {
    std::uint64_t step = 0;
    std::uint32_t micro_step = 0;
};

/// In device memory, zeroed by cuda_zero: what kernels found in the elements that they wrote, one partial result a warp
/// of a grid. Launches add to it; launches in the same order on one kind of GPU always give the same bits, because no
/// two warps share a slot.
struct CudaStats {
    static constexpr int kSlots = 8192;
    ReduceStats slots[kSlots];
};

/// reduce(). `device_scale`, one float on the device, multiplies args.scale (in fp32; fp64 for f64 targets).
/// `weight_offset` is added to every Segment::weight, so that one table serves all instances of a block. Pointers may
/// be null where kernels.h allows it.
void cuda_reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, const CudaSegments& table,
                 CudaStats* device_stats, const float* device_scale, CudaStream stream,
                 const CudaCounters* counters = nullptr, std::uint32_t weight_offset = 0);

/// scale(), by factor times *device_factor where that is given.
void cuda_scale(DType type, void* data, bool in_arena, const CudaSegments& table, double factor,
                const float* device_factor, CudaStream stream);

/// measure(): adds to `device_stats`.
void cuda_measure(DType type, const void* data, bool in_arena, const CudaSegments& table, CudaStats* device_stats,
                  CudaStream stream);

/// pack().
void cuda_pack(DType out_type, void* out, DType in_type, const void* in, const CudaSegments& table,
               const RoundingKey& rounding, CudaStream stream, const CudaCounters* counters = nullptr,
               std::uint32_t weight_offset = 0);

/// All-zero bytes.
void cuda_zero(void* data, std::size_t bytes, CudaStream stream);

/// *device_total = the sum over all slots, in a fixed order. Once a step, before the norm is used.
void cuda_total(const CudaStats* device_stats, ReduceStats* device_total, CudaStream stream);

}  // namespace gradgen
