// Cuts segments into tiles and puts them on the device.
#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "gradgen/cuda_segments.h"

namespace gradgen {
namespace {

/// Restores the current device.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        cudaGetDevice(&before_);
        cudaSetDevice(device);
    }
    ~OnDevice() { cudaSetDevice(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    int before_ = 0;
};

/// Groups of 8 are counted from the weight's start, so the first tile of a segment may begin inside of a group.
void append_tiles(const Segment& part, std::vector<CudaTile>& tiles) {
    const std::int64_t lead = part.element % 8, end = part.numel + lead;
    for (std::int64_t at = 0; at < end && part.numel > 0; at += kCudaTile) {
        CudaTile tile;
        tile.source = part.source - lead + at;
        tile.shard = part.shard - lead + at;
        tile.group = static_cast<std::uint64_t>((part.element - lead + at) / 8);
        tile.weight = part.weight;
        tile.begin = static_cast<std::uint16_t>(at == 0 ? lead : 0);
        tile.end = static_cast<std::uint16_t>(std::min<std::int64_t>(end - at, kCudaTile));
        tiles.push_back(tile);
    }
}

}  // namespace

CudaSegments::CudaSegments(std::span<const Segment> segments) {
    std::vector<CudaTile> tiles;
    for (const Segment& part : segments) {
        if (part.numel < 0 || part.element < 0) {
            throw std::invalid_argument("CudaSegments: a segment has numel " + std::to_string(part.numel) +
                                        " and element " + std::to_string(part.element));
        }
        append_tiles(part, tiles);
        numel_ += part.numel;
    }
    cuda::check(cudaGetDevice(&device_), "CudaSegments");
    tile_count_ = static_cast<std::int64_t>(tiles.size());
    if (tile_count_ > INT_MAX / 2)
        throw std::invalid_argument("CudaSegments: " + std::to_string(numel_) +
                                    " elements are too many for one launch");
    if (tiles.empty()) return;
    const std::size_t bytes = tiles.size() * sizeof(CudaTile);
    void* memory = nullptr;
    cuda::check(cudaMalloc(&memory, bytes), "CudaSegments: allocation of the tiles");
    tiles_ = std::shared_ptr<const CudaTile>(static_cast<CudaTile*>(memory), [device = device_](CudaTile* owned) {
        const OnDevice guard(device);
        cudaFree(owned);
    });
    // Kernels may read the table before their stream reaches them (see reduce.cuh), on any stream: it must be there
    // now. A copy from pageable memory returns before its last bytes have arrived.
    cuda::check(cudaMemcpy(memory, tiles.data(), bytes, cudaMemcpyHostToDevice), "CudaSegments: copy of the tiles");
    cuda::check(cudaStreamSynchronize(cudaStreamLegacy), "CudaSegments: copy of the tiles");
}

}  // namespace gradgen
