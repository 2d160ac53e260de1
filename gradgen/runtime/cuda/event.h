// Events between lanes and ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>

namespace gradgen::cuda {

/// A CUDA event and what must be known before it may be waited for: an event of a capture means nothing outside of it,
/// and one from before a capture nothing inside.
struct Event {
    cudaEvent_t handle = nullptr;
    std::atomic<bool> recorded{false};
    std::atomic<unsigned long long> capture{0};  // of the graph in which it was recorded; 0: none
};

/// From a pool that keeps events for good: another rank may still hold the address of one whose owner is gone.
std::shared_ptr<void> make_event(int device);

/// The capture that a stream belongs to, 0: none.
unsigned long long capture_of(cudaStream_t stream);

void record(Event& event, cudaStream_t stream);
void wait(cudaStream_t stream, const Event& event);

}  // namespace gradgen::cuda
