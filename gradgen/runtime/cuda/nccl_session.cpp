#include "nccl_session.h"

#include "check.h"
#include "event.h"
#include "gradgen/error.h"

namespace gradgen::cuda {

/// While it lives, a thread is inside a call.
class NcclSession::Calling {
  public:
    Calling(NcclSession& session, const std::string& what) : session_(session) {
        const std::lock_guard lock(session_.mutex_);
        session_.require_usable(what);
        session_.call_ = Call{what, Clock::now()};
        comm_ = session_.link_.comm();
    }
    ~Calling() {
        {
            const std::lock_guard lock(session_.mutex_);
            session_.call_.reset();
        }
        session_.wake_.notify_all();
    }
    Calling(const Calling&) = delete;
    Calling& operator=(const Calling&) = delete;
    NcclComm* comm() const { return comm_; }

  private:
    NcclSession& session_;
    NcclComm* comm_ = nullptr;
};

NcclSession::NcclSession(const Nccl& nccl, std::shared_ptr<Communicator> host, int device, Timeout timeout)
    : nccl_(nccl),
      host_(std::move(host)),
      device_(device),
      timeout_(timeout),
      link_(nccl, host_->rank(), host_->world_size(), device) {
    watcher_ = std::thread([this] { watch(); });
    try {
        connect();
    } catch (...) {
        stop_watching();
        disconnect();
        throw;
    }
}

NcclSession::~NcclSession() {
    stop_watching();
    disconnect();
}

void NcclSession::stop_watching() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    watcher_.join();
}

void NcclSession::connect() {
    NcclComm* const made = link_.create(*host_);
    {
        const std::lock_guard lock(mutex_);
        link_.use(made);
    }
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    check(cudaSetDevice(device_), "cudaSetDevice");
    const std::shared_ptr<void> back(nullptr, [before](void*) { cudaSetDevice(before); });
    void* scratch = nullptr;
    cudaStream_t stream = nullptr;
    check(cudaMalloc(&scratch, NcclLink::scratch_bytes(host_->world_size())), "memory to connect ranks");
    const std::shared_ptr<void> memory(scratch, [](void* data) { cudaFree(data); });
    check(cudaMemset(scratch, 0, NcclLink::scratch_bytes(host_->world_size())), "cudaMemset");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    const std::shared_ptr<void> lane(stream, [](void* s) { cudaStreamDestroy(static_cast<cudaStream_t>(s)); });
    const std::string what = "connecting ranks";
    call(what, stream, [&](NcclComm* comm) { return link_.try_out(comm, stream, scratch); });
    while (cudaStreamQuery(stream) == cudaErrorNotReady && !failed_)  // the watcher knows the time limit
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    cudaGetLastError();
    check_usable(what);
}

void NcclSession::disconnect() {
    const std::lock_guard lock(mutex_);
    bool running = failed_;
    for (const InFlight& op : in_flight_)
        running = running || cudaEventQuery(static_cast<Event*>(op.event.get())->handle) != cudaSuccess;
    cudaGetLastError();
    running ? link_.abort() : link_.destroy();
}

void NcclSession::call(const std::string& what, cudaStream_t stream, const std::function<int(NcclComm*)>& ask) {
    int result = 0;
    {
        const Calling calling(*this, what);
        result = ask(calling.comm());
    }
    if (nccl_failed(result)) {
        std::unique_lock lock(mutex_);
        fail(lock, {what + where() + ": " + link_.explain(result), nccl_lost_peer(result) ? Kind::lost : Kind::comm});
    }
    check_usable(what);
    follow(what, stream);
}

void NcclSession::check_usable(const std::string& what) {
    if (!failed_ && !closed_) return;
    const std::lock_guard lock(mutex_);
    require_usable(what);
}

// With mutex_.
void NcclSession::require_usable(const std::string& what) const {
    if (closed_) throw StateError("communicator: " + what + " after close()");
    if (!failed_) return;
    if (failure_.kind == Kind::timeout) throw CommTimeout(failure_.why);
    if (failure_.kind == Kind::lost) throw PeerLost(failure_.why);
    throw CommError(failure_.why);
}

