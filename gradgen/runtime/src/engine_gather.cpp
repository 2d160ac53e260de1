// Gradients that are whole on every rank after their sum: those of all_reduce, and weights declared `shard: whole`.
#include <algorithm>
#include <cstring>
#include <vector>

#include "gradgen/engine.h"

namespace gradgen {

// The part of every whole weight that `rank` sums where all ranks share one address space; a multiple of 8 elements.
std::vector<Segment> EngineManager::whole_pieces(const Unit& unit, int rank) const {
    std::vector<Segment> out;
    const std::int64_t world = comm_->world_size();
    for (const Segment& s : unit.mine_whole) {
        const std::int64_t chunk = ((s.numel + world - 1) / world + 7) / 8 * 8;
        const std::int64_t begin = std::min(rank * chunk, s.numel), end = std::min(begin + chunk, s.numel);
        if (begin < end) out.push_back({s.source + begin, s.shard + begin, end - begin, s.element + begin, s.weight});
    }
    return out;
}

// After the sums: whole gradients on every rank (all_reduce), and weights that are whole on every rank in any strategy.
// The latter send nothing more than the exchange was counted with.
void EngineManager::gather_full() {
    const int world = comm_->world_size();
    const bool everything = strategy_.collective == Collective::all_reduce;
    if (world == 1) return;
    bool drained = false;
    for (std::size_t u = 0; u < units_.size(); ++u) {
        const Unit& unit = units_[u];
        const bool pieces = unit.placement == Placement::full && !unit.mine_whole.empty() && !comm_->needs_staging();
        if (!everything && !pieces) continue;
        if (!drained) drain();
        drained = true;
        if (everything) {
            const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
            trace_.push_back({"all_gather", unit.name,
                              layout.shard_numel * static_cast<std::int64_t>(size_of(accumulator_)) * (world - 1),
                              micro_step_});
        }
        gather_unit(u, everything);
    }
}

void EngineManager::gather_unit(std::size_t u, bool everything) {
    const int world = comm_->world_size(), self = comm_->rank();
    const Unit& unit = units_[u];
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    const std::size_t size = size_of(accumulator_), slice = static_cast<std::size_t>(layout.shard_numel) * size;
    auto* arena = static_cast<char*>(unit.buffer->data);
    const auto bytes = [size](std::int64_t elements) { return static_cast<std::size_t>(elements) * size; };
    if (comm_->on_device()) return gather_on_device(unit);
    if (comm_->needs_staging()) return gather_staged(unit);
    constexpr Lane lane = Lane::exchange;
    Offer offer;
    offer.data = arena;
    offer.slice_bytes = slice;
    offer.tag = {model_key_,
                 step_,
                 micro_step_,
                 static_cast<std::int32_t>(u),
                 kGatherGradients,
                 static_cast<std::uint32_t>(accumulator_),
                 slice};
    offer.what = "all_gather of " + unit.name;
    backend_->record(units_[u].ready, lane);
    offer.event = unit.ready.get();
    const Ticket ticket = comm_->post(offer);
    const std::vector<ReduceSource> sources = comm_->sources(ticket);
    if (backend_->on_gpu())
        for (const void* event : comm_->source_events(ticket)) backend_->wait(lane, event);
    for (int rank = 0; rank < world; ++rank) {
        if (rank == self) continue;
        const auto* from = static_cast<const char*>(sources[static_cast<std::size_t>(rank)].data);
        for (const Segment& s : whole_pieces(unit, rank))
            backend_->copy(arena + bytes(s.source), from + bytes(s.source), bytes(s.numel), lane);
        for (const WeightSlot& slot : layout.by_rank[static_cast<std::size_t>(rank)])
            if (everything && slot.shard_numel > 0 && weight_desc(unit, slot).shard != ShardKind::whole)
                backend_->copy(arena + bytes(slot.offset + slot.shard_begin),
                               from + bytes(slot.offset + slot.shard_begin), bytes(slot.shard_numel), lane);
    }
    backend_->record(full_exchange_.consumed, lane);
    comm_->release(ticket, full_exchange_.consumed.get());
    full_exchange_.ticket = ticket;
    full_exchange_.draining = true;
}

// Over GPUs that send: where a rank's slice is one range, all ranges in one call, else piece by piece.
void EngineManager::gather_on_device(const Unit& unit) {
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    const std::size_t size = size_of(accumulator_);
    auto* arena = static_cast<char*>(unit.buffer->data);
    void* stream = backend_->stream(Lane::exchange);
    if (!layout.packed) {
        char* flat = arena + static_cast<std::size_t>(layout.flat_begin) * size;
        const std::size_t slice = static_cast<std::size_t>(layout.flat_shard) * size;
        comm_->gather_on_device(flat, flat + static_cast<std::size_t>(comm_->rank()) * slice, slice, stream);
        return;
    }
    std::vector<Communicator::Shared> pieces;
    for (int rank = 0; rank < comm_->world_size(); ++rank)
        for (const WeightSlot& slot : layout.by_rank[static_cast<std::size_t>(rank)])
            if (slot.shard_numel > 0 && weight_desc(unit, slot).shard != ShardKind::whole)
                pieces.push_back({arena + static_cast<std::size_t>(slot.offset + slot.shard_begin) * size,
                                  static_cast<std::size_t>(slot.shard_numel) * size, rank});
    comm_->broadcast_on_device(pieces, stream);
}

// Over a process group: slices of every rank through the receive staging, as much at a time as it holds. Whole weights
// are complete on every rank, since each summed what it received.
void EngineManager::gather_staged(const Unit& unit) {
    const int world = comm_->world_size(), self = comm_->rank();
    const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
    const std::size_t size = size_of(accumulator_), slice = static_cast<std::size_t>(layout.shard_numel) * size;
    const std::size_t room = full_exchange_.receive->bytes / static_cast<std::size_t>(world) / size * size;
    auto* arena = static_cast<char*>(unit.buffer->data);
    auto* every = static_cast<char*>(full_exchange_.receive->data);
    const char* mine = arena + static_cast<std::size_t>(layout.flat_begin + self * layout.flat_shard) * size;
    if (layout.packed) {
        auto* send = static_cast<char*>(full_exchange_.send->data);
        for (const Segment& s : unit.mine)
            std::memcpy(send + static_cast<std::size_t>(s.shard) * size,
                        arena + static_cast<std::size_t>(s.source) * size, static_cast<std::size_t>(s.numel) * size);
        mine = send;
    }
    for (std::size_t done = 0; done < slice; done += room) {
        const std::size_t now = std::min(room, slice - done);
        comm_->all_gather(every, mine + done, now);
        const auto from = static_cast<std::int64_t>(done / size), to = static_cast<std::int64_t>((done + now) / size);
        for (int rank = 0; rank < world; ++rank)
            for (const WeightSlot& slot : layout.by_rank[static_cast<std::size_t>(rank)]) {
                if (rank == self || weight_desc(unit, slot).shard == ShardKind::whole) continue;
                const std::int64_t begin = std::max(slot.shard_offset, from),
                                   end = std::min(slot.shard_offset + slot.shard_numel, to);
                if (begin >= end) continue;
                std::memcpy(
                    arena + static_cast<std::size_t>(slot.offset + slot.shard_begin + begin - slot.shard_offset) * size,
                    every + static_cast<std::size_t>(rank) * now + static_cast<std::size_t>(begin - from) * size,
                    static_cast<std::size_t>(end - begin) * size);
            }
    }
}

}  // namespace gradgen
