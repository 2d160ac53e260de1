// The control block of processes: one memory file that all of them map.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host_control.h"

namespace gradgen {

/// A mapping, undone with its last reference.
class Mapping {
  public:
    /// Throws CommError.
    Mapping(int fd, std::size_t bytes, bool writable);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const { return data_; }
    /// Gives back this process's page-table entries; the next read finds the pages again.
    void drop_pages() const;

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

using Gather = std::function<std::vector<std::string>(const std::string&)>;

/// Collective. Maps rank 0's control block, and makes sure that every rank can open files of every other; throws the
/// same CommError on all ranks if not. No file stays open.
std::shared_ptr<Mapping> join_shared_world(int rank, int world, const Gather& gather);

}  // namespace gradgen
