// Exchanges by NCCL. Everything is put on the stream that the caller names and returns at once.
#include "gradgen/nccl_communicator.h"

#include "check.h"
#include "gradgen/error.h"
#include "nccl_session.h"

namespace gradgen {
namespace {

using cuda::Nccl;
using cuda::NcclComm;

class NcclCommunicator final : public Communicator, public std::enable_shared_from_this<NcclCommunicator> {
  public:
    NcclCommunicator(std::shared_ptr<Communicator> host, int device, Timeout timeout, const Nccl& nccl)
        : Communicator(host->rank(), host->world_size()),
          host_(std::move(host)),
          nccl_(nccl),
          session_(nccl, host_, device, timeout) {}

    std::string_view transport() const override { return "nccl"; }
    bool needs_staging() const override { return true; }
    bool on_device() const override { return true; }
    bool sums_in_place() const override { return true; }

    Ticket post(const Offer& offer) override {
        auto* stream = static_cast<cudaStream_t>(offer.stream);
        Posted posted;
        session_.call(offer.what, stream, [&](NcclComm* comm) {
            return offer.sum ? sum(offer, comm, stream, posted) : exchange(offer, comm, stream, posted);
        });
        posted.ticket = next_++;
        posted_.push_back(posted);
        return posted.ticket;
    }

    // What was put on a stream is there for what comes after it: the host has nothing to wait for.
    bool ready(Ticket) override {
        session_.check_usable("ready");
        return true;
    }
    std::vector<ReduceSource> sources(Ticket ticket) override {
        session_.check_usable("sources");
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
        auto* on = static_cast<cudaStream_t>(stream);
        session_.call("all_gather of " + std::to_string(bytes) + " bytes", on, [&](NcclComm* comm) {
            return bytes == 0 ? 0 : nccl_.AllGather(in, out, bytes, cuda::kNcclUint8, comm, on);
        });
    }
    void broadcast_on_device(std::span<const Shared> pieces, void* stream) override {
        auto* on = static_cast<cudaStream_t>(stream);
        session_.call("all_gather of " + std::to_string(pieces.size()) + " pieces", on, [&](NcclComm* comm) {
            return cuda::grouped(nccl_, [&](auto&& add) {
                for (const Shared& p : pieces)
                    if (p.bytes > 0) add(nccl_.Broadcast(p.data, p.data, p.bytes, cuda::kNcclUint8, p.root, comm, on));
            });
        });
    }

    void register_memory(const std::shared_ptr<Storage>& storage) override {
        session_.enroll(storage->data, storage->bytes);
        // Before it is freed: NCCL would take the next memory at this address for the one whose mappings it has.
        storage->owner = std::shared_ptr<void>(storage->data,
                                               [comm = weak_from_this(), memory = storage->owner](void* data) mutable {
                                                   if (const auto alive = comm.lock()) alive->session_.forget(data);
                                                   memory.reset();
                                               });
    }

    // Small messages go by the host.
    void barrier() override { host_->barrier(); }
    std::vector<std::string> gather_objects(const std::string& mine) override {
        session_.check_usable("gather_objects");
        return host_->gather_objects(mine);
    }
    void all_gather(void* out, const void* in, std::size_t bytes) override { host_->all_gather(out, in, bytes); }
    void all_to_all(void* out, const void* in, std::size_t bytes) override { host_->all_to_all(out, in, bytes); }

    std::string failure() override { return session_.failure(); }
    void abort(const std::string& why) override {
        session_.fail(why);
        host_->abort(why);
    }
    void reset() override {
        session_.reset([this] {
            posted_.clear();
            host_->reset();
        });
    }
    void close() override { session_.close(); }

  private:
    struct Posted {
        Ticket ticket = 0;
        std::vector<ReduceSource> sources;
    };

    // Sums into this rank's slice of the memory that is sent.
    int sum(const Offer& offer, NcclComm* comm, cudaStream_t stream, Posted& posted) {
        char* const data = sent(offer, stream);
        char* const mine = data + static_cast<std::size_t>(rank_) * offer.slice_bytes;
        posted.sources = {ReduceSource{mine, true}};
        if (offer.slice_bytes == 0) return 0;
        return nccl_.ReduceScatter(data, mine, offer.slice_bytes / size_of(*offer.sum), cuda::nccl_type(*offer.sum),
                                   cuda::kNcclSum, comm, stream);
    }

    // Every rank's slice to the rank whose it is; nothing is summed.
    int exchange(const Offer& offer, NcclComm* comm, cudaStream_t stream, Posted& posted) {
        const auto world = static_cast<std::size_t>(world_), self = static_cast<std::size_t>(rank_);
        const std::size_t slice = offer.slice_bytes;
        char* const data = sent(offer, stream);
        auto* receive = static_cast<char*>(offer.receive);
        for (std::size_t r = 0; r < world; ++r)
            posted.sources.push_back({r == self ? data + self * slice : receive + r * slice, true});
        return cuda::grouped(nccl_, [&](auto&& add) {
            for (std::size_t r = 0; r < world && slice > 0; ++r) {
                if (r == self) continue;
                const int peer = static_cast<int>(r);
                add(nccl_.Send(data + r * slice, slice, cuda::kNcclUint8, peer, comm, stream));
                add(nccl_.Recv(receive + r * slice, slice, cuda::kNcclUint8, peer, comm, stream));
            }
        });
    }

    char* sent(const Offer& offer, cudaStream_t stream) {
        if (offer.data != nullptr) return static_cast<char*>(const_cast<void*>(offer.data));
        return zeros(offer.slice_bytes * static_cast<std::size_t>(world_), stream);
    }

    // What a rank without a gradient sends. A sum in place leaves its result here: cleared every time.
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

    const std::shared_ptr<Communicator> host_;
    const Nccl& nccl_;
    Ticket next_ = 0;
    std::vector<Posted> posted_;
    std::shared_ptr<void> zeros_;
    std::size_t zeros_bytes_ = 0;
    cuda::NcclSession session_;  // ends first: nothing is in flight when the memory above goes
};

}  // namespace

std::shared_ptr<Communicator> nccl_communicator(std::shared_ptr<Communicator> host, int device, Timeout timeout,
                                                const std::string& library) {
    // Every rank must learn of a missing library: they would wait for each other when connecting.
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
