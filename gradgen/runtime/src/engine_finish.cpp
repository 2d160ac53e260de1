// The end of a step: what ranks tell each other, and what is missing or not finite.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "engine_buffer.h"
#include "engine_guard.h"
#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {

// The end of a step in a few bytes: what each rank must know of the others.
struct StepReport {
    double sum_squares = 0;
    std::int64_t nonfinite = 0;
    double divide = 0;
    std::vector<std::string> missing;

    std::string encode() const {
        std::string out(kNumbers, '\0');
        std::memcpy(out.data(), &sum_squares, 8);
        std::memcpy(out.data() + 8, &nonfinite, 8);
        std::memcpy(out.data() + 16, &divide, 8);
        for (const std::string& name : missing) out += name + "\n";
        return out;
    }
    static StepReport decode(const std::string& bytes) {
        StepReport out;
        if (bytes.size() < kNumbers) throw CommError("a rank's report of the step is too short");
        std::memcpy(&out.sum_squares, bytes.data(), 8);
        std::memcpy(&out.nonfinite, bytes.data() + 8, 8);
        std::memcpy(&out.divide, bytes.data() + 16, 8);
        std::istringstream lines(bytes.substr(kNumbers));
        for (std::string line; std::getline(lines, line);) out.missing.push_back(line);
        return out;
    }
    static constexpr std::size_t kNumbers = 24;
};

}  // namespace

void EngineManager::finish_unit(Unit& unit) {
    if (comm_->world_size() > 1 || unit.scaled) return;
    if (!unit.touched) {
        with_buffer(unit, false, true, Lane::caller,
                    [&](void* target) { backend_->fill(target, 0, unit.buffer->bytes, Lane::caller); });
        unit.touched = true;
    } else if (factor() != 1.0) {
        ReduceArgs args;  // no source: the target itself, scaled and rounded as it was summed
        args.target_type = args.source_type = args.wire_type = accumulator_;
        args.target_in_arena = true;
        args.overwrite = false;
        args.scale = factor();
        args.rounding = rounding_key(RoundingSite::reduce, micro_step_);
        with_buffer(unit, true, true, Lane::caller, [&](void* target) {
            args.target = target;
            backend_->reduce(args, {}, unit.mine, nullptr, Lane::caller);
        });
    }
    unit.scaled = true;
}

// On a GPU the device adds it up.
ReduceStats EngineManager::measure_unit(Unit& unit) {
    const bool in_arena = unit.placement == Placement::full;
    ReduceStats out, whole;
    with_buffer(unit, true, false, Lane::caller, [&](void* data) {
        backend_->measure(accumulator_, data, in_arena, unit.mine, &out, Lane::caller);
        if (comm_->rank() == 0 && !unit.mine_whole.empty())
            backend_->measure(accumulator_, data, in_arena, unit.mine_whole, &whole, Lane::caller);
    });
    out.sum_squares += whole.sum_squares, out.nonfinite += whole.nonfinite;
    return out;
}

// One rank: the norm of what nobody has measured yet.
void EngineManager::measure_everything() {
    if (backend_->on_gpu()) {
        backend_->clear_stats(Lane::caller);
    }
    ReduceStats sum;
    for (Unit& unit : units_) {
        const ReduceStats stats = measure_unit(unit);
        sum.sum_squares += stats.sum_squares, sum.nonfinite += stats.nonfinite;
    }
    if (backend_->on_gpu()) {
        const void* total = backend_->total(Lane::caller);
        backend_->sum_totals({&total, 1}, Lane::caller);
        norm_known_ = !captured_ || backend_->capturing();  // a replay brings other gradients, and tells nobody
        return;
    }
    nonfinite_ = sum.nonfinite;
    norm_squared_ =
        nonfinite_ > 0 && std::isfinite(sum.sum_squares) ? std::numeric_limits<double>::quiet_NaN() : sum.sum_squares;
}

// GPU, several ranks: what each found while it summed becomes the norm over all, without the host.
void EngineManager::share_totals() {
    const auto world = static_cast<std::size_t>(comm_->world_size());
    constexpr Lane lane = Lane::exchange;
    void* mine = backend_->total(lane);
    std::vector<const void*> all(world);
    if (comm_->on_device()) {
        auto* room = static_cast<ReduceStats*>(backend_->totals_of_ranks());
        comm_->gather_on_device(room, mine, sizeof(ReduceStats), backend_->stream(lane));
        for (std::size_t r = 0; r < world; ++r) all[r] = room + r;
        backend_->sum_totals(all, lane);
    } else {
        backend_->record(totals_ready_, lane);
        Offer offer;
        offer.data = mine;
        offer.event = totals_ready_.get();
        offer.tag = {model_key_, step_, micro_step_, -1, 4, 0, sizeof(ReduceStats)};
        offer.what = "the norm of step " + std::to_string(step_);
        const Ticket ticket = comm_->post(offer);
        const std::vector<ReduceSource> sources = comm_->sources(ticket);
        for (const void* event : comm_->source_events(ticket)) backend_->wait(lane, event);
        for (std::size_t r = 0; r < world; ++r) all[r] = sources[r].data;
        backend_->sum_totals(all, lane);
        backend_->record(full_exchange_.consumed, lane);
        comm_->release(ticket, full_exchange_.consumed.get());
        full_exchange_.ticket = ticket;
        full_exchange_.draining = true;
    }
    norm_known_ = true;
}

// Asks the device whether the step is to be skipped; waits for it.
void EngineManager::resolve_nonfinite() {
    if (!unresolved_ || backend_->capturing()) return;
    unresolved_ = captured_;  // a replayed step asks again
    nonfinite_ = backend_->read_total().nonfinite;
    step_skipped_ = nonfinite_ > 0;
    skipped_steps_ += step_skipped_;
}

