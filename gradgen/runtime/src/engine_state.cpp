// Saving and loading in the middle of a step. Shards that are already summed over ranks go wherever their elements
// belong now. Sums that a rank still keeps for itself go back to it; at another number of ranks, rank q's go to rank q
// modulo the new number, so that the sum over ranks stays what it was.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "engine_guard.h"
#include "gradgen/engine.h"
#include "gradgen/error.h"
#include "gradgen/state.h"

namespace gradgen {

namespace {

constexpr int kMostRanks = 64;  // what a sum takes at once

bool power_of_two(int value) { return (value & (value - 1)) == 0; }

/// Scaling by a / b drops no bit (of numbers that stay in range).
bool exact_ratio(int a, int b) {
    while (a % 2 == 0 && b % 2 == 0) a /= 2, b /= 2;
    return (a % b == 0 && power_of_two(a / b)) || (b % a == 0 && power_of_two(b / a));
}

Segment all_of(std::int64_t numel) {
    Segment segment;
    segment.numel = numel;
    return segment;
}

void sum(DType target_type, void* target, DType source_type, std::span<const ReduceSource> sources, std::int64_t numel,
         double scale = 1.0) {
    ReduceArgs args;
    args.target_type = target_type;
    args.target = target;
    args.source_type = args.wire_type = source_type;
    args.scale = scale;
    const Segment segment = all_of(numel);
    reduce(args, sources, {&segment, 1}, nullptr);
}

/// True if `data` holds the sum of `sources` times `scale` without any rounding beyond fp32's.
bool holds_exactly(DType type, const void* data, std::span<const ReduceSource> sources, std::int64_t numel,
                   double scale) {
    std::vector<float> wanted(static_cast<std::size_t>(numel)), found(wanted.size());
    sum(DType::f32, wanted.data(), type, sources, numel, scale);
    const ReduceSource own{data, true};
    sum(DType::f32, found.data(), type, {&own, 1}, numel);
    for (std::size_t i = 0; i < wanted.size(); ++i)
        if (wanted[i] != found[i] && !(std::isnan(wanted[i]) && std::isnan(found[i]))) return false;
    return true;
}

std::string moment(const SavedState& s) {
    return "step " + std::to_string(s.step) + ", " + std::to_string(s.micro_step) + " of " +
           std::to_string(s.micro_steps) + " micro-steps";
}

}  // namespace

// A collective that fails leaves the manager failed: only reset() brings the ranks together again.
void EngineManager::remembering(const std::function<void()>& collective) {
    try {
        collective();
    } catch (const std::exception& error) {
        failure_ = error.what();
        throw;
    } catch (...) {
        failure_ = "a call was interrupted";
        throw;
    }
}

SavedState EngineManager::save_state() {
    Guard guard(*this, "state_dict");
    if (stage_ == Stage::inside) throw StateError(model_.name + ": state_dict inside " + where() + "; end it first");
    remembering([&] { drain(); });  // the other ranks' part of what this one has posted
    if (captured_) step_ = backend_->read_step();
    SavedState out;
    out.rank = comm_->rank(), out.world_size = comm_->world_size();
    out.accumulator = accumulator_;
    out.seed = options_.seed;
    out.step = step_, out.skipped_steps = skipped_steps_;
    out.divide = divide_, out.mean = !divide_given_ && !options_.divide;
    if (stage_ == Stage::fresh) return out;
    out.phase = stage_ == Stage::complete ? Phase::complete : Phase::accumulating;
    out.micro_step = micro_step_ + 1, out.micro_steps = micro_steps_;
    // One rank measures when it is asked for the norm. Those that load this have only parts to measure.
    const bool unmeasured = out.phase == Phase::complete && !norm_squared_ && !norm_known_;
    const std::int64_t nonfinite = nonfinite_;
    if (unmeasured) measure_everything();
    if (out.phase == Phase::complete)
        out.norm_squared = norm_squared_, out.nonfinite = nonfinite_, out.step_skipped = step_skipped_;
    if (out.phase == Phase::complete && norm_known_) {
        resolve_nonfinite();
        const ReduceStats total = backend_->read_total();
        out.norm_squared = total.sum_squares, out.nonfinite = total.nonfinite, out.step_skipped = step_skipped_;
    }
    if (unmeasured) norm_squared_.reset(), norm_known_ = false, nonfinite_ = nonfinite;  // nobody has asked yet
    for (const Unit& unit : units_) {
        // What is saved outlives the step, and is read by the host.
        const std::shared_ptr<Storage> bytes = backend_->on_gpu() ? backend_->to_host(unit.buffer) : unit.buffer;
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        for (std::size_t s = 0; s < layout.slots.size(); ++s) {
            const WeightSlot& slot = layout.slots[s];
            const WeightDesc& desc = weight_desc(unit, slot);
            const bool partial =
                out.phase == Phase::accumulating && unit.placement == Placement::full && out.world_size > 1;
            TensorShard shard =
                partial ? TensorShard{Tensor(unit.buffer, slot.offset, desc.shape, accumulator_), 0, desc.shape}
                        : shard_of(unit, desc, slot);
            if (bytes != unit.buffer) {
                const auto* base = static_cast<const char*>(unit.buffer->data);
                const auto at = static_cast<const char*>(shard.tensor.data()) - base;
                shard.tensor = Tensor(bytes, at / static_cast<std::ptrdiff_t>(size_of(accumulator_)),
                                      shard.tensor.shape(), accumulator_);
            }
            out.gradients.push_back({full_name(unit.block, unit.block < 0 ? -1 : unit.index, desc), desc.shape,
                                     shard.offset, shard.tensor.numel(), partial, unit.written[s],
                                     unit.touched ? shard.tensor.data() : nullptr, shard.tensor});
        }
    }
    return out;
}

void EngineManager::check_states(std::span<const SavedState> states) const {
    const auto refuse = [&](const std::string& why) {
        throw std::invalid_argument(model_.name + ": load_state_dict: " + why);
    };
    if (states.empty()) refuse("no state was given");
    const SavedState& first = states.front();
    const int world = comm_->world_size();
    if (first.world_size < 1 || first.world_size > kMostRanks)
        refuse("saved by " + std::to_string(first.world_size) + " ranks; there are at most " +
               std::to_string(kMostRanks));
    std::vector<bool> seen(static_cast<std::size_t>(first.world_size), false);
    for (const SavedState& s : states) {
        if (s.world_size != first.world_size || s.rank < 0 || s.rank >= first.world_size ||
            seen[static_cast<std::size_t>(s.rank)])
            refuse("these are not the states of different ranks of one run");
        seen[static_cast<std::size_t>(s.rank)] = true;
        if (s.step != first.step || s.phase != first.phase || s.micro_step != first.micro_step ||
            s.micro_steps != first.micro_steps || s.divide != first.divide || s.mean != first.mean)
            refuse("rank " + std::to_string(first.rank) + " was saved at " + moment(first) + ", rank " +
                   std::to_string(s.rank) + " at " + moment(s));
        if (s.accumulator != accumulator_ && !s.gradients.empty())
            refuse("saved sums are " + std::string(to_string(s.accumulator)) + ", this manager's are " +
                   std::string(to_string(accumulator_)) + "; build it with accumulator=\"" +
                   std::string(to_string(s.accumulator)) + "\"");
        if (s.seed != options_.seed &&
            (options_.rounding == Rounding::stochastic || options_.wire_rounding == Rounding::stochastic))
            refuse("saved with seed=" + std::to_string(s.seed) + ", this manager has seed=" +
                   std::to_string(options_.seed) + ", and stochastic rounding depends on it");
    }
    if (first.step < 0 || first.step > std::int64_t{1} << 62) refuse("there is no step " + std::to_string(first.step));
    if (first.phase == Phase::complete && !first.norm_squared && world > 1)
        refuse("the norm of the gradients is missing, which a rank cannot tell from its part of them");
    if (first.phase == Phase::accumulating && !(first.micro_step >= 1 && first.micro_step < first.micro_steps))
        refuse("there is no place after " + moment(first));
    const bool whole = std::find(seen.begin(), seen.end(), false) == seen.end();
    const bool own = first.world_size == world && states.size() == 1 && first.rank == comm_->rank();
    if (first.phase != Phase::fresh && !whole && !own)
        refuse("saved by rank " + std::to_string(first.rank) + " of " + std::to_string(first.world_size) +
               ", and this is rank " + std::to_string(comm_->rank()) + " of " + std::to_string(world) +
               "; pass the states of all " + std::to_string(first.world_size) + " ranks, as a list");
    if (first.phase != Phase::accumulating || !first.mean) return;
    if (options_.divide)
        refuse("saved in a step that takes the mean over ranks, and this manager divides by " +
               std::to_string(*options_.divide));
    if (!exact_ratio(world, first.world_size))
        refuse("the mean over " + std::to_string(first.world_size) + " ranks cannot go on as a mean over " +
               std::to_string(world) +
               " without rounding; resume at a multiple by a power of two, or save between steps, or "
               "use a divide that does not depend on the ranks");
}

// Returns true where data went into the unit.
bool EngineManager::restore_unit(Unit& unit, std::span<const SavedState> states,
                                 std::span<const std::map<std::string, const SavedGradient*>> by_name) {
    const SavedState& first = states.front();
    const int world = comm_->world_size(), self = comm_->rank();
    const bool accumulating = first.phase == Phase::accumulating;
    const bool keeps_own = accumulating && unit.placement == Placement::full && world > 1;
    const double scale = accumulating && first.mean ? static_cast<double>(world) / first.world_size : 1.0;
    const std::size_t size = size_of(accumulator_);
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    const std::shared_ptr<Storage> room =
        backend_->on_gpu() ? comm_->Communicator::allocate(unit.buffer->bytes) : unit.buffer;
    std::memset(room->data, 0, room->bytes);
    bool any = false;
    for (std::size_t index = 0; index < layout.slots.size(); ++index) {
        const WeightSlot& slot = layout.slots[index];
        const WeightDesc& desc = weight_desc(unit, slot);
        const std::string name = full_name(unit.block, unit.block < 0 ? -1 : unit.index, desc);
        const auto refuse = [&](const std::string& why) {
            throw std::invalid_argument(model_.name + ": load_state_dict: " + name + ": " + why);
        };
        const bool whole = keeps_own || (unit.placement == Placement::full &&
                                         (world == 1 || strategy_.collective == Collective::all_reduce));
        const std::int64_t begin = whole ? 0 : slot.shard_begin, numel = whole ? slot.numel : slot.shard_numel;
        const std::int64_t place = unit.placement == Placement::full ? slot.offset + begin : slot.shard_offset;
        auto* target = static_cast<char*>(room->data) + static_cast<std::size_t>(numel > 0 ? place : 0) * size;
        std::vector<ReduceSource> sources;
        std::int64_t covered = begin;
        unit.written[index] = true;
        bool filled = false;
        for (std::size_t s = 0; s < states.size(); ++s) {  // in rank order
            const auto found = by_name[s].find(name);
            if (found == by_name[s].end()) refuse("not in the state of rank " + std::to_string(states[s].rank));
            const SavedGradient& saved = *found->second;
            if (saved.global_shape != desc.shape) refuse("another shape was saved");
            if (saved.offset < 0 || saved.numel < 0 || saved.numel > slot.numel - saved.offset ||
                (saved.partial && saved.numel != slot.numel))
                refuse("elements that the weight does not have were saved");
            const bool assigned = states[s].rank % world == self;
            if (assigned) unit.written[index] = unit.written[index] && saved.written;
            if (saved.partial) {
                if (!keeps_own && static_cast<int>(states.size()) != first.world_size)
                    refuse("its sum over ranks needs the states of all " + std::to_string(first.world_size) +
                           " ranks, as a list");
                covered = begin + numel;
                if (saved.data != nullptr && (assigned || !keeps_own))
                    sources.push_back(
                        {static_cast<const char*>(saved.data) + static_cast<std::size_t>(begin) * size, true});
                continue;
            }
            // Pieces come in the order of their offsets, or each is the whole weight.
            const std::int64_t from = std::max(covered, saved.offset),
                               to = std::min(begin + numel, saved.offset + saved.numel);
            if (from != covered || to <= from) continue;
            covered = to;
            if (saved.data == nullptr || (keeps_own && self != 0)) continue;  // summed already: one rank brings it in
            std::memcpy(target + static_cast<std::size_t>(from - begin) * size,
                        static_cast<const char*>(saved.data) + static_cast<std::size_t>(from - saved.offset) * size,
                        static_cast<std::size_t>(to - from) * size);
            filled = true;
        }
        if (covered < begin + numel)
            refuse("elements " + std::to_string(covered) + " to " + std::to_string(begin + numel) +
                   " are in none of the states; pass those of all " + std::to_string(first.world_size) +
                   " ranks, as a list");
        std::vector<char> before;
        if (filled && scale != 1.0) {
            before.assign(target, target + static_cast<std::size_t>(numel) * size);
            sources.push_back({before.data(), true});
        }
        if (!sources.empty() && numel > 0) {
            sum(accumulator_, target, accumulator_, sources, numel, scale);
            if (size == 2 && !holds_exactly(accumulator_, target, sources, numel, scale))
                refuse("the sums of " + std::to_string(sources.size()) + " ranks do not fit one " +
                       std::string(to_string(accumulator_)) + " without rounding; resume at " +
                       std::to_string(first.world_size) +
                       " ranks or more, or save between steps, or accumulate in float32");
        }
        any = any || filled || !sources.empty();
    }
    if (room != unit.buffer) {
        backend_->copy(unit.buffer->data, room->data, room->bytes, Lane::caller);
        backend_->synchronize();
    }
    return any;
}

void EngineManager::require_free_divisor() const {
    if (divide_fixed_)
        throw StateError(model_.name + ", " + where() +
                         ": this step was resumed at another number of ranks as a mean over ranks, and takes no other "
                         "divisor; give divide before the state is saved");
}

void EngineManager::load_state(std::span<const SavedState> given, const std::string& problem) {
    Guard guard(*this, "load_state_dict");
    if (stage_ == Stage::inside)
        throw StateError(model_.name + ": load_state_dict inside " + where() + "; end it first");
    remembering([&] { drain(); });
    std::string refusal;
    std::exception_ptr error;
    const auto forget = [&] {
        clear_step();
        cleared_ = true;
        stage_ = Stage::fresh;
    };
    const std::int64_t step_before = step_, skipped_before = skipped_steps_;
    try {
        if (!problem.empty()) throw std::invalid_argument(model_.name + ": load_state_dict: " + problem);
        check_states(given);
        std::vector<SavedState> states(given.begin(), given.end());
        std::sort(states.begin(), states.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
        std::vector<std::map<std::string, const SavedGradient*>> by_name(states.size());
        for (std::size_t s = 0; s < states.size(); ++s)
            for (const SavedGradient& gradient : states[s].gradients) by_name[s][gradient.name] = &gradient;
        const SavedState& first = states.front();
        forget();
        step_ = first.step;
        skipped_steps_ = first.skipped_steps;
        trace_.clear();
        if (first.phase != Phase::fresh) {
            for (Unit& unit : units_) unit.touched = restore_unit(unit, states, by_name);
            micro_step_ = first.micro_step - 1, micro_steps_ = first.micro_steps;
            divide_ = first.mean ? comm_->world_size() : first.divide;
            divide_given_ = !first.mean;
            divide_fixed_ = first.mean && first.world_size != comm_->world_size();
            cleared_ = false;
            stage_ = first.phase == Phase::complete ? Stage::complete : Stage::between;
            if (first.phase == Phase::complete) {
                for (Unit& unit : units_) unit.touched = unit.scaled = true;
                norm_squared_ = first.norm_squared, nonfinite_ = first.nonfinite, step_skipped_ = first.step_skipped;
            }
        }
        if (backend_->on_gpu()) {
            backend_->set_counters(step_, first.phase == Phase::accumulating ? micro_step_ : 0);
            norm_known_ = first.phase == Phase::complete && norm_squared_.has_value();
            if (norm_known_) backend_->write_total({*norm_squared_, nonfinite_});
        }
    } catch (const std::exception& caught) {
        refusal = caught.what();
        if (refusal.empty()) refusal = "unknown error";
        error = std::current_exception();
    }
    if (comm_->world_size() > 1) {  // a rank that refuses must not leave the others in another place of the step
        const std::string place = std::to_string(step_) + " " + std::to_string(micro_step_);
        std::vector<std::string> all;
        remembering([&] { all = comm_->gather_objects(error ? "error: " + refusal.substr(0, 4000) : place); });
        for (std::size_t rank = 0; rank < all.size() && !error; ++rank) {
            const bool refused = all[rank].starts_with("error: ");
            if (refused || all[rank] != all[0])
                error = std::make_exception_ptr(
                    MismatchError(model_.name + ": load_state_dict: rank " + std::to_string(rank) +
                                  (refused ? " could not load its state: " + all[rank].substr(7)
                                           : " loaded another place of the run than rank 0")));
        }
    }
    if (error) {
        forget();
        step_ = step_before, skipped_steps_ = skipped_before;
        backend_->set_counters(step_, 0);
        std::rethrow_exception(error);
    }
}

}  // namespace gradgen
