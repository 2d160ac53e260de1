// Exchanges by NCCL. Everything is put on the stream that the caller names and returns at once; a thread watches what
// is in flight, so that a lost rank ends in an error and not in a kernel that waits for ever.
#include "gradgen/nccl_communicator.h"

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "check.h"
#include "event.h"
#include "gradgen/error.h"
#include "nccl.h"

namespace gradgen {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::Nccl;

class NcclCommunicator final : public Communicator, public std::enable_shared_from_this<NcclCommunicator> {
  public:
    NcclCommunicator(std::shared_ptr<Communicator> host, int device, Timeout timeout, const Nccl& nccl)
        : Communicator(host->rank(), host->world_size()),
          host_(std::move(host)),
          nccl_(nccl),
          device_(device),
          timeout_(timeout) {
        connect();
        watcher_ = std::thread([this] { watch(); });
    }

    ~NcclCommunicator() override {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        watcher_.join();
        disconnect();
    }

    std::string_view transport() const override { return "nccl"; }
    bool needs_staging() const override { return true; }
    bool on_device() const override { return true; }
    bool sums_in_place() const override { return true; }

    Ticket post(const Offer& offer) override {
        const std::lock_guard lock(mutex_);
        check_usable(offer.what);
        const auto world = static_cast<std::size_t>(world_), self = static_cast<std::size_t>(rank_);
        auto* stream = static_cast<cudaStream_t>(offer.stream);
        const std::size_t slice = offer.slice_bytes;
        auto* data = static_cast<char*>(const_cast<void*>(offer.data));
        if (data == nullptr) data = zeros(slice * world, stream);
        Posted posted;
        if (offer.sum) {
            const std::size_t numel = slice / size_of(*offer.sum);
            char* mine = data + self * slice;
            if (slice > 0)
                ask(nccl_.ReduceScatter(data, mine, numel, cuda::nccl_type(*offer.sum), cuda::kNcclSum, comm_, stream),
                    offer.what);
            posted.sources = {ReduceSource{mine, true}};
        } else {
            auto* receive = static_cast<char*>(offer.receive);
            grouped(offer.what, [&](auto&& add) {
                for (std::size_t r = 0; r < world && slice > 0; ++r) {
                    if (r == self) continue;
                    const int peer = static_cast<int>(r);
                    add(nccl_.Send(data + r * slice, slice, cuda::kNcclUint8, peer, comm_, stream));
                    add(nccl_.Recv(receive + r * slice, slice, cuda::kNcclUint8, peer, comm_, stream));
                }
            });
            for (std::size_t r = 0; r < world; ++r)
                posted.sources.push_back({r == self ? data + self * slice : receive + r * slice, true});
        }
        follow(offer.what, stream);
        posted.ticket = next_++;
        posted_.push_back(posted);
        return posted.ticket;
    }

    // What was put on a stream is there for what comes after it: the host has nothing to wait for.
    bool ready(Ticket) override {
        check_usable("ready");
        return true;
    }
    std::vector<ReduceSource> sources(Ticket ticket) override {
        check_usable("sources");
        for (const Posted& p : posted_)
            if (p.ticket == ticket) return p.sources;
        throw StateError("communicator: sources of an exchange that was released or never posted");
    }
    void release(Ticket ticket, const void*) override {
        std::erase_if(posted_, [&](const Posted& p) { return p.ticket == ticket; });
    }
    bool drained(Ticket) override { return true; }
    void wait_drained(Ticket) override {}

    void gather_on_device(void* out, const void* in, std::size_t bytes, void* stream) override {
        const std::string what = "all_gather of " + std::to_string(bytes) + " bytes";
        const std::lock_guard lock(mutex_);
        check_usable(what);
        if (bytes == 0) return;
        ask(nccl_.AllGather(in, out, bytes, cuda::kNcclUint8, comm_, static_cast<cudaStream_t>(stream)), what);
        follow(what, static_cast<cudaStream_t>(stream));
    }
    void broadcast_on_device(std::span<const Shared> pieces, void* stream) override {
        const std::string what = "all_gather of " + std::to_string(pieces.size()) + " pieces";
        const std::lock_guard lock(mutex_);
        check_usable(what);
        auto* on = static_cast<cudaStream_t>(stream);
        grouped(what, [&](auto&& add) {
            for (const Shared& p : pieces)
                if (p.bytes > 0) add(nccl_.Broadcast(p.data, p.data, p.bytes, cuda::kNcclUint8, p.root, comm_, on));
        });
        follow(what, on);
    }

