// CUDA status codes become gradgen::Error.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "gradgen/error.h"

namespace gradgen::cuda {

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a launch's error would otherwise be reported again by the next call
    throw Error(std::string(what) + ": " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
}

}  // namespace gradgen::cuda
