#include "arena.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "gradgen/error.h"

namespace gradgen {

std::size_t whole_pages(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (bytes > SIZE_MAX - page) return bytes;  // mmap says no
    return std::max((bytes + page - 1) / page * page, page);
}

Arena::Arena(std::size_t size, int file) : bytes(size), mapped(whole_pages(size)) {
    const int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, file, 0);
    if (memory == MAP_FAILED) {
        const int code = errno;
        struct sysinfo info{};
        sysinfo(&info);
        throw Error("gradgen: cannot allocate " + std::to_string(size) + " bytes of host memory (" +
                    std::to_string(static_cast<std::uint64_t>(info.freeram) * info.mem_unit) +
                    " bytes are free): " + std::strerror(code));
    }
    data = static_cast<std::byte*>(memory);
    fd = file;  // owned from here on: a constructor that throws leaves the file to its caller
}

Arena::~Arena() {
    // Off the table first: once unmapped, the address may belong to a new arena.
    if (table) table->remove(*this);
    munmap(data, mapped);
    if (fd >= 0) ::close(fd);
    if (on_free) on_free();
}

void ArenaTable::add(const std::shared_ptr<Arena>& arena) {
    const std::lock_guard lock(mutex_);
    arenas_[reinterpret_cast<std::uintptr_t>(arena->data)] = arena;
}

void ArenaTable::remove(const Arena& arena) noexcept {
    const std::lock_guard lock(mutex_);
    arenas_.erase(reinterpret_cast<std::uintptr_t>(arena.data));
}

std::shared_ptr<Arena> ArenaTable::find(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    std::shared_ptr<Arena> found;
    {
        const std::lock_guard lock(mutex_);
        auto after = arenas_.upper_bound(address);
        if (after == arenas_.begin()) return nullptr;
        found = std::prev(after)->second.lock();
    }
    // Compared outside the lock: dropping `found` may free the arena, which locks.
    return found && address < reinterpret_cast<std::uintptr_t>(found->data) + found->mapped ? found : nullptr;
}

std::shared_ptr<Storage> as_storage(std::shared_ptr<Arena> arena) {
    auto storage = std::make_shared<Storage>();
    storage->data = arena->data;
    storage->bytes = arena->bytes;
    storage->owner = std::move(arena);
    return storage;
}

}  // namespace gradgen
