// Philox4x32-10 for one block of 8 * kLanes elements, vectorised; the mapping is RoundingKey::bits() of philox.h.
//
// Each 64-bit lane holds one counter: the multiply wants 64-bit lanes anyway, and it ignores upper halves, so no round
// needs the blends that 32-bit lanes would. In the last round the two words of a product sit in one lane, which two
// in-lane unpacks then put in element order, because lane q = 2m + k counts group (kWide / 2) * k + m of its half: no
// permute crosses a 128-bit lane.
//
// Only the low counter word differs inside of a segment, so half of the first two rounds is done once a segment.
#pragma once

#include <cstdint>

#include "gradgen/philox.h"
#include "simd.h"

// Clang writes no element of a vector in a constant expression; there the table is filled when the library is loaded.
#ifdef __clang__
#define GRADGEN_VECTOR_CONSTEXPR
#else
#define GRADGEN_VECTOR_CONSTEXPR constexpr
#endif

namespace gradgen {

/// The low counter word is constant in its upper part for so many elements; segments are split at multiples of it.
inline constexpr std::int64_t kCounterSpan = std::int64_t{8} << 32;

/// Random bits of 8 * kLanes elements in element order: 16 bits each, the element with the lower index in the lower
/// half.
struct RandomBlock {
    simd::U32 bits[4];
};

/// What does not change from block to block of one segment.
class RandomStream {
  public:
    /// For the elements of weight `uid` from `element` up to the next multiple of kCounterSpan.
    RandomStream(const RoundingKey& key, std::uint32_t uid, std::uint64_t element) {
        if (!key.stochastic) return;
        constexpr U64 kZero = {};
        const auto counter = key.counter(element / 8, uid);
        auto [k0, k1] = key.key();
        const std::uint64_t b = std::uint64_t{kPhiloxM1} * counter[2];
        const std::uint32_t c0 = static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ k0;
        const std::uint64_t a = std::uint64_t{kPhiloxM0} * c0;
        first2_ = kZero + (counter[3] ^ k1);
        second0_ = kZero + (static_cast<std::uint32_t>(b) ^ (k0 + kPhiloxW0));
        second2_ = kZero + (static_cast<std::uint32_t>(a >> 32) ^ (k1 + kPhiloxW1));
        second3_ = kZero + static_cast<std::uint32_t>(a);
        for (std::uint32_t round = 0; round < 8; ++round) {
            keys_[round][0] = kZero + (k0 + (round + 2) * kPhiloxW0);
            keys_[round][1] = kZero + (k1 + (round + 2) * kPhiloxW1);
        }
    }

    /// Bits of the block that starts with the element 8 * group.
    GRADGEN_INLINE RandomBlock block(std::uint64_t group) const {
        constexpr std::uint64_t kLow = 0xffffffffu;
        U64 c0[2], c1[2], c2[2], c3[2];
        GRADGEN_UNROLL
        for (std::size_t half = 0; half < 2; ++half) {
            const U64 a = simd::multiply_low(kGroups.lane[half] + group, kPhiloxM0);
            const U64 b = simd::multiply_low((a >> 32) ^ first2_, kPhiloxM1);
            c0[half] = (b >> 32) ^ second0_;
            c1[half] = b;
            c2[half] = a ^ second2_;
            c3[half] = second3_;
        }
        GRADGEN_UNROLL
        for (std::size_t round = 0; round < 7; ++round) {
            GRADGEN_UNROLL
            for (std::size_t half = 0; half < 2; ++half) {
                const U64 a = simd::multiply_low(c0[half], kPhiloxM0), b = simd::multiply_low(c2[half], kPhiloxM1);
                c0[half] = simd::xor3(b >> 32, c1[half], keys_[round][0]);
                c2[half] = simd::xor3(a >> 32, c3[half], keys_[round][1]);
                c1[half] = b;
                c3[half] = a;
            }
        }
        RandomBlock result;
        GRADGEN_UNROLL
        for (std::size_t half = 0; half < 2; ++half) {
            const U64 a = simd::multiply_low(c0[half], kPhiloxM0), b = simd::multiply_low(c2[half], kPhiloxM1);
            const U64 words01 = simd::xor3((b >> 32) | (b << 32), c1[half] & kLow, keys_[7][0]);
            const U64 words23 = simd::xor3((a >> 32) | (a << 32), c3[half] & kLow, keys_[7][1]);
            result.bits[2 * half] = std::bit_cast<simd::U32>(simd::unpack_low(words01, words23));
            result.bits[2 * half + 1] = std::bit_cast<simd::U32>(simd::unpack_high(words01, words23));
        }
        return result;
    }

  private:
    using U64 = simd::U64;

    struct Groups {
        U64 lane[2];
        GRADGEN_VECTOR_CONSTEXPR Groups() : lane{} {
            for (std::size_t half = 0; half < 2; ++half) {
                for (std::size_t q = 0; q < simd::kWide; ++q)
                    lane[half][q] = half * simd::kWide + simd::kWide / 2 * (q % 2) + q / 2;
            }
        }
    };
    static const Groups kGroups;

    // Named for the round and the counter word that they complete.
    U64 first2_, second0_, second2_, second3_;
    U64 keys_[8][2];
};

inline const RandomStream::Groups RandomStream::kGroups;

}  // namespace gradgen
