// reduce, pack, scale and measure against kernel_reference.h, bit for bit, over types, sizes, offsets, sources and
// roundings. Prints one digest a case, so that tests/test_kernels.py can compare builds for different instruction sets.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "kernel_reference.h"

using namespace gradgen;

namespace {

constexpr std::int64_t kSizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 4097};
constexpr std::int64_t kStarts[] = {0, 8, 3, 1001, (std::int64_t{1} << 35) - 72, 16};
constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

enum class Values { mixed, special, tiny, huge };
constexpr const char* kValuesName[] = {"mixed", "special", "tiny", "huge"};

std::uint32_t hash(std::uint64_t x) {
    x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
    x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
    return static_cast<std::uint32_t>(x ^ (x >> 33));
}

double value(Values kind, DType type, std::uint64_t index) {
    const std::uint32_t h = hash(index);
    const double sign = h & 1 ? -1 : 1, fraction = 1 + (h >> 8) * 0x1p-24;
    const int spread = static_cast<int>(h >> 1 & 15);
    switch (kind) {
        case Values::mixed:
            return sign * std::ldexp(fraction, spread - 10);
        case Values::tiny:
            return sign * std::ldexp(fraction, spread - (type == DType::f16 ? 26 : 140));
        case Values::huge:
            return sign * std::ldexp(fraction, type == DType::f16 ? 15 - spread / 8 : 127 - spread / 4);
        case Values::special:
            break;
    }
    constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
    const double specials[] = {0.0, -0.0, kInf, -kInf, kNan, 65504, 65519, 0x1p-24, 0x1p-25, 3.3895314e38};
    return h % 7 == 0 ? specials[h / 7 % 10] : sign * std::ldexp(fraction, spread - 10);
}

/// Bytes with a canary before, between and after the segments: a pattern that reads as NaN in every type.
struct Buffer {
    DType type;
    std::vector<unsigned char> bytes;
    Buffer(DType t, std::int64_t numel) : type(t), bytes(static_cast<std::size_t>(numel) * size_of(t), 0xff) {}
    void fill(const std::vector<Segment>& segments, bool arena, Values kind, std::uint64_t seed) {
        for (const Segment& part : segments) {
            for (std::int64_t i = 0; i < part.numel; ++i) {
                const std::int64_t at = (arena ? part.source : part.shard) + i;
                const double x = value(kind, type, seed * 1000003 + static_cast<std::uint64_t>(at));
                const auto single = static_cast<float>(x);
                const float rounded = type == DType::bf16  ? reference::round_to(reference::kBf16, single, -1)
                                      : type == DType::f16 ? reference::round_to(reference::kF16, single, -1)
                                                           : single;
                reference::put(type, bytes.data(), at, type == DType::f64 ? x : rounded);
            }
        }
    }
};

/// One segment a size, with gaps of odd length; shards in the opposite order.
std::vector<Segment> make_segments(std::int64_t& numel) {
    std::vector<Segment> segments;
    std::int64_t at = 5;
    std::uint32_t uid = 1;
    for (const std::int64_t size : kSizes) {
        segments.push_back({at, 0, size, kStarts[uid % std::size(kStarts)], uid * 77777u & 0xffffffu});
        at += size + 3 + uid++ % 9;
    }
    numel = at;
    for (Segment& part : segments) part.shard = numel - part.source - part.numel;
    return segments;
}

/// Compares whole buffers, canaries included; NaNs are equal whatever their payload, except where a canary must be
/// untouched.
void compare(const std::string& name, const Buffer& got, const Buffer& want, check::Digest& digest) {
    const auto size = static_cast<std::int64_t>(size_of(got.type));
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(got.bytes.size()) / size; ++i) {
        const double a = reference::get(got.type, got.bytes.data(), i),
                     b = reference::get(want.type, want.bytes.data(), i);
        const bool same =
            std::memcmp(got.bytes.data() + i * size, want.bytes.data() + i * size, static_cast<std::size_t>(size)) == 0;
        const bool canary = std::all_of(want.bytes.begin() + i * size, want.bytes.begin() + (i + 1) * size,
                                        [](int x) { return x == 0xff; });
        const bool ok = same || (std::isnan(a) && std::isnan(b) && !canary);
        if (!ok) {  // the text is only made where it is needed: this runs millions of times
            check::that(false,
                        name + " at " + std::to_string(i) + ": " + check::number(a) + ", expected " + check::number(b));
        }
        digest.add(std::isnan(a) ? 1 : std::bit_cast<std::uint64_t>(a));
    }
}

