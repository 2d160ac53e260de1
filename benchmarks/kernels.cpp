// Times the CPU kernels on one thread, interleaved with memcpy, and prints one JSON object.
//
// Every case runs once a round; a case's time is the median over rounds, and its ratio is (bytes read plus written) /
// time over the same for memcpy in the same run. Buffers are far larger than the caches and live at different offsets,
// so that no two streams share a set.
#include "gradgen/kernels.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <vector>

using namespace gradgen;

namespace {

constexpr int kMostSources = 8;

/// Time that this thread ran: on a shared machine, time spent waiting for a core is no property of a kernel.
double thread_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Memory {
    std::unique_ptr<void, decltype(&std::free)> owner{nullptr, &std::free};
    unsigned char* data = nullptr;
    Memory(std::size_t bytes, std::size_t shift) : owner(std::aligned_alloc(4096, bytes + 65536), &std::free) {
        data = static_cast<unsigned char*>(owner.get()) + shift;
    }
};

struct Case {
    std::string name;
    double bytes;
    std::function<void()> run;
    std::vector<double> seconds = {};
};

class Bench {
  public:
    explicit Bench(std::int64_t bytes) : bytes_(bytes) {
        for (std::size_t i = 0; i < kMostSources + 1; ++i) {
            buffers_.emplace_back(static_cast<std::size_t>(bytes), i * 4096 + i * 576 % 4096);
            fill(buffers_.back().data);
        }
        add("memcpy", 2.0 * static_cast<double>(bytes),
            [this] { std::memcpy(buffers_[0].data, buffers_[1].data, static_cast<std::size_t>(bytes_)); });
    }

    /// target += (or =) the sum of `world` sources; the larger of the two types fills a buffer.
    void reduction(const std::string& name, DType target, DType source, int world, bool overwrite, bool stochastic,
                   bool stats) {
        const auto numel = bytes_ / static_cast<std::int64_t>(std::max(size_of(target), size_of(source)));
        const double bytes = static_cast<double>(numel) * (static_cast<double>(size_of(target)) * (overwrite ? 1 : 2) +
                                                           static_cast<double>(size_of(source)) * world);
        add(name, bytes, [=, this] {
            ReduceArgs args{
                target, buffers_[0].data, false, source, source, overwrite, world > 1 ? 1.0 / world : 1.0, {}, {}};
            args.rounding = {stochastic, 1, ++step_, 0, RoundingSite::reduce};
            ReduceSource sources[kMostSources];
            for (int r = 0; r < world; ++r) sources[r] = {buffers_[static_cast<std::size_t>(r) + 1].data, true};
            const Segment all{0, 0, numel, 0, 1};
            ReduceStats result;
            reduce(args, std::span(sources, static_cast<std::size_t>(world)), std::span(&all, 1),
                   stats ? &result : nullptr);
        });
    }

    void packing(const std::string& name, DType out, DType in, bool stochastic) {
        const auto numel = bytes_ / static_cast<std::int64_t>(std::max(size_of(out), size_of(in)));
        add(name, static_cast<double>(numel) * static_cast<double>(size_of(out) + size_of(in)), [=, this] {
            const Segment all{0, 0, numel, 0, 1};
            pack(out, buffers_[0].data, in, buffers_[1].data, std::span(&all, 1),
                 {stochastic, 1, ++step_, 0, RoundingSite::wire});
        });
    }

    void measuring(const std::string& name, DType type) {
        add(name, static_cast<double>(bytes_), [=, this] {
            const Segment all{0, 0, bytes_ / static_cast<std::int64_t>(size_of(type)), 0, 1};
            sink_ = measure(type, buffers_[1].data, false, std::span(&all, 1)).sum_squares;
        });
    }

    void scaling(const std::string& name, DType type) {
        add(name, 2.0 * static_cast<double>(bytes_), [=, this] {
            const Segment all{0, 0, bytes_ / static_cast<std::int64_t>(size_of(type)), 0, 1};
            scale(type, buffers_[0].data, false, std::span(&all, 1), 0.999);
        });
    }

