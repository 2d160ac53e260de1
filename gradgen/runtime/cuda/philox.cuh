// Philox4x32-10 on the device: RoundingKey::bits() of philox.h, eight elements a call.
#pragma once

#include <cstdint>

#include "gradgen/cuda_kernels.h"
#include "gradgen/philox.h"

namespace gradgen::cuda {

/// What a random counter holds besides weight and element, for one launch.
struct RandomStream {
    std::uint32_t key0, key1, word2, word3;

    __device__ __forceinline__ RandomStream(const RoundingKey& key, const CudaCounters* counters) {
        const std::uint64_t step = counters ? counters->step : key.step;
        const std::uint32_t micro_step = counters ? counters->micro_step : key.micro_step;
        key0 = static_cast<std::uint32_t>(key.seed);
        key1 = static_cast<std::uint32_t>(key.seed >> 32) ^ static_cast<std::uint32_t>(step >> 32);
        word2 = static_cast<std::uint32_t>(step);
        word3 = micro_step << 4 | static_cast<std::uint32_t>(key.site);
    }

    /// RoundingKey::for_rank.
    __device__ __forceinline__ RandomStream for_rank(int rank) const {
        const std::uint64_t mask = (static_cast<std::uint64_t>(rank) + 1) * 0x9E3779B97F4A7C15ull;
        RandomStream other = *this;
        other.key0 ^= static_cast<std::uint32_t>(mask);
        other.key1 ^= static_cast<std::uint32_t>(mask >> 32);
        return other;
    }

    /// Eight times 16 bits, in element order, the lower half of a word first.
    __device__ __forceinline__ uint4 bits(std::uint64_t group, std::uint32_t weight) const {
        uint4 c{static_cast<std::uint32_t>(group), (static_cast<std::uint32_t>(group >> 32) & 0xffu) | weight << 8,
                word2, word3};
        std::uint32_t k0 = key0, k1 = key1;
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const std::uint64_t a = static_cast<std::uint64_t>(kPhiloxM0) * c.x;
            const std::uint64_t b = static_cast<std::uint64_t>(kPhiloxM1) * c.z;
            c = {static_cast<std::uint32_t>(b >> 32) ^ c.y ^ k0, static_cast<std::uint32_t>(b),
                 static_cast<std::uint32_t>(a >> 32) ^ c.w ^ k1, static_cast<std::uint32_t>(a)};
            k0 += kPhiloxW0;
            k1 += kPhiloxW1;
        }
        return c;
    }
};

/// The bits of element `j` of a group.
__device__ __forceinline__ std::uint32_t bits_of(const uint4& words, int j) {
    const std::uint32_t word = j < 2 ? words.x : j < 4 ? words.y : j < 6 ? words.z : words.w;
    return j & 1 ? word >> 16 : word & 0xffffu;
}

}  // namespace gradgen::cuda
