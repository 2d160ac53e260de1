// Times the CUDA kernels block by block over real layouts and writes one JSON object (tests/gpu/run.sh builds and runs
// it).
//
// Every case runs once a round, interleaved with device-to-device copies of the same blocks; a case's time is the
// median over rounds and its ratio is (bytes read plus written) / time over the same for the copy of this run. Each
// block has memory of its own, in total far more than the L2 cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gradgen/cuda_kernels.h"
#include "gradgen/error.h"
#include "gradgen/layout.h"

using namespace gradgen;

namespace {

constexpr int kWorld = 8;

void ok(cudaError_t status) {
    if (status != cudaSuccess) throw Error(cudaGetErrorString(status));
}

struct Free {
    void operator()(void* data) const { cudaFree(data); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(std::size_t bytes) {
    void* data = nullptr;
    ok(cudaMalloc(&data, bytes));
    return Memory(data);
}

/// Random bf16 values (or halves of fp32 ones) in +-[0.5, 2): zeros run faster than real data.
__global__ void fill(std::uint16_t* data, std::int64_t numel, std::uint32_t seed) {
    for (std::int64_t i = blockIdx.x * 256 + threadIdx.x; i < numel; i += gridDim.x * 256) {
        std::uint32_t x = static_cast<std::uint32_t>(i) * 0x9E3779B9u + seed;
        x = (x ^ x >> 16) * 0x85ebca6bu;
        x = (x ^ x >> 13) * 0xc2b2ae35u;
        data[i] = static_cast<std::uint16_t>((x & 0x80ff) | 0x3f00);
    }
}

BlockDesc describe(std::int64_t hidden, std::int64_t kv, std::int64_t ffn, bool bias) {
    BlockDesc block;
    const auto add = [&](const char* id, std::vector<std::int64_t> shape) {
        WeightDesc weight;
        weight.id = weight.name = id;
        weight.shape = std::move(shape);
        block.weights.push_back(weight);
    };
    add("input_norm", {hidden});
    add("post_norm", {hidden});
    add("q", {hidden, hidden});
    add("k", {kv, hidden});
    add("v", {kv, hidden});
    add("o", {hidden, hidden});
    if (bias) {
        add("q_bias", {hidden});
        add("k_bias", {kv});
        add("v_bias", {kv});
    }
    add("gate", {ffn, hidden});
    add("up", {ffn, hidden});
    add("down", {hidden, ffn});
    return block;
}

struct Case {
    std::string name;
    double bytes = 0;  // of one block
    std::function<void(int)> run;
    std::vector<double> seconds = {};
    double median() {
        std::sort(seconds.begin(), seconds.end());
        return seconds[seconds.size() / 2];
    }
};

class Bench {
  public:
    Bench(std::string model, const BlockDesc& block, int blocks) : model_(std::move(model)), blocks_(blocks) {
        const ArenaLayout whole = layout_block(block, 1, 0), sharded = layout_block(block, kWorld, 0);
        shard_ = sharded.shard_numel;
        whole_ = std::make_unique<CudaSegments>(whole.segments(0, 1));
        mine_ = std::make_unique<CudaSegments>(sharded.segments(0, 1));
        bytes_ = static_cast<std::size_t>(sharded.numel) * 2;
        for (int i = 0; i < 2 * blocks; ++i) {
            memory_.push_back(allocate(bytes_));
            fill<<<1024, 256>>>(static_cast<std::uint16_t*>(memory_.back().get()), sharded.numel,
                                static_cast<std::uint32_t>(i));
        }
        stats_ = allocate(sizeof(CudaStats));
        scale_ = allocate(sizeof(float));
        counters_ = allocate(sizeof(CudaCounters));
        const float half = 0.5f;
        ok(cudaMemcpy(scale_.get(), &half, sizeof half, cudaMemcpyHostToDevice));
        cuda_zero(counters_.get(), sizeof(CudaCounters), nullptr);
        cuda_zero(stats_.get(), sizeof(CudaStats), nullptr);
        add_cases();
    }

    void run(int rounds) {
        cudaEvent_t start, stop;
        ok(cudaEventCreate(&start));
        ok(cudaEventCreate(&stop));
        for (int round = -2; round < rounds; ++round) {
            for (Case& c : cases_) {
                ok(cudaEventRecord(start));
                for (int block = 0; block < blocks_; ++block) c.run(block);
                ok(cudaEventRecord(stop));
                ok(cudaEventSynchronize(stop));
                float milliseconds = 0;
                ok(cudaEventElapsedTime(&milliseconds, start, stop));
                if (round >= 0) c.seconds.push_back(milliseconds * 1e-3);
            }
        }
        cudaEventDestroy(start);
        cudaEventDestroy(stop);
    }

    void report(std::FILE* json, bool last) {
        const double copy = cases_[0].bytes * blocks_ / cases_[0].median();
        for (std::size_t i = 0; i < cases_.size(); ++i) {
            Case& c = cases_[i];
            const double rate = c.bytes * blocks_ / c.median(), micro = c.median() / blocks_ * 1e6;
            std::printf("%-14s %-48s %8.1f us %7.0f GB/s %6.3f of copy\n", model_.c_str(), c.name.c_str(), micro,
                        rate * 1e-9, rate / copy);
            if (!json) continue;
            std::fprintf(json,
                         "    {\"model\": \"%s\", \"case\": \"%s\", \"us_per_block\": %.2f, \"gb_per_s\": %.1f, "
                         "\"of_copy\": %.4f}%s\n",
                         model_.c_str(), c.name.c_str(), micro, rate * 1e-9, rate / copy,
                         last && i + 1 == cases_.size() ? "" : ",");
        }
    }

  private:
    void* target(int block) const { return memory_[static_cast<std::size_t>(2 * block)].get(); }
    void* source(int block) const { return memory_[static_cast<std::size_t>(2 * block + 1)].get(); }
    CudaStats* stats() const { return static_cast<CudaStats*>(stats_.get()); }
    const float* scale() const { return static_cast<const float*>(scale_.get()); }

    void add_cases() {
        cases_.push_back({"copy", 2.0 * static_cast<double>(bytes_), [this](int block) {
                              ok(cudaMemcpyAsync(target(block), source(block), bytes_, cudaMemcpyDeviceToDevice));
                          }});
        accumulate("accumulate bf16 += bf16, nearest", false, false, false);
        accumulate("accumulate bf16 += bf16, stochastic", true, false, false);
        accumulate("accumulate stochastic, device counters", true, false, true);
        accumulate("accumulate stochastic, scale and statistics", true, true, false);
        reduction("reduce 8 x bf16 -> bf16 shard, stochastic", DType::bf16, true, false);
        reduction("reduce to bf16 stochastic, scale and statistics", DType::bf16, true, true);
        reduction("reduce 8 x bf16 -> fp32 shard", DType::f32, false, false);
        cases_.push_back({"measure bf16", 2.0 * static_cast<double>(whole_->numel()), [this](int block) {
                              cuda_measure(DType::bf16, target(block), true, *whole_, stats(), nullptr);
                          }});
        cases_.push_back({"pack bf16 slice", 4.0 * static_cast<double>(mine_->numel()), [this](int block) {
                              cuda_pack(DType::bf16, target(block), DType::bf16, source(block), *mine_, {}, nullptr);
                          }});
        cases_.push_back(
            {"zero", static_cast<double>(bytes_), [this](int block) { cuda_zero(target(block), bytes_, nullptr); }});
    }

    ReduceArgs arguments(DType target, bool stochastic) {
        ReduceArgs args;
        args.target_type = target;
        args.source_type = args.wire_type = DType::bf16;
        args.rounding = {stochastic, 1, ++step_, 0, RoundingSite::reduce};
        return args;
    }

    void accumulate(const char* name, bool stochastic, bool full, bool counted) {
        cases_.push_back({name, 6.0 * static_cast<double>(whole_->numel()), [=, this](int block) {
                              ReduceArgs args = arguments(DType::bf16, stochastic);
                              args.target = target(block);
                              args.target_in_arena = true;
                              args.overwrite = false;
                              const ReduceSource from{source(block), false};
                              cuda_reduce(args, std::span(&from, 1), *whole_, full ? stats() : nullptr,
                                          full ? scale() : nullptr, nullptr,
                                          counted ? static_cast<const CudaCounters*>(counters_.get()) : nullptr);
                          }});
    }

    void reduction(const char* name, DType type, bool stochastic, bool full) {
        const double bytes = static_cast<double>(mine_->numel()) * (2.0 * kWorld + static_cast<double>(size_of(type)));
        cases_.push_back({name, bytes, [=, this](int block) {
                              ReduceArgs args = arguments(type, stochastic);
                              args.target = target(block);
                              ReduceSource from[kWorld];
                              for (int r = 0; r < kWorld; ++r)
                                  from[r] = {static_cast<char*>(source(block)) + 2 * shard_ * r, true};
                              cuda_reduce(args, from, *mine_, full ? stats() : nullptr, full ? scale() : nullptr,
                                          nullptr);
                          }});
    }

    std::string model_;
    int blocks_;
    std::int64_t shard_ = 0;
    std::size_t bytes_ = 0;
    std::unique_ptr<CudaSegments> whole_, mine_;
    std::vector<Memory> memory_;
    Memory stats_, scale_, counters_;
    std::uint64_t step_ = 0;
    std::vector<Case> cases_;
};

void benchmark(const char* path, const char* driver, const char* command) {
    std::FILE* json = path ? std::fopen(path, "w") : nullptr;
    cudaDeviceProp device{};
    int runtime = 0;
    ok(cudaGetDeviceProperties(&device, 0));
    ok(cudaRuntimeGetVersion(&runtime));
    if (json) {
        std::fprintf(
            json,
            "{\n  \"machine\": \"%s, %d multiprocessors, %.0f GiB\",\n  \"driver\": \"%s\",\n  \"cuda\": \"%d.%d\",\n",
            device.name, device.multiProcessorCount, static_cast<double>(device.totalGlobalMem) / 1073741824.0, driver,
            runtime / 1000, runtime % 1000 / 10);
        std::fprintf(json, "  \"command\": \"%s\",\n  \"cases\": [\n", command);
    }
    {
        Bench bench("Llama-7B", describe(4096, 4096, 11008, false), 8);
        bench.run(21);
        bench.report(json, false);
    }
    Bench bench("Qwen2.5-0.5B", describe(896, 128, 4864, true), 24);
    bench.run(51);
    bench.report(json, true);
    if (json) std::fprintf(json, "  ]\n}\n");
    if (json) std::fclose(json);
}

}  // namespace

/// gpu_kernels [json file] [driver version] [command]
int main(int argc, char** argv) {
    try {
        benchmark(argc > 1 ? argv[1] : nullptr, argc > 2 ? argv[2] : "unknown",
                  argc > 3 ? argv[3] : "benchmarks/gpu_kernels");
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gpu_kernels: %s\n", error.what());
        return 1;
    }
}