    void register_memory(const std::shared_ptr<Storage>& storage) override {
        if (nccl_.CommRegister == nullptr || nccl_.CommDeregister == nullptr || storage->bytes == 0) return;
        const std::lock_guard lock(mutex_);
        Registered entry{storage->data, storage->bytes, nullptr};
        enroll(entry);
        registered_.push_back(entry);
        // Before it is freed: NCCL would take the next memory at this address for the one whose mappings it has.
        storage->owner = std::shared_ptr<void>(storage->data,
                                               [comm = weak_from_this(), memory = storage->owner](void* data) mutable {
                                                   if (const auto alive = comm.lock()) alive->forget(data);
                                                   memory.reset();
                                               });
    }

    // Small messages go by the host.
    void barrier() override { host_->barrier(); }
    std::vector<std::string> gather_objects(const std::string& mine) override {
        check_usable("gather_objects");
        return host_->gather_objects(mine);
    }
    void all_gather(void* out, const void* in, std::size_t bytes) override { host_->all_gather(out, in, bytes); }
    void all_to_all(void* out, const void* in, std::size_t bytes) override { host_->all_to_all(out, in, bytes); }

    std::string failure() override {
        const std::lock_guard lock(mutex_);
        return failure_;
    }
    void abort(const std::string& why) override {
        fail(why, Kind::comm);
        host_->abort(why);
    }
    void reset() override {
        if (closed_) check_usable("reset");
        {
            const std::lock_guard lock(mutex_);
            give_up();  // ranks may have stopped at different exchanges: what is in flight never ends
            in_flight_.clear();
        }
        posted_.clear();
        host_->reset();
        {
            const std::lock_guard lock(mutex_);
            failure_.clear();
            failed_ = false;
        }
        connect();
    }
    void close() override {
        disconnect();
        closed_ = true;
    }

  private:
    enum class Kind { comm, timeout, lost };
    struct Posted {
        Ticket ticket = 0;
        std::vector<ReduceSource> sources;
    };
    struct InFlight {
        std::shared_ptr<void> event;
        std::string what;
        Clock::time_point since;
    };
    struct Registered {
        void* data = nullptr;
        std::size_t bytes = 0;
        void* handle = nullptr;
    };

    void connect() {
        int before = 0;
        cuda::check(cudaGetDevice(&before), "cudaGetDevice");
        cuda::check(cudaSetDevice(device_), "cudaSetDevice");
        cuda::NcclId id{};
        std::string mine;
        if (rank_ == 0) {
            const int result = nccl_.GetUniqueId(&id);
            mine = result == 0 ? std::string(id.bytes, sizeof id.bytes) : std::string();
        }
        const std::vector<std::string> all = host_->gather_objects(mine);
        if (all.at(0).size() != sizeof id.bytes) throw CommError("NCCL made no unique id on rank 0");
        std::memcpy(id.bytes, all[0].data(), sizeof id.bytes);
        cuda::NcclComm* comm = nullptr;
        const int result = nccl_.CommInitRank(&comm, world_, id, rank_);
        cudaSetDevice(before);
        // Every rank hears of every rank's failure here, so that none goes on alone.
        const std::string said = result == 0 ? "" : std::string(nccl_.GetErrorString(result)) + ": " + last_error();
        const std::vector<std::string> outcome = host_->gather_objects(said);
        for (std::size_t r = 0; r < outcome.size(); ++r)
            if (!outcome[r].empty())
                throw CommError(
                    "NCCL " + version() + " could not connect rank " + std::to_string(r) + " of " +
                    std::to_string(world_) + ": " + outcome[r] +
                    "; give every rank its own GPU (torch.cuda.set_device(local_rank)), and see NCCL_DEBUG=INFO");
        const std::lock_guard lock(mutex_);
        comm_ = comm;
        for (Registered& entry : registered_) enroll(entry);
    }

