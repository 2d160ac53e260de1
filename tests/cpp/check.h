// The few lines that the C++ tests need: a check that says what differs and lets the others run, and a digest of the
// results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace check {

inline int failures = 0;

/// Prints `what` where `ok` is false; at most 40 lines.
inline bool that(bool ok, const std::string& what) {
    if (!ok && ++failures <= 40) std::printf("FAIL %s\n", what.c_str());
    return ok;
}

template <class Exception, class Function>
void throws(Function&& function, const std::string& part, const std::string& what) {
    try {
        function();
    } catch (const Exception& error) {
        that(std::strstr(error.what(), part.c_str()) != nullptr,
             what + ": message lacks '" + part + "': " + error.what());
        return;
    } catch (const std::exception& error) {
        that(false, what + ": threw another exception: " + error.what());
        return;
    }
    that(false, what + ": threw nothing");
}

/// FNV-1a, to compare builds for different instruction sets.
struct Digest {
    std::uint64_t value = 0xcbf29ce484222325u;
    void add(std::uint64_t word) { value = (value ^ word) * 0x100000001b3u; }
};

inline std::string number(double value) {
    char text[40];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

inline int result() {
    if (failures) std::printf("%d checks failed\n", failures);
    return failures != 0;
}

}  // namespace check
