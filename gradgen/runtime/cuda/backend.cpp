// One GPU: lanes are streams, sums are the kernels of this folder, and nothing of a step waits for the host.
#include "gradgen/backend.h"

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstring>
#include <map>
#include <string>

#include "check.h"
#include "event.h"
#include "gradgen/cuda_kernels.h"
#include "scalars.h"

namespace gradgen {
namespace {

using cuda::check;

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

class CudaBackend final : public Backend {
  public:
    explicit CudaBackend(int device) : device_(device) {
        const int before = enter();
        int least = 0, greatest = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
        // Sums over ranks are what the next step waits for: they go before the backward pass where both can run.
        check(cudaStreamCreateWithPriority(&exchange_, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
        check(cudaStreamCreateWithFlags(&offload_, cudaStreamNonBlocking), "cudaStreamCreate");
        for (auto& event : joints_) event = cuda::make_event(device_);
        scalars_ = allocate(sizeof(cuda::Scalars));
        stats_ = allocate(sizeof(CudaStats));
        leave(before);
    }

    ~CudaBackend() override {
        int before = 0;
        cudaGetDevice(&before);
        cudaSetDevice(device_);
        for (cudaStream_t stream : {exchange_, offload_})
            if (stream != nullptr) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
        cudaSetDevice(before);
        cudaGetLastError();
    }

    Device device() const override { return {DeviceKind::cuda, device_}; }

    int enter() override {
        int before = 0;
        check(cudaGetDevice(&before), "cudaGetDevice");
        if (before != device_) check(cudaSetDevice(device_), "cudaSetDevice");
        return before;
    }
    void leave(int before) override {
        if (before != device_) cudaSetDevice(before);
    }

    std::shared_ptr<Storage> allocate(std::size_t bytes) override {
        void* data = nullptr;
        const std::size_t room = bytes > 0 ? bytes : 1;
        const cudaError_t status = cudaMalloc(&data, room);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            std::size_t free = 0, all = 0;
            cudaMemGetInfo(&free, &all);
            throw Error("cuda:" + std::to_string(device_) + " has no room for " + mebibytes(room) + " of gradients (" +
                        mebibytes(free) + " of " + mebibytes(all) +
                        " are free); shard more, use a smaller dtype, or offload=True");
        }
        check(status, "cudaMalloc");
        auto storage = std::make_shared<Storage>();
        storage->data = data;
        storage->bytes = bytes;
        storage->device = device();
        storage->owner = std::shared_ptr<void>(data, [device = device_](void* memory) {
            int before = 0;
            cudaGetDevice(&before);
            cudaSetDevice(device);
            cudaFree(memory);
            cudaSetDevice(before);
        });
        check(cudaMemset(data, 0, room), "cudaMemset");
        check(cudaStreamSynchronize(cudaStreamLegacy), "cudaMemset");
        return storage;
    }

    std::shared_ptr<Storage> allocate_pinned(std::size_t bytes) override {
        void* data = nullptr;
        const std::size_t room = bytes > 0 ? bytes : 1;
        const cudaError_t status = cudaHostAlloc(&data, room, cudaHostAllocPortable);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            throw Error("the host has no room for " + mebibytes(room) +
                        " of pinned memory; offload less, or raise the "
                        "limit of locked memory");
        }
        check(status, "cudaHostAlloc");
        std::memset(data, 0, room);
        auto storage = std::make_shared<Storage>();
        storage->data = data;
        storage->bytes = bytes;
        storage->owner = std::shared_ptr<void>(data, [](void* memory) { cudaFreeHost(memory); });
        return storage;
    }

    // All units of a kind have the same geometry: one table serves them, told apart by an offset of the weight.
    void prepare(SegmentList& list) override {
        if (list.segments.empty()) return;
        const std::uint32_t first = list.segments.front().weight;
        std::vector<Segment> relative = list.segments;
        std::vector<std::int64_t> geometry;
        for (Segment& s : relative) {
            s.weight -= first;
            for (const std::int64_t value :
                 {s.source, s.shard, s.numel, s.element, static_cast<std::int64_t>(s.weight)})
                geometry.push_back(value);
        }
        auto& table = tables_[geometry];
        if (!table) table = std::make_shared<const CudaSegments>(relative);
        list.table = table;
        list.weight_offset = first;
    }

