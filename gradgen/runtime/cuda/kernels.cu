// The public functions that reduce: argument checks, and the choice of the kernel for the types.
#include <stdexcept>
#include <string>

#include "reduce_params.h"

namespace gradgen {

namespace cuda {
extern template void run_reduce<float, float>(const ReduceParams&, CudaStream);
extern template void run_reduce<float, bf16>(const ReduceParams&, CudaStream);
extern template void run_reduce<float, f16>(const ReduceParams&, CudaStream);
extern template void run_reduce<bf16, bf16>(const ReduceParams&, CudaStream);
extern template void run_reduce<bf16, float>(const ReduceParams&, CudaStream);
extern template void run_reduce<f16, f16>(const ReduceParams&, CudaStream);
extern template void run_reduce<f16, float>(const ReduceParams&, CudaStream);
extern template void run_reduce<double, double>(const ReduceParams&, CudaStream);
}  // namespace cuda

namespace {

using cuda::ReduceParams;
using Run = void (*)(const ReduceParams&, CudaStream);

Run find_run(DType target, DType source) {
    switch (target) {
        case DType::f32:
            if (source == DType::f32) return cuda::run_reduce<float, float>;
            if (source == DType::bf16) return cuda::run_reduce<float, bf16>;
            if (source == DType::f16) return cuda::run_reduce<float, f16>;
            return nullptr;
        case DType::bf16:
            if (source == DType::bf16) return cuda::run_reduce<bf16, bf16>;
            if (source == DType::f32) return cuda::run_reduce<bf16, float>;
            return nullptr;
        case DType::f16:
            if (source == DType::f16) return cuda::run_reduce<f16, f16>;
            if (source == DType::f32) return cuda::run_reduce<f16, float>;
            return nullptr;
        case DType::f64:
            return source == DType::f64 ? cuda::run_reduce<double, double> : nullptr;
    }
    return nullptr;
}

/// A wire that holds every value of the source rounds nothing.
bool wire_exact(DType source, DType wire) { return source == wire || (wire == DType::f32 && size_of(source) == 2); }

bool supported(const ReduceArgs& args) {
    const bool narrows = args.source_type == DType::f32 && size_of(args.wire_type) == 2;
    return find_run(args.target_type, args.source_type) && (wire_exact(args.source_type, args.wire_type) || narrows);
}

/// Which offsets an operand uses, and whether 16-byte accesses can ever be right for it.
void note_operand(ReduceParams& p, const void* data, bool packed) {
    (packed ? p.shard_mask : p.arena_mask) = 7;
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) p.unaligned = 1;
}

}  // namespace

void cuda_reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, const CudaSegments& table,
                 CudaStats* device_stats, const float* device_scale, CudaStream stream, const CudaCounters* counters,
                 std::uint32_t weight_offset) {
    if (!supported(args)) {
        throw std::invalid_argument("cuda_reduce: no kernel for a " + std::string(to_string(args.target_type)) +
                                    " target, " + std::string(to_string(args.source_type)) + " sources and a " +
                                    std::string(to_string(args.wire_type)) + " wire");
    }
    if (sources.size() > static_cast<std::size_t>(cuda::kMaxSources)) {
        throw std::invalid_argument("cuda_reduce: " + std::to_string(sources.size()) + " sources, at most 64");
    }
    ReduceParams p{};
    DType source_type = args.source_type;
    const auto add_source = [&p](const void* data, bool packed, std::size_t rank) {
        p.packed |= static_cast<std::uint64_t>(packed) << p.count;
        p.ranks[p.count] = static_cast<std::uint8_t>(rank);
        p.sources[p.count++] = data;
        note_operand(p, data, packed);
    };
    for (std::size_t rank = 0; rank < sources.size(); ++rank) {
        if (sources[rank].data) add_source(sources[rank].data, sources[rank].packed, rank);
    }
    p.target = args.target;
    p.target_in_arena = args.target_in_arena;
    note_operand(p, args.target, !args.target_in_arena);
    p.overwrite = args.overwrite;
    p.scale = args.scale;
    p.device_scale = device_scale;
    p.stats = device_stats;
    if (!wire_exact(args.source_type, args.wire_type)) p.wire = args.wire_type;
    if (p.count == 0 && args.overwrite) {  // zeros, whatever the scale
        p.initial = 0.0f;
        p.scale = 1.0;
        p.device_scale = nullptr;
        p.stats = nullptr;
    } else if (p.count == 0) {  // the target is the only term
        add_source(args.target, !args.target_in_arena, 0);
        p.overwrite = true;
        p.wire = DType::f32;
        source_type = args.target_type;
    }
    p.walk = cuda::walk_of(table);
    p.rounding = args.rounding;
    p.wire_rounding = args.wire_rounding;
    p.counters = counters;
    p.weight_offset = weight_offset;
    find_run(args.target_type, source_type)(p, stream);
}

void cuda_scale(DType type, void* data, bool in_arena, const CudaSegments& table, double factor,
                const float* device_factor, CudaStream stream) {
    ReduceArgs args;
    args.target_type = args.source_type = args.wire_type = type;
    args.target = data;
    args.target_in_arena = in_arena;
    args.overwrite = false;
    args.scale = factor;
    cuda_reduce(args, {}, table, nullptr, device_factor, stream);
}

void cuda_zero(void* data, std::size_t bytes, CudaStream stream) {
    if (bytes > 0) cuda::check(cudaMemsetAsync(data, 0, bytes, stream), "cuda_zero");
}

}  // namespace gradgen
