#include "gradgen/tensor.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

namespace gradgen {
namespace {

constexpr std::size_t kAlignment = 64;  // a cache line, and the widest vector register

std::int64_t checked_numel(const std::vector<std::int64_t>& shape, DType dtype) {
    bool empty = false;
    for (const std::int64_t dim : shape) {
        if (dim < 0) throw std::invalid_argument("tensor: dimension " + std::to_string(dim) + " is negative");
        empty = empty || dim == 0;
    }
    if (empty) return 0;  // before the product: {2^40, 2^40, 0} is a valid empty shape
    const std::int64_t limit = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(size_of(dtype));
    std::int64_t numel = 1;
    for (const std::int64_t dim : shape) {
        if (dim > limit / numel) {
            throw std::length_error("tensor: the shape's size in bytes does not fit 63 bits (dimension " +
                                    std::to_string(dim) + ")");
        }
        numel *= dim;
    }
    return numel;
}

/// Row-major; a zero dimension counts as 1, as in PyTorch. Wraps instead of overflowing where an empty shape has huge
/// dimensions.
std::vector<std::int64_t> row_major_strides(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> strides(shape.size());
    std::uint64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
        strides[i] = static_cast<std::int64_t>(stride);
        stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(shape[i], 1));
    }
    return strides;
}

struct Slice {
    std::int64_t begin, end;
};

Slice flat_slice(std::int64_t numel, int rank, int world) {
    const std::int64_t part = numel / world + (numel % world != 0);
    const auto bound = [&](std::int64_t r) { return part == 0 || r > numel / part ? numel : r * part; };
    return {bound(rank), bound(rank + std::int64_t{1})};
}

void check_rank(int rank, int world) {
    if (world < 1 || rank < 0 || rank >= world) {
        throw std::invalid_argument("shard: rank " + std::to_string(rank) + " of a world of " + std::to_string(world));
    }
}

std::vector<std::int64_t> slice_shape(const Tensor& full, Slice slice, int world) {
    return world == 1 ? full.shape() : std::vector<std::int64_t>{slice.end - slice.begin};
}

std::shared_ptr<Storage> host_storage(std::size_t bytes) {
    auto storage = std::make_shared<Storage>();
    if (bytes == 0) return storage;
    storage->owner = std::shared_ptr<void>(::operator new(bytes, std::align_val_t{kAlignment}),
                                           [](void* data) { ::operator delete(data, std::align_val_t{kAlignment}); });
    storage->data = storage->owner.get();
    storage->bytes = bytes;
    return storage;
}

std::size_t round_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Tensor::Tensor(std::shared_ptr<Storage> storage, std::int64_t offset, std::vector<std::int64_t> shape, DType dtype)
    : storage_(std::move(storage)),
      shape_(std::move(shape)),
      strides_(),
      numel_(checked_numel(shape_, dtype)),
      dtype_(dtype) {
    const std::size_t available = storage_ ? storage_->bytes / size_of(dtype) : 0;
    if (offset < 0 || static_cast<std::uint64_t>(offset) > available ||
        static_cast<std::uint64_t>(numel_) > available - static_cast<std::uint64_t>(offset)) {
        throw std::out_of_range("tensor: elements [" + std::to_string(offset) + ", +" + std::to_string(numel_) +
                                ") lie outside of a storage of " + std::to_string(available) + " " +
                                std::string(to_string(dtype)));
    }
    strides_ = row_major_strides(shape_);
    if (storage_ && storage_->data) {
        data_ = static_cast<std::byte*>(storage_->data) + static_cast<std::size_t>(offset) * size_of(dtype);
    }
}

void TensorContainer::add(std::string id, TensorShard shard) {
    if (find(id)) throw std::invalid_argument("container: id '" + id + "' is there already");
    if (!items_)
        items_ = std::make_shared<Items>();
    else if (items_.use_count() > 1)
        items_ = std::make_shared<Items>(*items_);
    items_->emplace_back(std::move(id), std::move(shard));
}

const TensorShard* TensorContainer::find(const std::string& id) const {
    if (!items_) return nullptr;
    const auto found = std::find_if(items_->begin(), items_->end(), [&](const auto& item) { return item.first == id; });
    return found == items_->end() ? nullptr : &found->second;
}

TensorContainer shard_view(const TensorContainer& full, int rank, int world) {
    check_rank(rank, world);
    TensorContainer result;
    for (std::size_t i = 0; i < full.size(); ++i) {
        const TensorShard& source = full.shard(i);
        const Tensor& tensor = source.tensor;
        const Slice slice = flat_slice(tensor.numel(), rank, world);
        std::int64_t base = 0;  // offset of the full tensor in its storage
        if (tensor.data()) {
            const auto bytes = static_cast<std::byte*>(tensor.data()) - static_cast<std::byte*>(tensor.storage()->data);
            base = bytes / static_cast<std::int64_t>(size_of(tensor.dtype()));
        }
        result.add(full.id(i),
                   {Tensor(tensor.storage(), base + slice.begin, slice_shape(tensor, slice, world), tensor.dtype()),
                    source.offset + slice.begin, source.global_shape});
    }
    return result;
}

TensorContainer shard_empty_container(const TensorContainer& full, int rank, int world, DType dtype) {
    check_rank(rank, world);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < full.size(); ++i) {
        const Tensor& tensor = full.tensor(i);
        if (tensor.device().kind != DeviceKind::cpu) {
            throw std::invalid_argument("shard_empty_container: '" + full.id(i) + "' is not in host memory");
        }
        const Slice slice = flat_slice(tensor.numel(), rank, world);
        const auto part = static_cast<std::size_t>(checked_numel({slice.end - slice.begin}, dtype)) * size_of(dtype);
        bytes += round_up(part);
    }
    const std::shared_ptr<Storage> storage = host_storage(bytes);
    TensorContainer result;
    std::size_t at = 0;
    for (std::size_t i = 0; i < full.size(); ++i) {
        const TensorShard& source = full.shard(i);
        const Slice slice = flat_slice(source.tensor.numel(), rank, world);
        Tensor tensor(storage, static_cast<std::int64_t>(at / size_of(dtype)), slice_shape(source.tensor, slice, world),
                      dtype);
        at += round_up(tensor.bytes());
        result.add(full.id(i), {std::move(tensor), source.offset + slice.begin, source.global_shape});
    }
    return result;
}

}  // namespace gradgen
