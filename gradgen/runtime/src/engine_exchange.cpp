// Collectives in plan order. Every rank posts the same sequence, whatever the order in which its gradients arrive: a
// unit is posted when all units before it are. Sums are completed as other ranks arrive, or when a buffer is needed.
#include <algorithm>
#include <cstring>

#include "engine_buffer.h"
#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {
constexpr std::size_t kMaxFlights = 32;
}  // namespace

bool EngineManager::staged(const Unit& unit) const {
    return unit.placement == Placement::sharded || !direct_ || unit.offloaded;
}

// A communicator that sums in place takes an arena as it is; whatever must be packed or converted is sent and summed by
// our own kernel. So are weights that every rank keeps whole: their sums must be the same bits on all.
bool EngineManager::receives(const Unit& unit) const {
    if (!comm_->needs_staging()) return false;
    const bool sharded = unit.placement == Placement::sharded;
    return !comm_->sums_in_place() || strategy_.collective == Collective::all_to_all ||
           layouts_[static_cast<std::size_t>(unit.kind)].packed ||
           wire(sharded) != (sharded ? options_.dtype : accumulator_);
}

// The caller may write where the last exchange read.
void EngineManager::order_after(Slot& slot) {
    if (!backend_->on_gpu()) return;
    backend_->wait(Lane::caller, slot.consumed.get());
    if (comm_->world_size() > 1)
        for (const void* event : comm_->drain_events(slot.ticket)) backend_->wait(Lane::caller, event);
}

bool EngineManager::exchanged(const Unit& unit) const {
    return comm_->world_size() > 1 && (unit.placement == Placement::sharded || micro_step_ == micro_steps_ - 1);
}

double EngineManager::factor() const { return device_divide_ ? kScaleOnDevice : 1.0 / divide_; }

void* EngineManager::arena_of(const Unit& unit) const {
    return staged(unit) ? slots_[static_cast<std::size_t>(unit.slot)].arena->data : unit.buffer->data;
}

DType EngineManager::buffer_type(const Unit&) const { return accumulator_; }

RoundingKey EngineManager::rounding_key(RoundingSite site, int micro_step) const {
    const Rounding mode = site == RoundingSite::wire ? options_.wire_rounding : options_.rounding;
    const std::uint64_t seed = options_.seed;
    return {mode == Rounding::stochastic, seed, static_cast<std::uint64_t>(step_),
            static_cast<std::uint32_t>(micro_step), site};
}

void EngineManager::accumulate_layer(Unit&, const ReduceArgs& args, std::span<const ReduceSource> sources,
                                     const SegmentList& segments, ReduceStats* stats, Lane lane) {
    backend_->reduce(args, sources, segments, stats, lane);
}

void EngineManager::acquire_slot(Unit& unit) {
    const int self = static_cast<int>(&unit - units_.data());
    if (unit.block < 0) {
        Slot& own = slots_[static_cast<std::size_t>(unit.slot)];
        while (own.owner >= 0) complete_front();
        if (own.draining) comm_->wait_drained(own.ticket);
        order_after(own);
        own.draining = false;
        own.owner = self;
        return;
    }
    const auto take = [&](bool wait) {
        int best = -1;
        for (int s = 0; s < block_slots_; ++s) {
            Slot& slot = slots_[static_cast<std::size_t>(s)];
            if (slot.owner >= 0) continue;
            if (slot.draining && comm_->drained(slot.ticket)) slot.draining = false;
            if (!slot.draining) return s;
            if (best < 0 || slot.ticket < slots_[static_cast<std::size_t>(best)].ticket) best = s;
        }
        if (!wait || best < 0) return -1;
        comm_->wait_drained(slots_[static_cast<std::size_t>(best)].ticket);
        slots_[static_cast<std::size_t>(best)].draining = false;
        return best;
    };
    int s = take(false);
    while (s < 0) {
        const auto holds_slot = [&](const Flight& f) { return f.slot >= 0 && f.slot < block_slots_; };
        if (std::any_of(flights_.begin(), flights_.end(), holds_slot)) {
            complete_front();
            s = take(false);
        } else {
            s = take(true);
            if (s < 0) make_room(static_cast<std::size_t>(self));
        }
    }
    order_after(slots_[static_cast<std::size_t>(s)]);
    slots_[static_cast<std::size_t>(s)].owner = self;
    unit.slot = s;
}

void EngineManager::free_slot(Unit& unit) {
    slots_[static_cast<std::size_t>(unit.slot)].owner = -1;
    if (unit.block >= 0) unit.slot = -1;
}

