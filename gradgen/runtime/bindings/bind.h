// What the binding files of the runtime share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "gradgen/engine.h"

namespace gradgen::bind {

namespace py = pybind11;

/// What Python sees of a gradient: a tensor, what part of which weight it is, and how to write it.
struct PyTensor {
    Tensor tensor;
    std::int64_t offset = 0;
    std::vector<std::int64_t> global_shape;
    bool accumulate = false;
};

/// A block handed out, or the shards of one.
struct PyBlock {
    TensorContainer tensors;
    bool accumulate = false;
    std::string name;
};

void bind_tensors(py::module_& m);
void bind_communicators(py::module_& m);
void bind_manager(py::module_& m);
void bind_state(py::class_<EngineManager>& manager);
void bind_kernels(py::module_& m);
void bind_errors(py::module_& m);

/// A Python integer (NumPy's too, not bool), or TypeError / IndexError with `what` in it.
std::int64_t index_from(const py::handle& value, const char* what);

/// Contiguous memory behind a Python object: a gradgen tensor, or anything with the buffer protocol or DLPack on the
/// CPU.
struct HostBuffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    std::int64_t numel = 0;
    DType dtype = DType::f32;
    bool readonly = false;
    py::object keep;
};
HostBuffer host_buffer(const py::object& value, const char* what, bool writable);

}  // namespace gradgen::bind
