// Kernels with a f64 target.
#include "kernel_loop.h"

namespace gradgen {

template void run_job<double, double>(const Job&, std::span<const Segment>, ReduceStats*);
template ReduceStats run_measure<double>(const double*, bool, std::span<const Segment>);

}  // namespace gradgen
