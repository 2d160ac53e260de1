// The one implementation behind every generated manager: a state machine per unit of reduction, collectives in plan
// order, and a kernel that sums, scales and rounds in one pass. Generated classes derive from the two named managers at
// the end.
//
// A unit is a block instance, or a weight outside the blocks. Units are `full` (a persistent arena, exchanged in the
// last micro-step) or `sharded` (a persistent shard, exchanged in every micro-step from a staging slot). With one rank
// both are arenas and nothing is exchanged.
#pragma once

#include <compare>
#include <deque>
#include <mutex>
#include <set>

#include "gradgen/manager.h"

namespace gradgen {

/// One collective as it was issued: what `plan` printed before the run.
struct TraceEntry {
    std::string operation;  // "reduce_scatter", "all_to_all", "all_reduce", "end_step"
    std::string unit;
    std::int64_t bytes = 0;  // that this rank sends
    int micro_step = 0;
    bool operator==(const TraceEntry&) const = default;
};

/// Bytes that a manager allocated, by purpose.
struct MemoryUse {
    std::int64_t full = 0;      // persistent arenas
    std::int64_t shards = 0;    // persistent shards
    std::int64_t staging = 0;   // arenas that backward writes and a kernel consumes
    std::int64_t exchange = 0;  // send and receive staging of process groups
    std::int64_t total() const { return full + shards + staging + exchange; }
};

/// A named buffer, whole and with its padding, for tests and debugging.
struct NamedBuffer {
    std::string name;
    Tensor tensor;
};

/// What is known of a weight once dimensions are.
struct WeightRecord {
    std::string name;  // full checkpoint name
    std::string id;
    int block = -1;  // index, -1: outside the blocks
    std::int64_t layer = -1;
    std::vector<std::int64_t> shape;
    bool trainable = true, zero = false, may_be_absent = false;
    std::string tied_to;  // full checkpoint name of the owner
};

class EngineManager : public GradientManager {
  public:
    EngineManager(ModelDesc model, StrategyDesc strategy, std::shared_ptr<Communicator> comm, const Options& options);
    ~EngineManager() override;

    void start_micro_step(int micro_step, int micro_steps, std::optional<double> divide = {}) override;
    /// Changes the divisor of the current step; the one in force when the last micro-step ends is used. Positive and
    /// finite.
    void set_divide(double divide);
    void end_micro_step() override;
    WeightGradient get_non_block_full(int weight) override;
    BlockGradients get_block_full(int block, std::int64_t layer) override;
    void notify_non_block(int weight) override;
    void notify_block(int block, std::int64_t layer) override;
    /// `written`: indices of the block's weights that received a gradient. The others count as absent in this visit.
    void notify_block(int block, std::int64_t layer, const std::vector<int>& written);
    TensorShard get_non_block_shard(int weight) override;
    TensorContainer get_block_shard(int block, std::int64_t layer) override;

    /// (checkpoint name, this rank's shard) of every trainable weight, in spec order; tied weights once, under their
    /// owner's name.
    std::vector<std::pair<std::string, TensorShard>> named_gradients();
    std::vector<WeightRecord> weights() const;

    /// Norm of the reduced gradient over all ranks; ties and replicated weights once. inf or nan when the gradient is.
    double grad_norm();
    /// Scales every gradient by min(1, max_norm / (norm + 1e-6)); returns the norm before.
    double clip_grad_norm(double max_norm);
    void scale_gradients(double factor);
    std::int64_t skipped_steps() const { return skipped_steps_; }
    bool step_skipped() const { return step_skipped_; }

    /// Forgets the gradients of the step, finished or not.
    void zero_grad();
    /// After an error on any rank: forgets everything pending and brings the communicator back. Collective.
    void reset();
    /// Marks the manager failed and wakes the other ranks: an exception left the micro-step half done.
    void fail(const std::string& why);
    void close();

