// Tensors for Python: DLPack without a copy, and the buffer protocol where the element type has a format.
#include "bind.h"
#include "dlpack.h"
#include "gradgen/error.h"

namespace gradgen::bind {
namespace {

// Keeps the memory and the arrays of a capsule alive until its consumer is done.
template <class Capsule>
struct Exported {
    Capsule capsule{};
    Tensor tensor;
    std::vector<std::int64_t> shape, strides;
};

dlpack::DataType dlpack_type(DType type) {
    return {static_cast<std::uint8_t>(type == DType::bf16 ? 4 : 2), static_cast<std::uint8_t>(size_of(type) * 8), 1};
}

dlpack::DeviceInfo dlpack_device(const Tensor& tensor) {
    return {tensor.device().kind == DeviceKind::cuda ? 2 : 1, tensor.device().index};
}

template <class Capsule>
py::object export_capsule(const Tensor& tensor, const char* name, const char* used_name) {
    auto* owned = new Exported<Capsule>{{}, tensor, tensor.shape(), tensor.strides()};
    owned->capsule.view = {tensor.data(),
                           dlpack_device(tensor),
                           static_cast<std::int32_t>(owned->shape.size()),
                           dlpack_type(tensor.dtype()),
                           owned->shape.data(),
                           owned->strides.data(),
                           0};
    owned->capsule.context = owned;
    owned->capsule.deleter = [](Capsule* self) { delete static_cast<Exported<Capsule>*>(self->context); };
    if constexpr (std::is_same_v<Capsule, dlpack::ManagedVersioned>) owned->capsule.version = {1, 0};
    (void)used_name;
    PyObject* capsule = PyCapsule_New(&owned->capsule, name, [](PyObject* object) {
        // A consumer renames the capsule; one that nobody consumed still owns its memory.
        const char* current = PyCapsule_GetName(object);
        if (!current || std::string_view(current).starts_with("used_")) return;
        auto* pointer = static_cast<Capsule*>(PyCapsule_GetPointer(object, current));
        if (pointer) pointer->deleter(pointer);
    });
    if (!capsule) {
        delete owned;
        throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(capsule);
}

py::object to_dlpack(const PyTensor& self, const py::object&, const py::object& max_version,
                     const py::object& dl_device, const py::object& copy) {
    if (!copy.is_none() && py::cast<bool>(copy))
        throw py::buffer_error("gradgen: a gradient is exported without a copy; copy the result instead");
    if (!dl_device.is_none()) {
        const auto wanted = py::cast<std::pair<int, int>>(dl_device);
        const auto own = dlpack_device(self.tensor);
        if (wanted.first != own.type || wanted.second != own.id)
            throw py::buffer_error("gradgen: a gradient cannot be exported to another device");
    }
    if (!max_version.is_none() && py::cast<std::pair<int, int>>(max_version).first >= 1)
        return export_capsule<dlpack::ManagedVersioned>(self.tensor, "dltensor_versioned", "used_dltensor_versioned");
    return export_capsule<dlpack::Managed>(self.tensor, "dltensor", "used_dltensor");
}

py::buffer_info buffer_of(PyTensor& self) {
    const Tensor& t = self.tensor;
    if (t.device().kind != DeviceKind::cpu)
        throw py::buffer_error("gradgen: the buffer protocol needs host memory; use DLPack");
    const char* format = nullptr;
    switch (t.dtype()) {
        case DType::f32:
            format = "f";
            break;
        case DType::f64:
            format = "d";
            break;
        case DType::f16:
            format = "e";
            break;
        case DType::bf16:
            throw py::buffer_error(
                "gradgen: bfloat16 has no buffer format; use DLPack, or view_bits() for the raw 16 bits");
    }
    std::vector<py::ssize_t> shape(t.shape().begin(), t.shape().end()), strides;
    for (const std::int64_t s : t.strides())
        strides.push_back(static_cast<py::ssize_t>(s) * static_cast<py::ssize_t>(size_of(t.dtype())));
    return py::buffer_info(t.data(), static_cast<py::ssize_t>(size_of(t.dtype())), format,
                           static_cast<py::ssize_t>(shape.size()), shape, strides);
}

// The raw bits of a 16-bit tensor as a memoryview of uint16, for consumers without a bfloat16 type.
py::object view_bits(const py::object& self) {
    const auto& t = py::cast<PyTensor&>(self).tensor;
    if (size_of(t.dtype()) != 2) throw py::type_error("gradgen: view_bits() is for bfloat16 and float16");
    py::object view = py::reinterpret_steal<py::object>(
        PyMemoryView_FromMemory(static_cast<char*>(t.data()), static_cast<py::ssize_t>(t.bytes()), PyBUF_WRITE));
    return view.attr("cast")("H");
}

std::string describe(const PyTensor& self) {
    std::string shape;
    for (const std::int64_t d : self.tensor.shape()) shape += (shape.empty() ? "" : ", ") + std::to_string(d);
    return "<gradgen.Tensor (" + shape + ") " + std::string(to_string(self.tensor.dtype())) + ">";
}

py::tuple tuple_of(const std::vector<std::int64_t>& values) {
    py::tuple out(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) out[i] = values[i];
    return out;
}

const TensorShard& item(const PyBlock& self, const std::string& id) {
    if (const TensorShard* shard = self.tensors.find(id)) return *shard;
    std::string names;
    for (std::size_t i = 0; i < self.tensors.size(); ++i) names += (i ? ", " : "") + self.tensors.id(i);
    throw py::key_error(self.name + " has no weight '" + id + "'; it has " + names);
}

PyTensor wrap(const PyBlock& block, const TensorShard& shard) {
    return {shard.tensor, shard.offset, shard.global_shape, block.accumulate};
}

// A weight by its id; one weight an expert by their common id, as a list.
py::object weight_of(const PyBlock& block, const std::string& id) {
    if (block.tensors.find(id)) return py::cast(wrap(block, item(block, id)));
    py::list experts;
    for (std::size_t i = 0; i < block.tensors.size(); ++i) {
        const std::string& one = block.tensors.id(i);
        if (one.size() > id.size() && one.starts_with(id) && one[id.size()] == '.')
            experts.append(wrap(block, block.tensors.shard(i)));
    }
    if (experts.empty()) (void)item(block, id);  // says what there is
    return std::move(experts);
}

}  // namespace

std::int64_t index_from(const py::handle& value, const char* what) {
    if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr()))
        throw py::type_error(std::string(what) + " must be an integer, got " +
                             std::string(py::str(py::type::handle_of(value).attr("__name__"))));
    const Py_ssize_t out = PyNumber_AsSsize_t(value.ptr(), PyExc_IndexError);
    if (out == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        throw py::index_error(std::string(what) + " " + std::string(py::str(value)).substr(0, 40) + " is out of range");
    }
    return out;
}

