// Runs a function as n ranks, threads or processes, and collects how each rank ended.
#pragma once

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gradgen/communicator.h"
#include "gradgen/error.h"

namespace gradgen::test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Ranks = std::function<void(std::shared_ptr<Communicator>)>;
using Gather = std::function<std::vector<std::string>(const std::string&)>;

[[noreturn]] inline void failed(const char* file, int line, const std::string& text) {
    throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) ::gradgen::test::failed(__FILE__, __LINE__, #condition); \
    } while (false)

#define CHECK_HAS(text, part)                                                                             \
    do {                                                                                                  \
        if (std::string(text).find(part) == std::string::npos)                                            \
            ::gradgen::test::failed(__FILE__, __LINE__,                                                   \
                                    "'" + std::string(part) + "' is not in '" + std::string(text) + "'"); \
    } while (false)

/// The message of the E (exactly E) that `call` throws.
template <class E>
std::string raises(const std::function<void()>& call) {
    try {
        call();
    } catch (const E& error) {
        if (typeid(error) == typeid(E)) return error.what();
        failed(__FILE__, __LINE__, std::string("another class: ") + error.what());
    }
    failed(__FILE__, __LINE__, "nothing was thrown");
}

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Every rank a thread; rethrows the first error.
inline void run_threads(int world, Timeout timeout, const Ranks& body) {
    auto comms = threads_communicators(world, timeout);
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::exception_ptr first;
    for (int r = 0; r < world; ++r)
        threads.emplace_back([&, comm = std::move(comms[static_cast<std::size_t>(r)])]() mutable {
            try {
                body(std::move(comm));
            } catch (...) {
                const std::lock_guard lock(mutex);
                if (!first) first = std::current_exception();
            }
        });
    for (auto& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
}

// --- processes -------------------------------------------------------------------------------------------------------

inline void send_all(int fd, const std::string& text) {
    const auto size = static_cast<std::uint64_t>(text.size());
    std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
    bytes += text;
    for (std::size_t at = 0; at < bytes.size();) {
        const ssize_t count = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
        if (count <= 0) throw std::runtime_error("send");
        at += static_cast<std::size_t>(count);
    }
}

inline std::string receive_all(int fd) {
    const auto read_exactly = [fd](char* to, std::size_t bytes) {
        for (std::size_t at = 0; at < bytes;) {
            const ssize_t count = read(fd, to + at, bytes - at);
            if (count <= 0) throw std::runtime_error("a rank hung up");
            at += static_cast<std::size_t>(count);
        }
    };
    std::uint64_t size = 0;
    read_exactly(reinterpret_cast<char*>(&size), sizeof size);
    std::string text(size, '\0');
    read_exactly(text.data(), text.size());
    return text;
}

struct Outcome {
    int status = 0;    // as of waitpid
    std::string text;  // "ok", or the message of what the rank threw
};

using ProcessBody = std::function<void(int rank, const Gather& gather)>;

/// Forks `world` ranks with an all-gather over sockets; rank 0 is the hub.
inline std::vector<Outcome> run_processes_raw(int world, const ProcessBody& body) {
    const auto count = static_cast<std::size_t>(world);
    std::vector<std::array<int, 2>> hubs(count), reports(count);
    for (auto& pair : hubs) CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()) == 0);
    for (auto& pair : reports) CHECK(pipe(pair.data()) == 0);
    std::vector<pid_t> pids;
    for (int r = 0; r < world; ++r) {
        const auto self = static_cast<std::size_t>(r);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid > 0) {
            pids.push_back(pid);
            continue;
        }
        for (std::size_t other = 0; other < count; ++other) {
            if (r != 0) close(hubs[other][0]);
            if (other != self) close(hubs[other][1]);
            close(reports[other][0]);
            if (other != self) close(reports[other][1]);
        }
        const Gather gather = [&](const std::string& mine) {
            std::vector<std::string> all(count);
            if (r == 0) {
                std::string joined;
                all[0] = mine;
                for (std::size_t other = 1; other < count; ++other) all[other] = receive_all(hubs[other][0]);
                for (std::size_t other = 1; other < count; ++other)
                    for (const auto& text : all) send_all(hubs[other][0], text);
            } else {
                send_all(hubs[self][1], mine);
                for (auto& text : all) text = receive_all(hubs[self][1]);
            }
            return all;
        };
        std::string report = "ok";
        try {
            body(r, gather);
        } catch (const std::exception& error) {
            report = error.what();
        }
        if (write(reports[self][1], report.data(), report.size()) < 0) _exit(3);
        _exit(report == "ok" ? 0 : 1);
    }
    std::vector<Outcome> outcomes(count);
    for (std::size_t r = 0; r < count; ++r) {
        close(hubs[r][0]);
        close(hubs[r][1]);
        close(reports[r][1]);
    }
    for (std::size_t r = 0; r < count; ++r) {
        char buffer[8192];
        for (ssize_t got; (got = read(reports[r][0], buffer, sizeof buffer)) > 0;)
            outcomes[r].text.append(buffer, static_cast<std::size_t>(got));
        close(reports[r][0]);
        CHECK(waitpid(pids[r], &outcomes[r].status, 0) == pids[r]);
    }
    return outcomes;
}

/// Every rank a process; throws what a rank reports.
inline void run_processes(int world, Timeout timeout, const Ranks& body) {
    const auto outcomes = run_processes_raw(
        world, [&](int rank, const Gather& gather) { body(shared_communicator(rank, world, timeout, gather)); });
    std::string errors;
    for (std::size_t r = 0; r < outcomes.size(); ++r)
        if (outcomes[r].text != "ok")
            errors += "\n  rank " + std::to_string(r) + " (status " + std::to_string(outcomes[r].status) +
                      "): " + outcomes[r].text;
    if (!errors.empty()) throw std::logic_error(errors);
}

/// run_threads or run_processes.
using Runner = std::function<void(int world, Timeout timeout, const Ranks& body)>;

struct Test {
    std::string name;
    std::function<void()> body;
};

std::vector<Test> exchange_tests(const std::string& mode, const std::vector<int>& worlds, const Runner& run);
std::vector<Test> transaction_tests(const std::string& mode, const std::vector<int>& worlds, const Runner& run);
std::vector<Test> failure_tests(const std::string& mode, const Runner& run);
std::vector<Test> thread_tests();
std::vector<Test> process_tests();
void benchmark();

}  // namespace gradgen::test
