// The public kernel functions: argument checks, and the choice of the loop for the types.
#include "gradgen/kernels.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "kernel_loop.h"

namespace gradgen {

// Instantiated in kernels_<target type>.cpp.
extern template void run_job<float, float>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<float, bf16>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<float, f16>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<bf16, bf16>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<bf16, float>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<f16, f16>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<f16, float>(const Job&, std::span<const Segment>, ReduceStats*);
extern template void run_job<double, double>(const Job&, std::span<const Segment>, ReduceStats*);
extern template ReduceStats run_measure<float>(const float*, bool, std::span<const Segment>);
extern template ReduceStats run_measure<double>(const double*, bool, std::span<const Segment>);
extern template ReduceStats run_measure<bf16>(const bf16*, bool, std::span<const Segment>);
extern template ReduceStats run_measure<f16>(const f16*, bool, std::span<const Segment>);

namespace {

using Loop = void (*)(const Job&, std::span<const Segment>, ReduceStats*);

Loop find_loop(DType target, DType source) {
    switch (target) {
        case DType::f32:
            if (source == DType::f32) return run_job<float, float>;
            if (source == DType::bf16) return run_job<float, bf16>;
            if (source == DType::f16) return run_job<float, f16>;
            return nullptr;
        case DType::bf16:
            if (source == DType::bf16) return run_job<bf16, bf16>;
            if (source == DType::f32) return run_job<bf16, float>;
            return nullptr;
        case DType::f16:
            if (source == DType::f16) return run_job<f16, f16>;
            if (source == DType::f32) return run_job<f16, float>;
            return nullptr;
        case DType::f64:
            return source == DType::f64 ? run_job<double, double> : nullptr;
    }
    return nullptr;
}

/// A wire that holds every value of the source rounds nothing.
bool wire_exact(DType source, DType wire) {
    return source == wire || (wire == DType::f32 && (source == DType::bf16 || source == DType::f16));
}

bool is_16_bit(DType type) { return size_of(type) == 2; }

void check_segments(const char* where, std::span<const Segment> segments) {
    for (const Segment& part : segments) {
        if (part.numel < 0 || part.element < 0) {
            throw std::invalid_argument(std::string(where) + ": a segment has numel " + std::to_string(part.numel) +
                                        " and element " + std::to_string(part.element));
        }
    }
}

/// All-zero bits are +0 in every type.
void set_zero(const ReduceArgs& args, std::span<const Segment> segments) {
    const std::size_t size = size_of(args.target_type);
    for (const Segment& part : segments) {
        const auto at = static_cast<std::size_t>(args.target_in_arena ? part.source : part.shard);
        if (part.numel > 0)
            std::memset(static_cast<std::byte*>(args.target) + at * size, 0,
                        static_cast<std::size_t>(part.numel) * size);
    }
}

}  // namespace

bool can_reduce(DType target, DType source, DType wire) {
    return find_loop(target, source) && (wire_exact(source, wire) || (source == DType::f32 && is_16_bit(wire)));
}

void reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, std::span<const Segment> segments,
            ReduceStats* stats) {
    if (!can_reduce(args.target_type, args.source_type, args.wire_type)) {
        throw std::invalid_argument("reduce: no kernel for a " + std::string(to_string(args.target_type)) +
                                    " target, " + std::string(to_string(args.source_type)) + " sources and a " +
                                    std::string(to_string(args.wire_type)) + " wire");
    }
    if (sources.size() > kMaxSources) {
        throw std::invalid_argument("reduce: " + std::to_string(sources.size()) + " sources, at most 64");
    }
    check_segments("reduce", segments);
    ReduceSource present[kMaxSources];
    Job job;
    job.target = args.target;
    job.target_in_arena = args.target_in_arena;
    job.sources = present;
    job.overwrite = args.overwrite;
    job.scale = args.scale;
    job.rounding = args.rounding;
    job.wire_rounding = args.wire_rounding;
    int ranks[kMaxSources];
    job.ranks = ranks;
    for (std::size_t rank = 0; rank < sources.size(); ++rank) {
        if (!sources[rank].data) continue;
        ranks[job.count] = static_cast<int>(rank);
        present[job.count++] = sources[rank];
    }
    if (wire_exact(args.source_type, args.wire_type)) {
        job.wire_rounding.stochastic = false;
    } else {
        job.wire = args.wire_type;
    }
    if (job.count == 0 && args.overwrite) return set_zero(args, segments);
    DType source_type = args.source_type;
    if (job.count == 0) {  // the target is the only term
        present[job.count++] = {args.target, !args.target_in_arena};
        job.overwrite = true;
        job.wire = DType::f32;
        job.wire_rounding.stochastic = false;
        source_type = args.target_type;
    }
    job.raw = job.count == 1 && job.overwrite && job.scale == 1.0;
    find_loop(args.target_type, source_type)(job, segments, stats);
}

ReduceStats measure(DType type, const void* data, bool in_arena, std::span<const Segment> segments) {
    check_segments("measure", segments);
    switch (type) {
        case DType::f32:
            return run_measure(static_cast<const float*>(data), in_arena, segments);
        case DType::f64:
            return run_measure(static_cast<const double*>(data), in_arena, segments);
        case DType::bf16:
            return run_measure(static_cast<const bf16*>(data), in_arena, segments);
        case DType::f16:
            return run_measure(static_cast<const f16*>(data), in_arena, segments);
    }
    throw std::invalid_argument("measure: not a DType");
}

void scale(DType type, void* data, bool in_arena, std::span<const Segment> segments, double factor) {
    ReduceArgs args;
    args.target_type = args.source_type = args.wire_type = type;
    args.target = data;
    args.target_in_arena = in_arena;
    args.overwrite = false;
    args.scale = factor;
    reduce(args, {}, segments, nullptr);
}

void pack(DType out_type, void* out, DType in_type, const void* in, std::span<const Segment> segments,
          const RoundingKey& rounding) {
    if (out_type == in_type) {
        check_segments("pack", segments);
        const std::size_t size = size_of(out_type);
        for (const Segment& part : segments) {
            if (part.numel == 0) continue;
            std::memcpy(static_cast<std::byte*>(out) + static_cast<std::size_t>(part.shard) * size,
                        static_cast<const std::byte*>(in) + static_cast<std::size_t>(part.source) * size,
                        static_cast<std::size_t>(part.numel) * size);
        }
        return;
    }
    ReduceArgs args;
    args.target_type = out_type;
    args.target = out;
    args.source_type = args.wire_type = in_type;
    args.rounding = rounding;
    const ReduceSource source{in, false};
    reduce(args, std::span(&source, 1), segments, nullptr);
}

const char* kernel_isa() { return simd::kIsa; }

}  // namespace gradgen
