// Saved states for Python: a dict of numbers, and a tuple a gradient.
#include "gradgen/state.h"

#include "bind.h"

namespace gradgen::bind {
namespace {

const char* const kPhases[] = {"fresh", "accumulating", "complete"};

py::dict numbers_of(const SavedState& s) {
    py::dict out;
    out["rank"] = s.rank, out["world_size"] = s.world_size;
    out["accumulator"] = std::string(to_string(s.accumulator));
    out["seed"] = s.seed, out["step"] = s.step, out["skipped_steps"] = s.skipped_steps;
    out["phase"] = kPhases[static_cast<int>(s.phase)];
    out["micro_step"] = s.micro_step, out["micro_steps"] = s.micro_steps;
    out["divide"] = s.divide, out["mean"] = s.mean;
    out["norm_squared"] = s.norm_squared;
    out["nonfinite"] = s.nonfinite, out["step_skipped"] = s.step_skipped;
    return out;
}

py::tuple save(EngineManager& self) {
    SavedState state;
    {
        py::gil_scoped_release release;
        state = self.save_state();
    }
    py::list gradients;
    for (const SavedGradient& g : state.gradients) {
        py::object values = py::none();
        if (g.data != nullptr && g.numel > 0) values = py::cast(PyTensor{g.tensor, g.offset, g.global_shape, false});
        gradients.append(py::make_tuple(g.name, py::tuple(py::cast(g.global_shape)), g.offset, g.numel, g.partial,
                                        g.written, values));
    }
    return py::make_tuple(numbers_of(state), gradients);
}

SavedState state_of(const py::handle& item, std::vector<HostBuffer>& keep) {
    const auto pair = py::cast<std::pair<py::dict, py::list>>(item);
    const py::dict& numbers = pair.first;
    SavedState out;
    out.rank = py::cast<int>(numbers["rank"]), out.world_size = py::cast<int>(numbers["world_size"]);
    out.accumulator = dtype_from_string(py::cast<std::string>(numbers["accumulator"]));
    out.seed = py::cast<std::uint64_t>(numbers["seed"]);
    out.step = py::cast<std::int64_t>(numbers["step"]);
    out.skipped_steps = py::cast<std::int64_t>(numbers["skipped_steps"]);
    const auto phase = py::cast<std::string>(numbers["phase"]);
    int known = 0;
    while (known < 3 && phase != kPhases[known]) ++known;
    if (known == 3) throw py::value_error("there is no phase '" + phase.substr(0, 40) + "'");
    out.phase = static_cast<Phase>(known);
    out.micro_step = py::cast<int>(numbers["micro_step"]), out.micro_steps = py::cast<int>(numbers["micro_steps"]);
    out.divide = py::cast<double>(numbers["divide"]), out.mean = py::cast<bool>(numbers["mean"]);
    out.norm_squared = py::cast<std::optional<double>>(numbers["norm_squared"]);
    out.nonfinite = py::cast<std::int64_t>(numbers["nonfinite"]);
    out.step_skipped = py::cast<bool>(numbers["step_skipped"]);
    for (const py::handle entry : pair.second) {
        const auto fields = py::cast<py::tuple>(entry);
        SavedGradient g;
        g.name = py::cast<std::string>(fields[0]);
        g.global_shape = py::cast<std::vector<std::int64_t>>(fields[1]);
        g.offset = py::cast<std::int64_t>(fields[2]), g.numel = py::cast<std::int64_t>(fields[3]);
        g.partial = py::cast<bool>(fields[4]), g.written = py::cast<bool>(fields[5]);
        if (const py::object values = fields[6]; !values.is_none()) {
            const std::string what = g.name;
            keep.push_back(host_buffer(values, what.c_str(), false));
            if (g.numel < 0 || keep.back().bytes != static_cast<std::size_t>(g.numel) * size_of(out.accumulator))
                throw py::value_error(what + ": " + std::to_string(keep.back().bytes) + " bytes of values for " +
                                      std::to_string(g.numel) + " elements of " +
                                      std::string(to_string(out.accumulator)));
            g.data = keep.back().data;
        }
        out.gradients.push_back(std::move(g));
    }
    return out;
}

void load(EngineManager& self, const py::list& items, std::string problem) {
    std::vector<HostBuffer> keep;
    std::vector<SavedState> states;
    try {
        for (const py::handle item : items) states.push_back(state_of(item, keep));
    } catch (const std::exception& error) {
        problem = error.what();
    }
    py::gil_scoped_release release;
    self.load_state(states, problem);
}

}  // namespace

void bind_state(py::class_<EngineManager>& manager) {
    manager.def("save_state", &save).def("load_state", &load, py::arg("states"), py::arg("problem") = "");
}

}  // namespace gradgen::bind
