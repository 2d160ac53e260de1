// A connection by NCCL that does not wait for ever: a thread watches calls and kernels in flight, and ends them when a
// rank is late or has failed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "nccl_link.h"

namespace gradgen::cuda {

class NcclSession {
  public:
    /// `host` connects the same ranks for small messages. Collective; throws CommError where ranks cannot be connected.
    NcclSession(const Nccl& nccl, std::shared_ptr<Communicator> host, int device, Timeout timeout);
    ~NcclSession();
    NcclSession(const NcclSession&) = delete;
    NcclSession& operator=(const NcclSession&) = delete;

    /// Makes calls of NCCL that put work on `stream` and watches that work. `ask(comm)` returns NCCL's result. The lock
    /// is not held meanwhile: a call may wait (where the stream's queue is full), and the watcher must be able to end
    /// it.
    void call(const std::string& what, cudaStream_t stream, const std::function<int(NcclComm*)>& ask);

    /// Throws what call() would.
    void check_usable(const std::string& what);
    std::string failure();
    /// The other ranks are told by whoever calls.
    void fail(const std::string& why);
    /// Collective, with all that `between` does on the way.
    void reset(const std::function<void()>& between);
    void close();

    void enroll(void* data, std::size_t bytes);
    void forget(const void* data);

  private:
    using Clock = std::chrono::steady_clock;
    enum class Kind { comm, timeout, lost };
    struct Failure {
        std::string why;
        Kind kind = Kind::comm;
    };
    struct InFlight {
        std::shared_ptr<void> event;
        std::string what;
        Clock::time_point since;  // when it was first seen at the front
    };
    struct Call {
        std::string what;
        Clock::time_point since;
    };
    class Calling;

    void connect();
    void disconnect();
    void stop_watching();
    void require_usable(const std::string& what) const;
    void fail(std::unique_lock<std::mutex>& lock, const Failure& failure);
    void follow(const std::string& what, cudaStream_t stream);
    void watch();
    std::optional<Failure> look();
    std::string where() const;

    const Nccl& nccl_;
    const std::shared_ptr<Communicator> host_;
    const int device_;
    const Timeout timeout_;

    std::mutex mutex_;  // of what follows, which the watching thread uses too
    std::condition_variable wake_;
    NcclLink link_;
    std::optional<Call> call_;  // that is being made
    std::deque<InFlight> in_flight_;
    Failure failure_;
    bool stop_ = false;
    std::atomic<bool> failed_{false}, closed_{false};
    std::thread watcher_;
};

}  // namespace gradgen::cuda
