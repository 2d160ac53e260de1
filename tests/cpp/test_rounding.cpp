// Philox against the published vectors, and stochastic rounding as a random variable: unbiased, errors that grow like a
// square root, independent between neighbours, micro-steps, weights, steps, seeds and sites. Seeds are fixed, so every
// run sees the same draws.
#include <array>
#include <cmath>
#include <vector>

#include "check.h"
#include "kernel_reference.h"

using namespace gradgen;

namespace {

void test_philox() {
    using Four = std::array<std::uint32_t, 4>;
    constexpr std::uint32_t kOnes = 0xffffffffu;
    struct Vector {
        Four counter;
        std::array<std::uint32_t, 2> key;
        Four want;
    };
    // Random123, kat_vectors, philox4x32 10
    constexpr Vector kVectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (const Vector& v : kVectors) {
        const Four got = philox4x32_10(v.counter, v.key);
        check::that(got == v.want,
                    "philox: first word " + std::to_string(got[0]) + ", expected " + std::to_string(v.want[0]));
    }
}

/// The counter and element order of docs/design/layout-and-memory.md, spelled out once more.
void test_mapping() {
    const RoundingKey key{true, 0x1122334455667788u, 0x99aabbccddeeff00u, 0x1234, RoundingSite::wire};
    const std::uint64_t element = (std::uint64_t{0x5a} << 35) + 8 * 77 + 5;
    const auto words =
        philox4x32_10({77, 0x5au | 0xabcdefu << 8, 0xddeeff00u, 0x12342u}, {0x55667788u, 0x11223344u ^ 0x99aabbccu});
    check::that(key.bits(element, 0xabcdef) == words[2] >> 16, "element 8g + 5 uses the upper half of word 2");
    check::that(key.bits(element - 1, 0xabcdef) == (words[2] & 0xffff), "element 8g + 4 uses the lower half of word 2");
}

/// Sums `values` into a bf16 or fp16 target that holds `start`, once, with the given key.
std::vector<float> accumulate(DType type, float start, float value, std::size_t numel, const RoundingKey& key,
                              std::uint32_t uid = 1) {
    std::vector<std::uint16_t> target(numel, type == DType::bf16 ? to_bf16(start).bits : to_f16(start).bits);
    const std::vector<float> source(numel, value);
    ReduceArgs args{type, target.data(), false, DType::f32, DType::f32, false, 1.0, key, {}};
    const ReduceSource from{source.data(), true};
    const Segment part{0, 0, static_cast<std::int64_t>(numel), 0, uid};
    reduce(args, std::span(&from, 1), std::span(&part, 1), nullptr);
    std::vector<float> result(numel);
    for (std::size_t i = 0; i < numel; ++i)
        result[i] = static_cast<float>(reference::get(type, target.data(), static_cast<std::int64_t>(i)));
    return result;
}

/// 256 + 1 has its bf16 neighbours at 256 and 258: 257 in the mean over seeds, for every position in a block.
void test_unbiased() {
    constexpr int kSeeds = 4000;
    constexpr std::size_t kNumel = 133;
    std::vector<double> sums(kNumel);
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        const auto x = accumulate(DType::bf16, 256, 1, kNumel, {true, seed, 0, 0, RoundingSite::reduce});
        for (std::size_t i = 0; i < kNumel; ++i) {
            if (x[i] != 256 && x[i] != 258) check::that(false, "256 + 1 became " + check::number(x[i]));
            sums[i] += x[i];
        }
    }
    for (std::size_t i = 0; i < kNumel; ++i) {  // one draw has a standard deviation of 1
        const double sigmas = (sums[i] / kSeeds - 257) * std::sqrt(kSeeds);
        check::that(std::fabs(sigmas) < 5,
                    "element " + std::to_string(i) + ": mean of 256 + 1 is " + check::number(sigmas) + " sigma off");
    }
    const std::size_t many = 1 << 18;
    for (const float fraction : {0.01f, 0.1f, 0.25f, 0.9f}) {
        for (const DType type : {DType::bf16, DType::f16}) {
            const float start = type == DType::bf16 ? 128.0f : 1024.0f;  // the unit is 1
            const auto x = accumulate(type, start, fraction, many, {true, 7, 0, 0, RoundingSite::reduce});
            double up = 0;
            for (const float value : x) up += value - start;
            const double sigma = std::sqrt(fraction * (1 - fraction) * many);
            check::that(std::fabs(up - fraction * static_cast<double>(many)) < 5 * sigma,
                        std::string(to_string(type)) + ": P(up) for a fraction of " + check::number(fraction) + " is " +
                            check::number(up / many));
        }
    }
}

/// fp16 subnormals drop 14 to 31 bits: the share of the 65536 thresholds that round up is the fraction, to half a
/// threshold.
void test_f16_subnormals() {
    for (const float x : {0x1.004p-15f, 0x1.8024p-17f, 0x1.000002p-24f, 0x1.fffffep-25f, 0x1.8p-30f, 0x1p-41f, 0x1p-60f,
                          0x1p-149f, 0x1.8p-24f}) {
        const double scaled = static_cast<double>(x) * 0x1p24, fraction = scaled - std::floor(scaled);
        std::size_t up = 0;
        const std::size_t numel = 1 << 20;
        for (const float value : accumulate(DType::f16, 0, x, numel, {true, 3, 1, 4, RoundingSite::reduce})) {
            const double steps = value * 0x1p24 - std::floor(scaled);
            if (steps != 0 && steps != 1) check::that(false, check::number(x) + " became " + check::number(value));
            up += value * 0x1p24 > scaled;
        }
        const double n = static_cast<double>(numel), sigma = std::sqrt(std::max(fraction * (1 - fraction) / n, 0.0));
        check::that(std::fabs(static_cast<double>(up) / n - fraction) <= 5 * sigma + 0x1p-17,
                    "fp16 of " + check::number(x) + ": P(up) " + check::number(static_cast<double>(up) / n) +
                        ", fraction " + check::number(fraction));
    }
}

