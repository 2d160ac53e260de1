// What is special about threads and about processes: whose memory it is, and how a peer dies.
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "comm_harness.h"

namespace gradgen::test {

namespace {

void exchange(Communicator& comm, const void* data, std::size_t bytes) {
    Offer offer;
    offer.data = data;
    offer.tag.bytes = bytes;
    offer.what = "block 'decoder' layer 3";
    const Ticket ticket = comm.post(offer);
    for (const ReduceSource& source : comm.sources(ticket)) {
        volatile char first = static_cast<const char*>(source.data)[bytes - 1];
        (void)first;
    }
    comm.release(ticket);
    comm.wait_drained(ticket);
}

#ifdef __SANITIZE_ADDRESS__
constexpr std::ptrdiff_t kOtherMaps = 1000;  // the sanitizer's own allocator grows
#else
constexpr std::ptrdiff_t kOtherMaps = 2;
#endif

struct Counts {
    std::ptrdiff_t files = 0, maps = 0, shared = 0;
};

Counts counts() {
    Counts now;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++now.files;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line); ++now.maps)
        if (line.find("memfd:gradgen") != std::string::npos) ++now.shared;
    return now;
}

std::size_t resident_kib() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
        if (line.rfind("VmRSS:", 0) == 0) return std::strtoull(line.c_str() + 6, nullptr, 10);
    return 0;
}

/// Memory dropped right after its offer was made must stay until others have read it.
void drop_in_flight(Communicator& comm) {
    for (int i = 0; i < 200; ++i) {
        auto arena = comm.allocate(1 << 16);
        auto* data = static_cast<int*>(arena->data);
        for (int k = 0; k < (1 << 14); ++k) data[k] = comm.rank() * 1000 + i;
        Offer offer;
        offer.data = data;
        offer.tag.bytes = 1 << 16;
        offer.what = "dropped";
        const Ticket ticket = comm.post(offer);
        arena.reset();
        const auto sources = comm.sources(ticket);
        for (int r = 0; r < comm.world_size(); ++r)
            for (int k = 0; k < (1 << 14); k += 100)
                CHECK(static_cast<const int*>(sources[static_cast<std::size_t>(r)].data)[k] == r * 1000 + i);
        comm.release(ticket);
    }
    comm.barrier();
}

/// A rank that is killed while the others wait for it: PeerLost within a second, a stopped one: CommTimeout.
void killed(int world, int signal) {
    const auto outcomes = run_processes_raw(world, [&](int rank, const Gather& gather) {
        auto comm = shared_communicator(rank, world, 1500ms, gather);
        auto arena = comm->allocate(4096);
        exchange(*comm, arena->data, 4096);
        if (rank == 1) {
            if (signal == SIGSTOP) {
                const pid_t self = getpid();
                if (fork() == 0) {  // wakes it up when the others are through
                    std::this_thread::sleep_for(3s);
                    kill(self, SIGCONT);
                    _exit(0);
                }
            }
            raise(signal);
            return;
        }
        const auto start = Clock::now();
        if (signal == SIGSTOP) {
            CHECK_HAS(raises<CommTimeout>([&] { exchange(*comm, arena->data, 4096); }), "for rank 1 (pid ");
            CHECK(seconds_since(start) < 2.5);
        } else {
            const std::string why = raises<PeerLost>([&] { exchange(*comm, arena->data, 4096); });
            CHECK(seconds_since(start) < 1.0);
            CHECK_HAS(why, "rank 1 (pid ");
            CHECK_HAS(why, "ended without closing its communicator after 1 exchange; rank");
            CHECK(raises<PeerLost>([&] { comm->barrier(); }) == why);
            CHECK_HAS(raises<PeerLost>([&] { comm->reset(); }), "is at reset()");
        }
    });
    for (std::size_t r = 0; r < outcomes.size(); ++r)
        if (r != 1 && outcomes[r].text != "ok")
            throw std::logic_error("rank " + std::to_string(r) + ": " + outcomes[r].text);
    CHECK(signal == SIGSTOP || WTERMSIG(outcomes[1].status) == signal);
}

void elsewhere(const std::string& from, const std::string& to, const std::string& expect) {
    const auto outcomes = run_processes_raw(3, [&](int rank, const Gather& gather) {
        bool first = true;
        const Gather disguised = [&](const std::string& mine) {
            std::string text = mine;
            const auto at = text.find(from);
            if (rank == 1 && first && at != std::string::npos) text.replace(at, from.size(), to);
            first = false;
            return gather(text);
        };
        const Counts before = counts();
        throw std::runtime_error(raises<CommError>([&] { shared_communicator(rank, 3, 5s, disguised); }) +
                                 (counts().files == before.files ? "" : " (a file stayed open)"));
    });
    CHECK_HAS(outcomes[0].text, expect);
    for (const auto& outcome : outcomes) CHECK(outcome.text == outcomes[0].text);
    CHECK(outcomes[0].text.find("stayed open") == std::string::npos);
}

