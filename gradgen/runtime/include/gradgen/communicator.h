// How ranks reach each other. One primitive carries every gradient: an exchange, in which each rank offers an arena and
// then reads its own slice of everybody's. In a shared address space (threads, or processes that map shared memory) the
// slices are read where they lie; a process group copies them into receive staging first. The sum itself is a kernel of
// ours (kernels.h), in rank order and in fp32, so that the result does not depend on the transport.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gradgen/kernels.h"
#include "gradgen/tensor.h"

namespace gradgen {

/// What an exchange is for. Ranks compare tags before they touch data; a difference is a MismatchError on all of them.
struct OpTag {
    std::uint64_t model_key = 0;
    std::int64_t step = 0;
    std::int32_t micro_step = 0;
    std::int32_t unit = 0;    // index in plan order
    std::int32_t op = 0;      // Collective, or one of the two below
    std::uint32_t dtype = 0;  // wire dtype
    std::uint64_t bytes = 0;  // of the arena
    bool operator==(const OpTag&) const = default;
};
constexpr std::int32_t kGatherGradients = 3, kGatherInPlace = 4;

/// A byte range of an arena that goes to one rank, and where it lies in that rank's packed slice.
struct Piece {
    std::size_t source = 0;
    std::size_t packed = 0;
    std::size_t bytes = 0;
};

/// This rank's side of an exchange. The memory at `data` must stay unchanged until drained().
struct Offer {
    const void* data = nullptr;                  // an arena from allocate(), or nullptr: this rank contributes zeros
    std::span<const std::vector<Piece>> pieces;  // for every destination rank
    std::size_t slice_bytes = 0;                 // of a packed slice (the same on every rank)
    void* receive = nullptr;                     // staging of world * slice_bytes bytes; only where needs_staging()
    void* send = nullptr;                        // staging likewise, only where a slice is more than one piece
    const void* event = nullptr;                 // GPU: after it the data is complete (a cudaEvent_t of this process)
    void* stream = nullptr;                      // GPU: where a communicator with on_device() puts its work
    std::optional<DType> sum;  // only where sums_in_place(): reduce-scatter `data`, which it may change
    OpTag tag;
    std::string what;  // for messages: "block 'decoder' layer 3, micro-step 1"
};

using Ticket = std::uint64_t;

/// A part of memory that every rank lays out alike.
struct ByteRange {
    std::size_t begin = 0, bytes = 0;
};

class Communicator {
  public:
    virtual ~Communicator() = default;
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    int rank() const { return rank_; }
    int world_size() const { return world_; }
    virtual std::string_view transport() const = 0;  // "single", "threads", "shared", "group"
    virtual bool needs_staging() const { return false; }

    /// Memory that exchanges can offer. Zeroed pages, 4096-byte aligned; freed with the last reference.
    virtual std::shared_ptr<Storage> allocate(std::size_t bytes);

    // An exchange. Every rank posts the same sequence. post() does not wait for other ranks.
    virtual Ticket post(const Offer& offer) = 0;
    /// True when every rank has posted, so that sources() will not block.
    virtual bool ready(Ticket ticket) = 0;
    /// Blocks until every rank has posted; checks tags. One source a rank, in rank order, valid until release().
    /// A source's pointer is either a whole arena of that rank (packed == false) or this rank's packed slice of it.
    virtual std::vector<ReduceSource> sources(Ticket ticket) = 0;
    /// This rank has read its slices; with an event: will have when it has passed.
    virtual void release(Ticket ticket, const void* event = nullptr) = 0;
    /// True when no other rank still reads what this rank offered: its memory may change.
    virtual bool drained(Ticket ticket) = 0;
    virtual void wait_drained(Ticket ticket) = 0;

    // GPUs. Ranks that are threads read each other's memory, and tell by events when it may be read or changed.
    // Communicators with on_device() move bytes on streams: their exchanges are ready at once.
    virtual bool on_device() const { return false; }
    /// True when an exchange with Offer::sum leaves this rank's summed slice at its place in `data`, as the one source.
    virtual bool sums_in_place() const { return false; }
    /// Of every rank that offered one, after sources() and before release().
    virtual std::vector<const void*> source_events(Ticket) { return {}; }
    /// Of every rank that released with one, once drained().
    virtual std::vector<const void*> drain_events(Ticket) { return {}; }
    /// Only where on_device(). `in` may lie at its place in `out`.
    virtual void gather_on_device(void* out, const void* in, std::size_t bytes, void* stream);
    /// Pieces of one buffer, each from the rank that owns it to all others. Only where on_device().
    struct Shared {
        void* data = nullptr;
        std::size_t bytes = 0;
        int root = 0;
    };
    virtual void broadcast_on_device(std::span<const Shared> pieces, void* stream);
    /// Memory that exchanges will use again and again; until the storage is freed.
    virtual void register_memory(const std::shared_ptr<Storage>&) {}

