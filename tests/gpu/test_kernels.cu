// The CUDA kernels against the CPU kernels, bit for bit, over types, sizes, offsets, sources, roundings and scales.
// `test_kernels --small` runs every 23rd case and small blocks only, for compute-sanitizer.
#include <algorithm>
#include <stdexcept>

#include "device_buffer.h"
#include "gradgen/cuda_kernels.h"

using namespace gradgen;
using gpu::Buffer;
using gpu::Device;
using gpu::Values;

namespace {

constexpr std::int64_t kSizes[] = {0, 1, 7, 8, 9, 63, 64, 65, 1023, 4097};
constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

bool small = false;
std::int64_t turn = 0, done = 0;

struct Layout {
    std::string name;
    std::vector<Segment> segments;
    std::int64_t numel = 0;
    int shift = 0;  // of the base pointers, elements
};

/// `aligned`: as an arena of whole or flat weights. `rows`: slices that start inside of a group of 8, packed shards.
/// `odd`: any offsets, elements up to 2^35 where the counter's second word changes. `bases`: pointers off by one
/// element.
std::vector<Layout> make_layouts() {
    std::vector<Layout> layouts = {{"aligned"}, {"rows"}, {"odd"}, {"bases", {}, 0, 1}};
    for (Layout& layout : layouts) {
        const bool odd = layout.name == "odd";
        std::int64_t arena = odd ? 5 : 64, shard = odd ? 3 : 0;
        std::uint32_t uid = 1;
        for (const std::int64_t size : kSizes) {
            constexpr std::int64_t kOddStarts[] = {0, 8, 3, 1001, (std::int64_t{1} << 35) - 72};
            const std::int64_t start = layout.name == "rows" ? 13 * uid : odd ? kOddStarts[uid % 5] : 64 * (uid % 3);
            const std::int64_t source = odd ? arena : arena + start % 64;
            layout.segments.push_back({source, shard, size, start, uid * 77777u & 0xffffffu});
            arena = odd ? source + size + 3 + uid % 9 : (source + size + 127) / 64 * 64;
            shard += odd ? size + 1 + uid % 5 : (size + 63) / 64 * 64;
            ++uid;
        }
        layout.numel = std::max(arena, shard) + 64;
    }
    return layouts;
}

struct Case {
    DType target, source, wire;
    bool stochastic, overwrite, in_arena, in_place;
    double scale;
    float device_scale;  // 0: none
    int world;
    Values values;
};

std::string describe(const Case& c, const Layout& layout) {
    constexpr const char* kValues[] = {" mixed", " special", " tiny", " huge"};
    return std::string(to_string(c.target)) + " <- " + std::to_string(c.world) + " x " +
           std::string(to_string(c.source)) + " wire " + std::string(to_string(c.wire)) +
           (c.stochastic ? " stochastic" : " nearest") + (c.overwrite ? " overwrite" : " add") +
           (c.in_arena ? " arena" : " shard") + (c.in_place ? " in-place" : "") + " scale " + check::number(c.scale) +
           " x " + check::number(c.device_scale) + kValues[static_cast<int>(c.values)] + " " + layout.name;
}

ReduceStats total_of(Device<CudaStats>& stats) {
    Device<ReduceStats> total;
    cuda_total(stats.get(), total.get(), nullptr);
    return total.read();
}

void run(const Case& c, const Layout& layout, const CudaSegments& table) {
    if (small && turn % 23 != 0) return;
    ++done;
    const std::string name = describe(c, layout);
    std::vector<Buffer> data;
    std::vector<ReduceSource> host, device;
    data.reserve(static_cast<std::size_t>(c.world));
    for (int r = 0; r < c.world; ++r) {
        const bool packed = r % 3 == 1, missing = c.world > 2 && r % 4 == 0;  // also the first
        Buffer& buffer = data.emplace_back(c.source, layout.numel, layout.shift);
        buffer.fill(layout.segments, !packed, c.values, static_cast<std::uint64_t>(r + 1));
        buffer.upload();
        host.push_back({missing ? nullptr : buffer.host(), packed});
        device.push_back({missing ? nullptr : buffer.device(), packed});
    }
    Buffer target(c.target, layout.numel, layout.shift);
    target.fill(layout.segments, c.in_arena, c.values, 99);
    target.upload();
    if (c.in_place) {
        host.push_back({target.host(), !c.in_arena});
        device.push_back({target.device(), !c.in_arena});
    }
    ReduceArgs args{c.target, target.device(), c.in_arena, c.source, c.wire, c.overwrite, c.scale, {}, {}};
    args.rounding = {c.stochastic, 0x123456789abcdefu, (7ull << 32) + 5, 3, RoundingSite::reduce};
    args.wire_rounding = {c.stochastic, 0x123456789abcdefu, (7ull << 32) + 5, 3, RoundingSite::wire};
    Device<CudaStats> stats;
    stats.zero();
    const Device<float> factor(c.device_scale);
    cuda_reduce(args, device, table, turn % 5 ? stats.get() : nullptr, c.device_scale ? factor.get() : nullptr,
                nullptr);

    args.target = target.host();
    if (c.device_scale && c.target == DType::f64) args.scale = c.scale * static_cast<double>(c.device_scale);
    if (c.device_scale && c.target != DType::f64) args.scale = static_cast<float>(c.scale) * c.device_scale;
    ReduceStats want;
    reduce(args, host, layout.segments, &want);
    target.compare(name);
    if (turn % 5) gpu::compare_stats(name, total_of(stats), want);
    if (c.world == 1 || turn % 5 == 0) {
        stats.zero();
        cuda_measure(c.target, target.device(), c.in_arena, table, stats.get(), nullptr);
        gpu::compare_stats(name + " measure", total_of(stats),
                           measure(c.target, target.host(), c.in_arena, layout.segments));
    }
}

void test_reduce(const std::vector<Layout>& layouts) {
    std::vector<CudaSegments> tables;
    for (const Layout& layout : layouts) tables.emplace_back(layout.segments);
    for (const DType target : kTypes)
        for (const DType source : kTypes)
            for (const DType wire : kTypes) {
                if (!can_reduce(target, source, wire)) {
                    const ReduceArgs args{target, nullptr, false, source, wire, true, 1.0, {}, {}};
                    check::throws<std::invalid_argument>(
                        [&] { cuda_reduce(args, {}, tables[0], nullptr, nullptr, nullptr); }, "no kernel", "types");
                    continue;
                }
                for (const bool stochastic : {false, true})
                    for (const bool overwrite : {false, true})
                        for (const int world : {0, 1, 2, 3, 4, 8, 63}) {
                            for (const Values kind : {Values::mixed, Values::special, Values::tiny, Values::huge}) {
                                if (kind != Values::mixed && world != 1 && world != 4) continue;
                                ++turn;
                                const auto which = static_cast<std::size_t>(turn) % layouts.size();
                                const bool in_place = target == source && turn % 2;
                                const Case c{target,
                                             source,
                                             wire,
                                             stochastic,
                                             overwrite,
                                             turn % 7 < 3,
                                             in_place,
                                             turn % 3 ? 1.0 / 3 : 1.0,
                                             turn % 4 == 1 ? 0.3f : 0.0f,
                                             world,
                                             kind};
                                run(c, layouts[which], tables[which]);
                            }
                        }
            }
}

void test_pack_and_scale(const Layout& layout) {
    const CudaSegments table(layout.segments);
    for (const DType in : kTypes)
        for (const DType out : kTypes)
            for (const bool stochastic : {false, true}) {
                if (in != out && !can_reduce(out, in, in)) continue;
                const std::string name =
                    "pack " + std::string(to_string(in)) + " to " + std::string(to_string(out)) + " " + layout.name;
                Buffer from(in, layout.numel, layout.shift), to(out, layout.numel, layout.shift);
                from.fill(layout.segments, true, Values::special, 4);
                to.fill(layout.segments, false, Values::mixed, 5);
                from.upload();
                to.upload();
                const RoundingKey key{stochastic, 11, 12, 13, RoundingSite::wire};
                cuda_pack(out, to.device(), in, from.device(), table, key, nullptr);
                pack(out, to.host(), in, from.host(), layout.segments, key);
                to.compare(name);
                if (in != out) continue;
                const Device<float> factor(0.3f);
                cuda_scale(in, to.device(), false, table, 0.5, factor.get(), nullptr);
                scale(in, to.host(), false, layout.segments,
                      in == DType::f64 ? 0.5 * static_cast<double>(0.3f) : 0.5f * 0.3f);
                to.compare("scale " + name);
            }
}

/// Many tiles a thread block, or many weights: the sums of squares of two runs are equal bit for bit.
void test_block(const std::string& name, std::int64_t weights, std::int64_t numel) {
    std::vector<Segment> segments;
    std::int64_t at = 0;
    for (std::int64_t w = 0; w < weights; ++w) {
        segments.push_back({at, at, numel, 0, static_cast<std::uint32_t>(w)});
        at += (numel + 63) / 64 * 64;
    }
    const CudaSegments table(segments);
    Buffer target(DType::bf16, at), source(DType::bf16, at);
    target.fill(segments, true, Values::mixed, 1);
    source.fill(segments, true, Values::mixed, 2);
    source.upload();
    ReduceArgs args{DType::bf16, target.device(), true, DType::bf16, DType::bf16, false, 0.5, {}, {}};
    args.rounding = {true, 3, 4, 5, RoundingSite::reduce};
    double squares[2];
    for (double& result : squares) {
        target.upload();
        Device<CudaStats> stats;
        stats.zero();
        const ReduceSource from{source.device(), false};
        cuda_reduce(args, std::span(&from, 1), table, stats.get(), nullptr, nullptr);
        result = total_of(stats).sum_squares;
    }
    args.target = target.host();
    const ReduceSource from{source.host(), false};
    ReduceStats want;
    reduce(args, std::span(&from, 1), segments, &want);
    target.compare(name);
    gpu::compare_stats(name, {squares[0], 0}, want);
    check::that(squares[0] == squares[1], name + ": two runs have different sums of squares");
}

/// A captured launch, replayed after its counters moved on, draws the bits of the new step; uids move with the offset.
void test_graph(const Layout& layout) {
    const CudaSegments table(layout.segments);
    Buffer target(DType::bf16, layout.numel), source(DType::f32, layout.numel);
    source.fill(layout.segments, true, Values::mixed, 8);
    source.upload();
    Device<CudaCounters> counters(CudaCounters{});
    ReduceArgs args{DType::bf16, target.device(), true, DType::f32, DType::f32, true, 1.0, {}, {}};
    args.rounding = {true, 21, 1, 1, RoundingSite::reduce};
    const ReduceSource from{source.device(), false};
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    gpu::ok(cudaStreamCreate(&stream));
    gpu::ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cuda_reduce(args, std::span(&from, 1), table, nullptr, nullptr, stream, counters.get(), 1000);
    cuda_scale(DType::bf16, target.device(), true, table, 2.0, nullptr, stream);
    gpu::ok(cudaStreamEndCapture(stream, &graph));
    gpu::ok(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<Segment> moved = layout.segments;
    for (Segment& part : moved) part.weight += 1000;
    args.target = target.host();
    const ReduceSource host{source.host(), false};
    for (const CudaCounters now : {CudaCounters{9, 2}, CudaCounters{(3ull << 32) + 9, 7}}) {
        target.fill(layout.segments, true, Values::mixed, 9);
        target.upload();
        counters.set(now);
        gpu::ok(cudaGraphLaunch(executable, stream));
        gpu::ok(cudaStreamSynchronize(stream));
        args.rounding.step = now.step;
        args.rounding.micro_step = now.micro_step;
        reduce(args, std::span(&host, 1), moved, nullptr);
        scale(DType::bf16, target.host(), true, moved, 2.0);
        target.compare("graph at step " + std::to_string(now.step));
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

void test_arguments() {
    const CudaSegments empty(std::span<const Segment>{});
    cuda_reduce({}, {}, empty, nullptr, nullptr, nullptr);
    check::that(empty.tile_count() == 0 && empty.numel() == 0, "an empty table");
    const std::vector<ReduceSource> many(65);
    check::throws<std::invalid_argument>([&] { cuda_reduce({}, many, empty, nullptr, nullptr, nullptr); }, "65 sources",
                                         "sources");
    const Segment bad{0, 0, -1, 0, 0};
    check::throws<std::invalid_argument>([&] { CudaSegments table(std::span(&bad, 1)); }, "numel -1",
                                         "negative segment");
    if (!small) check::throws<Error>([] { cuda_zero(nullptr, 16, nullptr); }, "invalid argument", "a CUDA error");
    Device<std::uint64_t> word;
    word.set(~0ull);
    cuda_zero(word.get(), 5, nullptr);
    check::that(word.read() == 0xffffff0000000000u, "cuda_zero writes its bytes");
}

}  // namespace

int main(int argc, char**) {
    small = argc > 1;
    try {
        const std::vector<Layout> layouts = make_layouts();
        test_arguments();
        test_reduce(layouts);
        for (const Layout& layout : layouts) test_pack_and_scale(layout);
        test_graph(layouts[0]);
        test_block("a block of 4000 weights", small ? 40 : 4000, 73);
        test_block("a block of 12 weights", 12, small ? 5000 : 1'000'003);
        gpu::ok(cudaDeviceSynchronize());
    } catch (const std::exception& error) {
        check::that(false, error.what());
    }
    std::printf("%lld cases, %d checks failed\n", static_cast<long long>(done), check::failures);
    return check::result();
}
