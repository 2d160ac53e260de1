// The functions of libnccl that gradgen calls, found in the library at run time: building needs no NCCL package, and
// the process uses the one copy that torch has loaded. Names, values and signatures are those of NCCL's public API
// (2.18 and later).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "gradgen/dtype.h"

namespace gradgen::cuda {

struct NcclComm;  // ncclComm
struct NcclId {   // ncclUniqueId
    char bytes[128];
};

struct Nccl {
    int version = 0;  // 23203: 2.32.3
    std::string path;
    int (*GetVersion)(int*) = nullptr;
    int (*GetUniqueId)(NcclId*) = nullptr;
    int (*CommInitRank)(NcclComm**, int, NcclId, int) = nullptr;
    int (*CommDestroy)(NcclComm*) = nullptr;
    int (*CommAbort)(NcclComm*) = nullptr;
    int (*CommGetAsyncError)(NcclComm*, int*) = nullptr;
    const char* (*GetErrorString)(int) = nullptr;
    const char* (*GetLastError)(NcclComm*) = nullptr;
    int (*GroupStart)() = nullptr;
    int (*GroupEnd)() = nullptr;
    int (*Send)(const void*, std::size_t, int, int, NcclComm*, cudaStream_t) = nullptr;
    int (*Recv)(void*, std::size_t, int, int, NcclComm*, cudaStream_t) = nullptr;
    int (*AllGather)(const void*, void*, std::size_t, int, NcclComm*, cudaStream_t) = nullptr;
    int (*ReduceScatter)(const void*, void*, std::size_t, int, int, NcclComm*, cudaStream_t) = nullptr;
    int (*Broadcast)(const void*, void*, std::size_t, int, int, NcclComm*, cudaStream_t) = nullptr;
    int (*CommRegister)(NcclComm*, void*, std::size_t, void**) = nullptr;  // null before 2.19
    int (*CommDeregister)(NcclComm*, void*) = nullptr;
};

inline constexpr int kNcclSum = 0, kNcclUint8 = 1, kNcclInProgress = 7;
int nccl_type(DType type);

/// The library at `path` (a file, or a name for the loader; "": what the process has among its global symbols). Throws
/// CommError that says what is missing.
const Nccl& open_nccl(const std::string& path);

}  // namespace gradgen::cuda
