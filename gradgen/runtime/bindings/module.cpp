// The runtime's extension module. Its name holds the content key: two runtimes in one process stay apart.
#include "bind.h"
#include "gradgen/error.h"

namespace gradgen::bind {

void bind_kernels(py::module_& m) {
    m.def("kernel_isa", &kernel_isa, "The instruction set that the kernels were built for.");
    m.def(
        "philox4x32_10",
        [](const std::array<std::uint32_t, 4>& counter, const std::array<std::uint32_t, 2>& key) {
            return philox4x32_10(counter, key);
        },
        py::arg("counter"), py::arg("key"));
    m.def(
        "rounding_bits",
        [](std::uint64_t seed, std::uint64_t step, std::uint32_t micro_step, std::uint32_t site, std::uint64_t element,
           std::uint32_t weight) {
            return RoundingKey{true, seed, step, micro_step, static_cast<RoundingSite>(site)}.bits(element, weight);
        },
        py::kw_only(), py::arg("seed"), py::arg("step"), py::arg("micro_step"), py::arg("site"), py::arg("element"),
        py::arg("weight"), "The 16 random bits that round one element of one weight.");
}

}  // namespace gradgen::bind

PYBIND11_MODULE(GRADGEN_RUNTIME_MODULE, m) {
    using namespace gradgen::bind;
    bind_errors(m);
    bind_tensors(m);
    bind_communicators(m);
    bind_manager(m);
    bind_kernels(m);
}