    /// The weights of one block. Throws std::out_of_range for a layer that the stack does not have.
    const std::vector<WeightDesc>& block_weights(int block, std::int64_t layer) const;
    const ModelDesc& model() const { return model_; }
    const StrategyDesc& strategy() const { return strategy_; }
    const Options& options() const { return options_; }
    Communicator& communicator() const { return *comm_; }
    std::shared_ptr<Communicator> communicator_ptr() const { return comm_; }
    DType accumulator() const { return accumulator_; }
    DType wire(bool sharded) const;
    bool direct() const { return direct_; }
    bool accumulating() const { return stage_ == Stage::inside || stage_ == Stage::between; }
    std::int64_t step() const { return step_; }
    void set_step(std::int64_t step);
    std::vector<TraceEntry> trace();
    const MemoryUse& memory() const { return memory_; }
    std::string layout_text() const { return describe_layout(model_, comm_->world_size()); }
    std::vector<NamedBuffer> buffers() const;
    /// Fills every buffer that the contract allows to hold anything between steps with NaN (tests).
    void poison();

  protected:
    enum class Status : std::uint8_t { idle, out, written, sent, done };

    struct Unit {
        int block = -1;
        std::size_t variant = 0;  // of the block's kinds
        std::int64_t index = 0;   // layer, or weight
        std::string name;
        int kind = 0;                // index into layouts_
        std::uint32_t uid_base = 0;  // of its weights, in the random counter
        Placement placement = Placement::full;
        std::vector<Segment> mine, mine_whole;  // what this rank owns; whole weights apart (counted on rank 0 only)
        std::vector<Segment>
            whole_piece;           // of whole weights in an arena: what this rank sums before the pieces are gathered
        std::vector<Segment> all;  // every element, for local accumulation into an arena
        std::shared_ptr<Storage> buffer;  // arena or shard
        int slot = -1;                    // staging in use, or the unit's own
        std::int64_t uses = 0;            // declared visits of a block a micro-step, 0: not declared
        std::int64_t expected = 1;        // visits after which nothing more is awaited
        bool strict = false;  // `expected` was declared (uses, ties): finished when it is reached, not before
        Status status = Status::idle;
        int visits = 0;             // of this micro-step
        bool touched = false;       // the step's sum holds something
        bool scaled = false;        // the step's factor has been applied
        std::vector<bool> written;  // per slot of the layout, over the step
        ReduceStats stats;
    };
    struct Slot {
        std::shared_ptr<Storage> arena, receive, send;
        int owner = -1;
        Ticket ticket = 0;
        bool draining = false;
    };
    struct Flight {
        int unit = -1, slot = -1;
        int micro_step = 0;
        bool last = false;
        Ticket ticket = 0;
    };

    // Where a model or a test plugs in.
    virtual void on_first_micro_step() {}
    virtual void on_get_block(int /*block*/, std::int64_t /*layer*/) {}
    virtual void on_notify_block(int /*block*/, std::int64_t /*layer*/) {}
    /// Adds what ranks contributed into the unit's accumulator: the only place where sums are made.
    virtual void accumulate_layer(Unit& unit, const ReduceArgs& args, std::span<const ReduceSource> sources,
                                  std::span<const Segment> segments, ReduceStats* stats);

  private:
    enum class Stage : std::uint8_t { fresh, inside, between, complete };