// Every buffer holds a block that waits for one before it in plan order, or for more uses of itself, which by the plan
// come before the unit that asks for room. Those before it are taken as not visited, or as finished. The one that asks
// cannot be: blocks behind it that came first keep their buffers until it has been visited.
void EngineManager::make_room(std::size_t asking) {
    std::size_t ready = next_;
    const std::size_t end = asking < next_ ? units_.size() : asking;
    const auto takeable = [&](std::size_t u) {
        const bool finished = units_[u].status == Status::sent || (units_[u].status == Status::written && u < asking);
        return finished && exchanged(units_[u]) && units_[u].placement == Placement::sharded;
    };
    while (ready < end && !takeable(ready)) {
        if (units_[ready].status == Status::out) {
            ready = end;
            break;
        }
        ++ready;
    }
    if (ready >= end)
        throw StateError(model_.name + ", " + where() + ": more blocks are in use at once than block_buffers = " +
                         std::to_string(options_.block_buffers) +
                         " holds; notify a block before getting the next, raise block_buffers, or mend the order "
                         "under `backward` (a block keeps its buffer until all before it were visited)");
    for (; next_ <= ready; ++next_) {
        Unit& unit = units_[next_];
        if (unit.status == Status::written) {
            unit.status = Status::sent;
            if (staged(unit) && unit.placement == Placement::full) accumulate_local(unit);
        }
        if (exchanged(unit)) post(static_cast<int>(next_));
    }
}

// A call about another unit tells that the written ones are finished (unless the spec says that more uses come): they
// leave their staging. `except` is the unit of the call, kEverything at the end of a micro-step, or kOnlyFinished.
void EngineManager::settle(int except) {
    bool any = false;
    for (std::size_t u = 0; u < units_.size(); ++u) {
        Unit& unit = units_[u];
        if (unit.status != Status::written || static_cast<int>(u) == except) continue;
        const bool finished = unit.strict ? unit.visits >= unit.expected : except != kOnlyFinished;
        if (!finished && except != kEverything) continue;
        unit.status = Status::sent;
        any = true;
        if (staged(unit) && unit.placement == Placement::full) accumulate_local(unit);
    }
    if (any) issue(false);
}

// A full arena with staging: this rank's contribution is added without any other rank.
void EngineManager::accumulate_local(Unit& unit) {
    const bool last = comm_->world_size() == 1 && micro_step_ == micro_steps_ - 1;
    Slot& slot = slots_[static_cast<std::size_t>(unit.slot)];
    const ReduceSource source{slot.arena->data, false};
    // Copies over PCIe must not hold up the backward pass.
    const Lane lane = unit.offloaded ? Lane::exchange : Lane::caller;
    const Range range(*backend_, "accumulate", unit.name);
    if (unit.offloaded) backend_->wait(lane, unit.ready.get());
    ReduceArgs args;
    args.target_type = accumulator_;
    args.target_in_arena = true;
    args.source_type = args.wire_type = options_.dtype;
    args.overwrite = !unit.touched;
    args.scale = last ? factor() : 1.0;
    // With more ranks the sum over them is rounded again, and each rank rounds its own numbers: other bits each time.
    args.rounding = comm_->world_size() == 1 ? rounding_key(RoundingSite::reduce, micro_step_)
                                             : rounding_key(RoundingSite::local, micro_step_).for_rank(comm_->rank());
    unit.stats = {};
    with_buffer(unit, unit.touched, true, lane, [&](void* target) {
        args.target = target;
        accumulate_layer(unit, args, {&source, 1}, unit.all, last && !backend_->on_gpu() ? &unit.stats : nullptr, lane);
    });
    if (comm_->world_size() > 1) backend_->record(unit.ready, lane);
    if (unit.offloaded) backend_->record(slot.consumed, lane);
    unit.touched = true;
    unit.scaled = last;
    free_slot(unit);
}

void EngineManager::issue(bool flush) {
    for (; next_ < units_.size(); ++next_) {
        const Unit& unit = units_[next_];
        if (!exchanged(unit) || unit.status == Status::done) continue;
        if (unit.status != Status::sent && !(flush && unit.status == Status::idle)) return;
        post(static_cast<int>(next_));
    }
}

