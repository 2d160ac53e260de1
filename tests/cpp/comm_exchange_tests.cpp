// What a communicator does when nothing goes wrong, compared with plain references.
#include <algorithm>
#include <deque>
#include <random>

#include "comm_harness.h"

namespace gradgen::test {

namespace {

#ifdef __SANITIZE_THREAD__
constexpr bool kSanitized = true;  // every access costs twenty: threads share memory, so sizes add nothing
#else
constexpr bool kSanitized = false;
#endif

float value(int rank, int exchange, std::size_t index) {
    return static_cast<float>(rank * 1000 + exchange * 17 + static_cast<int>(index % 251));
}

struct Flight {
    Ticket ticket;
    int exchange;
    std::size_t count, arena;
    std::vector<bool> zero;
};

void check_sources(Communicator& comm, const Flight& flight) {
    const auto sources = comm.sources(flight.ticket);
    CHECK(static_cast<int>(sources.size()) == comm.world_size());
    for (int r = 0; r < comm.world_size(); ++r) {
        const ReduceSource& source = sources[static_cast<std::size_t>(r)];
        CHECK(!source.packed);
        CHECK((source.data == nullptr) == flight.zero[static_cast<std::size_t>(r)]);
        if (source.data == nullptr) continue;
        for (std::size_t i = 0; i < flight.count; ++i)
            CHECK(static_cast<const float*>(source.data)[i] == value(r, flight.exchange, i));
    }
    comm.release(flight.ticket);
}

void check_collectives(Communicator& comm, int step) {
    const int world = comm.world_size(), rank = comm.rank();
    comm.barrier();
    const auto texts =
        comm.gather_objects(std::string(static_cast<std::size_t>(rank * 100 + step), static_cast<char>('a' + rank)));
    CHECK(static_cast<int>(texts.size()) == world);
    for (int r = 0; r < world; ++r)
        CHECK(texts[static_cast<std::size_t>(r)] ==
              std::string(static_cast<std::size_t>(r * 100 + step), static_cast<char>('a' + r)));
}

/// Exchanges in random order of use: several in flight, zeros, sub-ranges, collectives in between, ranks that dawdle.
void random_sequence(Communicator& comm, unsigned seed, int exchanges) {
    std::mt19937 common(seed), own(seed * 31 + static_cast<unsigned>(comm.rank()));
    constexpr std::size_t kArenas = 3, kMost = 5000;
    std::vector<std::shared_ptr<Storage>> arenas;
    std::vector<Ticket> last(kArenas);
    std::vector<bool> used(kArenas);
    for (std::size_t a = 0; a < kArenas; ++a) arenas.push_back(comm.allocate(kMost * 2 * sizeof(float)));
    for (std::size_t i = 0; i < kMost; ++i) CHECK(static_cast<const float*>(arenas[0]->data)[i] == 0.0f);
    std::deque<Flight> flights;
    const auto land = [&] {
        check_sources(comm, flights.front());
        flights.pop_front();
    };
    for (int e = 0; e < exchanges; ++e) {
        Flight flight{0, e, common() % kMost, static_cast<std::size_t>(e) % kArenas, {}};
        for (int r = 0; r < comm.world_size(); ++r) flight.zero.push_back(common() % 4 == 0);
        const std::size_t offset = common() % kMost;
        while (flights.size() >= kArenas) land();
        if (used[flight.arena]) comm.wait_drained(last[flight.arena]);
        if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
        auto* data = static_cast<float*>(arenas[flight.arena]->data) + offset;
        for (std::size_t i = 0; i < flight.count; ++i) data[i] = value(comm.rank(), e, i);
        Offer offer;
        if (!flight.zero[static_cast<std::size_t>(comm.rank())]) offer.data = data;
        offer.tag.step = e;
        offer.tag.bytes = flight.count * sizeof(float);
        offer.what = "exchange of the test " + std::to_string(e);
        flight.ticket = last[flight.arena] = comm.post(offer);
        used[flight.arena] = true;
        flights.push_back(flight);
        if (common() % 3 == 0) land();
        if (common() % 7 == 0) check_collectives(comm, e);
    }
    while (!flights.empty()) land();
    for (std::size_t a = 0; a < kArenas; ++a)
        if (used[a]) comm.wait_drained(last[a]);
    for (std::size_t a = 0; a < kArenas; ++a) CHECK(!used[a] || comm.drained(last[a]));
}

void moves(Communicator& comm, std::size_t bytes) {
    const auto world = static_cast<std::size_t>(comm.world_size()), rank = static_cast<std::size_t>(comm.rank());
    const auto byte = [](std::size_t r, std::size_t i) {
        return static_cast<unsigned char>(r * 101 + i * 7 + i / 251);
    };
    std::vector<unsigned char> in(bytes * world), out(bytes * world, 0xee);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = byte(rank, i);
    comm.all_gather(out.data(), in.data(), bytes);
    for (std::size_t r = 0; r < world; ++r)
        for (std::size_t i = 0; i < bytes; ++i) CHECK(out[r * bytes + i] == byte(r, i));
    std::fill(out.begin(), out.end(), static_cast<unsigned char>(0xee));
    comm.all_to_all(out.data(), in.data(), bytes);
    for (std::size_t r = 0; r < world; ++r)
        for (std::size_t i = 0; i < bytes; ++i) CHECK(out[r * bytes + i] == byte(r, rank * bytes + i));
    if (bytes == 0) return;
    std::copy(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(bytes),
              out.begin() + static_cast<std::ptrdiff_t>(rank * bytes));
    comm.all_gather(out.data(), out.data() + rank * bytes, bytes);  // in place
    for (std::size_t r = 0; r < world; ++r) CHECK(out[r * bytes + bytes / 2] == byte(r, bytes / 2));
}

/// fp32 sums in rank order, rounded once.
void sums(Communicator& comm, std::int64_t numel) {
    const int world = comm.world_size();
    const auto item = [](int r, std::int64_t i) {
        return (r == 1 ? 256.0f : 1.0f) + static_cast<float>(i % 3) * 0.37f;
    };
    const auto expect = [&](std::int64_t i) {
        float sum = item(0, i);
        for (int r = 1; r < world; ++r) sum += item(r, i);
        return sum;
    };
    const auto count = static_cast<std::size_t>(numel);
    std::vector<float> data(count);
    for (std::int64_t i = 0; i < numel; ++i) data[static_cast<std::size_t>(i)] = item(comm.rank(), i);
    comm.all_reduce(data.data(), numel, DType::f32);
    for (std::int64_t i = 0; i < numel; ++i) CHECK(data[static_cast<std::size_t>(i)] == expect(i));
    std::vector<bf16> narrow(count);
    for (std::int64_t i = 0; i < numel; ++i)
        narrow[static_cast<std::size_t>(i)] = to_bf16(i % 2 ? 1.0f : (comm.rank() == 1 ? 256.0f : 1.0f));
    comm.all_reduce(narrow.data(), numel, DType::bf16);
    for (std::int64_t i = 0; i < numel; ++i) {
        const float sum = i % 2 ? static_cast<float>(world) : (world > 1 ? 255.0f : 0.0f) + static_cast<float>(world);
        CHECK(narrow[static_cast<std::size_t>(i)].bits == to_bf16(sum).bits);
    }
    std::vector<double> in(count * static_cast<std::size_t>(world)), out(count);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<double>(i) + comm.rank();
    comm.reduce_scatter(out.data(), in.data(), numel, DType::f64);
    for (std::size_t i = 0; i < count; ++i) {
        const double base = static_cast<double>(i + static_cast<std::size_t>(comm.rank()) * count);
        CHECK(out[i] == base * world + world * (world - 1) / 2.0);
    }
}

/// More posts than the ring holds, the ranks out of step by as much as the ring lets them.
void many_posts(Communicator& comm) {
    auto arena = comm.allocate(4096);
    for (int e = 0; e < 300; ++e) {
        Offer offer;
        offer.data = arena->data;
        offer.tag.step = e;
        offer.what = "post " + std::to_string(e);
        const Ticket ticket = comm.post(offer);
        comm.sources(ticket);
        comm.release(ticket);
        comm.release(ticket);  // again: nothing
        if (e % 100 == 99) comm.wait_drained(ticket);
    }
    if (comm.transport() == "single") return;
    std::vector<Ticket> tickets;
    const auto post = [&](int e) {
        Offer offer;
        offer.tag.step = e;
        offer.what = "in flight";
        return comm.post(offer);
    };
    for (int e = 0; e < 64; ++e) tickets.push_back(post(e));
    CHECK_HAS(raises<StateError>([&] { post(64); }), "in flight");
    std::reverse(tickets.begin(), tickets.end());
    for (const Ticket ticket : tickets) comm.sources(ticket), comm.release(ticket);  // in any order
    const Ticket last = post(64);
    comm.sources(last);
    comm.release(last);
    CHECK_HAS(raises<StateError>([&] { comm.sources(last); }), "released");
    comm.wait_drained(tickets.front());
    comm.barrier();
}

/// Each rank writes every world-th range of the memory and ends up with all of it; then again, with other numbers.
void gathers(Communicator& comm, std::size_t range, std::size_t count) {
    const auto world = static_cast<std::size_t>(comm.world_size());
    const std::size_t bytes = range * count;
    const auto memory = comm.allocate(bytes);
    auto* data = static_cast<unsigned char*>(memory->data);
    std::vector<std::vector<ByteRange>> owned(world);
    for (std::size_t i = 0; i < count; ++i) owned[i % world].push_back({i * range, range});
    for (unsigned round = 0; round < 5; ++round) {
        const auto number = [&](std::size_t i, std::size_t at) {
            return static_cast<unsigned char>(31 * i + 7 * at + 101 * round);
        };
        for (std::size_t i = 0; i < count; ++i)
            if (i % world == static_cast<std::size_t>(comm.rank()))
                for (std::size_t at = 0; at < range; ++at) data[i * range + at] = number(i, at);
        comm.gather_in_place(data, bytes, owned);
        for (std::size_t i = 0; i < count; ++i)
            for (std::size_t at = 0; at < range; ++at) CHECK(data[i * range + at] == number(i, at));
    }
    owned.front().push_back({bytes - 1, 2});
    CHECK_HAS(raises<std::invalid_argument>([&] { comm.gather_in_place(data, bytes, owned); }),
              "of " + std::to_string(bytes));
    owned.pop_back();
    CHECK_HAS(raises<std::invalid_argument>([&] { comm.gather_in_place(data, bytes, owned); }), "for a world of");
}

/// Ranks that cut the memory differently are told so, all of them.
void unequal_gathers(Communicator& comm) {
    if (comm.world_size() == 1) return;
    const auto memory = comm.allocate(64);
    std::vector<std::vector<ByteRange>> owned(static_cast<std::size_t>(comm.world_size()));
    owned[0].push_back({0, comm.rank() == 1 ? 32u : 33u});
    CHECK_HAS(raises<MismatchError>([&] { comm.gather_in_place(memory->data, 64, owned); }), "model key");
    comm.reset();
    owned[0] = {{0, 32}};
    comm.gather_in_place(memory->data, 64, owned);
}

}  // namespace

std::vector<Test> exchange_tests(const std::string& mode, const std::vector<int>& worlds, const Runner& run) {
    std::vector<Test> tests;
    for (const int world : worlds) {
        const auto add = [&](const std::string& name, const std::function<void(Communicator&)>& body) {
            tests.push_back({mode + " world " + std::to_string(world) + ": " + name, [=] {
                                 run(world, 60s, [&](const std::shared_ptr<Communicator>& comm) { body(*comm); });
                             }});
        };
        for (unsigned seed = 1; seed <= 3; ++seed)
            add("random sequence " + std::to_string(seed), [=](Communicator& c) { random_sequence(c, seed, 150); });
        add("all_gather and all_to_all", [](Communicator& c) {
            const std::size_t most = kSanitized ? (1 << 16) + 1 : c.world_size() > 3 ? (1 << 20) + 1 : 10 << 20;
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{4097}, most})
                moves(c, bytes);
        });
        add("sums", [](Communicator& c) {
            for (const std::int64_t numel : {0, 1, 7, 4097}) sums(c, numel);
            if (!kSanitized) sums(c, 600'001);  // several rounds
        });
        add("many posts", many_posts);
        add("gather_in_place", [](Communicator& c) {
            gathers(c, 13, 40);
            if (!kSanitized) gathers(c, 3'000'001, 8);  // more than is resident at a time
            unequal_gathers(c);
        });
        add("reset of a healthy world", [](Communicator& c) {
            for (unsigned i = 0; i < 3; ++i) {
                random_sequence(c, i, 20);
                c.reset();
            }
            random_sequence(c, 9, 20);
        });
        add("large objects", [](Communicator& c) {
            const auto size = [](int r) { return static_cast<std::size_t>(r) * 700'000; };
            const auto all = c.gather_objects(std::string(size(c.rank()), 'x'));
            for (int r = 0; r < c.world_size(); ++r)
                CHECK(all[static_cast<std::size_t>(r)] == std::string(size(r), 'x'));
        });
    }
    return tests;
}

}  // namespace gradgen::test
