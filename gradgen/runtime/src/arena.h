// Memory that a rank offers in exchanges: found again by address, and kept while others read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "gradgen/tensor.h"

namespace gradgen {

class ArenaTable;

/// Zeroed pages. `fd` >= 0: a mapping of that file, closed with the arena.
class Arena {
  public:
    Arena(std::size_t bytes, int fd);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::byte* data = nullptr;
    std::size_t bytes = 0;   // as asked for
    std::size_t mapped = 0;  // whole pages, at least one
    int fd = -1;
    std::uint32_t slot = 0, generation = 0;
    std::uint64_t inode = 0;
    std::function<void()> on_free;
    std::shared_ptr<ArenaTable> table;  // outlives the arenas in it
};

/// The live arenas of a rank by address. Any thread may drop the last reference to a Storage, hence the lock.
class ArenaTable {
  public:
    void add(const std::shared_ptr<Arena>& arena);
    void remove(const Arena& arena) noexcept;
    /// The arena that holds `data`, or null.
    std::shared_ptr<Arena> find(const void* data);

  private:
    std::mutex mutex_;
    std::map<std::uintptr_t, std::weak_ptr<Arena>> arenas_;
};

std::size_t whole_pages(std::size_t bytes);
std::shared_ptr<Storage> as_storage(std::shared_ptr<Arena> arena);

}  // namespace gradgen
