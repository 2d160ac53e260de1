// One thread each: none of them is worth a second. They run on the device so that the host need not wait.
#include <cuda_runtime.h>

#include "check.h"
#include "scalars.h"

namespace gradgen::cuda {
namespace {

__global__ void set_kernel(Scalars* s, CudaCounters counters) { s->counters = counters; }

__global__ void count_kernel(Scalars* s, Count what) {
    if (what == Count::first_micro_step) s->counters.micro_step = 0;
    if (what == Count::next_micro_step) ++s->counters.micro_step;
    if (what == Count::step) ++s->counters.step;
}

__global__ void divide_kernel(Scalars* s, const void* number, bool is_double) {
    const double value = is_double ? *static_cast<const double*>(number) : *static_cast<const float*>(number);
    s->divide = static_cast<float>(1.0 / value);
}

__global__ void sum_kernel(Scalars* s, const __grid_constant__ Totals totals) {
    ReduceStats sum;
    for (int r = 0; r < totals.count; ++r) {
        sum.sum_squares += totals.of[r]->sum_squares;
        sum.nonfinite += totals.of[r]->nonfinite;
    }
    // Squares that overflow nowhere although an element is inf or nan: there is no such number.
    if (sum.nonfinite > 0 && isfinite(sum.sum_squares)) sum.sum_squares = nan("");
    s->all = sum;
    s->norm = static_cast<float>(sqrt(sum.sum_squares));
}

__global__ void clip_kernel(Scalars* s, double max_norm) {
    const double norm = sqrt(s->all.sum_squares), factor = max_norm / (norm + 1e-6);
    s->norm = static_cast<float>(norm);
    // inf and nan are left for the caller to see: scaling would turn them into zeros or spread them.
    const bool clips = isfinite(norm) && factor < 1.0;
    s->clip = clips ? static_cast<float>(factor) : 1.0f;
    if (clips) s->all.sum_squares *= factor * factor;
}

__global__ void scale_total_kernel(Scalars* s, double factor) {
    s->all.sum_squares *= factor * factor;
    s->norm = static_cast<float>(sqrt(s->all.sum_squares));
}

void launched(const char* what) { check(cudaGetLastError(), what); }

}  // namespace

void set_counters(Scalars* scalars, const CudaCounters& counters, CudaStream stream) {
    set_kernel<<<1, 1, 0, stream>>>(scalars, counters);
    launched("setting the step on the device");
}

void count(Scalars* scalars, Count what, CudaStream stream) {
    count_kernel<<<1, 1, 0, stream>>>(scalars, what);
    launched("counting on the device");
}

void set_divide(Scalars* scalars, const void* number, bool is_double, CudaStream stream) {
    divide_kernel<<<1, 1, 0, stream>>>(scalars, number, is_double);
    launched("reading the divisor on the device");
}

void sum_totals(Scalars* scalars, const Totals& totals, CudaStream stream) {
    sum_kernel<<<1, 1, 0, stream>>>(scalars, totals);
    launched("the norm over ranks");
}

void prepare_clip(Scalars* scalars, double max_norm, CudaStream stream) {
    clip_kernel<<<1, 1, 0, stream>>>(scalars, max_norm);
    launched("the clipping factor");
}

void scale_total(Scalars* scalars, double factor, CudaStream stream) {
    scale_total_kernel<<<1, 1, 0, stream>>>(scalars, factor);
    launched("scaling the norm");
}

}  // namespace gradgen::cuda
