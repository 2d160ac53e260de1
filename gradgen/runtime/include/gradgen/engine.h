// The one implementation behind every generated manager: a state machine per unit of reduction, collectives in plan
// order, and a kernel that sums, scales and rounds in one pass. Generated classes derive from the two named managers at
// the end.
//
// A unit is a block instance, or a weight outside the blocks. Units are `full` (a persistent arena, exchanged in the
// last micro-step) or `sharded` (a persistent shard, exchanged in every micro-step from a staging slot). With one rank
// both are arenas and nothing is exchanged.
#pragma once

#include <array>
#include <compare>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "gradgen/backend.h"
#include "gradgen/manager.h"
#include "gradgen/state.h"

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
    std::int64_t pinned = 0;    // block shards in host memory (offload)
    std::int64_t total() const { return full + shards + staging + exchange + pinned; }
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
    /// On a GPU the call waits for it; grad_norm_tensor does not.
    double grad_norm();
    /// Scales every gradient by min(1, max_norm / (norm + 1e-6)); returns the norm before.
    double clip_grad_norm(double max_norm);
    /// The same without waiting: one fp32 on the GPU, which the next step overwrites.
    Tensor grad_norm_tensor();
    Tensor clip_grad_norm_tensor(double max_norm);
    void scale_gradients(double factor);
    /// GPU: these wait for the device.
    std::int64_t skipped_steps();
    bool step_skipped();

    /// GPU: work of later calls goes on this stream (a cudaStream_t of the manager's device), after all before it.
    void use_stream(void* stream);
    /// GPU: like set_divide with one fp32 or fp64 number in device memory, read by the work that the step enqueues.
    void set_divide(const void* number, DType type);
    /// out = `bytes` of every rank's `in`, in rank order, in memory of the manager's device.
    void all_gather(void* out, const void* in, std::size_t bytes);
    Device device() const { return backend_->device(); }

    /// This rank's part of the step so far, between two micro-steps or after the last: views of the manager's memory.
    /// Every rank calls it: exchanges in flight are completed.
    SavedState save_state();
    /// Continues from a state of this rank, or from those of all ranks of a run of any size (in any order). Collective.
    /// Throws std::invalid_argument for what cannot be restored exactly, on the rank that finds it, MismatchError on
    /// the others; all of them are then as after zero_grad(). `problem`: why this rank has nothing to load.
    void load_state(std::span<const SavedState> states, const std::string& problem = "");

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
    /// The micro-step that comes next: 0 unless a step has begun.
    int next_micro_step() const { return stage_ == Stage::between || stage_ == Stage::inside ? micro_step_ + 1 : 0; }
    bool accumulating() const { return stage_ == Stage::inside || stage_ == Stage::between; }
    std::int64_t step();
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
        SegmentList mine, mine_whole;  // what this rank owns; whole weights apart (counted on rank 0 only)
        SegmentList whole_piece;  // of whole weights in an arena: what this rank sums before the pieces are gathered
        SegmentList all;          // every element, for local accumulation into an arena
        std::vector<SegmentList> by_rank;  // what each rank owns, where slices are packed before they are sent
        std::shared_ptr<Storage> buffer;   // arena or shard
        bool offloaded = false;            // `buffer` is pinned host memory
        Event ready;                       // on the caller's lane: this rank's contribution is complete
        int slot = -1;                     // staging in use, or the unit's own
        std::int64_t uses = 0;             // declared visits of a block a micro-step, 0: not declared
        std::int64_t expected = 1;         // visits after which nothing more is awaited
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
        Event consumed;  // this rank has read it
    };
    /// Device memory through which offloaded shards pass.
    struct Bounce {
        std::shared_ptr<Storage> memory;
        Event loaded, summed;
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
                                  const SegmentList& segments, ReduceStats* stats, Lane lane);

  private:
    enum class Stage : std::uint8_t { fresh, inside, between, complete };

    // engine.cpp: calls and their rules
    class Guard;
    void require_inside(const char* call, const std::string& what) const;
    std::size_t kind_of(int block, std::int64_t layer) const;
    int unit_of_block(int block, std::int64_t layer) const;
    int unit_of_weight(int weight) const;
    bool visit(Unit& unit, int weight);
    const TensorContainer& views(const Unit& unit, const std::shared_ptr<Storage>& storage, DType type);
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
    void leave_in_flight();
    void prepare_lists();
    // engine_exchange.cpp: collectives in plan order
    bool staged(const Unit& unit) const;
    bool receives(const Unit& unit) const;
    template <class Body>
    void with_buffer(Unit& unit, bool read, bool write, Lane lane, Body&& body);
    void order_after(Slot& slot);
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
    void gather_on_device(const Unit& unit);
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
    ReduceStats measure_unit(Unit& unit);
    void measure_everything();
    void share_totals();
    void resolve_nonfinite();
    std::string nonfinite_names();
    void fill_cleared();

    TensorShard weight_shard(int weight);
    TensorContainer block_shard(int block, std::int64_t layer);
    double norm();
    void norm_on_device();
    void multiply(double factor);

    // engine_state.cpp
    void remembering(const std::function<void()>& collective);
    void check_states(std::span<const SavedState> states) const;
    bool restore_unit(Unit& unit, std::span<const SavedState> states,
                      std::span<const std::map<std::string, const SavedGradient*>> by_name);
    void require_free_divisor() const;

    ModelDesc model_;
    StrategyDesc strategy_;
    std::shared_ptr<Communicator> comm_;
    Options options_;
    std::shared_ptr<Backend> backend_;
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
    std::array<Bounce, 2> bounces_;
    std::size_t next_bounce_ = 0;
    Event totals_ready_, totals_read_;
    std::map<std::pair<int, const Storage*>, TensorContainer> views_;  // of layout and buffer
    std::deque<Flight> flights_;
    std::size_t next_ = 0;  // first unit in plan order that this micro-step has not issued

    Stage stage_ = Stage::fresh;
    int micro_step_ = -1, micro_steps_ = 0;
    std::int64_t step_ = 0;
    double divide_ = 1.0;
    bool divide_given_ = false;  // for this step, instead of the mean over ranks
    bool divide_fixed_ = false;  // what was loaded has been scaled for the mean over another number of ranks
    std::string failure_;
    bool closed_ = false, cleared_ = false;
    std::optional<double> norm_squared_;
    bool norm_known_ = false;     // on the device
    bool unresolved_ = false;     // the device knows whether the step is to be skipped, the host not yet
    bool captured_ = false;       // a step was captured into a CUDA graph: the device counts steps
    bool device_divide_ = false;  // the step's divisor is in device memory
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