    void disconnect() {
        const std::lock_guard lock(mutex_);
        if (comm_ == nullptr) return;
        bool running = !failure_.empty();
        for (const InFlight& op : in_flight_)
            running = running || cudaEventQuery(static_cast<cuda::Event*>(op.event.get())->handle) != cudaSuccess;
        cudaGetLastError();
        if (running) return give_up();
        for (Registered& entry : registered_)
            if (entry.handle) nccl_.CommDeregister(comm_, entry.handle);
        registered_.clear();
        nccl_.CommDestroy(comm_);
        comm_ = nullptr;
    }

    void give_up() {  // with mutex_
        if (comm_ != nullptr) nccl_.CommAbort(comm_);
        comm_ = nullptr;
        for (Registered& entry : registered_) entry.handle = nullptr;
    }

    void enroll(Registered& entry) {
        // A library that cannot register still moves the bytes, through buffers of its own.
        if (nccl_.CommRegister(comm_, entry.data, entry.bytes, &entry.handle) != 0) entry.handle = nullptr;
    }

    void forget(const void* data) {
        const std::lock_guard lock(mutex_);
        std::erase_if(registered_, [&](const Registered& entry) {
            if (entry.data != data) return false;
            if (entry.handle && comm_ != nullptr) nccl_.CommDeregister(comm_, entry.handle);
            return true;
        });
    }

    std::string version() const {
        return std::to_string(nccl_.version / 10000) + "." + std::to_string(nccl_.version / 100 % 100) + "." +
               std::to_string(nccl_.version % 100);
    }
    std::string last_error() const {
        const char* text = nccl_.GetLastError(comm_);
        return text && *text ? text : "no more is known";
    }

    static bool failed(int result) { return result != 0 && result != cuda::kNcclInProgress; }

    /// A group ends whatever its calls say: torch uses the same library on this thread, and would find it open.
    template <class Calls>
    void grouped(const std::string& what, Calls&& calls) {
        ask(nccl_.GroupStart(), what);
        int first = 0;
        calls([&](int result) {
            if (!failed(first)) first = result;
        });
        const int end = nccl_.GroupEnd();
        ask(failed(first) ? first : end, what);
    }

    void ask(int result, const std::string& what) {
        if (!failed(result)) return;
        const std::string why = what + " on rank " + std::to_string(rank_) + " of " + std::to_string(world_) + ": " +
                                nccl_.GetErrorString(result) + ": " + last_error();
        fail(why, result == 6 ? Kind::lost : Kind::comm);
        raise();
    }

    void check_usable(const std::string& call) {
        if (closed_) throw StateError("communicator: " + call + " after close()");
        if (failed_) raise();
    }
    [[noreturn]] void raise() {
        std::string why;
        Kind kind;
        {
            const std::lock_guard lock(mutex_);
            why = failure_, kind = failure_kind_;
        }
        if (kind == Kind::timeout) throw CommTimeout(why);
        if (kind == Kind::lost) throw PeerLost(why);
        throw CommError(why);
    }
    void fail(const std::string& why, Kind kind) {
        const std::lock_guard lock(mutex_);
        fail_locked(why, kind);
    }
    void fail_locked(const std::string& why, Kind kind) {
        if (failure_.empty()) failure_ = why, failure_kind_ = kind;
        failed_ = true;
        give_up();
        in_flight_.clear();
    }

    // A send of zeros, for a rank without a gradient. A sum in place leaves its result here: cleared every time.
    char* zeros(std::size_t bytes, cudaStream_t stream) {
        if (zeros_bytes_ < bytes) {
            void* data = nullptr;
            cuda::check(cudaMalloc(&data, bytes), "memory for the gradients that this rank does not have");
            zeros_ = std::shared_ptr<void>(data, [](void* memory) { cudaFree(memory); });
            zeros_bytes_ = bytes;
        }
        cuda::check(cudaMemsetAsync(zeros_.get(), 0, bytes, stream), "cudaMemset");
        return static_cast<char*>(zeros_.get());
    }

