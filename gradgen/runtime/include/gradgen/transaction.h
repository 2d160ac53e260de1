// Collectives on tensors and containers, for C++ trainers that own their buffers: one by one, or queued and issued
// together, so that many small tensors cost one exchange.
#pragma once

#include <functional>
#include <vector>

#include "gradgen/communicator.h"
#include "gradgen/tensor.h"

namespace gradgen {

/// Operations of one rank, in the order in which they were queued. Every rank queues the same. Tensors are host memory
/// of any dtype that reduce() knows; they are kept alive, and nothing is read or written before execute().
///
///     Transaction transaction(comm);
///     transaction.reduce_scatter(shards, gradients);  // a container
///     transaction.reduce_scatter(shard, embedding);   // a tensor: travels in the same exchange
///     transaction.all_reduce(loss);
///     transaction.execute();
class Transaction {
  public:
    explicit Transaction(Communicator& comm) : comm_(comm) {}

    /// out = the sum over ranks of this rank's flat slice of `full` (as shard_view and shard_empty_container cut it):
    /// in rank order in fp32, rounded once to out's dtype. `out` may be shard_view(full). Throws std::invalid_argument
    /// for sizes, ids or dtypes that do not fit, before anything is sent.
    void reduce_scatter(const TensorContainer& out, const TensorContainer& full);
    void reduce_scatter(const Tensor& out, const Tensor& full);
    /// full = every rank's slices: the inverse. `in` may be shard_view(full).
    void all_gather(const TensorContainer& full, const TensorContainer& in);
    void all_gather(const Tensor& full, const Tensor& in);
    /// In place: the sum over ranks.
    void all_reduce(const Tensor& tensor);

    bool empty() const { return operations_.empty(); }
    /// Issues what was queued, and empties the queue; blocking. Neighbours of one kind travel together. An error leaves
    /// the queue empty and the outputs undefined.
    void execute();

  private:
    enum class Kind : std::uint8_t { reduce_scatter, all_gather, all_reduce };
    struct Operation {
        Kind kind;
        Tensor part, full;  // this rank's slice, and the whole
    };
    void add(Kind kind, const std::string& name, const Tensor& part, const Tensor& full);
    void reduce_scatter(std::span<const Operation> operations);
    void all_gather(std::span<const Operation> operations);

    Communicator& comm_;
    std::vector<Operation> operations_;
};

}  // namespace gradgen