    // Plain collectives on host memory, blocking. `out` and `in` do not overlap, except that all_gather may find `in`
    // at its place in `out`. They count in the same sequence as posts: every rank makes the same calls in the same
    // order.
    virtual void barrier() = 0;
    /// Every rank's bytes (any length, a few kB), in rank order.
    virtual std::vector<std::string> gather_objects(const std::string& mine) = 0;
    /// out[r * bytes .. (r + 1) * bytes) = in of rank r.
    virtual void all_gather(void* out, const void* in, std::size_t bytes) = 0;
    /// Slice r of `in` goes to rank r; out[r] is rank r's slice for this rank. `bytes` of one slice.
    virtual void all_to_all(void* out, const void* in, std::size_t bytes) = 0;
    /// out = sum over ranks of slice `rank` of `in` (numel elements a slice), in rank order in fp32, rounded once.
    void reduce_scatter(void* out, const void* in, std::int64_t numel, DType dtype);
    /// One tensor, or a container of any number in one exchange; transaction.h says more, and queues several.
    void reduce_scatter(const Tensor& out, const Tensor& full);
    void reduce_scatter(const TensorContainer& out, const TensorContainer& full);
    void all_reduce(void* data, std::int64_t numel, DType dtype);

    /// True where ranks read each other's memory, so that gather_in_place() works.
    virtual bool shares_memory() const { return false; }
    /// `data`: `bytes` from allocate(), laid out alike on every rank, of which rank r has written owned[r] (the ranges
    /// of two ranks do not overlap). Copies what the others own from their memory to the same place in this rank's:
    /// one copy a byte, no buffer. Collective, blocking: when it returns, nobody reads this rank's memory any more.
    void gather_in_place(void* data, std::size_t bytes, std::span<const std::vector<ByteRange>> owned,
                         const std::string& what = "gather_in_place");

    /// Marks the communicator failed and wakes every rank that waits: they raise CommError with `why`.
    virtual void abort(const std::string& why) = 0;
    /// Why the communicator has failed, on this rank or another that can tell; "" while it has not. Never waits, and
    /// may be called by another thread.
    virtual std::string failure() { return ""; }
    /// Collective. Brings a failed communicator back: every rank must call it.
    virtual void reset() = 0;
    /// Leaves: other ranks that wait for this one raise PeerLost.
    virtual void close() = 0;

    /// Gives back page-table entries for other ranks' memory, which count as this process's resident memory once they
    /// were read. Costs one page fault a page at the next read; nothing else changes.
    virtual void trim() {}

    /// Takes over memory that an exchange may still read or write when its owner is gone.
    virtual void adopt(std::vector<std::shared_ptr<Storage>> /*memory*/) {}

    /// Numbers the managers of a communicator in the order of their construction, the same on every rank.
    std::uint64_t next_manager() { return ++managers_; }
    /// Resets so far: what was in flight before the last one is gone, for every manager on this communicator.
    std::uint64_t resets() const { return resets_; }
    void count_reset() { ++resets_; }

    /// Called between waits of at most 50 ms, for Python's signal handling. May throw.
    static void set_interrupt_check(std::function<void()> check);
    static void check_interrupt();

  protected:
    Communicator(int rank, int world) : rank_(rank), world_(world) {}
    int rank_, world_;

  private:
    std::uint64_t managers_ = 0, resets_ = 0;
};

/// One rank, no other: nothing is ever sent.
std::shared_ptr<Communicator> single_communicator();

using Timeout = std::chrono::milliseconds;

/// n ranks in one process, one a thread. Element r belongs to the thread that plays rank r.
std::vector<std::shared_ptr<Communicator>> threads_communicators(int world, Timeout timeout);

/// Ranks of one host, one a process: payloads lie in memory that the others map. `gather` is an all-gather of small
/// byte strings over whatever connects the processes already (it bootstraps file descriptors, nothing more).
/// Collective. Throws CommError when some rank cannot map another's memory (another host, another user): then on every
/// rank.
std::shared_ptr<Communicator> shared_communicator(
    int rank, int world, Timeout timeout, const std::function<std::vector<std::string>(const std::string&)>& gather);

}  // namespace gradgen
