// Managers for Python. gradgen/manager.py adds what needs no C++: contexts, names, planning.
#include <algorithm>

#include "bind.h"
#include "gradgen/error.h"

namespace gradgen::bind {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

int block_index(const EngineManager& self, const py::object& block) {
    const auto& blocks = self.model().blocks;
    std::string names;
    for (const auto& b : blocks) names += (names.empty() ? "" : ", ") + b.id;
    if (block.is_none()) {
        if (blocks.size() == 1) return 0;
        throw py::value_error(
            self.model().name +
            (blocks.empty() ? " has no blocks" : " has several kinds of block (" + names + "); say which with block="));
    }
    if (!py::isinstance<py::str>(block)) throw py::type_error("block must be the id of a block kind (" + names + ")");
    const auto id = py::cast<std::string>(block);
    for (std::size_t b = 0; b < blocks.size(); ++b)
        if (blocks[b].id == id) return static_cast<int>(b);
    throw py::key_error(self.model().name + " has no block kind '" + id + "'; it has " + names);
}

int weight_index(const EngineManager& self, const std::string& id) {
    const auto& weights = self.model().weights;
    std::string names;
    for (std::size_t w = 0; w < weights.size(); ++w) {
        if (weights[w].id == id && weights[w].present) return static_cast<int>(w);
        if (weights[w].present) names += (names.empty() ? "" : ", ") + weights[w].id;
    }
    throw py::key_error(self.model().name + " has no weight '" + id +
                        "' outside its blocks in this configuration; it has " + names);
}

std::string block_name(const EngineManager& self, int block, std::int64_t layer) {
    return self.model().blocks[static_cast<std::size_t>(block)].id + " " + std::to_string(layer);
}

std::vector<int> written_indices(const EngineManager& self, int block, std::int64_t layer,
                                 const std::vector<std::string>& ids) {
    std::vector<int> out;
    const auto& weights = self.block_weights(block, layer);
    for (const std::string& id : ids) {
        std::size_t w = 0;
        while (w < weights.size() && weights[w].id != id) ++w;
        if (w == weights.size())
            throw py::key_error("block '" + self.model().blocks[static_cast<std::size_t>(block)].id +
                                "' has no weight '" + id + "'");
        out.push_back(static_cast<int>(w));
    }
    return out;
}

PyTensor wrap(const TensorShard& s) { return {s.tensor, s.offset, s.global_shape, false}; }

Options make_options(const std::string& dtype, const std::optional<std::string>& accumulator,
                     const std::optional<std::string>& wire, const std::string& rounding,
                     const std::string& wire_rounding, std::uint64_t seed, std::optional<double> divide,
                     int block_buffers, const std::string& nonfinite, bool poison, int cuda, bool offload) {
    const auto mode = [](const std::string& text, const char* name) {
        if (text == "nearest") return Rounding::nearest;
        if (text == "stochastic") return Rounding::stochastic;
        throw py::value_error(std::string(name) + " must be 'nearest' or 'stochastic', got '" + text + "'");
    };
    Options out;
    out.dtype = dtype_from_string(dtype);
    if (accumulator) out.accumulator = dtype_from_string(*accumulator);
    if (wire) out.wire = dtype_from_string(*wire);
    out.rounding = mode(rounding, "rounding");
    out.wire_rounding = mode(wire_rounding, "wire_rounding");
    out.seed = seed, out.divide = divide, out.block_buffers = block_buffers, out.poison = poison;
    if (cuda >= 0) out.device = {DeviceKind::cuda, cuda};
    out.offload = offload;
    if (nonfinite == "skip")
        out.nonfinite = NonFinite::skip;
    else if (nonfinite == "raise")
        out.nonfinite = NonFinite::raise;
    else if (nonfinite != "ignore")
        throw py::value_error("nonfinite must be 'ignore', 'skip' or 'raise', got '" + nonfinite + "'");
    return out;
}

}  // namespace