std::string NcclSession::failure() {
    const std::lock_guard lock(mutex_);
    return failure_.why;
}

void NcclSession::fail(const std::string& why) {
    std::unique_lock lock(mutex_);
    fail(lock, {why, Kind::comm});
}

// The first failure is the one that is told.
void NcclSession::fail(std::unique_lock<std::mutex>& lock, const Failure& failure) {
    if (!failed_) failure_ = failure;
    failed_ = true;
    // A thread inside a call still uses the connection, unless it is stuck there.
    wake_.wait_for(lock, std::chrono::milliseconds(200), [this] { return !call_; });
    link_.abort();
    in_flight_.clear();
}

void NcclSession::reset(const std::function<void()>& between) {
    {
        const std::lock_guard lock(mutex_);
        if (closed_) throw StateError("communicator: reset after close()");
        link_.abort();  // ranks may have stopped at different exchanges: what is in flight never ends
        in_flight_.clear();
    }
    between();
    {
        const std::lock_guard lock(mutex_);
        failure_ = {};
        failed_ = false;
    }
    connect();
}

void NcclSession::close() {
    disconnect();
    closed_ = true;
}

void NcclSession::enroll(void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    link_.enroll(data, bytes);
}

void NcclSession::forget(const void* data) {
    const std::lock_guard lock(mutex_);
    link_.forget(data);
}

void NcclSession::follow(const std::string& what, cudaStream_t stream) {
    if (capture_of(stream) != 0) return;  // it has not begun
    auto event = make_event(device_);
    record(*static_cast<Event*>(event.get()), stream);
    const std::lock_guard lock(mutex_);
    in_flight_.push_back({std::move(event), what, {}});
}

void NcclSession::watch() {
    cudaSetDevice(device_);
    // Another thread's capture must not be spoiled by questions about events.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    std::unique_lock lock(mutex_);
    while (!stop_) {
        wake_.wait_for(lock, std::chrono::milliseconds(50));
        if (stop_ || link_.comm() == nullptr) continue;
        // A rank that gave up takes part in nothing any more, and its collectives here would wait for ever: also for a
        // host that waits for the GPU and asks nobody.
        if (const std::string elsewhere = host_->failure(); !elsewhere.empty()) {
            fail(lock, {elsewhere, Kind::comm});
            continue;
        }
        const std::optional<Failure> found = look();
        if (!found) continue;
        fail(lock, *found);
        lock.unlock();
        host_->abort(found->why);  // the others wait for this rank
        lock.lock();
    }
}

// With mutex_.
std::optional<NcclSession::Failure> NcclSession::look() {
    while (!in_flight_.empty() &&
           cudaEventQuery(static_cast<Event*>(in_flight_.front().event.get())->handle) == cudaSuccess)
        in_flight_.pop_front();
    cudaGetLastError();
    const Clock::time_point now = Clock::now();
    InFlight* const front = in_flight_.empty() ? nullptr : &in_flight_.front();
    if (front && front->since == Clock::time_point{}) front->since = now;
    int error = 0;
    if (nccl_.CommGetAsyncError(link_.comm(), &error) == 0 && nccl_failed(error))
        return Failure{(front ? front->what : "a collective") + where() + ": " + link_.explain(error),
                       nccl_lost_peer(error) ? Kind::lost : Kind::comm};
    const auto late = [&](Clock::time_point since) { return now - since >= timeout_; };
    std::string what;
    if (front && late(front->since))
        what = front->what;
    else if (call_ && late(call_->since))
        what = call_->what;
    if (what.empty()) return std::nullopt;
    return Failure{what + where() + ": not done after " + std::to_string(timeout_.count() / 1000) +
                       " s; a rank did not arrive in time",
                   Kind::timeout};
}

std::string NcclSession::where() const {
    return " on rank " + std::to_string(host_->rank()) + " of " + std::to_string(host_->world_size());
}

}  // namespace gradgen::cuda