std::int64_t EngineManager::skipped_steps() {
    if (!backend_->on_gpu()) return skipped_steps_;
    Guard guard(*this, "skipped_steps", false);
    resolve_nonfinite();
    return skipped_steps_;
}

bool EngineManager::step_skipped() {
    if (!backend_->on_gpu()) return step_skipped_;
    Guard guard(*this, "step_skipped", false);
    resolve_nonfinite();
    return step_skipped_;
}

void EngineManager::finish_step() {
    const int world = comm_->world_size();
    while (!flights_.empty()) complete_front();
    gather_full();
    StepReport mine;
    mine.divide = divide_;
    for (Unit& unit : units_) {
        finish_unit(unit);
        const ArenaLayout& layout = layouts_[static_cast<std::size_t>(unit.kind)];
        for (std::size_t s = 0; s < layout.slots.size(); ++s) {
            const WeightDesc& desc = weight_desc(unit, layout.slots[s]);
            if (!unit.written[s] && !desc.may_be_absent && layout.slots[s].numel > 0)
                mine.missing.push_back(full_name(unit.block, unit.block < 0 ? -1 : unit.index, desc));
        }
        mine.sum_squares += unit.stats.sum_squares;
        mine.nonfinite += unit.stats.nonfinite;
    }
    std::vector<StepReport> reports{mine};
    if (world > 1) {
        reports.clear();
        trace_.push_back({"end_step", model_.name, 0, micro_step_});
        for (const std::string& bytes : comm_->gather_objects(mine.encode()))
            reports.push_back(StepReport::decode(bytes));
        if (backend_->on_gpu()) {
            share_totals();
        } else {
            norm_squared_ = 0.0;
            for (const StepReport& report : reports)
                *norm_squared_ += report.sum_squares, nonfinite_ += report.nonfinite;
        }
    } else if (options_.nonfinite != NonFinite::ignore) {
        measure_everything();
    }
    if (nonfinite_ > 0 && norm_squared_ && std::isfinite(*norm_squared_))
        norm_squared_ = std::numeric_limits<double>::quiet_NaN();
    drain();
    backend_->join(Lane::caller, Lane::exchange);
    backend_->join(Lane::caller, Lane::offload);
    backend_->count_step();
    for (std::size_t rank = 0; rank < reports.size(); ++rank)
        if (reports[rank].divide != reports[0].divide)
            throw MismatchError(model_.name + ": rank 0 divides the gradients of this step by " +
                                std::to_string(reports[0].divide) + ", rank " + std::to_string(rank) + " by " +
                                std::to_string(reports[rank].divide) + "; pass one divide on every rank");
    stage_ = Stage::complete;
    if (!backend_->capturing()) ++step_;  // a captured step has not run yet
    unresolved_ = backend_->on_gpu() && options_.nonfinite != NonFinite::ignore;
    if (options_.nonfinite == NonFinite::raise && backend_->capturing())
        throw StateError(model_.name +
                         ": nonfinite=\"raise\" has to look at the gradients, which a captured step cannot; use "
                         "nonfinite=\"skip\" and read step_skipped after a replay");

    std::string missing;
    int shown = 0;
    for (std::size_t rank = 0; rank < reports.size(); ++rank)
        for (const std::string& name : reports[rank].missing)
            if (++shown <= 20) missing += "\n  " + name + (world > 1 ? " (rank " + std::to_string(rank) + ")" : "");
    if (shown > 20) missing += "\n  and " + std::to_string(shown - 20) + " more";
    if (!missing.empty())
        throw StateError(model_.name + ": the step ended, but these weights received no gradient in any of its " +
                         std::to_string(micro_steps_) + " micro-steps:" + missing +
                         "\nTheir gradients count as zero. Declare `may_be_absent: true` where that is meant, or "
                         "`trainable: false`.");
    if (options_.nonfinite == NonFinite::raise) resolve_nonfinite();
    if (nonfinite_ > 0 && options_.nonfinite != NonFinite::ignore) {
        if (!backend_->on_gpu()) step_skipped_ = true, ++skipped_steps_;
        const std::string names = options_.nonfinite == NonFinite::raise ? nonfinite_names() : "";
        if (options_.nonfinite == NonFinite::raise)
            throw NonFiniteError(model_.name + ": step " + std::to_string(step_ - 1) + ": " +
                                 std::to_string(nonfinite_) + " gradient elements are inf or nan:" + names);
    }
}

// Which weights hold them, on which rank: asked only when there are some, by every rank alike.
std::string EngineManager::nonfinite_names() {
    std::string mine;
    backend_->synchronize();
    for (const Unit& unit : units_) {
        const std::shared_ptr<Storage> seen = backend_->to_host(unit.buffer);
        for (const SegmentList* segments : {&unit.mine, &unit.mine_whole})
            for (const Segment& segment : *segments) {
                const ReduceStats stats =
                    measure(accumulator_, seen->data, unit.placement == Placement::full, {&segment, 1});
                if (stats.nonfinite == 0) continue;
                for (const WeightSlot& slot : layouts_[static_cast<std::size_t>(unit.kind)].slots) {
                    const std::int64_t at = segment.source - segment.element;
                    if (at == slot.offset)
                        mine += "\n  " +
                                full_name(unit.block, unit.block < 0 ? -1 : unit.index, weight_desc(unit, slot)) +
                                ": " + std::to_string(stats.nonfinite);
                }
            }
    }
    if (comm_->world_size() == 1) return mine;
    std::string out;
    const std::vector<std::string> all = comm_->gather_objects(mine.substr(0, 4000));
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        if (!all[rank].empty()) out += "\n rank " + std::to_string(rank) + ":" + all[rank];
    return out;
}

}  // namespace gradgen
