// test_communicators [threads|processes|benchmark] [part of a test's name]
#include "comm_harness.h"

int main(int count, char** arguments) {
    using namespace gradgen::test;
    const std::string mode = count > 1 ? arguments[1] : "threads", part = count > 2 ? arguments[2] : "";
    if (mode == "benchmark") return benchmark(), 0;
    std::vector<Test> tests;
    const auto add = [&](std::vector<Test> more) { tests.insert(tests.end(), more.begin(), more.end()); };
    if (mode == "threads") {
        add(exchange_tests("threads", {1, 2, 3, 4, 8}, run_threads));
        add(transaction_tests("threads", {1, 2, 3, 8}, run_threads));
        add(failure_tests("threads", run_threads));
        add(thread_tests());
    } else if (mode == "processes") {
        add(exchange_tests("processes", {1, 2, 3}, run_processes));
        add(transaction_tests("processes", {1, 2, 3}, run_processes));
        add(failure_tests("processes", run_processes));
        add(process_tests());
    } else {
        const Runner alone = [](int, gradgen::Timeout, const Ranks& body) { body(gradgen::single_communicator()); };
        add(exchange_tests("single", {1}, alone));
        add(transaction_tests("single", {1}, alone));
    }
    int failures = 0, ran = 0;
    for (const Test& test : tests) {
        if (test.name.find(part) == std::string::npos) continue;
        ++ran;
        const auto start = Clock::now();
        std::string result = "ok";
        try {
            test.body();
        } catch (const std::exception& error) {
            result = std::string("FAILED: ") + error.what();
            ++failures;
        }
        std::cout << test.name << ": " << result << " (" << seconds_since(start) << " s)" << std::endl;
    }
    std::cout << ran - failures << " of " << ran << " passed" << std::endl;
    return failures == 0 && ran > 0 ? 0 : 1;
}
