// Host time of get and notify a block at one rank, from C++: the calls that a trainer without Python makes.
// Prints one line of JSON: microseconds a block, medians. tests/gpu/run.sh builds it; gpu_manager.py runs it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

#include "manager.h"  // generated/llama

namespace {

using namespace gradgen;
using models::llama::Block;
using models::llama::Weight;
using Manager = models::llama::UnshardedGradientManager;
using Clock = std::chrono::steady_clock;

constexpr int kMicroSteps = 4, kSteps = 100;

void wait_for_gpu() {
    if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess)
        throw std::runtime_error(cudaGetErrorString(status));
}

void visit(Manager& grads, Weight weight) {
    grads.get_non_block_full(weight);
    grads.notify_non_block(weight);
}

/// Microseconds a block, one value a micro-step. The GPU is idle when the clock starts, so no queue is full.
double host_time(Rounding rounding) {
    Options options;
    options.dtype = DType::bf16;
    options.rounding = rounding;
    options.device = {DeviceKind::cuda, 0};
    const auto config = models::llama::Config::preset("qwen2.5-0.5b");
    Manager grads(config, single_communicator(), options);
    std::vector<double> times;
    for (int step = 0; step < kSteps; ++step)
        for (int m = 0; m < kMicroSteps; ++m) {
            grads.start_micro_step(m, kMicroSteps);
            visit(grads, Weight::lm_head);
            visit(grads, Weight::final_norm);
            wait_for_gpu();
            const auto start = Clock::now();
            for (std::int64_t layer = config.layers - 1; layer >= 0; --layer) {
                grads.decoder_full(layer);
                grads.notify_decoder(layer);
            }
            const std::chrono::duration<double, std::micro> spent = Clock::now() - start;
            if (step > 0) times.push_back(spent.count() / static_cast<double>(config.layers));
            visit(grads, Weight::embedding);
            grads.end_micro_step();
        }
    wait_for_gpu();
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
}

}  // namespace

int main() {
    try {
        const double direct = host_time(Rounding::nearest), stochastic = host_time(Rounding::stochastic);
        std::printf("{\"direct_us\": %.3f, \"stochastic_us\": %.3f}\n", direct, stochastic);
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gpu_host_time: %s\n", error.what());
        return 1;
    }
}
