// Reductions into fp32.
#include "reduce.cuh"

namespace gradgen::cuda {

template void run_reduce<float, float>(const ReduceParams&, CudaStream);
template void run_reduce<float, bf16>(const ReduceParams&, CudaStream);
template void run_reduce<float, f16>(const ReduceParams&, CudaStream);

}  // namespace gradgen::cuda
