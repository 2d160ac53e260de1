// Construction: units in plan order, memory, and the agreement between ranks before the first collective.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "gradgen/engine.h"
#include "gradgen/error.h"
#include "gradgen/tables.h"

namespace gradgen {
namespace {

std::uint64_t fnv1a(const std::string& text) {
    std::uint64_t hash = 14695981039346656037ull;
    for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
    return hash;
}

std::string replace_index(const std::string& name, std::int64_t index) {
    const auto at = name.find("{i}");
    return at == std::string::npos ? name : name.substr(0, at) + std::to_string(index) + name.substr(at + 3);
}

}  // namespace

EngineManager::EngineManager(ModelDesc model, StrategyDesc strategy, std::shared_ptr<Communicator> comm,
                             const Options& options)
    : model_(std::move(model)), strategy_(std::move(strategy)), comm_(std::move(comm)), options_(options) {
    if (!comm_) throw std::invalid_argument("gradgen: " + model_.name + ": a manager needs a communicator, got none");
    accumulator_ = options_.accumulator.value_or(options_.dtype);
    direct_ = accumulator_ == options_.dtype && options_.rounding == Rounding::nearest;
    process_ = getpid();
    backend_ = std::make_shared<Backend>();  // until the device is known to be there
    resets_ = comm_->resets();
    divide_ = options_.divide.value_or(comm_->world_size());
    // What this rank refuses, the others must hear of: they wait for it in agree().
    std::string refusal;
    try {
        refuse_impossible();
        check_model(model_);
        backend_ = make_backend(options_.device);
        const OnDevice device(*backend_);
        if (comm_->world_size() > 1 && !comm_->on_device()) backend_->reach_peers();
        make_units();
        prepare_lists();
        allocate();
        backend_->set_counters(0, 0);
        model_key_ = fnv1a(model_.key + layout_text()) ^ comm_->next_manager() * 0x9E3779B97F4A7C15ull;
    } catch (const std::exception& error) {
        if (comm_->world_size() == 1) throw;
        refusal = error.what();
        if (refusal.empty()) refusal = "unknown error";
        agree(refusal);
        throw;
    }
    agree(refusal);
}

void EngineManager::refuse_impossible() const {
    const auto refuse = [&](const std::string& why) {
        throw ConfigError(model_.name + ", strategy '" + strategy_.id + "': " + why);
    };
    if (options_.block_buffers < 1)
        refuse("block_buffers must be at least 1, got " + std::to_string(options_.block_buffers));
    if (options_.divide && !(*options_.divide >= 1e-30 && *options_.divide <= 1e30))
        refuse("divide must lie between 1e-30 and 1e30");
    if (options_.offload && options_.device.kind == DeviceKind::cpu)
        refuse("offload moves shards from a GPU to the host; this manager is on the CPU, where they are already");
    if (options_.offload && strategy_.blocks == Placement::full && comm_->world_size() > 1)
        refuse(
            "offload keeps shards of blocks on the host, and this strategy keeps blocks whole; choose a sharded one");
    if (comm_->on_device() && options_.device.kind == DeviceKind::cpu)
        refuse("this communicator works on GPUs; pass device=\"cuda\", or make another one for the CPU");
    if (comm_->world_size() > 64) refuse("at most 64 ranks, got " + std::to_string(comm_->world_size()));
    if (options_.rounding == Rounding::stochastic && size_of(accumulator_) != 2)
        refuse("stochastic rounding needs a bfloat16 or float16 accumulator, not " +
               std::string(to_string(accumulator_)));
    if (strategy_.collective == Collective::all_reduce &&
        (strategy_.blocks != Placement::full || strategy_.non_blocks != Placement::full))
        refuse("all_reduce needs full placement of every gradient");
    for (const bool sharded : {false, true}) {
        const DType source = sharded ? options_.dtype : accumulator_, travels = wire(sharded);
        if (size_of(travels) > size_of(source) || (size_of(travels) == size_of(source) && travels != source))
            refuse("the wire dtype " + std::string(to_string(travels)) + " is not narrower than what is sent, " +
                   std::string(to_string(source)));
        if (options_.wire_rounding == Rounding::stochastic && options_.wire &&
            (travels == source || size_of(travels) != 2))
            refuse("stochastic wire rounding needs a wire dtype narrower than " + std::string(to_string(source)));
        if (!can_reduce(accumulator_, source, travels))
            refuse("no kernel sums " + std::string(to_string(source)) + " sent as " + std::string(to_string(travels)) +
                   " into " + std::string(to_string(accumulator_)));
    }
}

EngineManager::~EngineManager() {
    if (backend_->on_gpu()) {
        try {
            backend_->synchronize();
        } catch (...) {  // the device is lost; so are the gradients
        }
    }
    leave_in_flight();
}

// Work in flight may still read or write this memory: the communicator keeps it until that is over.
void EngineManager::leave_in_flight() {
    if (flights_.empty()) return;
    std::vector<std::shared_ptr<Storage>> memory;
    for (const Unit& unit : units_) memory.push_back(unit.buffer);
    for (const Slot& slot : slots_) memory.insert(memory.end(), {slot.arena, slot.receive, slot.send});
    memory.insert(memory.end(), {full_exchange_.receive, full_exchange_.send});
    comm_->adopt(std::move(memory));
    flights_.clear();
}

DType EngineManager::wire(bool sharded) const {
    return options_.wire.value_or(sharded ? options_.dtype : accumulator_);
}

// What kernels read, and the events between lanes.
void EngineManager::prepare_lists() {
    for (Unit& unit : units_) {
        unit.offloaded = options_.offload && unit.block >= 0;
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        const bool sharded = unit.placement == Placement::sharded;
        const bool packs = layout.packed || wire(sharded) != (sharded ? options_.dtype : accumulator_);
        if (packs && comm_->world_size() > 1 && receives(unit))
            for (int rank = 0; rank < comm_->world_size(); ++rank)
                unit.by_rank.emplace_back(layout.segments(rank, unit.uid_base));
        for (SegmentList* list : {&unit.mine, &unit.mine_whole, &unit.whole_piece, &unit.all}) backend_->prepare(*list);
        for (SegmentList& list : unit.by_rank) backend_->prepare(list);
        unit.ready = backend_->make_event();
    }
    totals_ready_ = backend_->make_event();
    totals_read_ = backend_->make_event();
    full_exchange_.consumed = backend_->make_event();
    for (Bounce& bounce : bounces_) bounce.loaded = backend_->make_event(), bounce.summed = backend_->make_event();
}

std::shared_ptr<Storage> EngineManager::allocate(std::int64_t bytes, std::int64_t& account, bool shareable) {
    account += bytes;
    if (backend_->on_gpu()) {
        auto memory = backend_->allocate(static_cast<std::size_t>(bytes));
        if (shareable) comm_->register_memory(memory);
        return memory;
    }
    return shareable ? comm_->allocate(static_cast<std::size_t>(bytes))
                     : comm_->Communicator::allocate(static_cast<std::size_t>(bytes));
}

void EngineManager::allocate() {
    const int world = comm_->world_size();
    const auto accumulator = static_cast<std::int64_t>(size_of(accumulator_)),
               produced = static_cast<std::int64_t>(size_of(options_.dtype));
    const bool staging = comm_->needs_staging() && world > 1;
    std::int64_t block_units = 0, largest_block = 0, largest_shard = 0, largest_exchange = 0, largest_offloaded = 0;
    bool block_packed = false, full_packed = false;
    for (const Unit& unit : units_) {
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        const bool sharded = unit.placement == Placement::sharded;
        const bool pack = layout.packed || wire(sharded) != (sharded ? options_.dtype : accumulator_);
        if (receives(unit)) {
            largest_exchange =
                std::max(largest_exchange, layout.shard_numel * static_cast<std::int64_t>(size_of(wire(sharded))));
            if (!sharded) full_packed |= pack;
        }
        if (unit.block < 0 || !staged(unit)) continue;
        ++block_units;
        largest_block = std::max(largest_block, layout.numel);
        if (unit.offloaded)
            largest_offloaded =
                std::max(largest_offloaded, (sharded ? layout.shard_numel : layout.numel) * accumulator);
        if (!sharded || !receives(unit)) continue;
        largest_shard = std::max(largest_shard, layout.shard_numel);
        block_packed |= pack;
    }
    const auto exchange_bytes = [&](std::int64_t shard) {
        return world * shard * static_cast<std::int64_t>(size_of(wire(true)));
    };
    block_slots_ = static_cast<int>(std::min<std::int64_t>(options_.block_buffers, block_units));
    for (int s = 0; s < block_slots_; ++s) {
        Slot slot;
        slot.arena = allocate(largest_block * produced, memory_.staging, true);
        slot.consumed = backend_->make_event();
        if (staging && largest_shard > 0) {
            slot.receive = allocate(exchange_bytes(largest_shard), memory_.exchange, false);
            if (block_packed) slot.send = allocate(exchange_bytes(largest_shard), memory_.exchange, false);
        }
        slots_.push_back(std::move(slot));
    }
    for (Unit& unit : units_) {
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        const bool sharded = unit.placement == Placement::sharded;
        const std::int64_t bytes = (sharded ? layout.shard_numel : layout.numel) * accumulator;
        if (unit.offloaded) {
            unit.buffer = backend_->allocate_pinned(static_cast<std::size_t>(bytes));
            memory_.pinned += bytes;
        } else {
            unit.buffer = allocate(bytes, sharded ? memory_.shards : memory_.full, !sharded);
        }
        if (unit.block >= 0 || !staged(unit)) continue;
        Slot slot;
        slot.arena = allocate(layout.numel * produced, memory_.staging, true);
        slot.consumed = backend_->make_event();
        if (staging && sharded && receives(unit)) {
            slot.receive = allocate(exchange_bytes(layout.shard_numel), memory_.exchange, false);
            if (layout.packed || wire(true) != options_.dtype)
                slot.send = allocate(exchange_bytes(layout.shard_numel), memory_.exchange, false);
        }
        unit.slot = static_cast<int>(slots_.size());
        slots_.push_back(std::move(slot));
    }
    for (Bounce& bounce : bounces_)
        if (largest_offloaded > 0) bounce.memory = allocate(largest_offloaded, memory_.staging, false);
    if (staging && largest_exchange > 0) {
        full_exchange_.receive = allocate(world * largest_exchange, memory_.exchange, false);
        if (full_packed) full_exchange_.send = allocate(world * largest_exchange, memory_.exchange, false);
    }
}

// What every rank must have in common, a line each, so that a difference can be named.
void EngineManager::agree(const std::string& refusal) {
    if (comm_->world_size() == 1) return;
    std::ostringstream mine;
    mine << std::setprecision(17);
    if (!refusal.empty()) mine << "error: " << refusal << '\n';
    mine << "model: " << model_.name << "\nspec: " << model_.key << "\nstrategy: " << strategy_.id
         << "\ndtype: " << to_string(options_.dtype) << "\naccumulator: " << to_string(accumulator_)
         << "\nwire: " << to_string(wire(false)) << '/' << to_string(wire(true))
         << "\nrounding: " << (options_.rounding == Rounding::stochastic ? "stochastic" : "nearest")
         << "\nwire rounding: " << (options_.wire_rounding == Rounding::stochastic ? "stochastic" : "nearest")
         << "\nseed: " << options_.seed << "\ndivide: " << divide_ << "\nblock_buffers: " << options_.block_buffers
         << "\ndevice: " << (options_.device.kind == DeviceKind::cuda ? "cuda" : "cpu")
         << (options_.offload ? ", offload" : "") << "\nnonfinite: " << static_cast<int>(options_.nonfinite) << "\n";
    if (refusal.empty()) mine << layout_text();
    const auto lines = [](const std::string& text) {
        std::vector<std::string> out;
        std::istringstream in(text);
        for (std::string line; std::getline(in, line);) out.push_back(line);
        return out;
    };
    const std::vector<std::string> all = comm_->gather_objects(mine.str());
    if (!refusal.empty()) return;  // this rank throws what it found
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        if (all[rank].starts_with("error: "))
            throw MismatchError(model_.name + ": rank " + std::to_string(rank) +
                                " could not build its manager: " + lines(all[rank])[0].substr(7));
    const std::vector<std::string> first = lines(all[0]);
    std::string differences;
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
        const std::vector<std::string> other = lines(all[rank]);
        int shown = 0;
        for (std::size_t i = 0; i < std::max(first.size(), other.size()) && shown < 6; ++i) {
            const std::string a = i < first.size() ? first[i] : "(nothing)",
                              b = i < other.size() ? other[i] : "(nothing)";
            if (a == b) continue;
            differences += "\n  rank 0 has '" + a + "', rank " + std::to_string(rank) + " has '" + b + "'";
            ++shown;
        }
    }
    if (!differences.empty())
        throw MismatchError("ranks built different gradient managers:" + differences +
                            "\nUse the same spec, configuration and options on every rank.");
}

