// The CPU's backend: kernels run when they are called.
#include "gradgen/backend.h"

#include <cstring>

#include "arena.h"
#include "gradgen/error.h"

namespace gradgen {

std::shared_ptr<Storage> Backend::allocate(std::size_t bytes) { return as_storage(std::make_shared<Arena>(bytes, -1)); }

void Backend::fill(void* data, int byte, std::size_t bytes, Lane) {
    if (bytes > 0) std::memset(data, byte, bytes);
}

void Backend::copy(void* to, const void* from, std::size_t bytes, Lane) {
    if (bytes > 0) std::memcpy(to, from, bytes);
}

void Backend::reduce(const ReduceArgs& args, std::span<const ReduceSource> sources, const SegmentList& segments,
                     ReduceStats* stats, Lane) {
    gradgen::reduce(args, sources, segments.segments, stats);
}

void Backend::measure(DType type, const void* data, bool in_arena, const SegmentList& segments, ReduceStats* stats,
                      Lane) {
    *stats = gradgen::measure(type, data, in_arena, segments.segments);
}

void Backend::scale(DType type, void* data, bool in_arena, const SegmentList& segments, double factor, Lane) {
    gradgen::scale(type, data, in_arena, segments.segments, factor);
}

void Backend::pack(DType out_type, void* out, DType in_type, const void* in, const SegmentList& segments,
                   const RoundingKey& rounding, Lane) {
    gradgen::pack(out_type, out, in_type, in, segments.segments, rounding);
}

#ifdef GRADGEN_CUDA
std::shared_ptr<Backend> make_cuda_backend(int device);  // cuda/backend.cpp
#endif

std::shared_ptr<Backend> make_backend(Device device) {
    if (device.kind == DeviceKind::cpu) return std::make_shared<Backend>();
#ifdef GRADGEN_CUDA
    return make_cuda_backend(device.index);
#else
    throw ConfigError(
        "this package was built for the CPU; build it for GPUs with `gradgen build SPEC --device cuda`, or load it "
        "with gradgen.load(spec, device=\"cuda\")");
#endif
}

}  // namespace gradgen
