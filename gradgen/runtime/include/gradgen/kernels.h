// CPU kernels: one pass over memory each, vectorised for the machine at build time, with scalar tails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradgen/dtype.h"
#include "gradgen/philox.h"

namespace gradgen {

/// A run of elements of one weight. `source` is its offset in an arena, `shard` in a shard buffer (or a packed slice);
/// `element` is the index of its first element within the weight (any), `weight` the uid in the random counter.
struct Segment {
    std::int64_t source = 0;
    std::int64_t shard = 0;
    std::int64_t numel = 0;
    std::int64_t element = 0;
    std::uint32_t weight = 0;
};

/// One rank's contribution. `data` null: zeros. `packed`: elements lie at `Segment::shard`, else at `Segment::source`.
struct ReduceSource {
    const void* data = nullptr;
    bool packed = false;
};

/// Filled by a kernel over the elements it wrote, as stored (after scaling and rounding).
struct ReduceStats {
    double sum_squares = 0;
    std::int64_t nonfinite = 0;  // number of inf and nan elements
};

struct ReduceArgs {
    DType target_type = DType::f32;
    void* target = nullptr;
    bool target_in_arena = false;  // target elements lie at Segment::source instead of Segment::shard
    DType source_type = DType::f32;
    DType wire_type =
        DType::f32;             // each source is rounded to this before it is summed; same as source_type: no rounding
    bool overwrite = true;      // false: the target's value is added
    double scale = 1.0;         // applied once to the sum, before rounding
    RoundingKey rounding;       // of the target (site reduce)
    RoundingKey wire_rounding;  // of the sources where wire_type is narrower (site wire); source r uses for_rank(r)
};

/// target = round(scale * (target + sum over ranks, in rank order, in fp32 (fp64 for f64 targets)))
/// The sum starts from the sources in rank order, then adds the target. `stats` may be null. Sources may alias the
/// target at equal elements. `scale` multiplies in fp32 (rounded to fp32 first) for all targets but f64; 1 multiplies
/// nothing. At most 64 sources. Elements outside of the segments are neither read nor written. The result does not
/// depend on how elements are cut into segments, on alignment or on the instruction set, except for the payload of
/// NaNs. fp16 targets round stochastically as bf16 ones do: 16 random bits scaled to the bits dropped (13; more for
/// subnormals). sum_squares is within 1e-6 of the exact sum, relatively, at any magnitude. Throws std::invalid_argument
/// for a pair of types that no kernel exists for.
void reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, std::span<const Segment> segments,
            ReduceStats* stats);

/// True if reduce() has a kernel for the types.
bool can_reduce(DType target, DType source, DType wire);

/// Sum of squares and non-finite count of `data` (offsets: Segment::source when `in_arena`).
ReduceStats measure(DType type, const void* data, bool in_arena, std::span<const Segment> segments);

/// data *= factor at the segments' elements, rounded to nearest.
void scale(DType type, void* data, bool in_arena, std::span<const Segment> segments, double factor);

/// Copies with conversion (wire staging): out[segment.shard] = round(in[segment.source]).
void pack(DType out_type, void* out, DType in_type, const void* in, std::span<const Segment> segments,
          const RoundingKey& rounding);

/// Name of the instruction set that the kernels were built for: "avx512", "avx2", "neon", "generic".
const char* kernel_isa();

}  // namespace gradgen