/// Exactly representable values stay exact; NaN and infinities stay; past the largest number is infinity.
void test_special() {
    const RoundingKey key{true, 5, 6, 7, RoundingSite::reduce};
    const float inf = std::numeric_limits<float>::infinity();
    for (const DType type : {DType::bf16, DType::f16}) {
        const float most = type == DType::bf16 ? 0x1.fep127f : 65504.0f,
                    least = type == DType::bf16 ? 0x1p-133f : 0x1p-24f;
        for (const float x : {0.0f, 1.0f, -1.5f, 255.0f, most, -most, least, -least, inf, -inf}) {
            for (const float got : accumulate(type, 0, x, 300, key)) {
                check::that(got == x,
                            std::string(to_string(type)) + ": " + check::number(x) + " became " + check::number(got));
            }
        }
        for (const float got : accumulate(type, inf, -inf, 300, key))
            check::that(std::isnan(got), "inf - inf became " + check::number(got));
        const float unit = type == DType::bf16 ? 0x1p120f : 32.0f;
        int infinite = 0;
        for (const float got : accumulate(type, most, unit / 2, 4096, key)) {
            check::that(got == most || got == inf, "past the largest: " + check::number(got));
            infinite += got == inf;
        }
        check::that(std::abs(infinite - 2048) < 5 * 32,
                    "half a unit past the largest: infinite in " + std::to_string(infinite) + " of 4096");
    }
}

/// After k additions of a value with a fraction of 1/2 the error is a random walk: its variance is k times that of one.
/// A threshold that is reused from micro-step to micro-step would give k^2.
void test_growth() {
    constexpr std::size_t kNumel = 1 << 15;
    constexpr std::uint32_t kSteps = 32;
    std::vector<std::uint16_t> target(kNumel, to_bf16(128).bits);  // the unit is 1 up to 256
    const std::vector<float> source(kNumel, 0.5f);
    const ReduceSource from{source.data(), true};
    const Segment part{0, 0, kNumel, 0, 1};
    for (std::uint32_t step = 0; step < kSteps; ++step) {
        const RoundingKey key{true, 42, 3, step, RoundingSite::reduce};
        reduce({DType::bf16, target.data(), false, DType::f32, DType::f32, false, 1.0, key, {}}, std::span(&from, 1),
               std::span(&part, 1), nullptr);
    }
    double sum = 0, squares = 0;
    for (const std::uint16_t bits : target) {
        const double error = to_float(bf16{bits}) - (128 + 0.5 * kSteps);
        sum += error;
        squares += error * error;
    }
    const double expected = kSteps * 0.25, variance = squares / kNumel;
    check::that(std::fabs(variance / expected - 1) < 5 * std::sqrt(2.0 / kNumel),
                "variance after 32 additions: " + check::number(variance) + ", expected 8");
    check::that(std::fabs(sum / kNumel) < 5 * std::sqrt(expected / kNumel),
                "mean error after 32 additions: " + check::number(sum / kNumel));
}

void test_independent() {
    constexpr std::size_t kNumel = 1 << 16;
    const RoundingKey base{true, 42, 3, 5, RoundingSite::reduce};
    const auto draws = [&](const RoundingKey& key, std::uint32_t uid = 1) {
        std::vector<float> x = accumulate(DType::bf16, 256, 1, kNumel, key, uid);
        for (float& value : x) value -= 257;  // +-1, both with probability 1/2
        return x;
    };
    const auto correlation = [&](const std::vector<float>& a, const std::vector<float>& b, std::size_t lag) {
        double sum = 0;
        for (std::size_t i = 0; i + lag < kNumel; ++i) sum += a[i] * b[i + lag];
        return sum / static_cast<double>(kNumel - lag);
    };
    const auto near_zero = [&](double value, const std::string& what) {
        check::that(std::fabs(value) < 5 / std::sqrt(static_cast<double>(kNumel)),
                    "correlation " + what + ": " + check::number(value));
    };
    const std::vector<float> first = draws(base);
    for (const std::size_t lag : {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256})
        near_zero(correlation(first, first, lag), "at lag " + std::to_string(lag));
    RoundingKey other = base;
    other.micro_step = 6;
    near_zero(correlation(first, draws(other), 0), "between micro-steps");
    other = base;
    other.step = 4;
    near_zero(correlation(first, draws(other), 0), "between steps");
    other.step = (std::uint64_t{1} << 32) + 3;
    near_zero(correlation(first, draws(other), 0), "between steps 2^32 apart");
    other = base;
    other.seed = 43;
    near_zero(correlation(first, draws(other), 0), "between seeds");
    for (const RoundingSite site : {RoundingSite::wire, RoundingSite::optimizer}) {
        other = base;
        other.site = site;
        near_zero(correlation(first, draws(other), 0), "between sites");
    }
    near_zero(correlation(first, draws(base, 2), 0), "between weights");
    check::that(draws(base) == first, "the same key gives other bits");
}

}  // namespace

int main() {
    test_philox();
    test_mapping();
    test_unbiased();
    test_f16_subnormals();
    test_special();
    test_growth();
    test_independent();
    return check::result();
}
