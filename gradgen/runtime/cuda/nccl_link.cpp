#include "nccl_link.h"

#include <algorithm>
#include <cstring>

#include "check.h"
#include "gradgen/error.h"

namespace gradgen::cuda {

NcclComm* NcclLink::create(Communicator& host) {
    NcclId id{};
    std::string mine;
    if (rank_ == 0) {
        const int result = nccl_.GetUniqueId(&id);
        mine = result == 0 ? std::string(id.bytes, sizeof id.bytes) : std::string();
    }
    const std::vector<std::string> all = host.gather_objects(mine);
    if (all.at(0).size() != sizeof id.bytes) throw CommError("NCCL made no unique id on rank 0");
    std::memcpy(id.bytes, all[0].data(), sizeof id.bytes);
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    check(cudaSetDevice(device_), "cudaSetDevice");
    NcclComm* comm = nullptr;
    const int result = nccl_.CommInitRank(&comm, world_, id, rank_);
    cudaSetDevice(before);
    const std::vector<std::string> outcome = host.gather_objects(result == 0 ? "" : explain(result));
    for (std::size_t r = 0; r < outcome.size(); ++r) {
        if (outcome[r].empty()) continue;
        if (result == 0) nccl_.CommAbort(comm);
        throw CommError("NCCL " + version() + " could not connect rank " + std::to_string(r) + " of " +
                        std::to_string(world_) + ": " + outcome[r] +
                        "; give every rank its own GPU (torch.cuda.set_device(local_rank)), and see NCCL_DEBUG=INFO");
    }
    return comm;
}

void NcclLink::use(NcclComm* comm) {
    comm_ = comm;
    for (Registered& entry : registered_) enroll(entry);
}

int NcclLink::try_out(NcclComm* comm, cudaStream_t stream, void* scratch) const {
    const auto world = static_cast<std::size_t>(world_), self = static_cast<std::size_t>(rank_);
    auto* const out = static_cast<char*>(scratch);
    char* const in = out + world * kPiece;
    int result = nccl_.AllGather(out + self * kPiece, out, kPiece, kNcclUint8, comm, stream);
    if (!nccl_failed(result))
        result = nccl_.ReduceScatter(out, out + self * kPiece, kPiece / sizeof(float), nccl_type(DType::f32), kNcclSum,
                                     comm, stream);
    if (nccl_failed(result)) return result;
    return grouped(nccl_, [&](auto&& add) {
        for (std::size_t r = 0; r < world; ++r) {
            if (r == self) continue;
            const int peer = static_cast<int>(r);
            add(nccl_.Send(out + r * kPiece, kPiece, kNcclUint8, peer, comm, stream));
            add(nccl_.Recv(in + r * kPiece, kPiece, kNcclUint8, peer, comm, stream));
        }
    });
}

void NcclLink::destroy() {
    if (comm_ == nullptr) return;
    for (Registered& entry : registered_)
        if (entry.handle) nccl_.CommDeregister(comm_, entry.handle);
    registered_.clear();
    nccl_.CommDestroy(comm_);
    comm_ = nullptr;
}

void NcclLink::abort() {
    if (comm_ != nullptr) nccl_.CommAbort(comm_);
    comm_ = nullptr;
    for (Registered& entry : registered_) entry.handle = nullptr;
}

void NcclLink::enroll(void* data, std::size_t bytes) {
    if (nccl_.CommRegister == nullptr || nccl_.CommDeregister == nullptr || bytes == 0) return;
    registered_.push_back({data, bytes, nullptr});
    if (comm_ != nullptr) enroll(registered_.back());
}

void NcclLink::enroll(Registered& entry) const {
    // A library that cannot register still moves the bytes, through buffers of its own.
    if (nccl_.CommRegister(comm_, entry.data, entry.bytes, &entry.handle) != 0) entry.handle = nullptr;
}

void NcclLink::forget(const void* data) {
    std::erase_if(registered_, [&](const Registered& entry) {
        if (entry.data != data) return false;
        if (entry.handle && comm_ != nullptr) nccl_.CommDeregister(comm_, entry.handle);
        return true;
    });
}

std::string NcclLink::explain(int result) const {
    const char* text = nccl_.GetLastError(comm_);
    return std::string(nccl_.GetErrorString(result)) + ": " + (text && *text ? text : "no more is known");
}

std::string NcclLink::version() const {
    return std::to_string(nccl_.version / 10000) + "." + std::to_string(nccl_.version / 100 % 100) + "." +
           std::to_string(nccl_.version % 100);
}

}  // namespace gradgen::cuda
