// Sum of squares and non-finite count that ride along with a kernel: each chunk is read again while it is in the
// first-level cache.
//
// Squares add up in fp32 lanes, four accumulators over a group of four blocks: a lane takes eight squares, so with the
// square's own rounding and the two additions that join the accumulators a group is off by at most 10 * 2^-24 = 6e-7 of
// itself; groups add in fp64. Nothing else is needed while a chunk's sum is finite and not tiny. An infinite or NaN sum
// (a non-finite element, or squares beyond fp32) and a sum so small that squares may have been flushed (below 2^-100 an
// element) send the chunk through measure_exact, which works in fp64 and counts. So there is no range in which the norm
// is wrong, and the count costs nothing in the common case.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "element.h"
#include "gradgen/kernels.h"

namespace gradgen {

inline constexpr int kGroupBlocks = 4;
inline constexpr std::int64_t kChunk = 2048;  // elements; a multiple of every kBlock

/// Squares in fp64, one element at a time; for the ends of segments.
template <class T>
void measure_scalar(const T* data, std::int64_t numel, ReduceStats& stats) {
    for (std::int64_t i = 0; i < numel; ++i) {
        double value;
        if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
            value = data[i];
        } else {
            value = to_float(data[i]);
        }
        stats.sum_squares += value * value;
        stats.nonfinite += !(__builtin_fabs(value) <= __DBL_MAX__);
    }
}

template <class T>
[[gnu::noinline]] void measure_exact(const T* data, std::int64_t numel, ReduceStats& stats) {
    using simd::F64;
    F64 squares = {};
    decltype(squares < squares) nonfinite = {};  // 64-bit lanes, -1 for each hit
    const auto add = [&](F64 value) {
        squares += value * value;
        const F64 zero_or_nan = value - value;
        nonfinite += zero_or_nan != zero_or_nan;
    };
    std::int64_t i = 0;
    for (; i + kBlock<T> <= numel; i += kBlock<T>) {
        const auto x = element::load<element::kAnyOrder<T>>(data + i);
        GRADGEN_UNROLL
        for (int j = 0; j < 8; ++j) {
            if constexpr (std::is_same_v<T, double>) {
                add(x.v[j]);
            } else {
                const auto wide = simd::widen(x.v[j]);
                add(wide.low);
                add(wide.high);
            }
        }
    }
    stats.sum_squares += simd::sum(squares);
    GRADGEN_UNROLL
    for (int lane = 0; lane < simd::kWide; ++lane) stats.nonfinite -= nonfinite[lane];
    measure_scalar(data + i, numel - i, stats);
}

/// The end of the chunk that starts at `at`: as many whole blocks as there are, at most kChunk elements.
template <class T>
std::int64_t chunk_end(std::int64_t at, std::int64_t numel) {
    return at + std::min<std::int64_t>((numel - at) / kBlock<T> * kBlock<T>, kChunk);
}

/// One chunk: a multiple of kBlock<T> elements.
template <class T>
GRADGEN_INLINE void measure_chunk(const T* data, std::int64_t numel, ReduceStats& stats) {
    simd::F64 totals = {};
    for (std::int64_t at = 0; at < numel;) {
        Compute<T> squares[4] = {};
        const std::int64_t end = std::min<std::int64_t>(at + kGroupBlocks * kBlock<T>, numel);
        for (; at < end; at += kBlock<T>) {
            const auto x = element::load<element::kAnyOrder<T>>(data + at);
            GRADGEN_UNROLL
            for (int i = 0; i < 8; ++i) squares[i & 3] += x.v[i] * x.v[i];
        }
        const auto joined = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        if constexpr (std::is_same_v<T, double>) {
            totals += joined;
        } else {
            const auto wide = simd::widen(joined);
            totals += wide.low + wide.high;
        }
    }
    const double total = simd::sum(totals),
                 least = std::is_same_v<T, double> ? 0.0 : 0x1p-100 * static_cast<double>(numel);
    if (total >= least && total <= __DBL_MAX__) [[likely]] {
        stats.sum_squares += total;
    } else {
        measure_exact(data, numel, stats);
    }
}

}  // namespace gradgen
