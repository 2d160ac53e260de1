// Plain collectives on memory that nobody else can see. Threads read each other's buffers; processes copy through
// bounce areas in the control block, in rounds: while peers read one half, the next round fills the other.
#include <algorithm>
#include <cstring>

#include "host_world.h"

namespace gradgen {

namespace {

void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0 && to != from) std::memmove(to, from, bytes);  // memmove: an all_gather may be in place
}

std::size_t round_down(std::size_t value, std::size_t unit) { return value / unit * unit; }

}  // namespace

/// The next half of this rank's bounce area, once nobody reads it any more.
std::byte* HostWorld::bounce_half(Published& item) {
    half_ ^= 1u;
    if (half_used_[half_] > 0) {
        const std::uint64_t sequence = half_used_[half_] - 1;
        wait([&](int r) { return is_drained(sequence, r); },
             [&] { return std::string("a collective, for a free bounce buffer"); });
    }
    half_used_[half_] = next_ + 1;
    item.place = Place::bounce;
    item.bounce = half_ * kBounceHalf;
    return control_->bounce(rank_) + item.bounce;
}

/// Moves `bytes` (of a rank, or of a slice) in rounds of `chunk`. `fill` copies a chunk to a bounce half, `take` reads
/// a rank's: from its bounce half, or from its whole `in` where memory is shared.
void HostWorld::rounds(Kind kind, std::size_t bytes, std::size_t chunk, const void* in, const Fill& fill,
                       const Take& take) {
    const std::string what =
        (kind == Kind::all_gather ? "all_gather of " : "all_to_all of ") + std::to_string(bytes) + " bytes";
    std::size_t begin = 0;
    do {
        const std::size_t count = std::min(chunk, bytes - begin);
        Published item;
        item.kind = kind;
        item.tag.bytes = bytes;
        if (bounces()) {
            fill(bounce_half(item), begin, count);
        } else {
            item.place = Place::pointer;
            item.pointer = in;
        }
        const std::uint64_t sequence = publish(item, what, nullptr);
        gather_offers(sequence);
        for (int r = 0; r < world_; ++r) {
            const Published& peer = control_->rank(r).ring[sequence % kRing];
            const std::byte* from =
                bounces() ? control_->bounce(r) + peer.bounce : static_cast<const std::byte*>(peer.pointer);
            take(r, r == rank_ ? nullptr : from, begin, count);
        }
        consume(sequence);
        // Without a bounce area the caller's own buffer is what others read.
        if (!bounces()) wait([&](int r) { return is_drained(sequence, r); }, [&] { return "the end of " + what; });
        begin += count;
    } while (begin < bytes);
}

void HostWorld::all_gather(void* out, const void* in, std::size_t bytes) {
    check_usable("all_gather");
    auto* to = static_cast<std::byte*>(out);
    const auto* own = static_cast<const std::byte*>(in);
    if (world_ == 1) return copy(to, own, bytes);
    const std::size_t chunk = bounces() ? kBounceHalf : bytes;
    rounds(
        Kind::all_gather, bytes, chunk, in,
        [&](std::byte* half, std::size_t begin, std::size_t count) { copy(half, own + begin, count); },
        [&](int r, const std::byte* from, std::size_t begin, std::size_t count) {
            const std::size_t at = static_cast<std::size_t>(r) * bytes + begin;
            copy(to + at, from == nullptr ? own + begin : from, count);
        });
}

void HostWorld::all_to_all(void* out, const void* in, std::size_t bytes) {
    check_usable("all_to_all");
    auto* to = static_cast<std::byte*>(out);
    const auto* own = static_cast<const std::byte*>(in);
    if (world_ == 1) return copy(to, own, bytes);
    const auto world = static_cast<std::size_t>(world_), self = static_cast<std::size_t>(rank_);
    const std::size_t chunk = bounces() ? round_down(kBounceHalf / world, 64) : bytes;
    rounds(
        Kind::all_to_all, bytes, chunk, in,
        [&](std::byte* half, std::size_t begin, std::size_t count) {
            for (std::size_t r = 0; r < world; ++r)
                if (r != self) copy(half + r * count, own + r * bytes + begin, count);
        },
        [&](int r, const std::byte* from, std::size_t begin, std::size_t count) {
            const std::byte* slice =
                from == nullptr ? own + self * bytes + begin : from + self * (bounces() ? count : bytes);
            copy(to + static_cast<std::size_t>(r) * bytes + begin, slice, count);
        });
}

void HostWorld::barrier() {
    check_usable("barrier");
    if (world_ == 1) return;
    Published item;
    item.kind = Kind::barrier;
    const std::uint64_t sequence = publish(item, "barrier", nullptr);
    gather_offers(sequence);
    consume(sequence);
}

std::vector<std::string> HostWorld::gather_objects(const std::string& mine) {
    check_usable("gather_objects");
    if (world_ == 1) return {mine};
    const std::size_t chunk = bounces() ? kBounceHalf : SIZE_MAX / 2;
    std::vector<std::string> all(static_cast<std::size_t>(world_));
    std::size_t begin = 0, longest = 0;
    do {  // lengths differ: everybody goes on until the longest is through
        Published item;
        item.kind = Kind::gather_objects;
        item.length = mine.size();
        const std::size_t from = std::min(begin, mine.size());
        if (bounces()) {
            copy(bounce_half(item), mine.data() + from, std::min(chunk, mine.size() - from));
        } else {
            item.place = Place::pointer;
            item.pointer = mine.data();
        }
        const std::uint64_t sequence = publish(item, "gather_objects", nullptr);
        gather_offers(sequence);
        for (int r = 0; r < world_; ++r) {
            const Published& peer = control_->rank(r).ring[sequence % kRing];
            const auto length = static_cast<std::size_t>(peer.length);
            longest = std::max(longest, length);
            const auto* data =
                bounces() ? control_->bounce(r) + peer.bounce : static_cast<const std::byte*>(peer.pointer);
            if (begin < length)
                all[static_cast<std::size_t>(r)].append(reinterpret_cast<const char*>(data),
                                                        std::min(chunk, length - begin));
        }
        consume(sequence);
        if (!bounces())
            wait([&](int r) { return is_drained(sequence, r); },
                 [] { return std::string("the end of gather_objects"); });
        begin += chunk;
    } while (begin < longest);
    return all;
}

}  // namespace gradgen
