// Reductions into fp16.
#include "reduce.cuh"

namespace gradgen::cuda {

template void run_reduce<f16, f16>(const ReduceParams&, CudaStream);
template void run_reduce<f16, float>(const ReduceParams&, CudaStream);

}  // namespace gradgen::cuda
