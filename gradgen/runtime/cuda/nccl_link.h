// A connection of ranks by NCCL: made, tried out, registered memory with, and ended.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

#include "gradgen/communicator.h"
#include "nccl.h"

namespace gradgen::cuda {

/// Not for several threads at once, but abort() may be called while another thread is inside one of NCCL's functions.
class NcclLink {
  public:
    NcclLink(const Nccl& nccl, int rank, int world, int device)
        : nccl_(nccl), rank_(rank), world_(world), device_(device) {}

    /// Collective: every rank hears of every rank's failure, so that none goes on alone. Throws CommError. NCCL itself
    /// has no time limit here: ranks meet on `host` first, so that only one that dies in between holds up the others.
    NcclComm* create(Communicator& host);
    /// From here on the connection is used (nullptr: none is).
    void use(NcclComm* comm);
    NcclComm* comm() const { return comm_; }
    /// A few bytes by each collective, so that NCCL sets up its channels now: later the host would wait for other ranks
    /// inside a call that is meant to return at once. The work is on a stream of its own, which the caller destroys.
    int try_out(NcclComm* comm, cudaStream_t stream, void* scratch) const;
    static constexpr std::size_t scratch_bytes(int world) { return 2 * kPiece * static_cast<std::size_t>(world); }

    /// Ends the connection in good order: nothing may be in flight.
    void destroy();
    /// Ends it whatever is in flight: kernels and calls that wait for other ranks return.
    void abort();

    /// User buffer registration, where the library has it; the library moves the bytes in any case.
    void enroll(void* data, std::size_t bytes);
    void forget(const void* data);

    std::string explain(int result) const;

  private:
    static constexpr std::size_t kPiece = 16;  // bytes of a slice in try_out
    struct Registered {
        void* data = nullptr;
        std::size_t bytes = 0;
        void* handle = nullptr;
    };
    void enroll(Registered& entry) const;
    std::string version() const;

    const Nccl& nccl_;
    const int rank_, world_, device_;
    NcclComm* comm_ = nullptr;
    std::vector<Registered> registered_;
};

/// What NCCL answers to a call that failed. In progress is no failure.
inline bool nccl_failed(int result) { return result != 0 && result != kNcclInProgress; }
inline bool nccl_lost_peer(int result) { return result == 6; }  // ncclRemoteError

/// A group of calls ends whatever they say: torch uses the same library on this thread, and would find it open.
template <class Calls>
int grouped(const Nccl& nccl, Calls&& calls) {
    if (const int start = nccl.GroupStart(); nccl_failed(start)) return start;
    int first = 0;
    calls([&](int result) {
        if (!nccl_failed(first)) first = result;
    });
    const int end = nccl.GroupEnd();
    return nccl_failed(first) ? first : end;
}

}  // namespace gradgen::cuda