void EngineManager::post(int index) {
    Unit& unit = units_[static_cast<std::size_t>(index)];
    const Range range(*backend_, "exchange", unit.name);
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    const bool sharded = unit.placement == Placement::sharded;
    const int world = comm_->world_size();
    const bool contributes = sharded ? unit.status == Status::sent : unit.touched;
    // A communicator holds 64 exchanges; half of them leave room for another manager.
    while (flights_.size() >= kMaxFlights) complete_front();
    const DType source = sharded ? options_.dtype : accumulator_, wired = wire(sharded);
    Offer offer;
    offer.slice_bytes = static_cast<std::size_t>(layout.shard_numel) * size_of(wired);
    if (contributes) offer.data = sharded ? slots_[static_cast<std::size_t>(unit.slot)].arena->data : unit.buffer->data;
    if (backend_->on_gpu()) {
        offer.event = contributes ? unit.ready.get() : nullptr;
        offer.stream = backend_->stream(Lane::exchange);
        if (contributes)
            backend_->wait(Lane::exchange, offer.event);
        else  // what the sum will overwrite may still be read on the caller's lane
            backend_->join(Lane::exchange, Lane::caller);
    }
    const auto finish_shared = [&] {
        while (std::any_of(flights_.begin(), flights_.end(), [](const Flight& f) { return f.slot < 0; }))
            complete_front();
    };
    if (comm_->needs_staging() && !receives(unit)) {
        offer.sum = wired;
        if (!contributes) finish_shared();  // sums in place of a rank without a gradient all lie in the same zeros
    } else if (comm_->needs_staging()) {
        const bool own = sharded && contributes;
        if (!own) finish_shared();  // the shared staging holds one exchange at a time
        Slot& staging = own ? slots_[static_cast<std::size_t>(unit.slot)] : full_exchange_;
        offer.receive = staging.receive->data;
        if (contributes && (layout.packed || wired != source)) {
            offer.send = staging.send->data;
            for (int rank = 0; rank < world; ++rank)
                backend_->pack(wired,
                               static_cast<char*>(offer.send) + static_cast<std::size_t>(rank) * offer.slice_bytes,
                               source, offer.data, unit.by_rank[static_cast<std::size_t>(rank)],
                               rounding_key(RoundingSite::wire, micro_step_).for_rank(comm_->rank()), Lane::exchange);
            offer.data = offer.send;
        }
    }
    offer.tag = {model_key_,
                 step_,
                 micro_step_,
                 index,
                 static_cast<std::int32_t>(strategy_.collective),
                 static_cast<std::uint32_t>(wired),
                 static_cast<std::uint64_t>(layout.numel) * size_of(wired)};
    offer.what = unit.name + ", micro-step " + std::to_string(micro_step_);
    static constexpr const char* kNames[] = {"reduce_scatter", "all_to_all", "all_reduce"};
    trace_.push_back({kNames[static_cast<int>(strategy_.collective)], unit.name,
                      static_cast<std::int64_t>(offer.slice_bytes) * (world - 1), micro_step_});
    Flight flight{index, sharded && contributes ? unit.slot : -1, micro_step_, micro_step_ == micro_steps_ - 1,
                  comm_->post(offer)};
    flights_.push_back(flight);
    unit.status = Status::done;
}

// Sums the oldest exchange into the accumulator of its unit.
void EngineManager::complete_front() {
    const Flight flight = flights_.front();
    Unit& unit = units_[static_cast<std::size_t>(flight.unit)];
    const bool sharded = unit.placement == Placement::sharded;
    const std::vector<ReduceSource> sources = comm_->sources(flight.ticket);
    Slot& slot = flight.slot >= 0 ? slots_[static_cast<std::size_t>(flight.slot)] : full_exchange_;
    constexpr Lane lane = Lane::exchange;
    if (backend_->on_gpu())
        for (const void* event : comm_->source_events(flight.ticket)) backend_->wait(lane, event);
    const Range range(*backend_, "reduce", unit.name);
    ReduceArgs args;
    args.target_type = accumulator_;
    args.target_in_arena = !sharded;
    args.wire_type = wire(sharded);
    args.source_type = comm_->needs_staging() ? args.wire_type : (sharded ? options_.dtype : accumulator_);
    args.overwrite = !sharded || !unit.touched;
    args.scale = flight.last ? factor() : 1.0;
    args.rounding = rounding_key(RoundingSite::reduce, flight.micro_step);
    args.wire_rounding = rounding_key(RoundingSite::wire, flight.micro_step);
    unit.stats = {};
    with_buffer(unit, !args.overwrite, true, lane, [&](void* target) {
        args.target = target;
        accumulate_layer(unit, args, sources, unit.mine, flight.last ? &unit.stats : nullptr, lane);
        if (!sharded && !comm_->needs_staging()) {
            // Others read all of this arena while it is summed in place, so each rank sums a piece; finish_step gathers
            // them.
            ReduceStats piece;
            accumulate_layer(unit, args, sources, unit.whole_piece, flight.last ? &piece : nullptr, lane);
            unit.stats.sum_squares += piece.sum_squares, unit.stats.nonfinite += piece.nonfinite;
        } else if (!unit.mine_whole.empty()) {
            // Replicated weights are summed by every rank and counted by the first.
            ReduceStats whole;
            const bool counts = flight.last && comm_->rank() == 0;
            accumulate_layer(unit, args, sources, unit.mine_whole, counts ? &whole : nullptr, lane);
            unit.stats.sum_squares += whole.sum_squares, unit.stats.nonfinite += whole.nonfinite;
        }
    });
    unit.touched = true;
    unit.scaled = flight.last;
    backend_->record(slot.consumed, lane);
    comm_->release(flight.ticket, slot.consumed.get());
    flights_.pop_front();
    if (flight.slot >= 0) {
        slot.owner = -1;
        if (unit.block >= 0 && unit.slot == flight.slot) unit.slot = -1;
    }
    slot.ticket = flight.ticket;
    slot.draining = true;
}

void EngineManager::progress() {
    while (!flights_.empty() && comm_->ready(flights_.front().ticket)) complete_front();
}

// No exchange is left: nobody reads this rank's buffers any more.
void EngineManager::drain() {
    while (!flights_.empty()) complete_front();
    for (Slot& slot : slots_) {
        if (slot.draining) comm_->wait_drained(slot.ticket), order_after(slot);
        slot.draining = false;
    }
    if (full_exchange_.draining) comm_->wait_drained(full_exchange_.ticket), order_after(full_exchange_);
    full_exchange_.draining = false;
}

}  // namespace gradgen
