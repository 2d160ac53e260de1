// The segments of a block as the CUDA kernels read them: cut into tiles, in device memory, built once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "gradgen/kernels.h"

namespace gradgen {

inline constexpr int kCudaTile = 8192;  // elements

/// One piece of work of a thread block: at most kCudaTile elements of one segment, which start at a multiple of 8 of
/// the weight. A tile is all that a thread block reads before its data: no search, no second load.
struct alignas(16) CudaTile {
    std::int64_t source = 0;   // offset in an arena of element 8 * group
    std::int64_t shard = 0;    // offset in a shard of element 8 * group
    std::uint64_t group = 0;   // index within the weight, in groups of 8 elements
    std::uint32_t weight = 0;  // as Segment::weight
    std::uint16_t begin = 0;   // the tile's elements are [begin, end), counted from element 8 * group; begin < 8
    std::uint16_t end = 0;
};
static_assert(sizeof(CudaTile) == 32);

/// Owns the tiles of some segments on the device that is current at construction; copies share them. Build it outside
/// of a stream capture: it allocates and waits for its copy. The last owner must outlive the kernels that use the
/// table.
class CudaSegments {
  public:
    explicit CudaSegments(std::span<const Segment> segments);

    const CudaTile* tiles() const { return tiles_.get(); }
    std::int64_t tile_count() const { return tile_count_; }
    std::int64_t numel() const { return numel_; }
    int device() const { return device_; }

  private:
    std::shared_ptr<const CudaTile> tiles_;
    std::int64_t tile_count_ = 0;
    std::int64_t numel_ = 0;
    int device_ = 0;
};

}  // namespace gradgen
