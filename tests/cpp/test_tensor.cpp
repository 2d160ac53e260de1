// Tensor, TensorContainer, shard_view and shard_empty_container.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "gradgen/tensor.h"

using namespace gradgen;
using Shape = std::vector<std::int64_t>;

namespace {

std::shared_ptr<Storage> storage_of(std::size_t bytes) {
    auto owner = std::shared_ptr<void>(std::malloc(bytes ? bytes : 1), &std::free);
    return std::make_shared<Storage>(Storage{owner.get(), bytes, {}, owner});
}

void test_tensor() {
    const auto storage = storage_of(100 * 4);
    const Tensor t(storage, 10, {2, 3, 4}, DType::f32);
    check::that(t.numel() == 24 && t.bytes() == 96 && t.strides() == Shape{12, 4, 1},
                "numel, bytes or strides of {2, 3, 4}");
    check::that(t.data() == static_cast<char*>(storage->data) + 40, "data lies at the offset");
    const Tensor scalar(storage, 99, {}, DType::f32);
    check::that(scalar.numel() == 1 && scalar.strides().empty(), "a 0-dim tensor has one element");
    const Tensor none(storage, 100, {3, 0, 5}, DType::f32);
    check::that(none.empty() && none.bytes() == 0 && none.strides() == Shape{5, 5, 1},
                "an empty tensor at the end of its storage");
    check::that(Tensor(nullptr, 0, {0}, DType::f64).data() == nullptr, "an empty tensor needs no storage");
    check::that(Tensor(storage, 0, {std::int64_t{1} << 40, std::int64_t{1} << 40, 0}, DType::f32).empty(),
                "huge but empty");

    const auto make = [&](std::int64_t offset, Shape shape, DType type) {
        return [=] { Tensor(storage, offset, shape, type); };
    };
    check::throws<std::out_of_range>(make(77, {24}, DType::f32), "100 float32", "past the end");
    check::throws<std::out_of_range>(make(101, {0}, DType::f32), "outside", "offset past the end");
    check::throws<std::out_of_range>(make(-1, {1}, DType::f32), "outside", "negative offset");
    check::throws<std::out_of_range>(make(0, {51}, DType::f64), "50 float64", "itemsize counts");
    check::throws<std::out_of_range>([] { Tensor(nullptr, 0, {1}, DType::f32); }, "outside", "no storage");
    check::throws<std::invalid_argument>(make(0, {2, -1}, DType::f32), "-1 is negative", "negative dimension");
    check::throws<std::length_error>(make(0, {std::int64_t{1} << 32, std::int64_t{1} << 31}, DType::bf16), "63 bits",
                                     "numel overflow");
    check::throws<std::length_error>(make(0, {std::int64_t{1} << 61}, DType::f32), "63 bits", "byte overflow");
}

TensorContainer example(const std::shared_ptr<Storage>& storage) {
    TensorContainer full;
    full.add("a", {Tensor(storage, 0, {5, 2}, DType::f32), 0, {5, 2}});
    full.add("b", {Tensor(storage, 16, {3}, DType::f32), 0, {3}});
    full.add("c", {Tensor(storage, 20, {}, DType::f32), 0, {}});
    full.add("d", {Tensor(storage, 32, {0, 4}, DType::f32), 0, {0, 4}});
    return full;
}

void test_shards() {
    const auto storage = storage_of(64 * 4);
    const TensorContainer full = example(storage);
    for (const int world : {1, 2, 3, 4, 8, 11}) {
        std::vector<std::int64_t> next(full.size(), 0);
        for (int rank = 0; rank < world; ++rank) {
            const TensorContainer view = shard_view(full, rank, world),
                                  fresh = shard_empty_container(full, rank, world, DType::bf16);
            check::that(view.size() == full.size() && fresh.size() == full.size(), "one shard a tensor");
            for (std::size_t i = 0; i < full.size(); ++i) {
                const std::string name = full.id(i) + " of rank " + std::to_string(rank) + "/" + std::to_string(world);
                const std::int64_t n = full.tensor(i).numel(), part = (n + world - 1) / world;
                const std::int64_t begin = std::min(rank * part, n), end = std::min((rank + 1) * part, n);
                const TensorShard &shard = view.shard(i), &copy = fresh.shard(i);
                const Shape shape = world == 1 ? full.tensor(i).shape() : Shape{end - begin};
                check::that(shard.tensor.shape() == shape && copy.tensor.shape() == shape, name + ": shape");
                check::that(shard.offset == begin && copy.offset == begin && begin == next[i],
                            name + ": offset " + std::to_string(shard.offset));
                check::that(shard.tensor.data() == static_cast<float*>(full.tensor(i).data()) + begin,
                            name + ": memory");
                check::that(shard.global_shape == full.shard(i).global_shape && view.id(i) == full.id(i),
                            name + ": global shape or id");
                check::that(copy.tensor.dtype() == DType::bf16, name + ": dtype");
                check::that(reinterpret_cast<std::uintptr_t>(copy.tensor.data()) % 64 == 0, name + ": alignment");
                if (!copy.tensor.empty()) std::memset(copy.tensor.data(), rank, copy.tensor.bytes());
                next[i] = end;
            }
        }
        for (std::size_t i = 0; i < full.size(); ++i)
            check::that(next[i] == full.tensor(i).numel(), full.id(i) + ": shards cover the tensor");
    }
    const TensorContainer twice = shard_view(shard_view(full, 1, 2), 1, 2);
    check::that(twice.find("a")->offset == 8 && twice.find("a")->tensor.numel() == 2,
                "a shard of a shard keeps its place in the whole");
    check::that(full.find("none") == nullptr, "find");
    TensorContainer copy = full;
    check::throws<std::invalid_argument>([&] { copy.add("a", {}); }, "'a'", "an id twice");
    check::throws<std::out_of_range>([&] { full.tensor(4); }, "", "index past the end");
    for (const auto& [rank, world] : {std::pair{2, 2}, {-1, 2}, {0, 0}}) {
        check::throws<std::invalid_argument>([&, r = rank, w = world] { shard_view(full, r, w); }, "rank", "bad rank");
    }
    auto device = std::make_shared<Storage>(*storage);
    device->device = {DeviceKind::cuda, 0};
    check::throws<std::invalid_argument>([&] { shard_empty_container(example(device), 0, 2, DType::f32); },
                                         "host memory", "device memory");
}

void test_lifetime() {
    Tensor view;
    {
        const TensorContainer full = example(storage_of(64 * 4));
        view = shard_view(full, 0, 2).tensor(0);
    }
    static_cast<float*>(view.data())[4] = 3;  // an address sanitizer would object
    check::that(view.storage().use_count() == 1, "a view keeps its memory alive, and alone");
}

}  // namespace

int main() {
    test_tensor();
    test_shards();
    test_lifetime();
    return check::result();
}
