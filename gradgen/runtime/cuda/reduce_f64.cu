// Reductions into fp64.
#include "reduce.cuh"

namespace gradgen::cuda {

template void run_reduce<double, double>(const ReduceParams&, CudaStream);

}  // namespace gradgen::cuda
