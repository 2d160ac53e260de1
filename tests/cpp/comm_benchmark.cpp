// Ratios to memcpy, measured side by side: printed, not asserted.
#include <algorithm>
#include <cstdio>

#include "comm_harness.h"

namespace gradgen::test {

namespace {

double best(int times, const std::function<void()>& body) {
    double least = 1e9;
    for (int i = 0; i < times; ++i) {
        const auto start = Clock::now();
        body();
        least = std::min(least, seconds_since(start));
    }
    return least * 1e3;
}

void measure(const std::string& mode, Communicator& comm) {
    constexpr std::int64_t kNumel = 16 << 20;  // fp32: 64 MiB
    const auto world = static_cast<std::int64_t>(comm.world_size());
    const std::int64_t slice = kNumel / world;
    auto arena = comm.allocate(kNumel * 4);
    std::fill_n(static_cast<float*>(arena->data), kNumel, 1.0f);
    std::vector<float> shard(static_cast<std::size_t>(slice));
    std::vector<char> copy_to(kNumel * 4, 1), gathered(static_cast<std::size_t>(kNumel) * 4);
    const Segment segment{comm.rank() * slice, 0, slice, 0, 0};
    const auto reduce_once = [&](bool trim) {
        Offer offer;
        offer.data = arena->data;
        offer.what = "benchmark";
        const Ticket ticket = comm.post(offer);
        const auto sources = comm.sources(ticket);
        ReduceArgs args;
        args.target = shard.data();
        reduce(args, sources, std::span(&segment, 1), nullptr);
        comm.release(ticket);
        comm.wait_drained(ticket);
        if (trim) comm.trim();
    };
    const auto print = [&](const char* what, double ms, double memcpy_ms) {
        if (comm.rank() == 0)
            std::printf("  %-9s %d ranks: %-34s %8.3f ms  %5.2f x memcpy\n", mode.c_str(), comm.world_size(), what, ms,
                        ms / memcpy_ms);
    };
    reduce_once(false);
    comm.barrier();
    const double memcpy_ms = best(7, [&] { std::memcpy(copy_to.data(), arena->data, copy_to.size()); });
    print("memcpy of 64 MiB, all ranks at once", memcpy_ms, memcpy_ms);
    print("reduce-scatter of 64 MiB", best(9, [&] { reduce_once(false); }), memcpy_ms);
    print("  with trim() after each", best(9, [&] { reduce_once(true); }), memcpy_ms);
    const std::size_t part = static_cast<std::size_t>(slice) * 4;
    print("all_gather to 64 MiB", best(7, [&] { comm.all_gather(gathered.data(), arena->data, part); }), memcpy_ms);
    print("all_to_all of 64 MiB", best(7, [&] { comm.all_to_all(gathered.data(), arena->data, part); }), memcpy_ms);
    const auto many = [&](const std::function<void()>& body) {
        return best(5,
                    [&] {
                        for (int i = 0; i < 1000; ++i) body();
                    }) /
               1000;
    };
    print("barrier", many([&] { comm.barrier(); }), memcpy_ms);
    print("an empty exchange", many([&] {
              Offer offer;
              offer.what = "empty";
              const Ticket ticket = comm.post(offer);
              comm.sources(ticket);
              comm.release(ticket);
              comm.wait_drained(ticket);
          }),
          memcpy_ms);
    std::fflush(stdout);
}

}  // namespace

void benchmark() {
    for (const int world : {2, 4}) {
        run_processes(world, 60s, [](const auto& comm) { measure("processes", *comm); });
        run_threads(world, 60s, [](const auto& comm) { measure("threads", *comm); });
    }
}

}  // namespace gradgen::test
