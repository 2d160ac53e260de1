// Bootstrap of a shared world: two all-gathers over whatever connects the processes. In the first, ranks say who they
// are and which file of theirs to open; in the second, what came of it. Since all see all answers, all decide alike.
#include "shared_world.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "gradgen/error.h"
#include "process.h"

namespace gradgen {

Mapping::Mapping(int fd, std::size_t bytes, bool writable) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        throw CommError("gradgen: cannot map " + std::to_string(bytes) +
                        " bytes of shared memory: " + std::strerror(errno));
    data_ = static_cast<std::byte*>(memory);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

void Mapping::drop_pages() const { madvise(data_, bytes_, MADV_DONTNEED); }

namespace {

class File {
  public:
    explicit File(int fd = -1) : fd_(fd) {}
    File(File&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    File& operator=(File&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~File() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }

  private:
    int fd_;
};

constexpr std::size_t kTokenBytes = 32;  // hex digits, at the start of every rank's file

/// What a rank says of itself; `problem` instead if it could not even make a file.
struct Card {
    ProcessId process;
    int fd = -1;
    std::uint64_t layout = sizeof(RankBlock);  // of another build of gradgen: other numbers
    int world = 0;
    std::string token, host, problem;

    std::string write() const {
        std::ostringstream text;
        text << process.pid << ' ' << process.started << ' ' << fd << ' ' << layout << ' ' << world << ' ' << token
             << '\n'
             << host << '\n'
             << problem;
        return text.str();
    }
    static Card read(const std::string& text) {
        Card card;
        std::istringstream in(text);
        in >> card.process.pid >> card.process.started >> card.fd >> card.layout >> card.world >> card.token;
        in.ignore();
        std::getline(in, card.host);
        std::getline(in, card.problem);
        if (!in && !in.eof()) card.problem = "sent an unreadable greeting";
        return card;
    }
};

/// Opens `peer`'s file and checks that it is the one it spoke of. Empty: it worked.
std::string open_peer(const Card& own, int rank, const Card& peer, File& file) {
    const std::string name = "rank " + std::to_string(rank);
    if (!peer.problem.empty()) return name + ": " + peer.problem;
    if (peer.host != own.host) return name + " runs elsewhere (" + peer.host + "; this rank: " + own.host + ")";
    if (peer.layout != own.layout || peer.world != own.world)
        return name + " has another gradgen or another world size";
    file = File(open_file_of(peer.process.pid, peer.fd));
    if (file.get() < 0)
        return "cannot open memory of " + name + " (pid " + std::to_string(peer.process.pid) +
               "): " + std::strerror(errno);
    std::string token(kTokenBytes, '\0');
    if (pread(file.get(), token.data(), token.size(), 0) != static_cast<ssize_t>(token.size()) || token != peer.token)
        return "memory of " + name + " (pid " + std::to_string(peer.process.pid) + ") is not what it announced";
    return "";
}

}  // namespace

std::shared_ptr<Mapping> join_shared_world(int rank, int world, const Gather& gather) {
    // Rank 0's file is the control block; the others' only show that they can be opened.
    const std::size_t control_bytes = Control::bytes(world, true);
    Card own;
    File file;
    std::shared_ptr<Mapping> mapping;
    own.world = world;
    try {
        own.process = this_process();
        own.host = host_identity();
        own.token = random_token();
        file = File(create_memory_file(rank == 0 ? control_bytes : kTokenBytes));
        own.fd = file.get();
        if (rank == 0) {
            mapping = std::make_shared<Mapping>(file.get(), control_bytes, true);
            std::memcpy(Control::create(mapping->data(), world)->token.data(), own.token.data(), kTokenBytes);
        } else if (pwrite(file.get(), own.token.data(), kTokenBytes, 0) != static_cast<ssize_t>(kTokenBytes)) {
            own.problem = "cannot write to a memory file";
        }
    } catch (const std::exception& error) {  // told to all instead of thrown here, where the others would wait
        own.problem = error.what();
    }
    const std::vector<std::string> cards = gather(own.write());
    std::string problem;
    if (cards.size() != static_cast<std::size_t>(world))
        problem = "gather returned " + std::to_string(cards.size()) + " strings";
    for (int r = 0; r < world && problem.empty(); ++r) {
        File opened;
        problem = open_peer(own, r, Card::read(cards[static_cast<std::size_t>(r)]), opened);
        if (!problem.empty() || r != 0 || rank == 0) continue;
        try {
            mapping = std::make_shared<Mapping>(opened.get(), control_bytes, true);
        } catch (const std::exception& error) {
            problem = error.what();
        }
    }
    if (problem.empty()) {
        RankBlock& mine = reinterpret_cast<Control*>(mapping->data())->rank(rank);
        mine.pid = own.process.pid;
        mine.started = own.process.started;
    }
    // Also a barrier: afterwards everybody has mapped what it needs, so that files may close.
    const std::vector<std::string> answers = gather(problem);
    std::string why;
    for (std::size_t r = 0; r < answers.size(); ++r)
        if (!answers[r].empty()) why += (why.empty() ? "" : "; ") + ("rank " + std::to_string(r) + ": " + answers[r]);
    if (!why.empty()) throw CommError("gradgen: ranks cannot share memory: " + why);
    return mapping;
}

}  // namespace gradgen
