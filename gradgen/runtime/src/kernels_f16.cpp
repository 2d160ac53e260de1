// Kernels with a f16 target.
#include "kernel_loop.h"

namespace gradgen {

template void run_job<f16, f16>(const Job&, std::span<const Segment>, ReduceStats*);
template void run_job<f16, float>(const Job&, std::span<const Segment>, ReduceStats*);
template ReduceStats run_measure<f16>(const f16*, bool, std::span<const Segment>);

}  // namespace gradgen
