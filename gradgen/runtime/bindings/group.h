// A communicator over collectives that live in Python: a torch.distributed group (gloo, MPI, UCC). Payloads are bytes;
// sums stay in our kernels, so a reduce-scatter is an all-to-all and a local sum.
#pragma once

#include <deque>

#include "bind.h"

namespace gradgen::bind {

/// `transport` offers all_to_all(out, in) -> work, all_gather(out, in), barrier(), gather_objects(bytes) -> list;
/// buffers arrive as memoryviews of bytes. work has wait() and is_completed().
class GroupCommunicator final : public Communicator {
  public:
    GroupCommunicator(int rank, int world, py::object transport);
    ~GroupCommunicator() override;
    std::string_view transport() const override { return "group"; }
    bool needs_staging() const override { return true; }
    Ticket post(const Offer& offer) override;
    bool ready(Ticket ticket) override;
    std::vector<ReduceSource> sources(Ticket ticket) override;
    void release(Ticket ticket, const void* event) override;
    bool drained(Ticket ticket) override;
    void wait_drained(Ticket ticket) override;
    void barrier() override;
    std::vector<std::string> gather_objects(const std::string& mine) override;
    void all_gather(void* out, const void* in, std::size_t bytes) override;
    void all_to_all(void* out, const void* in, std::size_t bytes) override;
    void abort(const std::string& why) override;
    void reset() override;
    void close() override {}
    void adopt(std::vector<std::shared_ptr<Storage>> memory) override;

  private:
    struct Pending {
        Ticket ticket = 0;
        py::object work;
        void* receive = nullptr;
        std::size_t slice = 0;
        std::string what;
        bool done = false;
    };
    Pending& pending(Ticket ticket);
    void require_usable() const;
    const void* zeros(std::size_t bytes);
    py::object transport_;
    std::deque<Pending> pending_;
    Ticket next_ = 1;
    std::string failure_;
    std::shared_ptr<Storage> zeros_;
    std::vector<std::shared_ptr<Storage>> adopted_;
};

}  // namespace gradgen::bind
