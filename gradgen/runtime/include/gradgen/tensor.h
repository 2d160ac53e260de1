// Tensors: a view of memory with shape, dtype, strides and device, and the containers that managers hand out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradgen/dtype.h"

namespace gradgen {

enum class DeviceKind : std::uint8_t { cpu, cuda };

struct Device {
    DeviceKind kind = DeviceKind::cpu;
    int index = 0;
    bool operator==(const Device&) const = default;
};

/// A block of memory with an owner: whoever holds the pointer keeps the bytes alive.
struct Storage {
    void* data = nullptr;
    std::size_t bytes = 0;
    Device device;
    std::shared_ptr<void> owner;
};

/// A dense row-major view. Copying a Tensor copies the view; `storage` keeps the memory alive.
class Tensor {
  public:
    Tensor() = default;
    /// `offset` in elements from the start of the storage.
    Tensor(std::shared_ptr<Storage> storage, std::int64_t offset, std::vector<std::int64_t> shape, DType dtype);

    void* data() const { return data_; }
    DType dtype() const { return dtype_; }
    const std::vector<std::int64_t>& shape() const { return shape_; }
    const std::vector<std::int64_t>& strides() const { return strides_; }  // in elements
    std::int64_t numel() const { return numel_; }
    std::size_t bytes() const { return static_cast<std::size_t>(numel_) * size_of(dtype_); }
    Device device() const { return storage_ ? storage_->device : Device{}; }
    const std::shared_ptr<Storage>& storage() const { return storage_; }
    bool empty() const { return numel_ == 0; }

  private:
    std::shared_ptr<Storage> storage_;
    void* data_ = nullptr;
    std::vector<std::int64_t> shape_, strides_;
    std::int64_t numel_ = 0;
    DType dtype_ = DType::f32;
};

/// This rank's part of a weight: `offset` elements into the flattened weight of `global_shape`.
/// A whole weight has the weight's shape; a flat slice is 1-dim; a row shard has the weight's shape with fewer rows.
struct TensorShard {
    Tensor tensor;
    std::int64_t offset = 0;
    std::vector<std::int64_t> global_shape;
};

/// The tensors of one block, in layout order, with the ids that the spec gives them. Copies share them until one is
/// added to.
class TensorContainer {
  public:
    void add(std::string id, TensorShard shard);
    std::size_t size() const { return items_ ? items_->size() : 0; }
    const std::string& id(std::size_t index) const { return item(index).first; }
    const TensorShard& shard(std::size_t index) const { return item(index).second; }
    const Tensor& tensor(std::size_t index) const { return shard(index).tensor; }
    const TensorShard* find(const std::string& id) const;

  private:
    using Items = std::vector<std::pair<std::string, TensorShard>>;
    const Items::value_type& item(std::size_t index) const {
        static const Items none;
        return (items_ ? *items_ : none).at(index);
    }
    std::shared_ptr<Items> items_;
};

/// Views of `rank`'s flat slice of every tensor: ceil(numel / world) elements a rank, fewer or none on the last ranks.
TensorContainer shard_view(const TensorContainer& full, int rank, int world);

/// A container of uninitialised tensors with the shapes of `shard_view(full, rank, world)` in fresh memory of `dtype`.
TensorContainer shard_empty_container(const TensorContainer& full, int rank, int world, DType dtype);

}  // namespace gradgen
