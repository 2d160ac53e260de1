// Reductions into bf16.
#include "reduce.cuh"

namespace gradgen::cuda {

template void run_reduce<bf16, bf16>(const ReduceParams&, CudaStream);
template void run_reduce<bf16, float>(const ReduceParams&, CudaStream);

}  // namespace gradgen::cuda
