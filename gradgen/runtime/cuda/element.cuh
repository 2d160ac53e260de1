// Groups of eight elements between memory and registers, for each element type; the conversions give the bits of
// src/convert.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gradgen/dtype.h"
#include "philox.cuh"

namespace gradgen::cuda {

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Eight elements as they lie in memory.
template <class T>
struct Group {
    static constexpr int kParts = static_cast<int>(sizeof(T)) / 2;
    uint4 part[kParts];
};

/// Plain accesses: streaming hints measured slower (docs/design/gpu-kernels.md). `from` is a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ Group<T> load_group(const T* from) {
    Group<T> group;
#pragma unroll
    for (int i = 0; i < Group<T>::kParts; ++i) group.part[i] = reinterpret_cast<const uint4*>(from)[i];
    return group;
}

template <class T>
__device__ __forceinline__ void store_group(T* to, const Group<T>& group) {
#pragma unroll
    for (int i = 0; i < Group<T>::kParts; ++i) reinterpret_cast<uint4*>(to)[i] = group.part[i];
}

__device__ __forceinline__ std::uint32_t word_of(const uint4& part, int i) {
    return i == 0 ? part.x : i == 1 ? part.y : i == 2 ? part.z : part.w;
}

__device__ __forceinline__ float to_compute(float value) { return value; }
__device__ __forceinline__ double to_compute(double value) { return value; }
__device__ __forceinline__ float to_compute(bf16 value) {
    return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}
__device__ __forceinline__ float to_compute(f16 value) { return __half2float(__ushort_as_half(value.bits)); }

/// Element `j` of a group, as it lies in memory.
template <class T>
__device__ __forceinline__ T element_of(const Group<T>& group, int j) {
    if constexpr (std::is_same_v<T, double>) {
        const uint4& part = group.part[j / 2];
        return __hiloint2double(static_cast<int>(word_of(part, j % 2 * 2 + 1)),
                                static_cast<int>(word_of(part, j % 2 * 2)));
    } else if constexpr (std::is_same_v<T, float>) {
        return __uint_as_float(word_of(group.part[j / 4], j % 4));
    } else {
        const std::uint32_t word = word_of(group.part[0], j / 2);
        return T{static_cast<std::uint16_t>(j & 1 ? word >> 16 : word)};
    }
}

template <class T>
__device__ __forceinline__ void widen(const Group<T>& group, Compute<T> (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = to_compute(element_of(group, j));
}

/// Upper half: the bf16 that P(up) = the dropped fraction gives. NaNs must not carry into the sign.
__device__ __forceinline__ std::uint32_t bf16_stochastic(float value, std::uint32_t random) {
    const std::uint32_t u = __float_as_uint(value);
    return value != value ? u | 0x400000u : u + random;
}

/// fp16 pattern; the reasons are in src/convert.h.
__device__ __forceinline__ std::uint32_t f16_stochastic(float value, std::uint32_t random) {
    const std::uint32_t u = __float_as_uint(value), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u | (magnitude >> 13 & 0x3ffu);
    if (magnitude >= 0x47800000u) return sign | 0x7c00u;
    if (magnitude >= 113u << 23) return sign | (magnitude + (random >> 3) - (112u << 23)) >> 13;
    const std::uint32_t all = 126u - min(magnitude >> 23, 112u);       // bits that a subnormal result drops, 14 or more
    const std::uint32_t excess = all > 31u ? min(all - 31u, 31u) : 0;  // of them, those that no 32-bit sum can hold
    const std::uint32_t dropped = min(all, 31u), significand = ((magnitude & 0x7fffffu) | 0x800000u) >> excess;
    const std::uint32_t threshold = dropped > 16u ? (random << 1 | 1u) << (dropped - 17u) : random >> (16u - dropped);
    return sign | (significand + threshold) >> dropped;
}

/// Two values rounded to one word of T; both become what was stored.
template <class T, bool kStochastic>
__device__ __forceinline__ std::uint32_t narrow_pair(float& low, float& high, std::uint32_t random) {
    std::uint32_t word;
    if constexpr (std::is_same_v<T, bf16>) {
        if constexpr (kStochastic) {
            word = __byte_perm(bf16_stochastic(low, random & 0xffffu), bf16_stochastic(high, random >> 16), 0x7632);
        } else {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
            word = static_cast<std::uint32_t>(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
        }
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xffff0000u);
    } else {
        if constexpr (kStochastic) {
            word = f16_stochastic(low, random & 0xffffu) | f16_stochastic(high, random >> 16) << 16;
        } else {
            const __half2 pair = __floats2half2_rn(low, high);
            word = static_cast<std::uint32_t>(__half_as_ushort(pair.y)) << 16 | __half_as_ushort(pair.x);
        }
        low = to_compute(f16{static_cast<std::uint16_t>(word)});
        high = to_compute(f16{static_cast<std::uint16_t>(word >> 16)});
    }
    return word;
}

/// Rounds to T; x becomes what the group holds. `random` counts only where stochastic.
template <class T, bool kStochastic>
__device__ __forceinline__ Group<T> narrow(Compute<T> (&x)[8], const uint4& random) {
    Group<T> group;
    if constexpr (std::is_same_v<T, double>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const auto bits = [](double value) { return static_cast<std::uint64_t>(__double_as_longlong(value)); };
            const std::uint64_t a = bits(x[2 * i]), b = bits(x[2 * i + 1]);
            group.part[i] = {static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32),
                             static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(b >> 32)};
        }
    } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            group.part[i] = {__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), __float_as_uint(x[4 * i + 2]),
                             __float_as_uint(x[4 * i + 3])};
        }
    } else {
        group.part[0] = {
            narrow_pair<T, kStochastic>(x[0], x[1], random.x), narrow_pair<T, kStochastic>(x[2], x[3], random.y),
            narrow_pair<T, kStochastic>(x[4], x[5], random.z), narrow_pair<T, kStochastic>(x[6], x[7], random.w)};
    }
    return group;
}

}  // namespace gradgen::cuda