void flat_over_cycles() {
    const auto outcomes = run_processes_raw(2, [](int rank, const Gather& gather) {
        const auto cycle = [&] {
            auto comm = shared_communicator(rank, 2, 20s, gather);
            auto first = comm->allocate(1 << 16), second = comm->allocate(100);
            exchange(*comm, first->data, 1 << 16);
            exchange(*comm, second->data, 100);
            second.reset();
            comm->barrier();
            if (rank == 0)
                comm->close();
            else
                comm.reset();  // before its memory
        };
        for (int i = 0; i < 10; ++i) cycle();
        const Counts before = counts();
        for (int i = 0; i < 100; ++i) cycle();
        const Counts after = counts();
        CHECK(after.files == before.files);
        CHECK(after.shared == before.shared);
        CHECK(after.maps <= before.maps + kOtherMaps);
        auto comm = shared_communicator(rank, 2, 20s, gather);
        const auto churn = [&] {
            auto arena = comm->allocate(1 << 16);
            exchange(*comm, arena->data, 1 << 16);
        };
        for (int i = 0; i < 10; ++i) churn();
        const Counts start = counts();
        for (int i = 0; i < 500; ++i) churn();
        comm->barrier();
        CHECK(counts().files == start.files);
        CHECK(counts().shared <= start.shared + 1);  // a peer's last arena is unmapped at the next call
        CHECK(counts().maps <= start.maps + kOtherMaps);
    });
    for (const auto& outcome : outcomes)
        if (outcome.text != "ok") throw std::logic_error(outcome.text);
}

void forked_child() {
    run_processes(2, 20s, [](const std::shared_ptr<Communicator>& comm) {
        auto arena = comm->allocate(4096);
        exchange(*comm, arena->data, 4096);
        const pid_t child = fork();
        if (child == 0) {
            int status = 1;
            try {
                raises<StateError>([&] { comm->barrier(); });
                const std::string why = raises<StateError>([&] { comm->allocate(1); });
                comm->abort("from the child");
                arena.reset();
                comm->close();
                status = why.find("forked child") == std::string::npos;
            } catch (...) {
            }
            _exit(status);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(status == 0);
        for (int i = 0; i < 10; ++i) exchange(*comm, arena->data, 4096);
    });
}

void foreign_memory(Communicator& comm) {
    std::vector<char> own(100);
    CHECK_HAS(raises<StateError>([&] { exchange(comm, own.data(), 100); }), "allocate()");
    auto arena = comm.allocate(100);
    CHECK_HAS(raises<StateError>([&] { exchange(comm, static_cast<char*>(arena->data) + 8, 4096); }),
              "the memory ends after 4088");
    CHECK_HAS(raises<Error>([&] { comm.allocate(std::size_t{1} << 50); }), "bytes");
    exchange(comm, arena->data, 100);
}

void trimmed(Communicator& comm) {
    constexpr std::size_t kBytes = 64 << 20;
    auto arena = comm.allocate(kBytes);
    std::memset(arena->data, 1, kBytes);
    Offer offer;
    offer.data = arena->data;
    const Ticket ticket = comm.post(offer);
    const auto sources = comm.sources(ticket);
    const auto read_peer = [&] {
        const auto* data = static_cast<const unsigned char*>(sources[static_cast<std::size_t>(1 - comm.rank())].data);
        for (std::size_t i = 0; i < kBytes; i += 512) CHECK(data[i] == 1);
    };
    const std::size_t before = resident_kib();
    read_peer();
    const std::size_t read = resident_kib();
    comm.trim();
    const std::size_t after = resident_kib();
    CHECK(read > before + 60'000);
    CHECK(after < before + 4'000);
    read_peer();
    comm.release(ticket);
    comm.wait_drained(ticket);
}

}  // namespace

std::vector<Test> thread_tests() {
    return {
        {"threads: memory dropped in flight",
         [] { run_threads(4, 20s, [](const auto& comm) { drop_in_flight(*comm); }); }},
        {"threads: arguments", [] { CHECK(threads_communicators(1, 1s).at(0)->transport() == "threads"); }},
    };
}

std::vector<Test> process_tests() {
    return {
        {"processes: memory dropped in flight",
         [] { run_processes(3, 20s, [](const auto& comm) { drop_in_flight(*comm); }); }},
        {"processes: a killed peer",
         [] {
             killed(2, SIGKILL);
             killed(3, SIGKILL);
         }},
        {"processes: a stopped peer", [] { killed(3, SIGSTOP); }},
        {"processes: another host", [] { elsewhere("boot ", "boot 1", "rank 1 runs elsewhere"); }},
        {"processes: a file that is gone", [] { elsewhere("\n", "0\n", "is not what it announced"); }},
        {"processes: flat over 100 cycles", flat_over_cycles},
        {"processes: a forked child", forked_child},
        {"processes: memory that others cannot see",
         [] { run_processes(2, 20s, [](const auto& comm) { foreign_memory(*comm); }); }},
        {"processes: trim", [] { run_processes(2, 20s, [](const auto& comm) { trimmed(*comm); }); }},
    };
}

}  // namespace gradgen::test
