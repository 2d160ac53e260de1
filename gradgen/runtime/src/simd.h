// The one vector type that the CPU kernels are written in: as wide as the instruction set of the build.
//
// GCC/Clang vector extensions carry the arithmetic, so AVX-512, AVX2, SSE2 and NEON share every line of the kernels;
// intrinsics appear only where the extensions have no word for an instruction (32 x 32 -> 64 bit multiply, three-way
// xor, fp16 conversion).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__FAST_MATH__)
#error "gradgen's kernels need IEEE arithmetic: NaN, infinities and the order of sums are part of their contract"
#endif

namespace gradgen::simd {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define GRADGEN_AVX512 1
inline constexpr const char* kIsa = "avx512";
inline constexpr std::size_t kBytes = 64;
#elif defined(__AVX2__)
#define GRADGEN_AVX2 1
inline constexpr const char* kIsa = "avx2";
inline constexpr std::size_t kBytes = 32;
#else
#if defined(__ARM_NEON)
inline constexpr const char* kIsa = "neon";
#else
inline constexpr const char* kIsa = "generic";
#endif
inline constexpr std::size_t kBytes = 16;
#endif

#define GRADGEN_INLINE [[gnu::always_inline]] inline
/// Before a loop over the registers of a block: unrolled even at -O2, so that the block lives in registers.
#if defined(__clang__)
#define GRADGEN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define GRADGEN_UNROLL _Pragma("GCC unroll 16")
#endif

inline constexpr int kLanes = kBytes / 4;  // fp32 lanes
inline constexpr int kWide = kBytes / 8;   // fp64 lanes

using F32 [[gnu::vector_size(kBytes)]] = float;
using F64 [[gnu::vector_size(kBytes)]] = double;
using U32 [[gnu::vector_size(kBytes)]] = std::uint32_t;
using U64 [[gnu::vector_size(kBytes)]] = std::uint64_t;
using HalfF32 [[gnu::vector_size(kBytes / 2)]] = float;
using HalfU16 [[gnu::vector_size(kBytes / 2)]] = std::uint16_t;

template <class V>
struct Halves {
    V low, high;
};

template <class V>
GRADGEN_INLINE V load(const void* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
GRADGEN_INLINE void store(void* to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}

/// Zero-extends the 16-bit halves of one register to two registers, in memory order.
GRADGEN_INLINE Halves<U32> widen(U32 packed) {
    const auto parts = std::bit_cast<Halves<HalfU16>>(packed);
    return {__builtin_convertvector(parts.low, U32), __builtin_convertvector(parts.high, U32)};
}

GRADGEN_INLINE Halves<F64> widen(F32 value) {
    const auto parts = std::bit_cast<Halves<HalfF32>>(value);
    return {__builtin_convertvector(parts.low, F64), __builtin_convertvector(parts.high, F64)};
}

GRADGEN_INLINE double sum(F64 value) {
    double total = 0;
    for (int lane = 0; lane < kWide; ++lane) total += value[lane];
    return total;
}

/// Low 32 bits of each 64-bit lane times a 32-bit constant: the full 64-bit product. The upper halves are ignored.
GRADGEN_INLINE U64 multiply_low(U64 a, std::uint32_t constant) {
#if defined(GRADGEN_AVX512)
    // maskz: GCC 12 warns about the undefined register inside of the unmasked intrinsic; the code is the same
    return (U64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi32(static_cast<int>(constant)));
#elif defined(GRADGEN_AVX2)
    return (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32(static_cast<int>(constant)));
#elif defined(__SSE2__)
    return (U64)_mm_mul_epu32((__m128i)a, _mm_set1_epi32(static_cast<int>(constant)));
#else
    for (int lane = 0; lane < kWide; ++lane)
        a[lane] = static_cast<std::uint64_t>(static_cast<std::uint32_t>(a[lane])) * constant;
    return a;
#endif
}

GRADGEN_INLINE U64 xor3(U64 a, U64 b, U64 c) {
#if defined(GRADGEN_AVX512)
    return (U64)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
    return a ^ b ^ c;
#endif
}

namespace detail {
template <std::size_t... I>
GRADGEN_INLINE U64 unpack_low(U64 a, U64 b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (I % 2 ? kWide + I - 1 : I)...);
}
template <std::size_t... I>
GRADGEN_INLINE U64 unpack_high(U64 a, U64 b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (I % 2 ? kWide + I : I + 1)...);
}
}  // namespace detail

/// Inside each 128-bit lane: the low (high) 64 bits of a, then those of b.
GRADGEN_INLINE U64 unpack_low(U64 a, U64 b) { return detail::unpack_low(a, b, std::make_index_sequence<kWide>{}); }
GRADGEN_INLINE U64 unpack_high(U64 a, U64 b) { return detail::unpack_high(a, b, std::make_index_sequence<kWide>{}); }

}  // namespace gradgen::simd
