// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
// and the one mapping from (seed, step, micro-step, weight, element, site) to random bits that every kernel uses.
#pragma once

#include <array>
#include <cstdint>

namespace gradgen {

constexpr std::uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr std::uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

constexpr std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                                     std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = static_cast<std::uint64_t>(kPhiloxM0) * counter[0];
        const std::uint64_t b = static_cast<std::uint64_t>(kPhiloxM1) * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
        key[0] += kPhiloxW0;
        key[1] += kPhiloxW1;
    }
    return counter;
}

/// Where random bits are used. Two sites never share bits.
enum class RoundingSite : std::uint32_t { reduce = 1, wire = 2, optimizer = 3, local = 4 };

/// What a stochastic rounding depends on besides weight and element.
struct RoundingKey {
    bool stochastic = false;
    std::uint64_t seed = 0;
    std::uint64_t step = 0;
    std::uint32_t micro_step = 0;
    RoundingSite site = RoundingSite::reduce;

    constexpr std::array<std::uint32_t, 2> key() const {
        return {static_cast<std::uint32_t>(seed),
                static_cast<std::uint32_t>(seed >> 32) ^ static_cast<std::uint32_t>(step >> 32)};
    }
    /// Counter for 8 elements that start at 8 * group of weight `uid` (24 bits).
    constexpr std::array<std::uint32_t, 4> counter(std::uint64_t group, std::uint32_t uid) const {
        return {static_cast<std::uint32_t>(group), (static_cast<std::uint32_t>(group >> 32) & 0xffu) | (uid << 8),
                static_cast<std::uint32_t>(step), (micro_step << 4) | static_cast<std::uint32_t>(site)};
    }
    /// The key with which one rank rounds what it sends. Ranks round different values of the same element: equal bits
    /// would correlate their errors, and the error of the sum would grow like W instead of like the root of W.
    constexpr RoundingKey for_rank(int rank) const {
        RoundingKey out = *this;
        out.seed ^= (static_cast<std::uint64_t>(rank) + 1) * 0x9E3779B97F4A7C15ull;
        return out;
    }
    /// The 16 bits of one element (the reference for the vector kernels).
    constexpr std::uint32_t bits(std::uint64_t element, std::uint32_t uid) const {
        const auto words = philox4x32_10(counter(element >> 3, uid), key());
        const auto j = static_cast<unsigned>(element & 7u);
        return (words[j >> 1] >> (16u * (j & 1u))) & 0xffffu;
    }
};

}  // namespace gradgen