    void follow(const std::string& what, cudaStream_t stream) {
        if (cuda::capture_of(stream) != 0) return;  // it has not begun
        auto event = cuda::make_event(device_);
        cuda::record(*static_cast<cuda::Event*>(event.get()), stream);
        const std::lock_guard lock(mutex_);
        in_flight_.push_back({std::move(event), what, {}});
    }

    void watch() {
        cudaSetDevice(device_);
        // Another thread's capture must not be spoiled by questions about events.
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        std::unique_lock lock(mutex_);
        while (!stop_) {
            wake_.wait_for(lock, std::chrono::milliseconds(50));
            if (stop_ || comm_ == nullptr) continue;
            // A rank that gave up takes part in nothing any more, and its collectives here would wait for ever: also
            // for a host that waits for the GPU and asks nobody.
            const std::string elsewhere = host_->failure();
            if (!elsewhere.empty()) {
                fail_locked(elsewhere, Kind::comm);
                continue;
            }
            const std::string found = look();
            if (found.empty()) continue;
            lock.unlock();
            host_->abort(found);  // the others wait for this rank
            lock.lock();
        }
    }

    /// With mutex_. What has failed, or "".
    std::string look() {
        while (!in_flight_.empty() &&
               cudaEventQuery(static_cast<cuda::Event*>(in_flight_.front().event.get())->handle) == cudaSuccess)
            in_flight_.pop_front();
        cudaGetLastError();
        const std::string where = " on rank " + std::to_string(rank_) + " of " + std::to_string(world_);
        int error = 0;
        if (nccl_.CommGetAsyncError(comm_, &error) == 0 && error != 0 && error != cuda::kNcclInProgress) {
            const std::string what = in_flight_.empty() ? "a collective" : in_flight_.front().what;
            fail_locked(what + where + ": " + nccl_.GetErrorString(error) + ": " + last_error(),
                        error == 6 ? Kind::lost : Kind::comm);
            return failure_;
        }
        if (in_flight_.empty()) return "";
        InFlight& front = in_flight_.front();
        if (front.since == Clock::time_point{}) front.since = Clock::now();
        if (Clock::now() - front.since < timeout_) return "";
        fail_locked(front.what + where + ": not done after " + std::to_string(timeout_.count() / 1000) +
                        " s; a rank did not arrive in time",
                    Kind::timeout);
        return failure_;
    }

    const std::shared_ptr<Communicator> host_;
    const Nccl& nccl_;
    const int device_;
    const Timeout timeout_;
    cuda::NcclComm* comm_ = nullptr;
    bool closed_ = false;
    Ticket next_ = 0;
    std::vector<Posted> posted_;
    std::vector<Registered> registered_;
    std::shared_ptr<void> zeros_;
    std::size_t zeros_bytes_ = 0;

    std::recursive_mutex mutex_;  // the watching thread may end comm_ between two calls, not inside one
    std::condition_variable_any wake_;
    std::deque<InFlight> in_flight_;
    std::string failure_;
    Kind failure_kind_ = Kind::comm;
    std::atomic<bool> failed_{false};
    bool stop_ = false;
    std::thread watcher_;
};

}  // namespace

std::shared_ptr<Communicator> nccl_communicator(std::shared_ptr<Communicator> host, int device, Timeout timeout,
                                                const std::string& library) {
    // Every rank must learn of a missing library: they would wait for each other in connect().
    std::string problem;
    const Nccl* nccl = nullptr;
    try {
        nccl = &cuda::open_nccl(library);
    } catch (const CommError& error) {
        problem = error.what();
    }
    const std::vector<std::string> all = host->gather_objects(problem);
    for (std::size_t r = 0; r < all.size(); ++r)
        if (!all[r].empty()) throw CommError("rank " + std::to_string(r) + ": " + all[r]);
    return std::make_shared<NcclCommunicator>(std::move(host), device, timeout, *nccl);
}

}  // namespace gradgen
