// Transactions and the collectives on tensors and containers, compared with plain sums.
#include "comm_harness.h"
#include "gradgen/transaction.h"

namespace gradgen::test {

namespace {

Tensor make(std::vector<std::int64_t> shape, DType dtype = DType::f32) {
    std::int64_t numel = 1;
    for (const std::int64_t dim : shape) numel *= dim;
    auto storage = std::make_shared<Storage>();
    auto memory = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(numel) * size_of(dtype) + 64);
    storage->data = memory->data(), storage->bytes = memory->size(), storage->owner = memory;
    return Tensor(storage, 0, std::move(shape), dtype);
}

float number(int rank, std::size_t tensor, std::int64_t index) {
    return static_cast<float>(1 + rank * 100 + static_cast<int>(tensor) * 7 + static_cast<int>(index % 97));
}

float expected(int world, std::size_t tensor, std::int64_t index) {
    float sum = 0;
    for (int r = 0; r < world; ++r) sum += number(r, tensor, index);
    return sum;
}

/// Sizes that no world divides, one element, none, and one of several chunks.
TensorContainer gradients(int rank) {
    TensorContainer out;
    const std::vector<std::vector<std::int64_t>> shapes{{5}, {3, 7}, {1}, {0, 4}, {}, {700'001}, {64}};
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        Tensor tensor = make(shapes[i]);
        for (std::int64_t k = 0; k < tensor.numel(); ++k) static_cast<float*>(tensor.data())[k] = number(rank, i, k);
        out.add("w" + std::to_string(i), {tensor, 0, shapes[i]});
    }
    return out;
}

void check_shards(const TensorContainer& shards, int world) {
    for (std::size_t i = 0; i < shards.size(); ++i) {
        const TensorShard& shard = shards.shard(i);
        for (std::int64_t k = 0; k < shard.tensor.numel(); ++k)
            CHECK(static_cast<const float*>(shard.tensor.data())[k] == expected(world, i, shard.offset + k));
    }
}

void containers(Communicator& comm) {
    const int world = comm.world_size(), rank = comm.rank();
    const TensorContainer full = gradients(rank);
    const TensorContainer shards = shard_empty_container(full, rank, world, DType::f32);
    comm.reduce_scatter(shards, full);
    check_shards(shards, world);
    const TensorContainer own = shard_view(full, rank, world);  // into the gradients themselves
    comm.reduce_scatter(own, full);
    check_shards(own, world);
    const Tensor& one = full.tensor(1);
    Transaction transaction(comm);  // the sums, back into the whole
    transaction.all_gather(full, own);
    transaction.execute();
    for (std::size_t i = 0; i < full.size(); ++i)
        for (std::int64_t k = 0; k < full.tensor(i).numel(); ++k)
            CHECK(static_cast<const float*>(full.tensor(i).data())[k] == expected(world, i, k));
    CHECK(one.numel() == 21);
}

void several(Communicator& comm) {
    const int world = comm.world_size(), rank = comm.rank();
    const TensorContainer full = gradients(rank);
    const TensorContainer shards = shard_empty_container(full, rank, world, DType::f32);
    const Tensor half = make({10}, DType::bf16);  // 256 on rank 0 and 1 elsewhere
    for (int k = 0; k < 10; ++k)
        static_cast<std::uint16_t*>(half.data())[k] = rank == 0 ? std::uint16_t{0x4380} : std::uint16_t{0x3f80};
    TensorContainer holder;
    holder.add("half", {half, 0, {10}});
    const TensorContainer wide = shard_empty_container(holder, rank, world, DType::f32);
    const Tensor loss = make({});
    *static_cast<float*>(loss.data()) = static_cast<float>(rank + 1);
    Transaction transaction(comm);
    transaction.reduce_scatter(shards, full);
    transaction.reduce_scatter(wide.tensor(0), half);
    transaction.all_reduce(loss);
    CHECK(*static_cast<const float*>(loss.data()) == static_cast<float>(rank + 1));  // nothing has happened yet
    CHECK(!transaction.empty());
    transaction.execute();
    CHECK(transaction.empty());
    transaction.execute();
    check_shards(shards, world);
    for (std::int64_t k = 0; k < wide.tensor(0).numel(); ++k)  // bf16 would have dropped the ones
        CHECK(static_cast<const float*>(wide.tensor(0).data())[k] == static_cast<float>(255 + world));
    CHECK(*static_cast<const float*>(loss.data()) == static_cast<float>(world * (world + 1)) / 2);
}

void refusals(Communicator& comm) {
    const int world = comm.world_size(), rank = comm.rank();
    const Tensor ten = make({10}), wrong = make({11});
    Transaction transaction(comm);
    CHECK_HAS(raises<std::invalid_argument>([&] { transaction.reduce_scatter(wrong, ten); }), "of 10 elements, not 11");
    TensorContainer named, other;
    named.add("a", {ten, 0, {10}});
    other.add("b", {ten, 0, {10}});
    CHECK_HAS(raises<std::invalid_argument>([&] { transaction.reduce_scatter(other, named); }), "different ids");
    TensorContainer both = named;
    both.add("b", {wrong, 0, {11}});
    TensorContainer parts;
    parts.add("a", shard_view(named, rank, world).shard(0));
    parts.add("b", {make({12}), 0, {12}});
    CHECK_HAS(raises<std::invalid_argument>([&] { transaction.all_gather(both, parts); }), "'b': rank");
    CHECK(transaction.empty());  // all of a container or nothing
    const Tensor half = shard_empty_container(named, rank, world, DType::f16).tensor(0);
    CHECK_HAS(raises<std::invalid_argument>([&] { transaction.all_gather(ten, half); }), "float16");
}

}  // namespace

std::vector<Test> transaction_tests(const std::string& mode, const std::vector<int>& worlds, const Runner& run) {
    std::vector<Test> tests;
    for (const int world : worlds) {
        const auto add = [&](const std::string& name, void (*body)(Communicator&)) {
            tests.push_back({mode + " world " + std::to_string(world) + ": " + name, [=] {
                                 run(world, 60s, [&](const std::shared_ptr<Communicator>& comm) { body(*comm); });
                             }});
        };
        add("reduce_scatter of containers", containers);
        add("several operations in a transaction", several);
        add("refused operations", refusals);
    }
    return tests;
}

}  // namespace gradgen::test
