// The control block of a host world: everything that ranks of one host tell each other. It lies on the heap for threads
// and in a shared mapping for processes, so it holds no pointers that only one process understands (except
// Published::pointer, which threads alone use), no locks that a killed process could keep, and only lock-free atomics.
//
// Who writes what: a rank writes its own RankBlock and nobody else's. `events`, `sleepers` and `failed` are for all.
// Memory order: plain fields of a ring slot are written before `posted` is stored with release and read after it was
// loaded with acquire. A slot is written again only after every rank's `consumed` for it was loaded with acquire, each
// stored with release after that rank's last read of slot and payload. So payloads need no ordering of their own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include "gradgen/communicator.h"

namespace gradgen {

constexpr std::size_t kRing = 64;                // exchanges in flight
constexpr std::size_t kWhatBytes = 160;          // of an offer's text
constexpr std::size_t kWhyBytes = 2048;          // of a failure's text
constexpr std::size_t kArenaSlots = 4096;        // live arenas of a rank
constexpr std::size_t kBounceHalf = 512 * 1024;  // a rank has two halves and fills one while the other is read

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "a lock inside a shared mapping could be held by a dead process");

/// A call that every rank makes together. Exchanges and plain collectives share one sequence, so that a rank in a
/// barrier and a rank in an exchange find out about each other at once.
enum class Kind : std::uint32_t { exchange, barrier, gather_objects, all_gather, all_to_all };

/// Where an offer's bytes are.
enum class Place : std::uint32_t { none, pointer, arena, bounce };

/// An arena as others see it: file `fd` of the owner, with the inode that it must have.
struct ArenaRef {
    std::uint32_t slot = 0, generation = 0;
    std::int32_t fd = -1;
    std::uint64_t inode = 0, mapped = 0, offset = 0;
};

struct Published {
    Kind kind = Kind::exchange;
    Place place = Place::none;
    OpTag tag;
    std::uint64_t number = 0;  // how many exchanges this rank had posted, this one included
    std::uint64_t length = 0;  // gather_objects: of this rank's string
    const void* pointer = nullptr;
    const void* event = nullptr;  // of a GPU, threads only
    std::uint64_t bounce = 0;     // offset in the rank's bounce area
    ArenaRef arena;
    char what[kWhatBytes] = {};
};

enum class Failure : std::uint32_t { comm, peer_lost, timeout, mismatch };

struct alignas(64) RankBlock {
    std::atomic<std::uint64_t> posted{0};     // length of this rank's sequence
    std::atomic<std::uint64_t> exchanges{0};  // of those, exchanges (for messages)
    alignas(
        64) std::array<std::atomic<std::uint64_t>, kRing> consumed{};  // sequence number + 1 of the last read, a slot
    std::array<std::atomic<const void*>, kRing> read_event{};          // written before `consumed`; threads only
    alignas(64) std::atomic<std::uint64_t> reset_phase{0};  // odd: has entered a reset; even: has cleared its state
    std::atomic<std::uint32_t> left{0};
    std::atomic<std::uint32_t> failure{0};  // Failure, with `why`; valid once Control::failed names this rank
    std::atomic<std::uint64_t> retired{0};  // arenas freed so far: tells others that mappings went stale
    std::int64_t pid = 0;
    std::uint64_t started = 0;  // start time of the process, since numbers of dead processes are used again
    std::array<std::atomic<std::uint32_t>, kArenaSlots> generation{};  // of an arena slot; rises when an arena is freed
    std::array<Published, kRing> ring{};
    char why[kWhyBytes] = {};
};

struct alignas(64) Control {
    std::array<char, 32> token{};
    std::uint32_t world = 0;
    alignas(64) std::atomic<std::uint32_t> events{0};  // futex word: rises with everything that a waiter could wait for
    alignas(64) std::atomic<std::uint32_t> sleepers{
        0};  // ranks in, or about to enter, a sleep. A killed one stays counted
    alignas(64) std::atomic<std::uint32_t> failed{0};  // rank + 1 of the rank whose `failure` and `why` hold

    RankBlock& rank(int index) { return reinterpret_cast<RankBlock*>(this + 1)[index]; }
    std::byte* bounce(int index) {
        return reinterpret_cast<std::byte*>(&rank(static_cast<int>(world))) +
               static_cast<std::size_t>(index) * 2 * kBounceHalf;
    }

    static std::size_t bytes(int world, bool with_bounce) {
        const auto count = static_cast<std::size_t>(world);
        return sizeof(Control) + count * (sizeof(RankBlock) + (with_bounce ? 2 * kBounceHalf : 0));
    }
    /// Makes a control block in zeroed memory of bytes(world, ...).
    static Control* create(void* memory, int world) {
        auto* control = new (memory) Control;
        control->world = static_cast<std::uint32_t>(world);
        for (int r = 0; r < world; ++r) new (&control->rank(r)) RankBlock;
        return control;
    }
};

}  // namespace gradgen
