// One algorithm for all ranks of one host. Threads and processes differ in where the control block lies, in how a
// peer's memory is reached, and in how a peer dies: those are the virtual functions.
#pragma once

#include <sys/types.h>

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gradgen/communicator.h"
#include "gradgen/error.h"
#include "host_control.h"

namespace gradgen {

class HostWorld : public Communicator {
  public:
    ~HostWorld() override;

    Ticket post(const Offer& offer) override;
    bool ready(Ticket ticket) override;
    std::vector<ReduceSource> sources(Ticket ticket) override;
    void release(Ticket ticket, const void* event) override;
    std::vector<const void*> source_events(Ticket ticket) override;
    std::vector<const void*> drain_events(Ticket ticket) override;
    bool drained(Ticket ticket) override;
    void wait_drained(Ticket ticket) override;

    bool shares_memory() const override { return true; }
    void barrier() override;
    std::vector<std::string> gather_objects(const std::string& mine) override;
    void all_gather(void* out, const void* in, std::size_t bytes) override;
    void all_to_all(void* out, const void* in, std::size_t bytes) override;

    void abort(const std::string& why) override;
    std::string failure() override;
    void reset() override;
    void close() override;

  protected:
    /// `control` lives as long as `owner`.
    HostWorld(int rank, int world, Timeout timeout, std::shared_ptr<void> owner, Control* control);

    /// Says in `out` where `data` is; returns what must live until others have read it.
    virtual std::shared_ptr<void> locate(const void* data, Published& out) = 0;
    /// Address of what `rank` published; `hold` keeps it mapped. Null: cannot be reached, and `problem` says why.
    virtual const std::byte* reach(int rank, const Published& published, std::shared_ptr<void>& hold,
                                   std::string& problem) = 0;
    /// False: the rank has died (a rank that left is not asked about).
    virtual bool alive(int) { return true; }
    virtual std::string name(int rank) const { return "rank " + std::to_string(rank); }
    /// Processes copy plain collectives through the bounce areas; threads read each other's memory.
    virtual bool bounces() const { return false; }
    /// Drops mappings of memory that its owner has freed.
    virtual void sweep() {}

    void check_usable(const char* call);
    bool in_owner_process() const;

    std::shared_ptr<void> owner_;
    Control* control_;
    RankBlock& mine_;
    const Timeout timeout_;
    bool closed_ = false;

    /// Own side of a ring slot.
    struct Local {
        std::shared_ptr<void> keep;                // memory that was offered
        std::vector<std::shared_ptr<void>> holds;  // mappings of what others offered
        bool released = true;
    };
    std::array<Local, kRing> local_;

  private:
    using Arrived = std::function<bool(int rank)>;
    using Describe = std::function<std::string()>;

    // host_wait.cpp
    /// Blocks until every rank has arrived. Ends with an error on a failure, a lost peer, the time limit, an interrupt.
    void wait(const Arrived& arrived, const Describe& describe, bool resetting = false);
    /// Raises if a rank that has not arrived never will: it left, it is in reset(), or (asked with `liveness`) it died.
    void look_at_missing(const Arrived& arrived, const Describe& describe, bool resetting, bool liveness);
    void interruptible(const Describe& describe, bool resetting);
    std::string missing(const Arrived& arrived);
    void notify();
    /// Makes `why` the world's failure unless there is one; throws the world's failure.
    [[noreturn]] void fail(Failure failure, const std::string& why);
    void record_failure(Failure failure, const std::string& why);
    void raise_if_failed();
    bool in_reset(int rank) const;
    std::string count_text(int rank);

    // host_exchange.cpp
    /// Publishes the next item of this rank's sequence. Waits only when the ring is full.
    void drop_drained(std::uint64_t sequence);
    std::uint64_t publish(Published item, const std::string& what, std::shared_ptr<void> keep);
    /// Waits for everybody's item `sequence` and compares the tags.
    void gather_offers(std::uint64_t sequence);
    bool has_posted(std::uint64_t sequence, int rank) const;
    bool is_drained(std::uint64_t sequence, int rank) const;
    bool poll(const Arrived& arrived, const Describe& describe);
    void consume(std::uint64_t sequence);
    std::uint64_t sequence_of(Ticket ticket, const char* call) const;
    bool stale(Ticket ticket) const;
    std::string difference(std::uint64_t sequence);
    std::string describe(int rank, std::uint64_t sequence);

    // host_collectives.cpp
    using Fill = std::function<void(std::byte* to, std::size_t begin, std::size_t count)>;
    using Take = std::function<void(int rank, const std::byte* from, std::size_t begin, std::size_t count)>;
    std::byte* bounce_half(Published& item);
    void rounds(Kind kind, std::size_t bytes, std::size_t chunk, const void* in, const Fill& fill, const Take& take);

    const pid_t pid_;
    const int spins_;
    std::uint64_t next_ = 0;                    // sequence number of the next item
    std::uint64_t exchanges_ = 0;               // posted since construction or reset
    std::uint64_t epoch_ = 0;                   // resets so far: part of a ticket
    bool reset_pending_ = false;                // a reset() ended with an error
    std::array<std::uint64_t, 2> half_used_{};  // sequence number + 1 of the last item in a bounce half
    unsigned half_ = 0;
    std::mutex failure_mutex_;  // abort() may come from another thread than the rank's own
};

}  // namespace gradgen
