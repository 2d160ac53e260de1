// What every communicator has: memory, sums over ranks built of an all-to-all and our own kernel, the interrupt check.
#include "gradgen/communicator.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "arena.h"
#include "gradgen/error.h"

namespace gradgen {

namespace {

constexpr std::int64_t kChunk = 1 << 18;    // elements of a slice that travel at a time: bounds the temporary memory
constexpr std::size_t kResident = 8 << 20;  // bytes of other ranks' memory that count as this process's own at a time

std::mutex interrupt_mutex;
std::shared_ptr<const std::function<void()>> interrupt_check;  // shared: may be replaced while another thread calls it

void check_type(const char* call, DType dtype) {
    // Before anything is sent, so that it fails alike on every rank.
    if (!can_reduce(dtype, dtype, dtype))
        throw std::invalid_argument(std::string("gradgen: ") + call + " has no kernel for " +
                                    std::string(to_string(dtype)));
}

}  // namespace

std::shared_ptr<Storage> Communicator::allocate(std::size_t bytes) {
    return as_storage(std::make_shared<Arena>(bytes, -1));
}

/// out[0 .. numel) = sum over ranks, in rank order, of the slices for this rank. `send` holds world_ slices of numel.
static void sum_slices(Communicator& comm, std::byte* out, const std::byte* send, std::byte* receive,
                       std::int64_t numel, DType dtype) {
    const std::size_t bytes = static_cast<std::size_t>(numel) * size_of(dtype);
    comm.all_to_all(receive, send, bytes);
    if (numel == 0) return;
    std::vector<ReduceSource> sources;
    for (int r = 0; r < comm.world_size(); ++r)
        sources.push_back({receive + static_cast<std::size_t>(r) * bytes, false});
    ReduceArgs args;
    args.target_type = args.source_type = args.wire_type = dtype;
    args.target = out;
    Segment all;
    all.numel = numel;
    reduce(args, sources, std::span(&all, 1), nullptr);
}

void Communicator::reduce_scatter(void* out, const void* in, std::int64_t numel, DType dtype) {
    check_type("reduce_scatter", dtype);
    const auto world = static_cast<std::size_t>(world_);
    const std::size_t size = size_of(dtype), slice = static_cast<std::size_t>(numel) * size;
    const std::int64_t chunk = std::min(numel, kChunk);
    const bool whole = chunk == numel;  // small: `in` is laid out as one chunk already
    std::vector<std::byte> receive(world * static_cast<std::size_t>(chunk) * size), send(whole ? 0 : receive.size());
    std::int64_t begin = 0;
    do {  // once even for nothing: the ranks' sequences stay equal
        const std::int64_t count = std::min(chunk, numel - begin);
        const std::size_t bytes = static_cast<std::size_t>(count) * size,
                          offset = static_cast<std::size_t>(begin) * size;
        const auto* from = static_cast<const std::byte*>(in);
        if (!whole)
            for (std::size_t r = 0; r < world; ++r)
                std::memcpy(send.data() + r * bytes, from + r * slice + offset, bytes);
        auto* to = static_cast<std::byte*>(out);
        sum_slices(*this, numel == 0 ? to : to + offset, whole ? from : send.data(), receive.data(), count, dtype);
        begin += count;
    } while (begin < numel);
}

void Communicator::all_reduce(void* data, std::int64_t numel, DType dtype) {
    check_type("all_reduce", dtype);
    if (world_ == 1) return barrier();
    const std::int64_t world = world_;
    const std::size_t size = size_of(dtype);
    const std::int64_t chunk = std::min((numel + world - 1) / world, kChunk);
    const std::size_t room = static_cast<std::size_t>(world * chunk) * size;
    std::vector<std::byte> send(room), receive(room), sum(static_cast<std::size_t>(chunk) * size);
    std::int64_t begin = 0;
    do {
        const std::int64_t count = std::min(world * chunk, numel - begin), slice = (count + world - 1) / world;
        const std::size_t bytes = static_cast<std::size_t>(count) * size,
                          padded = static_cast<std::size_t>(slice * world) * size;
        auto* at = static_cast<std::byte*>(data) + (numel == 0 ? 0 : static_cast<std::size_t>(begin) * size);
        if (bytes > 0) std::memcpy(send.data(), at, bytes);
        if (padded > bytes) std::memset(send.data() + bytes, 0, padded - bytes);  // the last slice may be short
        sum_slices(*this, sum.data(), send.data(), receive.data(), slice, dtype);
        all_gather(send.data(), sum.data(), static_cast<std::size_t>(slice) * size);
        if (bytes > 0) std::memcpy(at, send.data(), bytes);
        begin += count;
    } while (begin < numel);
}

void Communicator::gather_on_device(void*, const void*, std::size_t, void*) {
    throw StateError("communicator: " + std::string(transport()) + " has no collectives on a GPU");
}

void Communicator::broadcast_on_device(std::span<const Shared>, void*) {
    throw StateError("communicator: " + std::string(transport()) + " has no collectives on a GPU");
}

void Communicator::gather_in_place(void* data, std::size_t bytes, std::span<const std::vector<ByteRange>> owned,
                                   const std::string& what) {
    if (owned.size() != static_cast<std::size_t>(world_))
        throw std::invalid_argument("gradgen: gather_in_place: ranges of " + std::to_string(owned.size()) +
                                    " ranks for a world of " + std::to_string(world_));
    OpTag tag;
    for (const auto& ranges : owned)
        for (const ByteRange& range : ranges) {
            if (range.begin > bytes || range.bytes > bytes - range.begin)
                throw std::invalid_argument("gradgen: gather_in_place: bytes " + std::to_string(range.begin) + " to " +
                                            std::to_string(range.begin + range.bytes) + " of " + std::to_string(bytes));
            // Ranks that cut the memory differently must find out: the cuts are part of the tag.
            for (const std::uint64_t value : {range.begin, range.bytes})
                tag.model_key = (tag.model_key ^ value) * 1099511628211ull + 1;
        }
    if (world_ == 1) return barrier();
    if (!shares_memory())
        throw StateError("gradgen: gather_in_place needs ranks that read each other's memory; over \"" +
                         std::string(transport()) + "\" use all_gather");
    tag.op = kGatherInPlace;
    tag.bytes = bytes;
    Offer offer;
    offer.data = data;
    offer.tag = tag;
    offer.what = what;
    // The others read this rank's ranges only, and it writes only theirs: nothing moves under a reader.
    const Ticket ticket = post(offer);
    const std::vector<ReduceSource> sources = this->sources(ticket);
    std::size_t resident = kResident;  // what sums have read before is dropped first
    for (int step = 1; step < world_; ++step) {
        const auto rank = static_cast<std::size_t>((rank_ + step) % world_);  // each rank starts at another's memory
        const auto* from = static_cast<const std::byte*>(sources[rank].data);
        for (const ByteRange& range : owned[rank])
            for (std::size_t done = 0; done < range.bytes;) {
                if (resident >= kResident) trim(), resident = 0;
                const std::size_t count = std::min(range.bytes - done, kResident - resident), at = range.begin + done;
                std::memcpy(static_cast<std::byte*>(data) + at, from + at, count);
                done += count, resident += count;
            }
    }
    trim();
    release(ticket);
    wait_drained(ticket);
}

void Communicator::set_interrupt_check(std::function<void()> check) {
    auto next = check ? std::make_shared<const std::function<void()>>(std::move(check)) : nullptr;
    const std::lock_guard lock(interrupt_mutex);
    interrupt_check.swap(next);
}

void Communicator::check_interrupt() {
    std::shared_ptr<const std::function<void()>> check;
    {
        const std::lock_guard lock(interrupt_mutex);
        check = interrupt_check;
    }
    if (check) (*check)();
}

}  // namespace gradgen