std::string EngineManager::full_name(int block, std::int64_t layer, const WeightDesc& weight) const {
    if (block < 0) return weight.name;
    const std::string prefix = replace_index(model_.blocks[static_cast<std::size_t>(block)].name, layer);
    return prefix.empty() ? weight.name : prefix + "." + weight.name;
}

const WeightDesc& EngineManager::weight_desc(const Unit& unit, const WeightSlot& slot) const {
    const auto w = static_cast<std::size_t>(slot.weight);
    if (unit.block < 0) return model_.weights[w];
    return model_.blocks[static_cast<std::size_t>(unit.block)].kinds[unit.variant].weights[w];
}

UnshardedGradientManager::UnshardedGradientManager(ModelDesc model, StrategyDesc strategy,
                                                   std::shared_ptr<Communicator> comm, const Options& options)
    : EngineManager(std::move(model), std::move(strategy), std::move(comm), options) {
    if (this->strategy().blocks != Placement::full)
        throw std::invalid_argument("UnshardedGradientManager: strategy '" + this->strategy().id + "' shards blocks");
}

ShardedBlocksGradientManager::ShardedBlocksGradientManager(ModelDesc model, StrategyDesc strategy,
                                                           std::shared_ptr<Communicator> comm, const Options& options)
    : EngineManager(std::move(model), std::move(strategy), std::move(comm), options) {
    if (this->strategy().blocks != Placement::sharded)
        throw std::invalid_argument("ShardedBlocksGradientManager: strategy '" + this->strategy().id +
                                    "' keeps blocks full");
}

}  // namespace gradgen
