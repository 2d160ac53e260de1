// Ranks that are processes of one host. An arena is a memory file; a peer opens it through /proc/<pid>/fd when it first
// reads from it, keeps the mapping, and drops it once the owner has freed the arena.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>

#include "arena.h"
#include "host_world.h"
#include "process.h"
#include "shared_world.h"

namespace gradgen {

namespace {

/// Numbers of this rank's arenas. Outlives the communicator: arenas may.
struct ArenaSlots {
    std::shared_ptr<Mapping> world;
    RankBlock* block;
    pid_t owner;
    std::mutex mutex;
    std::vector<std::uint32_t> free;
    std::uint32_t next = 0;

    std::uint32_t take() {
        const std::lock_guard lock(mutex);
        if (free.empty() && next == kArenaSlots)
            throw Error("gradgen: more than " + std::to_string(kArenaSlots) +
                        " shared arenas are alive in one process");
        if (free.empty()) return next++;
        const std::uint32_t slot = free.back();
        free.pop_back();
        return slot;
    }
    void give_back(std::uint32_t slot) {
        if (getpid() != owner) return;  // a forked child frees its copy of the mapping, not the parent's arena
        const std::lock_guard lock(mutex);
        block->generation[slot].fetch_add(1, std::memory_order_release);
        block->retired.fetch_add(1, std::memory_order_release);
        free.push_back(slot);
    }
};

class SharedCommunicator final : public HostWorld {
  public:
    SharedCommunicator(int rank, int world, Timeout timeout, const std::shared_ptr<Mapping>& control)
        : HostWorld(rank, world, timeout, control, reinterpret_cast<Control*>(control->data())),
          retired_seen_(static_cast<std::size_t>(world)) {
        slots_->world = control;
        slots_->block = &mine_;
        slots_->owner = getpid();
    }

    std::string_view transport() const override { return "shared"; }

    std::shared_ptr<Storage> allocate(std::size_t bytes) override {
        if (!in_owner_process()) check_usable("allocate");
        sweep();
        const int fd = create_memory_file(whole_pages(bytes));
        std::shared_ptr<Arena> arena;
        try {
            arena = std::make_shared<Arena>(bytes, fd);
        } catch (...) {
            ::close(fd);
            throw;
        }
        arena->slot = slots_->take();
        arena->on_free = [slots = slots_, slot = arena->slot] { slots->give_back(slot); };
        arena->generation = mine_.generation[arena->slot].load(std::memory_order_relaxed);
        arena->inode = inode_of(fd);
        arena->table = arenas_;
        arenas_->add(arena);
        return as_storage(std::move(arena));
    }

    void close() override {
        HostWorld::close();
        for (Local& local : local_) local = Local{};
        mapped_.clear();
    }

    void trim() override {
        for (const auto& [key, peer] : mapped_) peer.mapping->drop_pages();
    }

  protected:
    std::shared_ptr<void> locate(const void* data, Published& out) override {
        std::shared_ptr<Arena> arena = arenas_->find(data);
        if (!arena)
            throw StateError(
                "communicator: processes can only exchange memory that came from allocate() of this communicator");
        const auto offset = static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - arena->data);
        if (out.tag.bytes > arena->mapped - offset)
            throw StateError("communicator: " + std::to_string(out.tag.bytes) +
                             " bytes are offered, but the memory ends after " + std::to_string(arena->mapped - offset));
        out.place = Place::arena;
        out.arena = {arena->slot, arena->generation, arena->fd, arena->inode, arena->mapped, offset};
        out.pointer = data;  // for this rank itself
        return arena;
    }

    const std::byte* reach(int rank, const Published& published, std::shared_ptr<void>& hold,
                           std::string& problem) override {
        if (rank == rank_) return static_cast<const std::byte*>(published.pointer);
        sweep();
        const ArenaRef& ref = published.arena;
        auto found = mapped_.find({rank, ref.slot});
        if (found == mapped_.end() || found->second.generation != ref.generation) {
            std::shared_ptr<Mapping> mapping = map_arena(rank, ref, problem);
            if (!mapping) return nullptr;
            found = mapped_.insert_or_assign({rank, ref.slot}, Peer{ref.generation, std::move(mapping)}).first;
        }
        hold = found->second.mapping;
        return found->second.mapping->data() + ref.offset;
    }

    bool alive(int rank) override {
        const RankBlock& peer = control_->rank(rank);
        return is_alive({peer.pid, peer.started});
    }
    std::string name(int rank) const override {
        return "rank " + std::to_string(rank) + " (pid " + std::to_string(control_->rank(rank).pid) + ")";
    }
    bool bounces() const override { return true; }

    void sweep() override {
        for (int r = 0; r < world_; ++r) {
            // Counted first: an arena that is freed during the walk is found by the next sweep.
            const std::uint64_t retired = control_->rank(r).retired.load(std::memory_order_acquire);
            if (retired == retired_seen_[static_cast<std::size_t>(r)]) continue;
            retired_seen_[static_cast<std::size_t>(r)] = retired;
            std::erase_if(mapped_, [&](const auto& item) {
                return item.first.first == r && control_->rank(r).generation[item.first.second].load(
                                                    std::memory_order_acquire) != item.second.generation;
            });
        }
    }

  private:
    struct Peer {
        std::uint32_t generation;
        std::shared_ptr<Mapping> mapping;
    };

    std::shared_ptr<Mapping> map_arena(int rank, const ArenaRef& ref, std::string& problem) {
        const int fd = open_file_of(control_->rank(rank).pid, ref.fd);
        if (fd < 0) {
            problem = std::string("opening its memory: ") + std::strerror(errno);
            return nullptr;
        }
        std::shared_ptr<Mapping> mapping;
        // A file number is used again after close: the inode is not.
        if (inode_of(fd) != ref.inode) {
            problem = "it has freed the memory";
        } else {
            try {
                mapping = std::make_shared<Mapping>(fd, ref.mapped, false);
            } catch (const std::exception& error) {
                problem = error.what();
            }
        }
        ::close(fd);
        return mapping;
    }

    std::shared_ptr<ArenaTable> arenas_ = std::make_shared<ArenaTable>();
    std::shared_ptr<ArenaSlots> slots_ = std::make_shared<ArenaSlots>();
    std::map<std::pair<int, std::uint32_t>, Peer> mapped_;  // by rank and arena slot
    std::vector<std::uint64_t> retired_seen_;
};

}  // namespace

std::shared_ptr<Communicator> shared_communicator(int rank, int world, Timeout timeout, const Gather& gather) {
    if (world < 1 || rank < 0 || rank >= world)
        throw std::invalid_argument("gradgen: rank " + std::to_string(rank) + " of " + std::to_string(world) +
                                    " ranks");
    if (timeout.count() <= 0) throw std::invalid_argument("gradgen: a communicator's timeout must be positive");
    return std::make_shared<SharedCommunicator>(rank, world, timeout, join_shared_world(rank, world, gather));
}

}  // namespace gradgen
