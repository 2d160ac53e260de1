#include "group.h"

#include <cstring>

#include "gradgen/error.h"

namespace gradgen::bind {
namespace {

py::object view(const void* data, std::size_t bytes, bool writable) {
    return py::reinterpret_steal<py::object>(PyMemoryView_FromMemory(static_cast<char*>(const_cast<void*>(data)),
                                                                     static_cast<py::ssize_t>(bytes),
                                                                     writable ? PyBUF_WRITE : PyBUF_READ));
}

}  // namespace

GroupCommunicator::GroupCommunicator(int rank, int world, py::object transport)
    : Communicator(rank, world), transport_(std::move(transport)) {}

GroupCommunicator::~GroupCommunicator() {
    py::gil_scoped_acquire gil;
    bool running = false;
    for (const Pending& p : pending_) running = running || (!p.done && !py::cast<bool>(p.work.attr("is_completed")()));
    if (running) {  // the group still writes into this memory, and nothing can stop it: it is never freed
        static auto* const forever = new std::vector<std::shared_ptr<Storage>>;
        forever->insert(forever->end(), adopted_.begin(), adopted_.end());
        forever->push_back(zeros_);
        // Nor are the works and the group: its threads are in the middle of them, and its destructor would end the
        // process.
        for (Pending& p : pending_) p.work.release();
        transport_.release();
    }
    pending_.clear();
    transport_ = py::object();
}

void GroupCommunicator::adopt(std::vector<std::shared_ptr<Storage>> memory) {
    adopted_.insert(adopted_.end(), memory.begin(), memory.end());
}

void GroupCommunicator::require_usable() const {
    if (!failure_.empty()) throw CommError(failure_);
}

// Pages that nobody writes share the kernel's zero page: a source of zeros that costs no memory.
const void* GroupCommunicator::zeros(std::size_t bytes) {
    if (!zeros_ || zeros_->bytes < bytes) zeros_ = Communicator::allocate(bytes);
    return zeros_->data;
}

Ticket GroupCommunicator::post(const Offer& offer) {
    require_usable();
    const std::size_t bytes = offer.slice_bytes * static_cast<std::size_t>(world_);
    const void* data = offer.data ? offer.data : zeros(bytes);
    py::gil_scoped_acquire gil;
    Pending entry{next_++, {}, offer.receive, offer.slice_bytes, offer.what, false};
    entry.work = transport_.attr("all_to_all")(view(offer.receive, bytes, true), view(data, bytes, false), true);
    pending_.push_back(std::move(entry));
    return pending_.back().ticket;
}

GroupCommunicator::Pending& GroupCommunicator::pending(Ticket ticket) {
    for (Pending& p : pending_)
        if (p.ticket == ticket) return p;
    throw CommError("ticket " + std::to_string(ticket) + " is not in flight");
}

bool GroupCommunicator::ready(Ticket ticket) {
    Pending& p = pending(ticket);
    if (p.done) return true;
    py::gil_scoped_acquire gil;
    return py::cast<bool>(p.work.attr("is_completed")());
}

std::vector<ReduceSource> GroupCommunicator::sources(Ticket ticket) {
    Pending& p = pending(ticket);
    if (!p.done) {
        py::gil_scoped_acquire gil;
        try {
            p.work.attr("wait")();
        } catch (py::error_already_set& error) {
            failure_ = p.what + ": " + error.what();
            throw;
        }
        p.work = py::object();
        p.done = true;
    }
    std::vector<ReduceSource> out;
    for (int r = 0; r < world_; ++r)
        out.push_back({static_cast<const char*>(p.receive) + static_cast<std::size_t>(r) * p.slice, true});
    return out;
}

void GroupCommunicator::release(Ticket ticket, const void*) {
    for (auto it = pending_.begin(); it != pending_.end(); ++it)
        if (it->ticket == ticket) {
            pending_.erase(it);
            return;
        }
}

// The group has copied what it sends when the work is done; release() comes after that.
bool GroupCommunicator::drained(Ticket) { return true; }
void GroupCommunicator::wait_drained(Ticket) {}

void GroupCommunicator::barrier() {
    require_usable();
    py::gil_scoped_acquire gil;
    transport_.attr("barrier")();
}

std::vector<std::string> GroupCommunicator::gather_objects(const std::string& mine) {
    require_usable();
    py::gil_scoped_acquire gil;
    std::vector<std::string> out;
    for (const py::handle item : transport_.attr("gather_objects")(py::bytes(mine)))
        out.push_back(py::cast<std::string>(item));
    return out;
}

void GroupCommunicator::all_gather(void* out, const void* in, std::size_t bytes) {
    require_usable();
    if (bytes == 0) return;
    py::gil_scoped_acquire gil;
    transport_.attr("all_gather")(view(out, bytes * static_cast<std::size_t>(world_), true), view(in, bytes, false));
}

void GroupCommunicator::all_to_all(void* out, const void* in, std::size_t bytes) {
    require_usable();
    if (bytes == 0) return;
    const std::size_t all = bytes * static_cast<std::size_t>(world_);
    py::gil_scoped_acquire gil;
    transport_.attr("all_to_all")(view(out, all, true), view(in, all, false), true).attr("wait")();
}

// A process group cannot be woken from outside: the other ranks learn of it by the group's own time limit.
void GroupCommunicator::abort(const std::string& why) { failure_ = why; }

void GroupCommunicator::reset() {
    failure_.clear();
    {
        py::gil_scoped_acquire gil;
        pending_.clear();
    }
    barrier();
}

}  // namespace gradgen::bind
