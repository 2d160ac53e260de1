// Exchanges: a sequence of offers a rank, in a ring of slots in the control block.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "gradgen/layout.h"
#include "host_world.h"

namespace gradgen {

namespace {

constexpr int kEpochShift = 40;  // a ticket holds the number of resets above the sequence number

std::size_t slot_of(std::uint64_t sequence) { return static_cast<std::size_t>(sequence % kRing); }

const char* to_text(Kind kind) {
    switch (kind) {
        case Kind::exchange:
            return "exchange";
        case Kind::barrier:
            return "barrier";
        case Kind::gather_objects:
            return "gather_objects";
        case Kind::all_gather:
            return "all_gather";
        case Kind::all_to_all:
            return "all_to_all";
    }
    return "?";
}

std::string hex(std::uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
}

std::string collective_text(const Published& item) {
    if (item.kind != Kind::exchange) return to_text(item.kind);
    if (item.tag.op == kGatherGradients) return "all_gather";
    if (item.tag.op == kGatherInPlace) return "gather_in_place";
    switch (static_cast<Collective>(item.tag.op)) {
        case Collective::reduce_scatter:
            return "reduce_scatter";
        case Collective::all_to_all:
            return "all_to_all";
        case Collective::all_reduce:
            return "all_reduce";
    }
    return std::to_string(item.tag.op);
}

std::string dtype_text(const Published& item) {
    static constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16"};
    return item.tag.dtype < 4 ? kNames[item.tag.dtype] : std::to_string(item.tag.dtype);
}

}  // namespace

std::uint64_t HostWorld::publish(Published item, const std::string& what, std::shared_ptr<void> keep) {
    const std::uint64_t sequence = next_;
    Local& local = local_[slot_of(sequence)];
    if (sequence >= kRing) {
        if (!local.released)
            throw StateError("communicator: " + std::to_string(kRing) +
                             " exchanges are in flight; release the oldest before '" + what + "'");
        // Others may still read the slot's old item (and the memory it offered).
        wait([&](int r) { return is_drained(sequence - kRing, r); }, [&] { return "the start of '" + what + "'"; });
    }
    if (item.kind == Kind::exchange) mine_.exchanges.store(++exchanges_, std::memory_order_relaxed);
    item.number = exchanges_;
    const std::size_t count = std::min(what.size(), kWhatBytes - 1);
    std::memcpy(item.what, what.data(), count);
    item.what[count] = '\0';
    mine_.ring[slot_of(sequence)] = item;
    local.keep = std::move(keep);
    local.holds.clear();
    local.released = false;
    next_ = sequence + 1;
    mine_.posted.store(next_, std::memory_order_release);
    notify();
    return sequence;
}

Ticket HostWorld::post(const Offer& offer) {
    check_usable("post");
    Published item;
    item.tag = offer.tag;
    item.event = offer.event;
    std::shared_ptr<void> keep;
    if (offer.data != nullptr) keep = locate(offer.data, item);
    return publish(item, offer.what, std::move(keep)) | epoch_ << kEpochShift;
}

bool HostWorld::stale(Ticket ticket) const { return ticket >> kEpochShift != epoch_; }

std::uint64_t HostWorld::sequence_of(Ticket ticket, const char* call) const {
    const std::uint64_t sequence = ticket & ((std::uint64_t{1} << kEpochShift) - 1);
    if (stale(ticket)) throw StateError(std::string("communicator: ") + call + " with a ticket from before reset()");
    if (sequence >= next_)
        throw StateError(std::string("communicator: ") + call + " with a ticket that was never given out");
    return sequence;
}

bool HostWorld::has_posted(std::uint64_t sequence, int rank) const {
    return control_->rank(rank).posted.load(std::memory_order_acquire) > sequence;
}

/// True if all have arrived; raises if some never will, so that a loop of polls ends.
bool HostWorld::poll(const Arrived& arrived, const Describe& describe) {
    for (int r = 0; r < world_; ++r) {
        if (arrived(r)) continue;
        look_at_missing(arrived, describe, false, false);
        return false;
    }
    return true;
}

bool HostWorld::ready(Ticket ticket) {
    check_usable("ready");
    const std::uint64_t sequence = sequence_of(ticket, "ready");
    if (sequence + kRing < next_) return true;
    return poll([&](int r) { return has_posted(sequence, r); }, [&] { return describe(rank_, sequence); });
}

void HostWorld::gather_offers(std::uint64_t sequence) {
    wait([&](int r) { return has_posted(sequence, r); }, [&] { return describe(rank_, sequence); });
    for (int r = 1; r < world_; ++r) {
        const Published &first = control_->rank(0).ring[slot_of(sequence)],
                        &other = control_->rank(r).ring[slot_of(sequence)];
        // Every rank compares all with rank 0, so every rank finds the difference and words it alike.
        if (first.kind != other.kind || first.tag != other.tag) fail(Failure::mismatch, difference(sequence));
    }
}

std::vector<ReduceSource> HostWorld::sources(Ticket ticket) {
    check_usable("sources");
    const std::uint64_t sequence = sequence_of(ticket, "sources");
    Local& local = local_[slot_of(sequence)];
    if (sequence + kRing < next_ || local.released)
        throw StateError("communicator: sources of an exchange that was released");
    gather_offers(sequence);
    local.holds.assign(static_cast<std::size_t>(world_), nullptr);
    std::vector<ReduceSource> result(static_cast<std::size_t>(world_));
    for (int r = 0; r < world_; ++r) {
        const Published& item = control_->rank(r).ring[slot_of(sequence)];
        if (item.place == Place::none) continue;
        std::string problem;
        const std::byte* data = reach(r, item, local.holds[static_cast<std::size_t>(r)], problem);
        if (data == nullptr)
            fail(
                control_->rank(r).left.load(std::memory_order_acquire) != 0 ? Failure::peer_lost : Failure::comm,
                name(rank_) + " cannot read what " + name(r) + " offered in " + describe(r, sequence) + ": " + problem);
        result[static_cast<std::size_t>(r)].data = data;
    }
    return result;
}

void HostWorld::consume(std::uint64_t sequence) {
    Local& local = local_[slot_of(sequence)];
    local.released = true;
    local.holds.clear();
    if (world_ == 1) local.keep.reset();
    // Release: this rank's reads of the payload come before the owner's next writes to it.
    mine_.consumed[slot_of(sequence)].store(sequence + 1, std::memory_order_release);
    notify();
}

void HostWorld::release(Ticket ticket, const void* event) {
    // Also on a failed world, so that an error path can release. After a reset there is nothing left to release.
    if (stale(ticket) || closed_ || !in_owner_process()) return;
    const std::uint64_t sequence = sequence_of(ticket, "release");
    if (sequence + kRing < next_ || local_[slot_of(sequence)].released) return;
    mine_.read_event[slot_of(sequence)].store(event, std::memory_order_relaxed);  // consume() publishes it
    consume(sequence);
}

std::vector<const void*> HostWorld::source_events(Ticket ticket) {
    const std::uint64_t sequence = sequence_of(ticket, "source_events");
    std::vector<const void*> events;
    for (int r = 0; r < world_; ++r) {
        const Published& item = control_->rank(r).ring[slot_of(sequence)];
        if (item.event != nullptr) events.push_back(item.event);
    }
    return events;
}

// A slot that was used again since holds a later event of the same stream, which comes after the one asked for.
std::vector<const void*> HostWorld::drain_events(Ticket ticket) {
    if (stale(ticket)) return {};
    const std::uint64_t sequence = sequence_of(ticket, "drain_events");
    std::vector<const void*> events;
    for (int r = 0; r < world_; ++r) {
        const void* event = control_->rank(r).read_event[slot_of(sequence)].load(std::memory_order_relaxed);
        if (r != rank_ && event != nullptr) events.push_back(event);
    }
    return events;
}

bool HostWorld::is_drained(std::uint64_t sequence, int rank) const {
    // A slot counts upwards: a later item in it was consumed only after this one.
    return rank == rank_ || control_->rank(rank).consumed[slot_of(sequence)].load(std::memory_order_acquire) > sequence;
}

bool HostWorld::drained(Ticket ticket) {
    check_usable("drained");
    if (stale(ticket)) return true;
    const std::uint64_t sequence = sequence_of(ticket, "drained");
    const auto end = [&] { return "the end of " + describe(rank_, sequence); };
    if (!poll([&](int r) { return is_drained(sequence, r); }, end)) return false;
    drop_drained(sequence);
    return true;
}

// Whoever waits for the last of several exchanges lets go of the memory of those before it, too.
void HostWorld::drop_drained(std::uint64_t sequence) {
    for (std::uint64_t s = next_ > kRing ? next_ - kRing : 0; s <= sequence; ++s) {
        if (!local_[slot_of(s)].keep) continue;
        bool over = true;
        for (int r = 0; r < world_; ++r) over = over && is_drained(s, r);
        if (over) local_[slot_of(s)].keep.reset();
    }
}

void HostWorld::wait_drained(Ticket ticket) {
    if (stale(ticket)) return check_usable("wait_drained");
    // What all ranks have read is over: a rank that failed afterwards does not spoil it. wait() looks in that order.
    const std::uint64_t sequence = sequence_of(ticket, "wait_drained");
    if (closed_ || !in_owner_process()) check_usable("wait_drained");
    wait([&](int r) { return is_drained(sequence, r); }, [&] { return "the end of " + describe(rank_, sequence); });
    drop_drained(sequence);
}

// "exchange 13 (block 'decoder' layer 3, micro-step 1)"
std::string HostWorld::describe(int rank, std::uint64_t sequence) {
    const Published& item = control_->rank(rank).ring[slot_of(sequence)];
    if (item.kind != Kind::exchange) return item.what;
    return "exchange " + std::to_string(item.number) + " (" + item.what + ")";
}

std::string HostWorld::difference(std::uint64_t sequence) {
    const auto item = [&](int r) -> const Published& { return control_->rank(r).ring[slot_of(sequence)]; };
    std::string text = "ranks disagree about what they exchange";
    const auto compare = [&](const char* field, auto&& value) {
        bool same = true;
        for (int r = 1; r < world_; ++r) same = same && value(item(r)) == value(item(0));
        if (same) return;
        text += std::string("; ") + field + ":";
        for (int r = 0; r < world_; ++r)
            text += (r ? ", rank " : " rank ") + std::to_string(r) + " has " + value(item(r));
    };
    compare("operation", collective_text);
    compare("dtype", dtype_text);
    compare("bytes", [](const Published& p) { return std::to_string(p.tag.bytes); });
    compare("unit", [](const Published& p) { return std::to_string(p.tag.unit); });
    compare("micro-step", [](const Published& p) { return std::to_string(p.tag.micro_step); });
    compare("step", [](const Published& p) { return std::to_string(p.tag.step); });
    compare("model key", [](const Published& p) { return hex(p.tag.model_key); });
    for (int r = 0; r < world_; ++r)
        text += (r ? ", rank " : " (rank ") + std::to_string(r) + ": " + describe(r, sequence);
    return text + ")";
}

}  // namespace gradgen
