// Bit-level conversions between fp32 and the 16-bit formats, written once for a scalar and for a vector of patterns.
//
// U is std::uint32_t or simd::U32. Values are fp32 bit patterns, 16-bit patterns sit in the low half of a lane, and
// `random` is 16 random bits (0 .. 0xffff). Scalar and vector code cannot drift apart: it is the same code.
#pragma once

#include <bit>
#include <cstdint>

#include "simd.h"

namespace gradgen::convert {

template <class U>
struct FloatOf;
template <>
struct FloatOf<std::uint32_t> {
    using type = float;
};
template <>
struct FloatOf<simd::U32> {
    using type = simd::F32;
};

template <class U>
GRADGEN_INLINE auto as_float(U bits) {
    return std::bit_cast<typename FloatOf<U>::type>(bits);
}
template <class U>
GRADGEN_INLINE U splat(std::uint32_t value) {
    return U{} + value;
}

/// Makes a signalling NaN quiet. Arithmetic does so too; only values that none has touched need it.
template <class U>
GRADGEN_INLINE U quiet(U u) {
    const auto value = as_float(u);
    const U silenced = u | 0x400000u;
    return value != value ? silenced : u;
}

/// fp32 pattern whose upper half is the bf16 nearest to `u` (ties to even); the lower half is garbage.
/// NaNs, which must be quiet, stay as they are: adding could carry into the sign. Truncating them is safe, the quiet
/// bit remains.
template <class U>
GRADGEN_INLINE U bf16_nearest(U u) {
    const auto value = as_float(u);
    const U rounded = u + (((u >> 16) & 1u) + 0x7fffu);
    return value != value ? u : rounded;
}

/// The same with P(up) = the fraction that 16 bits drop. Infinity needs no care: 0x7f800000 + 0xffff has the same upper
/// half.
template <class U>
GRADGEN_INLINE U bf16_stochastic(U u, U random) {
    const auto value = as_float(u);
    const U rounded = u + random;
    return value != value ? u : rounded;
}

/// fp16 pattern to fp32 pattern; exact. A signalling NaN becomes quiet, as the hardware conversion does.
template <class U>
GRADGEN_INLINE U f16_to_f32(U h) {
    const U sign = (h & 0x8000u) << 16;
    const U magnitude = (h & 0x7fffu) << 13;
    const U normal = magnitude + (112u << 23);
    const U special = (magnitude + (224u << 23)) | (((magnitude & 0x7fffffu) + 0x7fffffu) >> 1 & 0x400000u);
    // 0 and subnormals: put the bits below an implicit one at 2^-14, then take that one away; the subtraction is exact.
    const U one = splat<U>(113u << 23);
    const U tiny = std::bit_cast<U>(as_float(U(magnitude + one)) - as_float(one));
    return sign | (magnitude < (1u << 23) ? tiny : magnitude >= (31u << 23) ? special : normal);
}

template <class U>
GRADGEN_INLINE U f16_special(U magnitude, U finite) {
    const U nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
    const U infinity = splat<U>(0x7c00u);
    return magnitude > 0x7f800000u ? nan : magnitude >= 0x47800000u ? infinity : finite;
}

/// Nearest, ties to even; at and above 65520 infinity.
template <class U>
GRADGEN_INLINE U f16_nearest(U u) {
    const U magnitude = u & 0x7fffffffu;
    const U normal = (magnitude + (((magnitude >> 13) & 1u) + 0xfffu) - (112u << 23)) >> 13;
    // Below 2^-14 the unit is 2^-24, which is the unit of fp32 at 0.5: the addition rounds.
    const U half = splat<U>(126u << 23);
    const U tiny = std::bit_cast<U>(as_float(magnitude) + as_float(half)) - half;
    const U finite = magnitude < (113u << 23) ? tiny : normal;
    return ((u >> 16) & 0x8000u) | f16_special<U>(magnitude, finite);
}

/// P(up) = the dropped fraction, to 16 bits. A normal result drops 13 bits: the upper 13 random bits are added. A
/// subnormal result drops d >= 14 bits: the random bits are scaled to d, and where d > 16 stand in the middle of their
/// step, so that the bias is at most 2^-17 of a unit and exact values stay exact. 65504 plus a fraction can round to
/// infinity; 65536 and above always does.
template <class U>
GRADGEN_INLINE U f16_stochastic(U u, U random) {
    const U magnitude = u & 0x7fffffffu;
    const U normal = (magnitude + (random >> 3) - (112u << 23)) >> 13;
    const U exponent = magnitude >> 23;
    const U clamped = exponent < 112u ? exponent : splat<U>(112u);
    U dropped = 126u - clamped;
    U significand = (magnitude & 0x7fffffu) | 0x800000u;
    const U excess =
        dropped > 31u ? U(dropped - 31u) : splat<U>(0u);  // 32-bit sums hold 31 dropped bits; the rest is below 2^-31
    significand = significand >> (excess < 31u ? excess : splat<U>(31u));
    dropped = dropped - excess;
    const U narrow = random >> (dropped < 16u ? U(16u - dropped) : splat<U>(0u));
    const U step = dropped > 16u ? U(dropped - 17u) : splat<U>(0u);
    const U wide = ((random << 1) | 1u) << step;
    const U tiny = (significand + (dropped > 16u ? wide : narrow)) >> dropped;
    const U finite = magnitude < (113u << 23) ? tiny : normal;
    return ((u >> 16) & 0x8000u) | f16_special<U>(magnitude, finite);
}

}  // namespace gradgen::convert
