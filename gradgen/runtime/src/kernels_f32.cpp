// Kernels with a f32 target.
#include "kernel_loop.h"

namespace gradgen {

template void run_job<float, float>(const Job&, std::span<const Segment>, ReduceStats*);
template void run_job<float, bf16>(const Job&, std::span<const Segment>, ReduceStats*);
template void run_job<float, f16>(const Job&, std::span<const Segment>, ReduceStats*);
template ReduceStats run_measure<float>(const float*, bool, std::span<const Segment>);

}  // namespace gradgen