    // engine.cpp: calls and their rules
    class Guard;
    void require_inside(const char* call, const std::string& what) const;
    std::size_t kind_of(int block, std::int64_t layer) const;
    int unit_of_block(int block, std::int64_t layer) const;
    int unit_of_weight(int weight) const;
    bool visit(Unit& unit, int weight);
    void notify(Unit& unit, const std::vector<int>* written);
    void finish_step();
    void clear_step();
    std::string where() const;
    // engine_setup.cpp: units, memory and agreement between ranks
    struct BufferKey {
        int block = -1;
        std::int64_t index = 0;  // layer, or weight
        auto operator<=>(const BufferKey&) const = default;
    };
    struct BufferUse {
        BufferKey key;
        int weight = -1;         // outside the blocks, whose use this is
        std::int64_t extra = 0;  // contributions by a weight that is tied to one elsewhere
    };
    void make_units();
    BufferKey owner_of(int block, std::int64_t index, const WeightDesc& desc) const;
    std::vector<BufferUse> buffer_uses() const;
    void allocate();
    void refuse_impossible() const;
    void agree(const std::string& refusal);
    std::shared_ptr<Storage> allocate(std::int64_t bytes, std::int64_t& account, bool shareable);
    // engine_exchange.cpp: collectives in plan order
    bool staged(const Unit& unit) const;
    bool exchanged(const Unit& unit) const;
    void acquire_slot(Unit& unit);
    static constexpr int kEverything = -1, kOnlyFinished = -2;  // for settle
    void settle(int except);
    void accumulate_local(Unit& unit);
    void free_slot(Unit& unit);
    void issue(bool flush);
    void make_room(std::size_t asking);
    void post(int unit);
    void complete_front();
    void progress();
    void drain();
    void gather_full();
    void gather_unit(std::size_t unit, bool everything);
    void gather_staged(const Unit& unit);
    std::vector<Segment> whole_pieces(const Unit& unit, int rank) const;
    void finish_unit(Unit& unit);
    RoundingKey rounding_key(RoundingSite site, int micro_step) const;
    double factor() const;
    void* arena_of(const Unit& unit) const;
    DType buffer_type(const Unit& unit) const;
    // engine_results.cpp: what the optimizer reads
    void require_readable(const std::string& what) const;
    TensorShard shard_of(const Unit& unit, const WeightDesc& weight, const WeightSlot& slot) const;
    std::string full_name(int block, std::int64_t layer, const WeightDesc& weight) const;
    const WeightDesc& weight_desc(const Unit& unit, const WeightSlot& slot) const;
    ReduceStats measure_unit(const Unit& unit) const;
    std::string nonfinite_names() const;
    void fill_cleared();

    TensorShard weight_shard(int weight);
    TensorContainer block_shard(int block, std::int64_t layer);
    double norm();
    void multiply(double factor);

    ModelDesc model_;
    StrategyDesc strategy_;
    std::shared_ptr<Communicator> comm_;
    Options options_;
    std::uint64_t resets_ = 0;  // of the communicator, as this manager knows it
    int process_ = 0;           // that built it: a forked child shares memory with its parent
    DType accumulator_;
    bool direct_ = true;
    std::uint64_t model_key_ = 0;

    std::vector<ArenaLayout> layouts_;          // non-block weights, then the kinds of every block
    std::vector<Unit> units_;                   // in plan order
    std::vector<int> weight_unit_;              // by weight; -1: no buffer of its own or tied to none
    std::vector<int> weight_order_;             // position among the weights that share its buffer, in backward order
    std::vector<std::vector<int>> block_unit_;  // by block and layer; -1: none
    std::vector<std::vector<int>> block_kind_;  // the same; -1: no such block
    std::vector<Slot> slots_;
    int block_slots_ = 0;
    Slot full_exchange_;
    std::deque<Flight> flights_;
    std::size_t next_ = 0;  // first unit in plan order that this micro-step has not issued

    Stage stage_ = Stage::fresh;
    int micro_step_ = -1, micro_steps_ = 0;
    std::int64_t step_ = 0;
    double divide_ = 1.0;
    std::string failure_;
    bool closed_ = false, cleared_ = false;
    std::optional<double> norm_squared_;
    std::int64_t nonfinite_ = 0, skipped_steps_ = 0;
    bool step_skipped_ = false;
    std::vector<int> weight_visits_;
    std::vector<std::int64_t> weight_uses_;  // declared, with those of weights in blocks that are tied to it; 0: not
    std::vector<TraceEntry> trace_;
    MemoryUse memory_;
    std::mutex busy_;
};

/// Full gradients on every rank; reduced in the last micro-step.
class UnshardedGradientManager : public EngineManager {
  public:
    UnshardedGradientManager(ModelDesc model, StrategyDesc strategy, std::shared_ptr<Communicator> comm,
                             const Options& options);
};

/// A shard of every block on each rank; full-size gradients exist for `block_buffers` blocks only.
class ShardedBlocksGradientManager : public EngineManager {
  public:
    ShardedBlocksGradientManager(ModelDesc model, StrategyDesc strategy, std::shared_ptr<Communicator> comm,
                                 const Options& options);
};

}  // namespace gradgen