void compare_stats(const std::string& name, const ReduceStats& stats, const Buffer& buffer, bool arena,
                   const std::vector<Segment>& segments) {
    double squares = 0;
    std::int64_t nonfinite = 0;
    for (const Segment& part : segments) {
        for (std::int64_t i = 0; i < part.numel; ++i) {
            const double x = reference::get(buffer.type, buffer.bytes.data(), (arena ? part.source : part.shard) + i);
            squares += x * x;
            nonfinite += !std::isfinite(x);
        }
    }
    check::that(stats.nonfinite == nonfinite,
                name + ": " + std::to_string(stats.nonfinite) + " non-finite, expected " + std::to_string(nonfinite));
    const bool close = std::isfinite(squares) ? std::fabs(stats.sum_squares - squares) <= 1e-6 * squares
                                              : !std::isfinite(stats.sum_squares);
    check::that(close,
                name + ": sum of squares " + check::number(stats.sum_squares) + ", expected " + check::number(squares));
}

struct Case {
    DType target, source, wire;
    bool stochastic, overwrite, in_arena, in_place;
    double scale;
    int world;
    Values values;
};

void run(const Case& c, const std::vector<Segment>& segments, std::int64_t numel) {
    const std::string name = std::string(to_string(c.target)) + " <- " + std::to_string(c.world) + " x " +
                             std::string(to_string(c.source)) + " wire " + std::string(to_string(c.wire)) +
                             (c.stochastic ? " stochastic" : " nearest") + (c.overwrite ? " overwrite" : " add") +
                             (c.in_arena ? " arena" : " shard") + (c.in_place ? " in-place" : "") + " scale " +
                             check::number(c.scale) + " " + kValuesName[static_cast<int>(c.values)];
    std::vector<Buffer> data;
    std::vector<bool> packed;
    for (int r = 0; r < c.world; ++r) {
        packed.push_back(r % 3 == 1);
        data.emplace_back(c.source, numel);
        data.back().fill(segments, !packed.back(), c.values, static_cast<std::uint64_t>(r + 1));
    }
    Buffer target(c.target, numel);
    target.fill(segments, c.in_arena, c.values, 99);
    Buffer expected = target;

    ReduceArgs args{c.target, target.bytes.data(), c.in_arena, c.source, c.wire, c.overwrite, c.scale, {}, {}};
    args.rounding = {c.stochastic, 0x123456789abcdefu, (7ull << 32) + 5, 3, RoundingSite::reduce};
    args.wire_rounding = {c.stochastic, 0x123456789abcdefu, (7ull << 32) + 5, 3, RoundingSite::wire};
    std::vector<ReduceSource> sources;
    for (int r = 0; r < c.world; ++r) {
        const bool missing = c.world > 2 && r % 4 == 0;  // also the first
        sources.push_back(
            {missing ? nullptr : data[static_cast<std::size_t>(r)].bytes.data(), packed[static_cast<std::size_t>(r)]});
    }
    std::vector<ReduceSource> expected_sources = sources;
    if (c.in_place) {
        sources.push_back({target.bytes.data(), !c.in_arena});
        expected_sources.push_back({expected.bytes.data(), !c.in_arena});
    }
    ReduceStats stats;
    reduce(args, sources, segments, &stats);
    args.target = expected.bytes.data();
    reference::reduce(args, expected_sources, segments);
    check::Digest digest;
    compare(name, target, expected, digest);
    compare_stats(name, stats, target, c.in_arena, segments);
    compare_stats(name + " measure", measure(c.target, target.bytes.data(), c.in_arena, segments), target, c.in_arena,
                  segments);
    std::printf("%s: %016llx\n", name.c_str(), static_cast<unsigned long long>(digest.value));
}

void test_reduce(const std::vector<Segment>& segments, std::int64_t numel) {
    int turn = 0;
    for (const DType target : kTypes)
        for (const DType source : kTypes)
            for (const DType wire : kTypes) {
                if (!can_reduce(target, source, wire)) {
                    ReduceArgs args{target, nullptr, false, source, wire, true, 1.0, {}, {}};
                    check::throws<std::invalid_argument>([&] { reduce(args, {}, {}, nullptr); }, "no kernel",
                                                         "unsupported types");
                    continue;
                }
                for (const bool stochastic : {false, true})
                    for (const bool overwrite : {false, true})
                        for (const int world : {0, 1, 2, 3, 8, 63}) {
                            ++turn;
                            const bool in_place = target == source && turn % 2;
                            const double scale = turn % 3 ? 1.0 / 3 : 1.0;
                            run({target, source, wire, stochastic, overwrite, turn % 4 < 2, in_place, scale, world,
                                 Values::mixed},
                                segments, numel);
                            if (world == 1 || world == 3) {
                                for (const Values kind : {Values::special, Values::tiny, Values::huge}) {
                                    run({target, source, wire, stochastic, overwrite, turn % 4 < 2, in_place, scale,
                                         world, kind},
                                        segments, numel);
                                }
                            }
                        }
            }
}