HostBuffer host_buffer(const py::object& value, const char* what, bool writable) {
    HostBuffer out;
    out.keep = value;
    if (py::isinstance<PyTensor>(value)) {
        const Tensor& t = py::cast<PyTensor&>(value).tensor;
        if (t.device().kind != DeviceKind::cpu) throw py::value_error(std::string(what) + ": expected host memory");
        out.data = t.data(), out.bytes = t.bytes(), out.numel = t.numel(), out.dtype = t.dtype();
        return out;
    }
    if (py::hasattr(value, "__dlpack__") && !PyObject_CheckBuffer(value.ptr())) {
        py::capsule capsule = value.attr("__dlpack__")();
        const auto* managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
        if (!managed) throw py::error_already_set();
        const dlpack::View& v = managed->view;
        if (v.device.type != 1)
            throw py::value_error(std::string(what) + ": expected host memory, got device type " +
                                  std::to_string(v.device.type));
        out.numel = 1;
        for (int d = 0; d < v.ndim; ++d) out.numel *= v.shape[d];
        std::int64_t stride = 1;
        for (int d = v.ndim - 1; v.strides && d >= 0; --d) {
            if (v.shape[d] != 1 && v.strides[d] != stride && out.numel)
                throw py::value_error(std::string(what) + ": expected a contiguous tensor; call .contiguous()");
            stride *= v.shape[d];
        }
        out.bytes = static_cast<std::size_t>(out.numel) * v.dtype.bits / 8;
        out.data = static_cast<char*>(v.data) + v.byte_offset;
        if (v.dtype.code == 4 && v.dtype.bits == 16)
            out.dtype = DType::bf16;
        else if (v.dtype.code == 2 && v.dtype.bits == 16)
            out.dtype = DType::f16;
        else if (v.dtype.code == 2 && v.dtype.bits == 64)
            out.dtype = DType::f64;
        out.keep = py::make_tuple(value, capsule);
        return out;
    }
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(value).request(writable);
    std::int64_t stride = info.itemsize;
    for (auto d = static_cast<std::ptrdiff_t>(info.ndim) - 1; d >= 0; --d) {
        const auto i = static_cast<std::size_t>(d);
        if (info.shape[i] != 1 && info.strides[i] != stride && info.size)
            throw py::value_error(std::string(what) + ": expected contiguous memory");
        stride *= info.shape[i];
    }
    out.data = info.ptr, out.numel = info.size, out.bytes = static_cast<std::size_t>(info.size * info.itemsize),
    out.readonly = info.readonly;
    if (info.format == "d") out.dtype = DType::f64;
    if (info.format == "e") out.dtype = DType::f16;
    return out;
}

