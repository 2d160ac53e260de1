// What a generated module binds: its configuration, its strategies and a factory. All methods are bound once, in the
// runtime.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>

#include "gradgen/config.h"
#include "gradgen/engine.h"
#include "gradgen/error.h"

namespace gradgen::bind {

namespace py = pybind11;

/// Dimensions and flags from keywords. Booleans are flags; anything with __index__ is a dimension.
inline ConfigValues values_from(const py::kwargs& keywords) {
    ConfigValues values;
    for (const auto& item : keywords) {
        const auto name = py::cast<std::string>(item.first);
        if (PyBool_Check(item.second.ptr())) {
            values.emplace_back(name, item.second.ptr() == Py_True ? 1 : 0);
            continue;
        }
        if (!PyIndex_Check(item.second.ptr()))
            throw py::type_error("'" + name + "' must be an integer or a bool, got " +
                                 py::cast<std::string>(py::str(item.second)));
        const py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(item.second.ptr()));
        if (!number) throw py::error_already_set();
        int overflow = 0;
        PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
        if (overflow != 0)
            throw ConfigError("'" + name + "' must lie between 1 and 2147483648, got " +
                              py::cast<std::string>(py::str(number)).substr(0, 40));
        values.emplace_back(name, py::cast<std::int64_t>(number));
    }
    return values;
}

template <class Config>
void model(py::module_& m, ModelDesc (*describe)(const Config&),
           std::unique_ptr<EngineManager> (*make)(const Config&, std::shared_ptr<Communicator>, std::string_view,
                                                  const Options&),
           const char* name) {
    py::class_<Config>(m, "Config", py::module_local())
        .def(py::init([](const py::kwargs& keywords) { return Config::from(values_from(keywords)); }))
        .def("values",
             [](const Config& self) {
                 py::dict out;
                 for (const auto& [key, value] : self.values()) out[py::str(std::string(key))] = value;
                 return out;
             })
        .def("__getattr__", [](const Config& self, const std::string& key) {
            for (const auto& [known, value] : self.values())
                if (known == key) return value;
            throw py::attribute_error("no dimension or flag '" + key + "'");
        });
    m.def(
        "make_gradient_manager",
        [make](const Config& config, std::shared_ptr<Communicator> comm, const std::string& strategy,
               const Options& options) {
            py::gil_scoped_release release;
            return make(config, std::move(comm), strategy, options);
        },
        py::arg("config"), py::arg("comm"), py::arg("strategy"), py::arg("options"));
    m.def(
        "layout_text", [describe](const Config& config, int world) { return describe_layout(describe(config), world); },
        py::arg("config"), py::arg("world_size"));
    m.attr("model_name") = name;
}

template <class Manager>
void strategy(py::module_& m, const char* name) {
    py::class_<Manager, EngineManager>(m, name, py::module_local());
}

}  // namespace gradgen::bind
