// How a block of elements moves between memory and registers, for each element type.
//
// A block is 8 registers of the compute type. Natural layout: register i holds the i-th run of lanes. Paired layout,
// for kernels whose memory is all bf16: registers 2j and 2j + 1 hold the even and the odd elements of the j-th run of
// two lanes, because a shift and a mask are all it takes to get there and back.
#pragma once

#include <type_traits>

#include "convert.h"
#include "gradgen/dtype.h"
#include "random_bits.h"
#include "simd.h"

namespace gradgen {

enum class Order { natural, paired };
enum class Rounding { nearest, stochastic };

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, simd::F64, simd::F32>;

template <class V>
struct Block {
    V v[8];
};

template <class T>
inline constexpr int kBlock = 8 * static_cast<int>(simd::kBytes / (std::is_same_v<T, double> ? 8 : 4));

namespace element {

using simd::F32;
using simd::HalfU16;
using simd::kLanes;
using simd::U32;

GRADGEN_INLINE F32 f16_load(const void* from) {
    const HalfU16 half = simd::load<HalfU16>(from);
#if defined(GRADGEN_AVX512)
    return (F32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half);  // maskz: as in simd.h
#elif defined(GRADGEN_AVX2) && defined(__F16C__)
    return (F32)_mm256_cvtph_ps((__m128i)half);
#else
    return convert::as_float(convert::f16_to_f32(U32(__builtin_convertvector(half, U32))));
#endif
}

GRADGEN_INLINE HalfU16 f16_nearest(F32 value) {
#if defined(GRADGEN_AVX512)
    return (HalfU16)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(GRADGEN_AVX2) && defined(__F16C__)
    return (HalfU16)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    return __builtin_convertvector(convert::f16_nearest(std::bit_cast<U32>(value)), HalfU16);
#endif
}

/// The cheaper order, for uses that do not care.
template <class T>
inline constexpr Order kAnyOrder = std::is_same_v<T, bf16> ? Order::paired : Order::natural;

template <Order kOrder, class T>
GRADGEN_INLINE Block<Compute<T>> load(const T* from) {
    Block<Compute<T>> x;
    if constexpr (kOrder == Order::paired) {
        static_assert(std::is_same_v<T, bf16>);
        GRADGEN_UNROLL
        for (int j = 0; j < 4; ++j) {
            const U32 pair = simd::load<U32>(from + 2 * kLanes * j);
            x.v[2 * j] = convert::as_float(U32(pair << 16));
            x.v[2 * j + 1] = convert::as_float(U32(pair & 0xffff0000u));
        }
    } else {
        GRADGEN_UNROLL
        for (int i = 0; i < 8; ++i) {
            if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
                x.v[i] = simd::load<Compute<T>>(from + i * (kBlock<T> / 8));
            } else if constexpr (std::is_same_v<T, bf16>) {
                const HalfU16 half = simd::load<HalfU16>(from + kLanes * i);
                x.v[i] = convert::as_float(U32(__builtin_convertvector(half, U32) << 16));
            } else {
                x.v[i] = f16_load(from + kLanes * i);
            }
        }
    }
    return x;
}

GRADGEN_INLINE void quiet(Block<F32>& x) {
    GRADGEN_UNROLL
    for (int i = 0; i < 8; ++i) x.v[i] = convert::as_float(convert::quiet(std::bit_cast<U32>(x.v[i])));
}

/// fp32 patterns rounded to bf16, lower halves cleared. `random` only where stochastic.
template <Order kOrder, Rounding kRounding>
GRADGEN_INLINE void round_bf16(Block<F32>& x, const RandomBlock& random) {
    GRADGEN_UNROLL
    for (int j = 0; j < 4; ++j) {
        U32 a = std::bit_cast<U32>(x.v[2 * j]), b = std::bit_cast<U32>(x.v[2 * j + 1]);
        if constexpr (kRounding == Rounding::nearest) {
            a = convert::bf16_nearest(a);
            b = convert::bf16_nearest(b);
        } else if constexpr (kOrder == Order::paired) {
            a = convert::bf16_stochastic<U32>(a, random.bits[j] & 0xffffu);
            b = convert::bf16_stochastic<U32>(b, random.bits[j] >> 16);
        } else {
            const auto bits = simd::widen(random.bits[j]);
            a = convert::bf16_stochastic(a, bits.low);
            b = convert::bf16_stochastic(b, bits.high);
        }
        x.v[2 * j] = convert::as_float(U32(a & 0xffff0000u));
        x.v[2 * j + 1] = convert::as_float(U32(b & 0xffff0000u));
    }
}

/// fp16 patterns of a block in natural order.
template <Rounding kRounding>
GRADGEN_INLINE void to_f16(const Block<F32>& x, const RandomBlock& random, HalfU16 (&out)[8]) {
    GRADGEN_UNROLL
    for (int j = 0; j < 4; ++j) {
        if constexpr (kRounding == Rounding::nearest) {
            out[2 * j] = f16_nearest(x.v[2 * j]);
            out[2 * j + 1] = f16_nearest(x.v[2 * j + 1]);
        } else {
            const auto bits = simd::widen(random.bits[j]);
            const U32 a = convert::f16_stochastic(std::bit_cast<U32>(x.v[2 * j]), bits.low);
            const U32 b = convert::f16_stochastic(std::bit_cast<U32>(x.v[2 * j + 1]), bits.high);
            out[2 * j] = __builtin_convertvector(a, HalfU16);
            out[2 * j + 1] = __builtin_convertvector(b, HalfU16);
        }
    }
}

template <Rounding kRounding>
GRADGEN_INLINE void round_f16(Block<F32>& x, const RandomBlock& random) {
    HalfU16 half[8];
    to_f16<kRounding>(x, random, half);
    GRADGEN_UNROLL
    for (int i = 0; i < 8; ++i) x.v[i] = f16_load(&half[i]);
}

/// Rounds and stores a block; x becomes the values as stored.
template <Order kOrder, Rounding kRounding, class T>
GRADGEN_INLINE void store(T* to, Block<Compute<T>>& x, const RandomBlock& random) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
        GRADGEN_UNROLL
        for (int i = 0; i < 8; ++i) simd::store(to + i * (kBlock<T> / 8), x.v[i]);
    } else if constexpr (std::is_same_v<T, bf16>) {
        round_bf16<kOrder, kRounding>(x, random);
        GRADGEN_UNROLL
        for (int j = 0; j < 4; ++j) {
            const U32 a = std::bit_cast<U32>(x.v[2 * j]), b = std::bit_cast<U32>(x.v[2 * j + 1]);
            if constexpr (kOrder == Order::paired) {
                simd::store(to + 2 * kLanes * j, U32((a >> 16) | b));
            } else {
                simd::store(to + 2 * kLanes * j, __builtin_convertvector(U32(a >> 16), HalfU16));
                simd::store(to + 2 * kLanes * j + kLanes, __builtin_convertvector(U32(b >> 16), HalfU16));
            }
        }
    } else {
        HalfU16 half[8];
        to_f16<kRounding>(x, random, half);
        GRADGEN_UNROLL
        for (int i = 0; i < 8; ++i) simd::store(to + kLanes * i, half[i]);
        GRADGEN_UNROLL
        for (int i = 0; i < 8; ++i) x.v[i] = f16_load(&half[i]);
    }
}

}  // namespace element
}  // namespace gradgen
