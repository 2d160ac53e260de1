// A run of operations is one long row: each tensor's slices, padded to the longest, one behind the other. The row
// travels in chunks, which bounds the temporary memory whatever the tensors' number and size.
#include "gradgen/transaction.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace gradgen {

namespace {

constexpr std::int64_t kRowChunk = 1 << 18;  // elements of one rank that travel at a time

std::int64_t longest_slice(std::int64_t numel, int world) { return (numel + world - 1) / world; }

std::byte* element_of(const Tensor& tensor, std::int64_t index) {
    return static_cast<std::byte*>(tensor.data()) + static_cast<std::size_t>(index) * size_of(tensor.dtype());
}

/// Calls body(operation, first element of its slices, offset in the chunk, elements) for what a chunk of the row holds.
template <class Operation, class Body>
void walk(std::span<const Operation> operations, int world, std::int64_t begin, std::int64_t count, const Body& body) {
    std::int64_t at = 0;
    for (const Operation& operation : operations) {
        const std::int64_t length = longest_slice(operation.full.numel(), world);
        const std::int64_t first = std::max(at, begin), last = std::min(at + length, begin + count);
        if (first < last) body(operation, first - at, first - begin, last - first);
        at += length;
    }
}

/// How much of `count` elements from `offset` of rank's slice exists: the last slices are shorter, or empty.
std::int64_t existing(const Tensor& full, int world, int rank, std::int64_t offset, std::int64_t count) {
    const std::int64_t begin = rank * longest_slice(full.numel(), world) + offset;
    return std::clamp<std::int64_t>(full.numel() - begin, 0, count);
}

template <class Operation>
std::int64_t row_length(std::span<const Operation> operations, int world) {
    std::int64_t length = 0;
    for (const Operation& operation : operations) length += longest_slice(operation.full.numel(), world);
    return length;
}

void check_ids(const TensorContainer& a, const TensorContainer& b) {
    bool same = a.size() == b.size();
    for (std::size_t i = 0; same && i < a.size(); ++i) same = a.id(i) == b.id(i);
    if (!same) throw std::invalid_argument("transaction: the two containers hold different ids");
}

}  // namespace

void Transaction::add(Kind kind, const std::string& name, const Tensor& part, const Tensor& full) {
    const int world = comm_.world_size(), rank = comm_.rank();
    const std::int64_t want = existing(full, world, rank, 0, longest_slice(full.numel(), world));
    const auto refuse = [&](const std::string& why) {
        throw std::invalid_argument("transaction: " + (name.empty() ? "" : "'" + name + "': ") + why);
    };
    if (part.device().kind != DeviceKind::cpu || full.device().kind != DeviceKind::cpu)
        refuse("the tensor is not in host memory");
    if (kind != Kind::all_reduce && part.numel() != want)
        refuse("rank " + std::to_string(rank) + " of " + std::to_string(world) + " has " + std::to_string(want) +
               " of " + std::to_string(full.numel()) + " elements, not " + std::to_string(part.numel()));
    if (kind == Kind::all_gather ? part.dtype() != full.dtype() : !can_reduce(part.dtype(), full.dtype(), full.dtype()))
        refuse("no kernel makes " + std::string(to_string(part.dtype())) + " of " +
               std::string(to_string(full.dtype())));
    operations_.push_back({kind, part, full});
}

void Transaction::reduce_scatter(const Tensor& out, const Tensor& full) { add(Kind::reduce_scatter, "", out, full); }

void Transaction::reduce_scatter(const TensorContainer& out, const TensorContainer& full) {
    check_ids(out, full);
    Transaction all(comm_);  // all or nothing
    for (std::size_t i = 0; i < full.size(); ++i)
        all.add(Kind::reduce_scatter, full.id(i), out.tensor(i), full.tensor(i));
    operations_.insert(operations_.end(), all.operations_.begin(), all.operations_.end());
}

void Transaction::all_gather(const Tensor& full, const Tensor& in) { add(Kind::all_gather, "", in, full); }

void Transaction::all_gather(const TensorContainer& full, const TensorContainer& in) {
    check_ids(in, full);
    Transaction all(comm_);
    for (std::size_t i = 0; i < full.size(); ++i) all.add(Kind::all_gather, full.id(i), in.tensor(i), full.tensor(i));
    operations_.insert(operations_.end(), all.operations_.begin(), all.operations_.end());
}

void Transaction::all_reduce(const Tensor& tensor) { add(Kind::all_reduce, "", tensor, tensor); }

