// reduce() one element at a time, from its description alone: conversions in double arithmetic, no code shared with the
// kernels but RoundingKey::bits(), which test_rounding.cpp checks against the published vectors of Philox.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "gradgen/kernels.h"

namespace reference {

using namespace gradgen;

struct Format {
    int mantissa, least_exponent;
    double limit;  // 2^(largest exponent + 1)
};
inline constexpr Format kBf16{7, -126, 0x1p128}, kF16{10, -14, 65536.0};

/// Rounds an fp32 value to a 16-bit format. `random` < 0: to nearest even, else 16 random bits.
inline float round_to(const Format& format, float x, int random) {
    if (std::isnan(x) || std::isinf(x) || x == 0.0f) return x;
    int exponent = 0;
    std::frexp(std::fabs(x), &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent - 1, format.least_exponent) - format.mantissa);
    const double scaled = std::fabs(static_cast<double>(x)) / unit, whole = std::floor(scaled),
                 fraction = scaled - whole;
    double rounded = std::nearbyint(scaled);
    if (random >= 0) {
        const int dropped = std::max(exponent - 1, -126) - 23 < std::ilogb(unit)
                                ? std::ilogb(unit) + 23 - std::max(exponent - 1, -126)
                                : 0;
        const double threshold = dropped > 16 ? (random + 0.5) / 65536 : std::ldexp(random >> (16 - dropped), -dropped);
        rounded = whole + (fraction + threshold >= 1.0);
    }
    const double value = rounded * unit;
    const float result = value >= format.limit ? std::numeric_limits<float>::infinity() : static_cast<float>(value);
    return std::copysign(result, x);
}

inline float decode(DType type, std::uint16_t bits) {
    if (type == DType::bf16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction), std::max(exponent, 1) - 25);
    if (exponent == 31)
        value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    return bits & 0x8000 ? -value : value;
}

inline std::uint16_t encode(DType type, float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    if (type == DType::bf16) return static_cast<std::uint16_t>((bits >> 16) | (std::isnan(value) ? 0x40 : 0));
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    if (std::isnan(value)) return sign | 0x7e00;
    if (std::isinf(value)) return sign | 0x7c00;
    const double size = std::fabs(value);
    int exponent = 0;
    std::frexp(size, &exponent);
    if (size < 0x1p-14) return sign | static_cast<std::uint16_t>(size * 0x1p24);
    return static_cast<std::uint16_t>(sign | ((exponent + 14) << 10) |
                                      (static_cast<int>(std::ldexp(size, 11 - exponent)) & 1023));
}

inline double get(DType type, const void* data, std::int64_t at) {
    const auto* bytes = static_cast<const unsigned char*>(data) + at * static_cast<std::int64_t>(size_of(type));
    if (type == DType::f64) {
        double value;
        std::memcpy(&value, bytes, 8);
        return value;
    }
    if (type == DType::f32) {
        float value;
        std::memcpy(&value, bytes, 4);
        return value;
    }
    std::uint16_t value;
    std::memcpy(&value, bytes, 2);
    return decode(type, value);
}

inline void put(DType type, void* data, std::int64_t at, double value) {
    auto* bytes = static_cast<unsigned char*>(data) + at * static_cast<std::int64_t>(size_of(type));
    const auto single = static_cast<float>(value);
    const std::uint16_t half = size_of(type) == 2 ? encode(type, single) : 0;
    std::memcpy(bytes,
                type == DType::f64   ? static_cast<const void*>(&value)
                : type == DType::f32 ? static_cast<const void*>(&single)
                                     : &half,
                size_of(type));
}

inline float round_as(DType type, float value, const RoundingKey& key, std::int64_t element, std::uint32_t uid) {
    if (type == DType::f32) return value;
    const int random = key.stochastic ? static_cast<int>(key.bits(static_cast<std::uint64_t>(element), uid)) : -1;
    return round_to(type == DType::bf16 ? kBf16 : kF16, value, random);
}

template <class Real>
Real combine(const ReduceArgs& args, std::span<const ReduceSource> sources, const Segment& part, std::int64_t i) {
    Real total = 0;
    bool first = true;
    const auto add = [&](Real value) {
        total = first ? value : total + value;
        first = false;
    };
    for (std::size_t rank = 0; rank < sources.size(); ++rank) {
        const ReduceSource& source = sources[rank];
        if (!source.data) continue;
        double value = get(args.source_type, source.data, (source.packed ? part.shard : part.source) + i);
        if (args.source_type == DType::f32) {
            value =
                round_as(args.wire_type, static_cast<float>(value),
                             args.wire_rounding.for_rank(static_cast<int>(rank)), part.element + i, part.weight);
        }
        add(static_cast<Real>(value));
    }
    const std::int64_t at = (args.target_in_arena ? part.source : part.shard) + i;
    if (!args.overwrite) add(static_cast<Real>(get(args.target_type, args.target, at)));
    return total * static_cast<Real>(args.scale);
}

/// `args.target` may not alias a source here, except exactly.
inline void reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, std::span<const Segment> segments) {
    for (const Segment& part : segments) {
        for (std::int64_t i = 0; i < part.numel; ++i) {
            const std::int64_t at = (args.target_in_arena ? part.source : part.shard) + i;
            if (args.target_type == DType::f64) {
                put(DType::f64, args.target, at, combine<double>(args, sources, part, i));
            } else {
                const float sum = combine<float>(args, sources, part, i);
                put(args.target_type, args.target, at,
                    round_as(args.target_type, sum, args.rounding, part.element + i, part.weight));
            }
        }
    }
}

}  // namespace reference
