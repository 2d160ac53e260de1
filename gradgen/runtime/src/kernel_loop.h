// The one loop behind reduce, pack and scale: every block of a segment is loaded, summed, scaled, rounded and stored
// once.
//
// FMA contraction cannot change a result here: no value that reaches the target is a product that is then added (sums
// come first, the scale last), so the flags of a build do not matter.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "element.h"
#include "gradgen/kernels.h"
#include "statistics.h"

namespace gradgen {

inline constexpr int kMaxSources = 64;

/// ReduceArgs without the types, and only the sources that have data: at least one.
struct Job {
    void* target = nullptr;
    bool target_in_arena = false;
    const ReduceSource* sources = nullptr;
    const int* ranks = nullptr;  // of the sources
    int count = 0;
    bool overwrite = true;
    double scale = 1.0;
    bool raw = false;         // fp32 sources reach a 16-bit target without arithmetic: their NaNs may be signalling
    DType wire = DType::f32;  // f32: no rounding of sources
    RoundingKey rounding, wire_rounding;
};

/// Implemented in kernels_*.cpp, one file a target type, so that they compile in parallel.
template <class T, class S>
void run_job(const Job& job, std::span<const Segment> segments, ReduceStats* stats);
template <class T>
ReduceStats run_measure(const T* data, bool in_arena, std::span<const Segment> segments);

namespace loop {

/// Out of line: four roundings, inlined into every loop over fp32 sources, would be most of the library.
[[gnu::noinline]] inline void round_wire(Block<simd::F32>& x, DType wire, bool stochastic, const RandomBlock& random) {
    if (wire == DType::bf16) {
        element::quiet(x);
        if (stochastic) return element::round_bf16<Order::natural, Rounding::stochastic>(x, random);
        return element::round_bf16<Order::natural, Rounding::nearest>(x, random);
    }
    if (stochastic) return element::round_f16<Rounding::stochastic>(x, random);
    return element::round_f16<Rounding::nearest>(x, random);
}

template <class V>
GRADGEN_INLINE void add(Block<V>& x, const Block<V>& y) {
    GRADGEN_UNROLL
    for (int i = 0; i < 8; ++i) x.v[i] += y.v[i];
}

/// One segment: the memory of its first element in the target and in every source.
template <class T, class S, Rounding kRounding, bool kWire>
struct Run {
    using V = Compute<T>;
    static constexpr Order kOrder = std::is_same_v<T, bf16> && std::is_same_v<S, bf16> ? Order::paired : Order::natural;

    const Job& job;
    RandomStream random;
    const RandomStream* wire_random;  // one a source, where the wire is rounded stochastically
    typename std::conditional_t<std::is_same_v<V, simd::F64>, double, float> scale;

    GRADGEN_INLINE Block<V> source(const S* from, const RandomBlock& wire_bits) const {
        Block<V> x = element::load<kOrder>(from);
        if constexpr (kWire) round_wire(x, job.wire, job.wire_rounding.stochastic, wire_bits);
        return x;
    }

    /// `at`: offset from the segment's first element; `element`: index in the weight of the block's first element.
    GRADGEN_INLINE void block(T* target, const S* const* sources, std::int64_t at, std::uint64_t element) const {
        RandomBlock bits, wire_bits;
        if constexpr (kRounding == Rounding::stochastic) bits = random.block(element / 8);
        const auto draw = [&]([[maybe_unused]] int r) {
            if constexpr (kWire) {
                if (job.wire_rounding.stochastic) wire_bits = wire_random[r].block(element / 8);
            }
        };
        draw(0);
        Block<V> x = source(sources[0] + at, wire_bits);
        for (int r = 1; r < job.count; ++r) {
            draw(r);
            add(x, source(sources[r] + at, wire_bits));
        }
        if (!job.overwrite) add(x, element::load<kOrder>(static_cast<const T*>(target + at)));
        if (job.scale != 1.0) {
            GRADGEN_UNROLL
            for (int i = 0; i < 8; ++i) x.v[i] *= scale;
        }
        if constexpr (std::is_same_v<S, float>) {
            if (job.raw) element::quiet(x);
        }
        element::store<kOrder, kRounding>(target + at, x, bits);
    }