void Transaction::execute() {
    const std::vector<Operation> operations = std::move(operations_);
    operations_.clear();
    for (std::size_t begin = 0; begin < operations.size();) {
        const Operation& first = operations[begin];
        std::size_t end = begin + 1;
        const auto alike = [&](const Operation& other) {
            return other.kind == first.kind && other.part.dtype() == first.part.dtype() &&
                   other.full.dtype() == first.full.dtype();
        };
        while (first.kind != Kind::all_reduce && end < operations.size() && alike(operations[end])) ++end;
        const std::span run(operations.data() + begin, end - begin);
        if (first.kind == Kind::reduce_scatter)
            reduce_scatter(run);
        else if (first.kind == Kind::all_gather)
            all_gather(run);
        else
            comm_.all_reduce(first.full.data(), first.full.numel(), first.full.dtype());
        begin = end;
    }
}

void Transaction::reduce_scatter(std::span<const Operation> operations) {
    const int world = comm_.world_size(), self = comm_.rank();
    const DType type = operations.front().full.dtype();
    const std::size_t size = size_of(type);
    const std::int64_t total = row_length(operations, world), chunk = std::min(total, kRowChunk);
    std::vector<std::byte> send(static_cast<std::size_t>(world * chunk) * size), receive(send.size());
    std::int64_t begin = 0;
    do {  // once even for nothing: the ranks' sequences stay equal
        const std::int64_t count = std::min(chunk, total - begin);
        const auto slot = [&](std::vector<std::byte>& buffer, std::int64_t rank, std::int64_t at) {
            return buffer.data() + static_cast<std::size_t>(rank * count + at) * size;
        };
        walk(operations, world, begin, count, [&](const Operation& op, std::int64_t from, std::int64_t at, auto n) {
            for (int r = 0; r < world; ++r) {
                const std::int64_t have = existing(op.full, world, r, from, n);
                const std::int64_t where = r * longest_slice(op.full.numel(), world) + from;
                if (have > 0)
                    std::memcpy(slot(send, r, at), element_of(op.full, where), static_cast<std::size_t>(have) * size);
                if (have < n) std::memset(slot(send, r, at + have), 0, static_cast<std::size_t>(n - have) * size);
            }
        });
        comm_.all_to_all(receive.data(), send.data(), static_cast<std::size_t>(count) * size);
        std::vector<ReduceSource> sources;
        for (int r = 0; r < world; ++r)
            sources.push_back({receive.data() + static_cast<std::size_t>(r * count) * size});
        walk(operations, world, begin, count, [&](const Operation& op, std::int64_t from, std::int64_t at, auto n) {
            ReduceArgs args;
            args.target_type = op.part.dtype();
            args.target = op.part.data();
            args.source_type = args.wire_type = type;
            Segment segment;
            segment.source = at, segment.shard = from, segment.numel = existing(op.full, world, self, from, n);
            if (segment.numel > 0) reduce(args, sources, {&segment, 1}, nullptr);
        });
        begin += count;
    } while (begin < total);
}

void Transaction::all_gather(std::span<const Operation> operations) {
    const int world = comm_.world_size(), self = comm_.rank();
    const std::size_t size = size_of(operations.front().full.dtype());
    const std::int64_t total = row_length(operations, world), chunk = std::min(total, kRowChunk);
    std::vector<std::byte> send(static_cast<std::size_t>(chunk) * size),
        receive(static_cast<std::size_t>(world) * send.size());
    std::int64_t begin = 0;
    do {
        const std::int64_t count = std::min(chunk, total - begin);
        walk(operations, world, begin, count, [&](const Operation& op, std::int64_t from, std::int64_t at, auto n) {
            const std::int64_t have = existing(op.full, world, self, from, n);
            if (have > 0)
                std::memcpy(send.data() + static_cast<std::size_t>(at) * size, element_of(op.part, from),
                            static_cast<std::size_t>(have) * size);
        });
        comm_.all_gather(receive.data(), send.data(), static_cast<std::size_t>(count) * size);
        walk(operations, world, begin, count, [&](const Operation& op, std::int64_t from, std::int64_t at, auto n) {
            for (int r = 0; r < world; ++r) {
                const std::int64_t have = existing(op.full, world, r, from, n);
                const std::int64_t where = r * longest_slice(op.full.numel(), world) + from;
                if (have > 0)
                    std::memcpy(element_of(op.full, where),
                                receive.data() + static_cast<std::size_t>(r * count + at) * size,
                                static_cast<std::size_t>(have) * size);
            }
        });
        begin += count;
    } while (begin < total);
}

void Communicator::reduce_scatter(const Tensor& out, const Tensor& full) {
    Transaction one(*this);
    one.reduce_scatter(out, full);
    one.execute();
}

void Communicator::reduce_scatter(const TensorContainer& out, const TensorContainer& full) {
    Transaction one(*this);
    one.reduce_scatter(out, full);
    one.execute();
}

}  // namespace gradgen