void test_pack_and_scale(const std::vector<Segment>& segments, std::int64_t numel) {
    for (const DType in : kTypes)
        for (const DType out : kTypes)
            for (const bool stochastic : {false, true}) {
                if (in != out && !can_reduce(out, in, in)) continue;
                const std::string name = "pack " + std::string(to_string(in)) + " to " + std::string(to_string(out)) +
                                         (stochastic ? " stochastic" : "");
                Buffer from(in, numel), to(out, numel);
                from.fill(segments, true, Values::special, 4);
                Buffer expected = to;
                const RoundingKey key{stochastic, 11, 12, 13, RoundingSite::wire};
                pack(out, to.bytes.data(), in, from.bytes.data(), segments, key);
                ReduceArgs args{out, expected.bytes.data(), false, in, in, true, 1.0, key, {}};
                const ReduceSource source{from.bytes.data(), false};
                reference::reduce(args, std::span(&source, 1), segments);
                check::Digest digest;
                compare(name, to, expected, digest);
                if (in != out) continue;
                ReduceArgs scaling{in, expected.bytes.data(), false, in, in, false, 0.3, {}, {}};
                scale(in, to.bytes.data(), false, segments, 0.3);
                reference::reduce(scaling, {}, segments);
                compare("scale " + std::string(to_string(in)), to, expected, digest);
                std::printf("%s: %016llx\n", name.c_str(), static_cast<unsigned long long>(digest.value));
            }
}

/// Exhaustive: every fp16 pattern, its neighbourhoods in fp32, and the signalling NaNs whose payload a truncation would
/// lose.
void test_conversions() {
    for (std::uint32_t h = 0; h < 0x10000; ++h) {
        const float want = reference::decode(DType::f16, static_cast<std::uint16_t>(h)),
                    got = to_float(f16{static_cast<std::uint16_t>(h)});
        check::that(
            std::isnan(want) ? std::isnan(got)
                             : std::bit_cast<std::uint32_t>(want) == std::bit_cast<std::uint32_t>(got),
            "fp16 pattern " + std::to_string(h) + ": " + check::number(got) + ", expected " + check::number(want));
        for (const int offset : {-0x1001, -0x1000, -1, 0, 1, 0xfff, 0x1000, 0x1001}) {
            const float x =
                std::bit_cast<float>(std::bit_cast<std::uint32_t>(want) + static_cast<std::uint32_t>(offset));
            if (std::isnan(x)) continue;
            const std::uint16_t expected = reference::encode(DType::f16, reference::round_to(reference::kF16, x, -1));
            check::that(to_f16(x).bits == expected,
                        "to_f16(" + check::number(x) + ") = " + std::to_string(to_f16(x).bits));
        }
        const std::uint16_t b = to_bf16(std::bit_cast<float>(h << 16)).bits;
        check::that(b == (std::isnan(std::bit_cast<float>(h << 16)) ? h | 0x40 : h),
                    "bf16 pattern " + std::to_string(h));
    }
    const std::vector<Segment> one{{0, 0, 200, 0, 1}};
    const std::vector<std::uint32_t> signalling(200, 0x7f800001u);
    for (const bool stochastic : {false, true})
        for (const DType type : {DType::bf16, DType::f16}) {
            std::vector<std::uint16_t> out(200);
            pack(type, out.data(), DType::f32, signalling.data(), one, {stochastic, 1, 2, 3, RoundingSite::wire});
            for (const std::uint16_t x : out)
                check::that(std::isnan(reference::decode(type, x)), "signalling NaN became " + std::to_string(x));
        }
}

void test_arguments() {
    for (const DType type : kTypes) check::that(dtype_from_string(to_string(type)) == type, "dtype names");
    check::throws<std::invalid_argument>([] { dtype_from_string("int8"); }, "float32, float64, bfloat16 or float16",
                                         "dtype_from_string");
    const std::vector<ReduceSource> many(65);
    check::throws<std::invalid_argument>([&] { reduce({}, many, {}, nullptr); }, "65 sources", "too many sources");
    const std::vector<Segment> bad{{0, 0, -1, 0, 0}};
    check::throws<std::invalid_argument>([&] { reduce({}, {}, bad, nullptr); }, "numel -1", "negative segment");
}

}  // namespace

int main() {
    std::int64_t numel = 0;
    const std::vector<Segment> segments = make_segments(numel);
    test_arguments();
    test_conversions();
    test_reduce(segments, numel);
    test_pack_and_scale(segments, numel);
    std::fprintf(stderr, "isa %s\n", kernel_isa());
    return check::result();
}
