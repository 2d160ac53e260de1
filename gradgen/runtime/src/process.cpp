#include "process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

#include "gradgen/error.h"

namespace gradgen {

namespace {

std::string read_small_file(const char* path) {
    std::array<char, 1024> text{};
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return "";
    const ssize_t count = read(fd, text.data(), text.size());
    ::close(fd);
    return count > 0 ? std::string(text.data(), static_cast<std::size_t>(count)) : "";
}

/// State letter and start time from /proc/<pid>/stat; '\0' if there is no such process.
std::pair<char, std::uint64_t> state_of(std::int64_t pid) {
    const std::string text = read_small_file(("/proc/" + std::to_string(pid) + "/stat").c_str());
    // The command name is in parentheses and may hold spaces and parentheses itself.
    const std::size_t end = text.rfind(')');
    if (end == std::string::npos || end + 2 >= text.size()) return {'\0', 0};
    std::size_t at = end + 2;  // field 3
    for (int field = 3; field < 22 && at != std::string::npos; ++field) {
        at = text.find(' ', at);
        if (at != std::string::npos) ++at;
    }
    return {text[end + 2], at == std::string::npos ? 0 : std::strtoull(text.c_str() + at, nullptr, 10)};
}

}  // namespace

ProcessId this_process() { return {getpid(), state_of(getpid()).second}; }

bool is_alive(const ProcessId& process) {
    const auto [state, started] = state_of(process.pid);
    return state != '\0' && state != 'Z' && state != 'X' && started == process.started;
}

std::string host_identity() {
    std::array<char, 256> host{}, space{};
    gethostname(host.data(), host.size() - 1);
    if (readlink("/proc/self/ns/pid", space.data(), space.size() - 1) < 0) space[0] = '\0';
    std::string boot = read_small_file("/proc/sys/kernel/random/boot_id");
    while (!boot.empty() && boot.back() == '\n') boot.pop_back();
    return std::string("host ") + host.data() + ", boot " + boot + ", " + space.data();
}

int create_memory_file(std::size_t bytes) {
    const int fd = memfd_create("gradgen", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0) return fd;
    const int code = errno;
    if (fd >= 0) ::close(fd);
    throw Error("gradgen: cannot create a memory file of " + std::to_string(bytes) + " bytes: " + std::strerror(code));
}

std::uint64_t inode_of(int fd) {
    struct stat info{};
    return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

int open_file_of(std::int64_t pid, int fd) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

std::string random_token() {
    std::array<unsigned char, 16> bytes{};
    if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
        std::random_device device;
        for (auto& byte : bytes) byte = static_cast<unsigned char>(device());
    }
    std::string text;
    char digits[3];
    for (const unsigned char byte : bytes) {
        std::snprintf(digits, sizeof digits, "%02x", byte);
        text += digits;
    }
    return text;
}

}  // namespace gradgen