void bind_tensors(py::module_& m) {
    py::class_<PyTensor>(
        m, "Tensor", py::buffer_protocol(),
        "A gradient, or this rank's shard of one, in the manager's memory. Speaks DLPack and the buffer protocol.")
        .def_property_readonly("shape", [](const PyTensor& t) { return tuple_of(t.tensor.shape()); })
        .def_property_readonly(
            "strides", [](const PyTensor& t) { return tuple_of(t.tensor.strides()); }, "In elements.")
        .def_property_readonly("dtype", [](const PyTensor& t) { return std::string(to_string(t.tensor.dtype())); })
        .def_property_readonly("numel", [](const PyTensor& t) { return t.tensor.numel(); })
        .def_property_readonly("nbytes", [](const PyTensor& t) { return t.tensor.bytes(); })
        .def_property_readonly("data_ptr",
                               [](const PyTensor& t) { return reinterpret_cast<std::uintptr_t>(t.tensor.data()); })
        .def_property_readonly("device",
                               [](const PyTensor& t) {
                                   return t.tensor.device().kind == DeviceKind::cuda
                                              ? "cuda:" + std::to_string(t.tensor.device().index)
                                              : std::string("cpu");
                               })
        .def_property_readonly(
            "accumulate", [](const PyTensor& t) { return t.accumulate; },
            "True: add to what is there. False: overwrite (weights that need zeros hold zeros).")
        .def_property_readonly(
            "offset", [](const PyTensor& t) { return t.offset; },
            "First element of the flattened weight that this shard holds.")
        .def_property_readonly("global_shape", [](const PyTensor& t) { return tuple_of(t.global_shape); })
        .def("__dlpack__", &to_dlpack, py::kw_only(), py::arg("stream") = py::none(),
             py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
        .def("__dlpack_device__",
             [](const PyTensor& t) {
                 const auto d = dlpack_device(t.tensor);
                 return py::make_tuple(d.type, d.id);
             })
        .def(
            "view_bits", [](const py::object& self) { return view_bits(self); }, py::keep_alive<0, 1>(),
            "The 16-bit elements as a memoryview of uint16.")
        .def("__len__",
             [](const PyTensor& t) {
                 if (t.tensor.shape().empty()) throw py::type_error("a 0-dim tensor has no length");
                 return t.tensor.shape()[0];
             })
        .def("__repr__", &describe)
        .def_buffer(&buffer_of);
    py::class_<PyBlock>(m, "Block", "The gradients of one block, by weight id: block.q_proj or block['q_proj'].")
        .def_property_readonly(
            "accumulate", [](const PyBlock& b) { return b.accumulate; },
            "True: add to what is there. False: overwrite (weights that need zeros hold zeros).")
        .def("__getitem__", [](const PyBlock& b, const std::string& id) { return weight_of(b, id); })
        .def("__getattr__",
             [](const PyBlock& b, const std::string& id) {
                 try {
                     return weight_of(b, id);
                 } catch (const py::key_error& error) {
                     throw py::attribute_error(error.what());
                 }
             })
        .def("__contains__", [](const PyBlock& b, const std::string& id) { return b.tensors.find(id) != nullptr; })
        .def("__len__", [](const PyBlock& b) { return b.tensors.size(); })
        .def("keys",
             [](const PyBlock& b) {
                 py::list out;
                 for (std::size_t i = 0; i < b.tensors.size(); ++i) out.append(b.tensors.id(i));
                 return out;
             })
        .def("__iter__",
             [](const PyBlock& b) {
                 py::list out;
                 for (std::size_t i = 0; i < b.tensors.size(); ++i) out.append(b.tensors.id(i));
                 return py::iter(out);
             })
        .def("items",
             [](const PyBlock& b) {
                 py::list out;
                 for (std::size_t i = 0; i < b.tensors.size(); ++i)
                     out.append(py::make_tuple(b.tensors.id(i), wrap(b, b.tensors.shard(i))));
                 return out;
             })
        .def("__repr__", [](const PyBlock& b) { return "<gradients of " + b.name + ">"; });
}

}  // namespace gradgen::bind
