// Kernels with a bf16 target.
#include "kernel_loop.h"

namespace gradgen {

template void run_job<bf16, bf16>(const Job&, std::span<const Segment>, ReduceStats*);
template void run_job<bf16, float>(const Job&, std::span<const Segment>, ReduceStats*);
template ReduceStats run_measure<bf16>(const bf16*, bool, std::span<const Segment>);

}  // namespace gradgen