    /// Fewer elements than a block, or a start inside of a group of 8: through a copy with zeros around them, so that
    /// no neighbour is touched.
    [[gnu::noinline]] void partial(T* target, const S* const* sources, std::int64_t at, std::int64_t numel,
                                   std::uint64_t element) const {
        alignas(64) S copies[kMaxSources][kBlock<T>];
        alignas(64) T result[kBlock<T>] = {};
        const S* rows[kMaxSources];
        const auto lead = static_cast<std::int64_t>(element % 8);
        for (int r = 0; r < job.count; ++r) {
            std::memset(copies[r], 0, sizeof copies[r]);
            std::memcpy(copies[r] + lead, sources[r] + at, static_cast<std::size_t>(numel) * sizeof(S));
            rows[r] = copies[r];
        }
        if (!job.overwrite) std::memcpy(result + lead, target + at, static_cast<std::size_t>(numel) * sizeof(T));
        block(result, rows, 0, element - static_cast<std::uint64_t>(lead));
        std::memcpy(target + at, result + lead, static_cast<std::size_t>(numel) * sizeof(T));
    }

    void segment(T* target, const S* const* sources, std::int64_t numel, std::uint64_t element,
                 ReduceStats* stats) const {
        std::int64_t at = 0;
        if (const auto lead = static_cast<std::int64_t>(element % 8); lead != 0 && numel > 0) {
            at = std::min(8 - lead, numel);
            partial(target, sources, 0, at, element);
            if (stats) measure_scalar(target, at, *stats);
        }
        while (numel - at >= kBlock<T>) {
            const std::int64_t start = at, end = chunk_end<T>(at, numel);
            for (; at < end; at += kBlock<T>) block(target, sources, at, element + static_cast<std::uint64_t>(at));
            if (stats) measure_chunk(target + start, end - start, *stats);
        }
        if (at < numel) {
            partial(target, sources, at, numel - at, element + static_cast<std::uint64_t>(at));
            if (stats) measure_scalar(target + at, numel - at, *stats);
        }
    }
};

template <class T, class S, Rounding kRounding, bool kWire>
void run(const Job& job, std::span<const Segment> segments, ReduceStats* stats) {
    const S* sources[kMaxSources];
    using Scale = std::conditional_t<std::is_same_v<T, double>, double, float>;
    for (const Segment& part : segments) {
        for (std::int64_t done = 0; done < part.numel;) {
            const std::int64_t element = part.element + done;
            const std::int64_t numel = std::min(part.numel - done, kCounterSpan - element % kCounterSpan);
            for (int r = 0; r < job.count; ++r) {
                const std::int64_t at = (job.sources[r].packed ? part.shard : part.source) + done;
                sources[r] = static_cast<const S*>(job.sources[r].data) + at;
            }
            T* target = static_cast<T*>(job.target) + (job.target_in_arena ? part.source : part.shard) + done;
            const auto first = static_cast<std::uint64_t>(element);
            std::vector<RandomStream> wire;
            for (int r = 0; kWire && job.wire_rounding.stochastic && r < job.count; ++r)
                wire.emplace_back(job.wire_rounding.for_rank(job.ranks[r]), part.weight, first);
            const Run<T, S, kRounding, kWire> work{job, RandomStream(job.rounding, part.weight, first), wire.data(),
                                                   static_cast<Scale>(job.scale)};
            work.segment(target, sources, numel, first, stats);
            done += numel;
        }
    }
}

template <class T, class S, Rounding kRounding>
void choose_wire(const Job& job, std::span<const Segment> segments, ReduceStats* stats) {
    if constexpr (std::is_same_v<S, float>) {
        if (job.wire != DType::f32) return run<T, S, kRounding, true>(job, segments, stats);
    }
    run<T, S, kRounding, false>(job, segments, stats);
}

}  // namespace loop

template <class T, class S>
void run_job(const Job& job, std::span<const Segment> segments, ReduceStats* stats) {
    if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
        if (job.rounding.stochastic) return loop::choose_wire<T, S, Rounding::stochastic>(job, segments, stats);
    }
    loop::choose_wire<T, S, Rounding::nearest>(job, segments, stats);
}

template <class T>
ReduceStats run_measure(const T* data, bool in_arena, std::span<const Segment> segments) {
    ReduceStats stats;
    for (const Segment& part : segments) {
        const T* from = data + (in_arena ? part.source : part.shard);
        std::int64_t at = 0;
        while (part.numel - at >= kBlock<T>) {
            const std::int64_t end = chunk_end<T>(at, part.numel);
            measure_chunk(from + at, end - at, stats);
            at = end;
        }
        measure_scalar(from + at, part.numel - at, stats);
    }
    return stats;
}

}  // namespace gradgen
