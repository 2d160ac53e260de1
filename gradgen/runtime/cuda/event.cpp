#include "event.h"

#include <map>
#include <mutex>
#include <vector>

#include "check.h"

namespace gradgen::cuda {
namespace {

struct Pool {
    std::mutex mutex;
    std::map<int, std::vector<Event*>> idle;
};

Pool& pool() {
    static auto* const only = new Pool;  // never destroyed: managers may outlive static objects
    return *only;
}

}  // namespace

std::shared_ptr<void> make_event(int device) {
    Event* event = nullptr;
    {
        const std::lock_guard lock(pool().mutex);
        auto& idle = pool().idle[device];
        if (!idle.empty()) event = idle.back(), idle.pop_back();
    }
    if (event == nullptr) {
        event = new Event;
        check(cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming), "cudaEventCreate");
    }
    event->recorded = false;
    event->capture = 0;
    return {event, [device](void* done) {
                const std::lock_guard lock(pool().mutex);
                pool().idle[device].push_back(static_cast<Event*>(done));
            }};
}

unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

void record(Event& event, cudaStream_t stream) {
    event.capture = capture_of(stream);
    check(cudaEventRecord(event.handle, stream), "cudaEventRecord");
    event.recorded = true;
}

void wait(cudaStream_t stream, const Event& event) {
    if (!event.recorded) return;
    const unsigned long long capture = event.capture, current = capture_of(stream);
    // Joining a stream to a capture is what waiting for one of its events means.
    if (capture != current && !(capture != 0 && current == 0)) return;
    if (capture != 0 && current == 0) {
        // Either this stream joins a capture that goes on, or the event is a leftover of one that has ended.
        const cudaError_t status = cudaStreamWaitEvent(stream, event.handle, 0);
        if (status == cudaErrorCapturedEvent || status == cudaErrorInvalidValue) {
            cudaGetLastError();
            return;
        }
        return check(status, "cudaStreamWaitEvent");
    }
    check(cudaStreamWaitEvent(stream, event.handle, 0), "cudaStreamWaitEvent");
}

}  // namespace gradgen::cuda