    std::shared_ptr<Storage> to_host(const std::shared_ptr<Storage>& storage) override {
        synchronize();
        if (storage->device.kind == DeviceKind::cpu) return storage;
        std::shared_ptr<Storage> out = Backend::allocate(storage->bytes);
        check(cudaMemcpy(out->data, storage->data, storage->bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
        return out;
    }

    void fill(void* data, int byte, std::size_t bytes, Lane lane) override {
        if (bytes == 0) return;
        check(cudaMemsetAsync(data, byte, bytes, use(lane)), "cudaMemset");
    }

    void copy(void* to, const void* from, std::size_t bytes, Lane lane) override {
        if (bytes == 0) return;
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, use(lane)), "cudaMemcpy");
    }

    void reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, const SegmentList& segments,
                ReduceStats* stats, Lane lane) override {
        if (segments.empty()) return;
        ReduceArgs own = args;
        const float* factor = nullptr;
        if (args.scale == kScaleOnDevice) own.scale = 1.0, factor = &scalars()->divide;
        cuda_reduce(own, sources, table_of(segments), stats ? device_stats() : nullptr, factor, use(lane), counters(),
                    segments.weight_offset);
    }

    void measure(DType type, const void* data, bool in_arena, const SegmentList& segments, ReduceStats*,
                 Lane lane) override {
        if (!segments.empty()) cuda_measure(type, data, in_arena, table_of(segments), device_stats(), use(lane));
    }

    void scale(DType type, void* data, bool in_arena, const SegmentList& segments, double factor, Lane lane) override {
        if (!segments.empty()) cuda_scale(type, data, in_arena, table_of(segments), factor, nullptr, use(lane));
    }

    void pack(DType out_type, void* out, DType in_type, const void* in, const SegmentList& segments,
              const RoundingKey& rounding, Lane lane) override {
        if (!segments.empty())
            cuda_pack(out_type, out, in_type, in, table_of(segments), rounding, use(lane), counters(),
                      segments.weight_offset);
    }

    Event make_event() override { return cuda::make_event(device_); }
    void record(const Event& event, Lane lane) override {
        cuda::record(*static_cast<cuda::Event*>(event.get()), stream_of(lane));
    }
    void wait(Lane lane, const void* event) override {
        if (event != nullptr) cuda::wait(use(lane), *static_cast<const cuda::Event*>(event));
    }
    // A lane on which nothing was put since the last join has nothing to wait for (and may not be in a capture).
    void join(Lane after, Lane before) override {
        bool& busy = busy_[static_cast<std::size_t>(before)];
        if (before != Lane::caller && !busy) return;
        if (before != Lane::caller && after == Lane::caller) busy = false;
        auto& joint = *static_cast<cuda::Event*>(joints_[static_cast<std::size_t>(before)].get());
        cuda::record(joint, stream_of(before));
        cuda::wait(use(after), joint);
    }
    void* stream(Lane lane) override { return use(lane); }
    void synchronize() override {
        check(cudaStreamSynchronize(caller_), "waiting for the caller's stream");
        check(cudaStreamSynchronize(exchange_), "waiting for sums over ranks");
        check(cudaStreamSynchronize(offload_), "waiting for copies to the host");
    }
    void begin_range(const char* name) override { nvtxRangePushA(name); }
    void end_range() override { nvtxRangePop(); }
    void reach_peers() override;

    void use_stream(void* stream) override {
        auto* next = static_cast<cudaStream_t>(stream);
        if (next == caller_) return;
        auto& joint = *static_cast<cuda::Event*>(joints_[0].get());
        if ((cuda::capture_of(caller_) != 0) == (cuda::capture_of(next) != 0)) {
            cuda::record(joint, caller_);
            cuda::wait(next, joint);
        }
        caller_ = next;
    }
    bool capturing() const override { return cuda::capture_of(caller_) != 0; }

