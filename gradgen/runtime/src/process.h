// Processes of one host: who they are, whether they live, and how one opens another's memory file.
#pragma once

#include <cstdint>
#include <string>

namespace gradgen {

struct ProcessId {
    std::int64_t pid = 0;
    std::uint64_t started = 0;  // clock ticks after boot
};

ProcessId this_process();

/// False once the process has ended, a zombie included, also when another process got its number.
bool is_alive(const ProcessId& process);

/// What two processes must have in common to see each other in /proc: boot, host name, pid namespace.
std::string host_identity();

/// An anonymous file named "gradgen" of `bytes` zero bytes; throws Error. Closed on exec.
int create_memory_file(std::size_t bytes);

/// Inode of an open file, 0 if it cannot be told.
std::uint64_t inode_of(int fd);

/// Opens file `fd` of another process; -1 and errno on failure.
int open_file_of(std::int64_t pid, int fd);

/// 128 random bits in hex.
std::string random_token();

}  // namespace gradgen
