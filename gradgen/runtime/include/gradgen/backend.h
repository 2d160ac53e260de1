// Where gradients lie and what works on them: host memory, or one GPU. The engine decides what happens and in which
// order; a backend makes it happen.
//
// Work is put on lanes. On the CPU a call returns when its work is done. On a GPU a lane is a stream: the call returns
// at once, work of one lane runs in the order of the calls, and events order lanes among each other. The engine never
// waits for a GPU inside a step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gradgen/kernels.h"
#include "gradgen/tensor.h"

namespace gradgen {

/// `caller`: the stream on which backward writes and the optimizer reads. `exchange`: sums over ranks. `offload`:
/// copies between device and pinned host memory.
enum class Lane : std::uint8_t { caller, exchange, offload };

/// Segments, and what the backend made of them.
struct SegmentList {
    std::vector<Segment> segments;
    std::shared_ptr<const void> table;  // CudaSegments on a GPU, shared by all lists of the same geometry
    std::uint32_t weight_offset = 0;    // from the weights in the table to those of this list

    SegmentList() = default;
    SegmentList(std::vector<Segment> list) : segments(std::move(list)) {}
    bool empty() const { return segments.empty(); }
    auto begin() const { return segments.begin(); }
    auto end() const { return segments.end(); }
    void push_back(const Segment& segment) { segments.push_back(segment); }
};

/// A point on a lane that another lane, or another rank's, waits for. Null on the CPU.
using Event = std::shared_ptr<void>;

/// ReduceArgs::scale of a backend on a GPU: the factor that divide_by() left on the device.
inline constexpr double kScaleOnDevice = -1.0;

class Backend {
  public:
    virtual ~Backend() = default;

    virtual Device device() const { return {}; }
    bool on_gpu() const { return device().kind == DeviceKind::cuda; }
    /// Makes the device current for this thread; returns what leave() puts back.
    virtual int enter() { return 0; }
    virtual void leave(int) {}

    /// Zeroed memory.
    virtual std::shared_ptr<Storage> allocate(std::size_t bytes);
    /// Zeroed host memory that the GPU copies from and to by itself.
    virtual std::shared_ptr<Storage> allocate_pinned(std::size_t bytes) { return allocate(bytes); }
    /// Fills in SegmentList::table.
    virtual void prepare(SegmentList&) {}

    /// The bytes in host memory, there or copied. Blocks.
    virtual std::shared_ptr<Storage> to_host(const std::shared_ptr<Storage>& storage) { return storage; }

    virtual void fill(void* data, int byte, std::size_t bytes, Lane lane);
    virtual void copy(void* to, const void* from, std::size_t bytes, Lane lane);
    /// kernels.h: reduce. `stats` set: counts what is written; filled in on the CPU, kept on the device on a GPU
    /// (total).
    virtual void reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, const SegmentList& segments,
                        ReduceStats* stats, Lane lane);
    virtual void measure(DType type, const void* data, bool in_arena, const SegmentList& segments, ReduceStats* stats,
                         Lane lane);
    virtual void scale(DType type, void* data, bool in_arena, const SegmentList& segments, double factor, Lane lane);
    virtual void pack(DType out_type, void* out, DType in_type, const void* in, const SegmentList& segments,
                      const RoundingKey& rounding, Lane lane);

    virtual Event make_event() { return nullptr; }
    virtual void record(const Event&, Lane) {}
    /// `event`: of make_event() of any rank of this process, or null.
    virtual void wait(Lane, const void* /*event*/) {}
    /// `after` waits for everything on `before` so far.
    virtual void join(Lane /*after*/, Lane /*before*/) {}
    /// What the exchange lane is to a communicator (a cudaStream_t).
    virtual void* stream(Lane) { return nullptr; }
    /// Ranks are threads of this process: their memory on other GPUs is about to be read.
    virtual void reach_peers() {}
    /// Blocks until every lane is idle.
    virtual void synchronize() {}
    /// Names what follows for profilers; end_range closes the last one.
    virtual void begin_range(const char*) {}
    virtual void end_range() {}

    // Scalars of a step that stay on the GPU. Only where on_gpu().

    /// From now on `caller` is this stream; it waits for the one before.
    virtual void use_stream(void*) {}
    /// Whether the caller's stream is being captured into a CUDA graph.
    virtual bool capturing() const { return false; }
    /// Step and micro-step of random counters, kept on the device so that a replayed graph counts on.
    virtual void set_counters(std::int64_t /*step*/, int /*micro_step*/) {}
    virtual void count_micro_step(bool /*first*/) {}
    virtual void count_step() {}
    virtual std::int64_t read_step() { return 0; }
    /// From one fp32 or fp64 number on the device; reduce multiplies by 1 / *divide where ReduceArgs::scale is
    /// kScaleOnDevice.
    virtual void divide_by(const void* /*divide*/, DType) {}
    virtual void clear_stats(Lane) {}
    /// Adds up what reduce and measure counted, on `lane`, into 16 bytes on the device: a ReduceStats.
    virtual void* total(Lane) { return nullptr; }
    /// Room for the totals of all ranks, and their sum in rank order; then norm() is known.
    virtual void* totals_of_ranks() { return nullptr; }
    virtual void sum_totals(std::span<const void* const> /*of ranks*/, Lane) {}
    /// Sum of squares and count over all ranks. Blocks.
    virtual ReduceStats read_total() { return {}; }
    virtual void write_total(const ReduceStats&) {}
    /// Gradients were multiplied: so is their norm.
    virtual void scale_total(double /*factor*/) {}
    /// The norm as one fp32 on the device.
    virtual Tensor norm_tensor() { return {}; }
    /// Multiplies by the clipping factor of `max_norm` (1 where the norm is below it, or not finite).
    virtual void prepare_clip(double /*max_norm*/) {}
    virtual void clip(DType, void* /*data*/, bool /*in_arena*/, const SegmentList&, Lane) {}
};

/// Makes a backend's device current for this thread, and puts back what was.
class OnDevice {
  public:
    explicit OnDevice(Backend& backend) : backend_(backend), before_(backend.enter()) {}
    ~OnDevice() { backend_.leave(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    Backend& backend_;
    int before_;
};

/// The CPU's, or a GPU's where the runtime was built for GPUs. Throws ConfigError with a cure otherwise.
std::shared_ptr<Backend> make_backend(Device device);

}  // namespace gradgen