    void set_counters(std::int64_t step, int micro_step) override {
        cuda::set_counters(scalars(), {static_cast<std::uint64_t>(step), static_cast<std::uint32_t>(micro_step)},
                           caller_);
    }
    void count_micro_step(bool first) override {
        in_capture_ = capturing();
        cuda::count(scalars(), first ? cuda::Count::first_micro_step : cuda::Count::next_micro_step, caller_);
    }
    void count_step() override { cuda::count(scalars(), cuda::Count::step, caller_); }
    std::int64_t read_step() override {
        CudaCounters counters;
        read(&counters, &scalars()->counters, sizeof counters);
        return static_cast<std::int64_t>(counters.step);
    }
    void divide_by(const void* divide, DType type) override {
        if (type != DType::f32 && type != DType::f64)
            throw std::invalid_argument("a divisor on the GPU must be float32 or float64, got " +
                                        std::string(to_string(type)));
        cuda::set_divide(scalars(), divide, type == DType::f64, caller_);
    }
    void clear_stats(Lane lane) override { cuda_zero(device_stats(), sizeof(CudaStats), use(lane)); }
    void* total(Lane lane) override {
        cuda_total(device_stats(), &scalars()->mine, use(lane));
        return &scalars()->mine;
    }
    void* totals_of_ranks() override { return scalars()->ranks; }
    void sum_totals(std::span<const void* const> of_ranks, Lane lane) override {
        cuda::Totals totals;
        for (const void* total : of_ranks) totals.of[totals.count++] = static_cast<const ReduceStats*>(total);
        cuda::sum_totals(scalars(), totals, use(lane));
    }
    ReduceStats read_total() override {
        ReduceStats total;
        read(&total, &scalars()->all, sizeof total);
        return total;
    }
    void write_total(const ReduceStats& total) override {
        check(cudaMemcpyAsync(&scalars()->all, &total, sizeof total, cudaMemcpyHostToDevice, caller_), "a saved norm");
        check(cudaStreamSynchronize(caller_), "a saved norm");
    }
    void scale_total(double factor) override { cuda::scale_total(scalars(), factor, caller_); }
    Tensor norm_tensor() override {
        auto storage = std::make_shared<Storage>();
        storage->data = &scalars()->norm;
        storage->bytes = sizeof(float);
        storage->device = device();
        storage->owner = scalars_->owner;
        return Tensor(std::move(storage), 0, {}, DType::f32);
    }
    void prepare_clip(double max_norm) override { cuda::prepare_clip(scalars(), max_norm, caller_); }
    void clip(DType type, void* data, bool in_arena, const SegmentList& segments, Lane lane) override {
        if (!segments.empty()) cuda_scale(type, data, in_arena, table_of(segments), 1.0, &scalars()->clip, use(lane));
    }

  private:
    cudaStream_t stream_of(Lane lane) const {
        return lane == Lane::caller ? caller_ : lane == Lane::exchange ? exchange_ : offload_;
    }
    cudaStream_t use(Lane lane) {
        busy_[static_cast<std::size_t>(lane)] = true;
        return stream_of(lane);
    }
    cuda::Scalars* scalars() const { return static_cast<cuda::Scalars*>(scalars_->data); }
    CudaStats* device_stats() const { return static_cast<CudaStats*>(stats_->data); }
    /// A captured step counts for itself; otherwise the host says which step a sum belongs to, however late it is made.
    const CudaCounters* counters() const { return in_capture_ ? &scalars()->counters : nullptr; }
    static const CudaSegments& table_of(const SegmentList& list) {
        return *static_cast<const CudaSegments*>(list.table.get());
    }
    void read(void* to, const void* from, std::size_t bytes) {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, caller_), "reading a result");
        check(cudaStreamSynchronize(caller_), "reading a result");
    }

    int device_;
    cudaStream_t caller_ = nullptr, exchange_ = nullptr, offload_ = nullptr;
    std::array<bool, 3> busy_{};
    std::array<Event, 3> joints_;
    std::shared_ptr<Storage> scalars_, stats_;
    std::map<std::vector<std::int64_t>, std::shared_ptr<const CudaSegments>> tables_;
    bool in_capture_ = false;
};

// Ranks of one process read each other's memory; across GPUs the driver must be told once.
void CudaBackend::reach_peers() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    for (int peer = 0; peer < count; ++peer) {
        int can = 0;
        if (peer == device_ || cudaDeviceCanAccessPeer(&can, device_, peer) != cudaSuccess || can == 0) continue;
        const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
        cudaGetLastError();
        if (status != cudaErrorPeerAccessAlreadyEnabled) check(status, "cudaDeviceEnablePeerAccess");
    }
}

}  // namespace

std::shared_ptr<Backend> make_cuda_backend(int device) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError();
        throw ConfigError("device=\"cuda\": no GPU can be used: " + std::string(cudaGetErrorString(status)) +
                          "; on a machine without one pass device=\"cpu\"");
    }
    if (device < 0 || device >= count)
        throw ConfigError("device=\"cuda:" + std::to_string(device) + "\": there are " + std::to_string(count) +
                          " GPUs, numbered from 0");
    return std::make_shared<CudaBackend>(device);
}

}  // namespace gradgen