    void run(int rounds) {
        const int repeats = static_cast<int>(std::max<std::int64_t>(1, (8 << 20) / bytes_));
        for (int round = -1; round < rounds; ++round) {  // the first round warms up
            fill(buffers_[0].data);
            for (Case& c : cases_) {
                const double start = thread_seconds();
                for (int i = 0; i < repeats; ++i) c.run();
                const double seconds = (thread_seconds() - start) / repeats;
                if (round >= 0) c.seconds.push_back(seconds);
            }
        }
    }

    void print() {
        std::printf("{\"isa\": \"%s\", \"bytes\": %lld, \"cases\": [", kernel_isa(), static_cast<long long>(bytes_));
        const char* separator = "";
        for (Case& c : cases_) {
            std::sort(c.seconds.begin(), c.seconds.end());
            std::printf(
                "%s\n  {\"name\": \"%s\", \"traffic\": %.0f, \"median\": %.6g, \"best\": %.6g, \"worst\": %.6g}",
                separator, c.name.c_str(), c.bytes, c.seconds[c.seconds.size() / 2], c.seconds.front(),
                c.seconds.back());
            separator = ",";
        }
        std::printf("\n]}\n");
    }

  private:
    void add(const std::string& name, double bytes, std::function<void()> run) {
        cases_.push_back({name, bytes, std::move(run)});
    }

    /// Patterns that are moderate numbers as fp32, bf16 and fp16 alike: 0x3cXX and 0xbcXX halves.
    void fill(unsigned char* data) const {
        std::uint32_t state = 1;
        for (std::int64_t i = 0; i < bytes_; i += 2) {
            state = state * 1664525u + 1013904223u;
            const auto half = static_cast<std::uint16_t>(0x3c00u | (state >> 16 & 0x80ffu));
            std::memcpy(data + i, &half, 2);
        }
    }

    std::int64_t bytes_;
    std::vector<Memory> buffers_;
    std::vector<Case> cases_;
    std::uint64_t step_ = 0;
    volatile double sink_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    const int kibibytes = argc > 1 ? std::atoi(argv[1]) : 65536, rounds = argc > 2 ? std::atoi(argv[2]) : 11;
    Bench bench(std::int64_t{kibibytes} << 10);
    struct Pair {
        const char* name;
        DType target, source;
        bool stochastic;
    };
    constexpr Pair kPairs[] = {
        {"fp32 %s fp32", DType::f32, DType::f32, false},   {"fp32 %s bf16", DType::f32, DType::bf16, false},
        {"bf16 %s bf16", DType::bf16, DType::bf16, false}, {"bf16 %s bf16 stochastic", DType::bf16, DType::bf16, true},
        {"bf16 %s fp32", DType::bf16, DType::f32, false},  {"bf16 %s fp32 stochastic", DType::bf16, DType::f32, true},
        {"fp16 %s fp16", DType::f16, DType::f16, false},   {"fp16 %s fp16 stochastic", DType::f16, DType::f16, true},
        {"fp64 %s fp64", DType::f64, DType::f64, false}};
    for (const Pair& p : kPairs) {
        for (const bool stats : {false, true}) {
            for (const int world : {1, 2, 4, 8}) {
                const bool core = p.target != DType::f16 && p.target != DType::f64 &&
                                  !(p.target == DType::bf16 && p.source == DType::f32);
                if (world > 1 && (!core || stats)) continue;
                char name[64];
                std::snprintf(name, sizeof name, p.name,
                              world == 1 ? "+=" : ("= mean of " + std::to_string(world)).c_str());
                bench.reduction(name + std::string(stats ? ", stats" : ""), p.target, p.source, world, world > 1,
                                p.stochastic, stats);
            }
        }
    }
    bench.packing("pack fp32 to bf16", DType::bf16, DType::f32, false);
    bench.packing("pack fp32 to bf16 stochastic", DType::bf16, DType::f32, true);
    bench.packing("pack fp32 to fp16", DType::f16, DType::f32, false);
    bench.measuring("measure fp32", DType::f32);
    bench.measuring("measure bf16", DType::bf16);
    bench.scaling("scale fp32", DType::f32);
    bench.scaling("scale bf16", DType::bf16);
    bench.run(rounds);
    bench.print();
}
