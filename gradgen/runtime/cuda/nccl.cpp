#include "nccl.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "gradgen/error.h"

namespace gradgen::cuda {

int nccl_type(DType type) {
    switch (type) {
        case DType::f16:
            return 6;
        case DType::f32:
            return 7;
        case DType::f64:
            return 8;
        case DType::bf16:
            return 9;
    }
    return 7;
}

namespace {

template <class Function>
void find(void* library, const char* name, Function*& out) {
    out = reinterpret_cast<Function*>(dlsym(library, name));
}

std::unique_ptr<Nccl> load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* why = dlerror();
        throw CommError("NCCL cannot be opened: " + std::string(why ? why : path) +
                        "; several ranks on GPUs need it: install torch with CUDA or nvidia-nccl, or name the file in "
                        "GRADGEN_NCCL");
    }
    auto out = std::make_unique<Nccl>();
    out->path = path;
    find(library, "ncclGetVersion", out->GetVersion);
    find(library, "ncclGetUniqueId", out->GetUniqueId);
    find(library, "ncclCommInitRank", out->CommInitRank);
    find(library, "ncclCommDestroy", out->CommDestroy);
    find(library, "ncclCommAbort", out->CommAbort);
    find(library, "ncclCommGetAsyncError", out->CommGetAsyncError);
    find(library, "ncclGetErrorString", out->GetErrorString);
    find(library, "ncclGetLastError", out->GetLastError);
    find(library, "ncclGroupStart", out->GroupStart);
    find(library, "ncclGroupEnd", out->GroupEnd);
    find(library, "ncclSend", out->Send);
    find(library, "ncclRecv", out->Recv);
    find(library, "ncclAllGather", out->AllGather);
    find(library, "ncclReduceScatter", out->ReduceScatter);
    find(library, "ncclBroadcast", out->Broadcast);
    find(library, "ncclCommRegister", out->CommRegister);
    find(library, "ncclCommDeregister", out->CommDeregister);
    if (!out->GetVersion || !out->GetUniqueId || !out->CommInitRank || !out->CommDestroy || !out->CommAbort ||
        !out->CommGetAsyncError || !out->GetErrorString || !out->GetLastError || !out->GroupStart || !out->GroupEnd ||
        !out->Send || !out->Recv || !out->AllGather || !out->ReduceScatter || !out->Broadcast)
        throw CommError("the NCCL in " + path + " lacks functions that gradgen calls; 2.18 or later is needed");
    out->GetVersion(&out->version);
    return out;
}

}  // namespace

// Never closed: communicators may outlive everything, and torch uses the same copy.
const Nccl& open_nccl(const std::string& path) {
    static std::mutex mutex;
    static auto* const opened = new std::map<std::string, std::unique_ptr<Nccl>>;
    const std::lock_guard lock(mutex);
    auto& entry = (*opened)[path];
    if (!entry) entry = load(path);
    return *entry;
}

}  // namespace gradgen::cuda