void bind_manager(py::module_& m) {
    py::class_<Options>(m, "Options")
        .def(py::init(&make_options), py::kw_only(), py::arg("dtype") = "float32", py::arg("accumulator") = py::none(),
             py::arg("wire") = py::none(), py::arg("rounding") = "nearest", py::arg("wire_rounding") = "nearest",
             py::arg("seed") = 0, py::arg("divide") = py::none(), py::arg("block_buffers") = 2,
             py::arg("nonfinite") = "ignore", py::arg("poison") = false, py::arg("cuda") = -1,
             py::arg("offload") = false);
    py::class_<EngineManager> manager(m, "GradientManager");
    bind_state(manager);
    manager
        .def("start_micro_step", &EngineManager::start_micro_step, py::arg("micro_step"), py::arg("micro_steps"),
             py::arg("divide") = py::none(), Unlocked())
        .def("set_divide", py::overload_cast<double>(&EngineManager::set_divide), Unlocked())
        .def(
            "set_divide_on_device",
            [](EngineManager& self, std::uintptr_t number, const std::string& dtype) {
                self.set_divide(reinterpret_cast<const void*>(number), dtype_from_string(dtype));
            },
            py::arg("address"), py::arg("dtype"))
        .def(
            "use_stream",
            [](EngineManager& self, std::uintptr_t stream) { self.use_stream(reinterpret_cast<void*>(stream)); },
            py::arg("stream"))
        .def(
            "all_gather",
            [](EngineManager& self, std::uintptr_t out, std::uintptr_t in, std::size_t bytes) {
                self.all_gather(reinterpret_cast<void*>(out), reinterpret_cast<const void*>(in), bytes);
            },
            py::arg("out"), py::arg("input"), py::arg("bytes"), Unlocked())
        .def("grad_norm_tensor",
             [](EngineManager& self) {
                 const Tensor t = self.grad_norm_tensor();
                 return PyTensor{t, 0, t.shape(), false};
             })
        .def(
            "clip_grad_norm_tensor",
            [](EngineManager& self, double max_norm) {
                const Tensor t = self.clip_grad_norm_tensor(max_norm);
                return PyTensor{t, 0, t.shape(), false};
            },
            py::arg("max_norm"))
        .def("end_micro_step", &EngineManager::end_micro_step, Unlocked())
        .def(
            "block_full",
            [](EngineManager& self, const py::object& layer, const py::object& block) {
                const int b = block_index(self, block);
                const std::int64_t l = index_from(layer, "layer");
                BlockGradients out;
                {
                    py::gil_scoped_release release;
                    out = self.get_block_full(b, l);
                }
                return PyBlock{std::move(out.tensors), out.accumulate, block_name(self, b, l)};
            },
            py::arg("layer"), py::arg("block") = py::none())
        .def(
            "notify_block",
            [](EngineManager& self, const py::object& layer, const py::object& block,
               const std::optional<std::vector<std::string>>& written) {
                const int b = block_index(self, block);
                const std::int64_t l = index_from(layer, "layer");
                std::vector<int> indices;
                if (written) indices = written_indices(self, b, l, *written);
                py::gil_scoped_release release;
                if (written)
                    self.notify_block(b, l, indices);
                else
                    self.notify_block(b, l);
            },
            py::arg("layer"), py::arg("block") = py::none(), py::arg("written") = py::none())
        .def(
            "non_block_full",
            [](EngineManager& self, const std::string& id) {
                const int w = weight_index(self, id);
                WeightGradient out;
                {
                    py::gil_scoped_release release;
                    out = self.get_non_block_full(w);
                }
                return PyTensor{out.tensor, 0, out.tensor.shape(), out.accumulate};
            },
            py::arg("weight"))
        .def(
            "notify_non_block",
            [](EngineManager& self, const std::string& id) {
                const int w = weight_index(self, id);
                py::gil_scoped_release release;
                self.notify_non_block(w);
            },
            py::arg("weight"))
        .def(
            "block_shard",
            [](EngineManager& self, const py::object& layer, const py::object& block) {
                const int b = block_index(self, block);
                const std::int64_t l = index_from(layer, "layer");
                return PyBlock{self.get_block_shard(b, l), false, block_name(self, b, l)};
            },
            py::arg("layer"), py::arg("block") = py::none())
        .def(
            "non_block_shard",
            [](EngineManager& self, const std::string& id) {
                return wrap(self.get_non_block_shard(weight_index(self, id)));
            },
            py::arg("weight"))
        .def("named_gradients",
             [](EngineManager& self) {
                 py::dict out;
                 for (const auto& [name, shard] : self.named_gradients()) out[py::str(name)] = wrap(shard);
                 return out;
             })
        .def("weights",
             [](const EngineManager& self) {
                 py::list out;
                 for (const WeightRecord& r : self.weights())
                     out.append(py::make_tuple(
                         r.name, r.id,
                         r.block < 0 ? py::object(py::none())
                                     : py::object(py::str(self.model().blocks[static_cast<std::size_t>(r.block)].id)),
                         r.block < 0 ? py::object(py::none()) : py::object(py::int_(r.layer)),
                         py::tuple(py::cast(r.shape)), r.trainable, r.zero, r.may_be_absent,
                         r.tied_to.empty() ? py::object(py::none()) : py::object(py::str(r.tied_to))));
                 return out;
             })
        .def("grad_norm", &EngineManager::grad_norm, Unlocked())
        .def("clip_grad_norm_", &EngineManager::clip_grad_norm, py::arg("max_norm"), Unlocked())
        .def("scale_gradients", &EngineManager::scale_gradients, Unlocked())
        .def("zero_grad", &EngineManager::zero_grad, Unlocked())
        .def("reset", &EngineManager::reset, Unlocked())
        .def("fail", &EngineManager::fail, Unlocked())
        .def("close", &EngineManager::close, Unlocked())
        .def("trace",
             [](EngineManager& self) {
                 py::list out;
                 for (const TraceEntry& e : self.trace())
                     out.append(py::make_tuple(e.operation, e.unit, e.bytes, e.micro_step));
                 return out;
             })
        .def("memory",
             [](const EngineManager& self) {
                 const MemoryUse& u = self.memory();
                 py::dict out;
                 out["full"] = u.full, out["shards"] = u.shards, out["staging"] = u.staging,
                 out["exchange"] = u.exchange, out["pinned"] = u.pinned, out["total"] = u.total();
                 return out;
             })
        .def("buffers",
             [](const EngineManager& self) {
                 py::list out;
                 for (const NamedBuffer& b : self.buffers())
                     out.append(py::make_tuple(b.name, PyTensor{b.tensor, 0, b.tensor.shape(), false}));
                 return out;
             })
        .def("poison", &EngineManager::poison)
        .def("layout_text", &EngineManager::layout_text)
        .def_property_readonly("model_name", [](const EngineManager& self) { return self.model().name; })
        .def_property_readonly("strategy", [](const EngineManager& self) { return self.strategy().id; })
        .def_property_readonly("blocks",
                               [](const EngineManager& self) {
                                   py::dict out;
                                   for (const auto& b : self.model().blocks) out[py::str(b.id)] = b.count;
                                   return out;
                               })
        .def_property_readonly("layers",
                               [](const EngineManager& self) {
                                   py::dict out;
                                   for (const auto& b : self.model().blocks) {
                                       std::vector<std::int64_t> layers;
                                       for (const auto& kind : b.kinds)
                                           layers.insert(layers.end(), kind.layers.begin(), kind.layers.end());
                                       std::sort(layers.begin(), layers.end());
                                       out[py::str(b.id)] = py::tuple(py::cast(layers));
                                   }
                                   return out;
                               })
        .def_property_readonly("dtype",
                               [](const EngineManager& self) { return std::string(to_string(self.options().dtype)); })
        .def_property_readonly("accumulator",
                               [](const EngineManager& self) { return std::string(to_string(self.accumulator())); })
        .def_property_readonly(
            "wire",
            [](const EngineManager& self) {
                return std::string(to_string(self.wire(self.strategy().blocks == Placement::sharded)));
            })
        .def_property_readonly(
            "direct",
            [](const EngineManager& self) {
                return self.direct() && !self.options().offload &&
                       (self.communicator().world_size() == 1 || self.strategy().blocks == Placement::full);
            })
        .def_property_readonly("device",
                               [](const EngineManager& self) {
                                   const Device d = self.device();
                                   return d.kind == DeviceKind::cpu ? std::string("cpu")
                                                                    : "cuda:" + std::to_string(d.index);
                               })
        .def_property_readonly("rank", [](const EngineManager& self) { return self.communicator().rank(); })
        .def_property_readonly("world_size", [](const EngineManager& self) { return self.communicator().world_size(); })
        .def_property_readonly("transport",
                               [](const EngineManager& self) { return std::string(self.communicator().transport()); })
        .def_property("step", &EngineManager::step, &EngineManager::set_step)
        .def_property_readonly("next_micro_step", &EngineManager::next_micro_step)
        .def_property_readonly("accumulating", &EngineManager::accumulating)
        .def_property_readonly("skipped_steps", &EngineManager::skipped_steps)
        .def_property_readonly("step_skipped", &EngineManager::step_skipped);
}

}  // namespace gradgen::bind
