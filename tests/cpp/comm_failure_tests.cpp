// Every way in which ranks get out of step, for threads and processes alike.
#include "comm_harness.h"

namespace gradgen::test {

namespace {

Ticket post(Communicator& comm, const void* data, std::int64_t step, const std::string& what, std::uint32_t dtype = 0) {
    Offer offer;
    offer.data = data;
    offer.tag.step = step;
    offer.tag.dtype = dtype;
    offer.what = what;
    return comm.post(offer);
}

void exchange(Communicator& comm, const void* data, std::int64_t step, const std::string& what = "unit") {
    const Ticket ticket = post(comm, data, step, what);
    comm.sources(ticket);
    comm.release(ticket);
    comm.wait_drained(ticket);
}

/// One exchange with a result that is checked: the world works.
void check_works(Communicator& comm) {
    auto arena = comm.allocate(4096);
    *static_cast<int*>(arena->data) = 40 + comm.rank();
    const Ticket ticket = post(comm, arena->data, 7, "after recovery");
    const auto sources = comm.sources(ticket);
    for (int r = 0; r < comm.world_size(); ++r)
        CHECK(*static_cast<const int*>(sources[static_cast<std::size_t>(r)].data) == 40 + r);
    comm.release(ticket);
    comm.wait_drained(ticket);
    comm.barrier();
}

void mismatch(Communicator& comm) {
    const bool odd = comm.rank() == 1;
    const Ticket ticket =
        post(comm, nullptr, odd ? 4 : 3, odd ? "block 'decoder' layer 2" : "block 'decoder' layer 3", odd ? 2 : 3);
    const std::string why = raises<MismatchError>([&] { comm.sources(ticket); });
    for (const char* part :
         {"dtype: rank 0 has float16, rank 1 has bfloat16", "step: rank 0 has 3, rank 1 has 4",
          "rank 0: exchange 1 (block 'decoder' layer 3)", "rank 1: exchange 1 (block 'decoder' layer 2)"})
        CHECK_HAS(why, part);
    CHECK(raises<MismatchError>([&] { comm.barrier(); }) == why);
    comm.reset();
    check_works(comm);
}

void other_operation(Communicator& comm) {
    char byte = 0, bytes[8];
    const std::string why = raises<MismatchError>([&] {
        if (comm.rank() == 1)
            comm.barrier();
        else
            exchange(comm, nullptr, 0, "block 'decoder' layer 3");
    });
    CHECK_HAS(why, "rank 1 has barrier");
    CHECK_HAS(why, "rank 0: exchange 1 (block 'decoder' layer 3)");
    comm.reset();
    CHECK_HAS(raises<MismatchError>([&] { comm.all_gather(bytes, &byte, comm.rank() == 1 ? 1 : 0); }),
              "bytes: rank 0 has 0, rank 1 has 1");
    comm.reset();
    check_works(comm);
}

void timeout(Communicator& comm) {
    const auto start = Clock::now();
    exchange(comm, nullptr, 0);
    if (comm.rank() == 1) {
        std::this_thread::sleep_for(1200ms);
        CHECK_HAS(raises<CommTimeout>([&] { exchange(comm, nullptr, 1); }), "waited 0.4 s");
    } else {
        const std::string why = raises<CommTimeout>([&] { exchange(comm, nullptr, 1, "block 'decoder' layer 3"); });
        CHECK(seconds_since(start) < 1.0);
        CHECK_HAS(why, "waited 0.4 s in exchange 2 (block 'decoder' layer 3) for rank 1");
        CHECK_HAS(why, "which has posted 1 exchange)");
        CHECK(raises<CommTimeout>([&] { comm.barrier(); }) == why);
    }
}

void slow_is_fine(Communicator& comm) {
    for (int i = 0; i < 3; ++i) {
        if (comm.rank() == i % comm.world_size()) std::this_thread::sleep_for(500ms);
        exchange(comm, nullptr, i);
    }
}

void close_early(Communicator& comm) {
    auto arena = comm.allocate(4096);
    exchange(comm, arena->data, 0);
    exchange(comm, arena->data, 1);
    if (comm.rank() == 1) {
        comm.close();
        comm.close();
        CHECK_HAS(raises<StateError>([&] { comm.barrier(); }), "after close()");
        return;
    }
    std::this_thread::sleep_for(100ms);  // until all are through with the second
    const auto start = Clock::now();
    const std::string why = raises<PeerLost>([&] { exchange(comm, arena->data, 2, "block 'decoder' layer 3"); });
    CHECK(seconds_since(start) < 1.0);
    CHECK_HAS(why, "rank 1");
    CHECK_HAS(why, "closed its communicator after 2 exchanges; rank");
    CHECK_HAS(why, "is at exchange 3 (block 'decoder' layer 3)");
    CHECK(raises<PeerLost>([&] { comm.gather_objects(""); }) == why);
    CHECK_HAS(raises<PeerLost>([&] { comm.reset(); }), "closed its communicator");
}

void abort_and_reset(Communicator& comm) {
    auto arena = comm.allocate(4096);
    for (int round = 0; round < 5; ++round) {
        exchange(comm, arena->data, 0);
        CHECK(comm.failure().empty());
        // Different numbers of offers outstanding, by rank.
        std::vector<Ticket> open;
        const bool culprit = comm.rank() == comm.world_size() - 1;
        for (int i = 0; i < (culprit ? 1 : 2 + comm.rank()); ++i)
            open.push_back(post(comm, arena->data, 1 + i, "outstanding"));
        if (culprit) {
            std::this_thread::sleep_for(50ms);
            comm.abort("rank threw in layer 3");
        }
        const auto start = Clock::now();
        CHECK(raises<CommError>([&] {
                  comm.sources(open.back());
                  comm.barrier();
              }) == "rank threw in layer 3");
        CHECK(seconds_since(start) < 1.0);
        CHECK(raises<CommError>([&] { comm.drained(open.back()); }) == "rank threw in layer 3");
        CHECK(comm.failure() == "rank threw in layer 3");
        CHECK(raises<CommError>([&] { exchange(comm, nullptr, 0); }) == "rank threw in layer 3");
        comm.release(open.front());
        if (comm.rank() == 0) std::this_thread::sleep_for(20ms);
        comm.reset();
        CHECK(comm.drained(open.front()));
        comm.release(open.front());
        CHECK_HAS(raises<StateError>([&] { comm.sources(open.front()); }), "before reset()");
        check_works(comm);
    }
}

void reset_alone(Communicator& comm) {
    exchange(comm, nullptr, 0);
    if (comm.rank() == 0) {
        const std::string why = raises<CommError>([&] { comm.barrier(); });
        CHECK_HAS(why, "is in reset()");
        comm.reset();
    } else {
        std::this_thread::sleep_for(100ms);
        comm.reset();
    }
    check_works(comm);
}

void reset_times_out_then_works(Communicator& comm) {
    if (comm.rank() == 0) {
        std::this_thread::sleep_for(700ms);
    } else {
        CHECK_HAS(raises<CommTimeout>([&] { comm.reset(); }), "in reset() for rank 0");
        CHECK_HAS(raises<CommError>([&] { comm.barrier(); }), "the last reset() did not complete");
        std::this_thread::sleep_for(200ms);
    }
    comm.reset();
    check_works(comm);
}

void leave_with_an_exception(const std::shared_ptr<Communicator>& comm) {
    exchange(*comm, nullptr, 0);
    std::this_thread::sleep_for(100ms);  // until all are through
    const auto start = Clock::now();
    try {
        if (comm->rank() == 1) throw std::runtime_error("hook");
        exchange(*comm, nullptr, 1);
        CHECK(false);
    } catch (const PeerLost&) {
        CHECK(seconds_since(start) < 1.0);
    } catch (const std::runtime_error&) {
        if (comm->rank() != 1) throw;  // its communicator goes with this frame
    }
}

struct Interrupt {};

void interrupt(Communicator& comm) {
    if (comm.rank() != 0) {
        std::this_thread::sleep_for(400ms);
        CHECK_HAS(raises<CommError>([&] { comm.barrier(); }), "was interrupted while it waited in barrier");
    } else {
        Communicator::set_interrupt_check([] { throw Interrupt{}; });
        const auto start = Clock::now();
        bool caught = false;
        try {
            comm.barrier();
        } catch (const Interrupt&) {
            caught = true;
        }
        Communicator::set_interrupt_check(nullptr);
        CHECK(caught);
        CHECK(seconds_since(start) < 0.3);
    }
    comm.reset();
    check_works(comm);
}

}  // namespace

std::vector<Test> failure_tests(const std::string& mode, const Runner& run) {
    std::vector<Test> tests;
    const auto add = [&](const std::string& name, int world, Timeout limit,
                         const std::function<void(Communicator&)>& body) {
        tests.push_back({mode + " world " + std::to_string(world) + ": " + name,
                         [=] { run(world, limit, [&](const std::shared_ptr<Communicator>& comm) { body(*comm); }); }});
    };
    for (const int world : {2, 3}) {
        add("mismatch", world, 20s, mismatch);
        add("other operation", world, 20s, other_operation);
        add("timeout", world, 400ms, timeout);
        add("slow rank", world, 1s, slow_is_fine);
        add("close early", world, 20s, close_early);
        add("abort and reset", world, 20s, abort_and_reset);
        add("interrupt", world, 20s, interrupt);
        add("reset alone", world, 20s, reset_alone);
        add("reset times out", world, 300ms, reset_times_out_then_works);
        tests.push_back({mode + ": leave with an exception", [=] { run(world, 20s, leave_with_an_exception); }});
    }
    return tests;
}

}  // namespace gradgen::test
