// Ranks that are threads of one process: pointers mean the same to all.
#include <cstdlib>
#include <stdexcept>

#include "arena.h"
#include "host_world.h"

namespace gradgen {

namespace {

/// What the threads have in common; lives until the last communicator is gone.
struct ThreadsWorld {
    explicit ThreadsWorld(int world)
        : memory(std::aligned_alloc(alignof(Control), whole_pages(Control::bytes(world, false)))) {
        if (memory == nullptr) throw std::bad_alloc();
        control = Control::create(memory, world);
    }
    ~ThreadsWorld() { std::free(memory); }
    ThreadsWorld(const ThreadsWorld&) = delete;
    ThreadsWorld& operator=(const ThreadsWorld&) = delete;

    void* memory;
    Control* control;
    std::mutex mutex;
    std::vector<std::shared_ptr<void>> left_behind;  // offered by ranks that closed before others had read it
};

class ThreadsCommunicator final : public HostWorld {
  public:
    ThreadsCommunicator(int rank, int world, Timeout timeout, const std::shared_ptr<ThreadsWorld>& shared)
        : HostWorld(rank, world, timeout, shared, shared->control), world_state_(shared) {}
    ~ThreadsCommunicator() override {
        try {
            leave_memory();
        } catch (...) {
        }
    }

    std::string_view transport() const override { return "threads"; }

    std::shared_ptr<Storage> allocate(std::size_t bytes) override {
        auto arena = std::make_shared<Arena>(bytes, -1);
        arena->table = arenas_;
        arenas_->add(arena);
        return as_storage(std::move(arena));
    }

    void close() override {
        leave_memory();
        HostWorld::close();
    }

  protected:
    std::shared_ptr<void> locate(const void* data, Published& out) override {
        out.place = Place::pointer;
        out.pointer = data;
        return arenas_->find(data);  // null for foreign memory, which its owner must keep until drained()
    }
    const std::byte* reach(int, const Published& published, std::shared_ptr<void>&, std::string&) override {
        return static_cast<const std::byte*>(published.pointer);
    }

  private:
    // A thread may end while others read its gradients.
    void leave_memory() {
        if (closed_) return;
        const std::lock_guard lock(world_state_->mutex);
        for (Local& local : local_)
            if (local.keep) world_state_->left_behind.push_back(std::move(local.keep));
    }

    std::shared_ptr<ThreadsWorld> world_state_;
    std::shared_ptr<ArenaTable> arenas_ = std::make_shared<ArenaTable>();
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> threads_communicators(int world, Timeout timeout) {
    if (world < 1)
        throw std::invalid_argument("gradgen: a communicator needs at least one rank, got " + std::to_string(world));
    if (timeout.count() <= 0) throw std::invalid_argument("gradgen: a communicator's timeout must be positive");
    auto shared = std::make_shared<ThreadsWorld>(world);
    std::vector<std::shared_ptr<Communicator>> ranks;
    for (int r = 0; r < world; ++r) ranks.push_back(std::make_shared<ThreadsCommunicator>(r, world, timeout, shared));
    return ranks;
}

}  // namespace gradgen
