#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#ifdef GRADGEN_CUDA
#include "gradgen/nccl_communicator.h"
#endif
#include "group.h"

namespace gradgen::bind {
namespace {

Timeout timeout_from(double seconds) {
    if (!(seconds > 0)) throw py::value_error("timeout must be a positive number of seconds");
    // Whole milliseconds, at least one; a year stands for everything longer.
    return Timeout(static_cast<std::int64_t>(std::ceil(std::min(seconds, 3.2e7) * 1000)));
}

void require_same(bool ok, const std::string& text) {
    if (!ok) throw py::value_error(text);
}

// Memory that the other ranks of a host can read, for Python: bytes with the buffer protocol.
struct PyMemory {
    std::shared_ptr<Storage> storage;
};

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

void gather_in_place(Communicator& comm, const PyMemory& memory, const std::vector<Pairs>& owned) {
    std::vector<std::vector<ByteRange>> ranges;
    for (const Pairs& pairs : owned) {
        ranges.emplace_back();
        for (const auto& [begin, bytes] : pairs) ranges.back().push_back({begin, bytes});
    }
    py::gil_scoped_release release;
    comm.gather_in_place(memory.storage->data, memory.storage->bytes, ranges);
}

}  // namespace

void bind_communicators(py::module_& m) {
    py::class_<PyMemory>(m, "Memory", py::buffer_protocol(),
                         "Zeroed host memory of a communicator; freed with the last view of it.")
        .def_property_readonly("nbytes", [](const PyMemory& memory) { return memory.storage->bytes; })
        .def("__repr__",
             [](const PyMemory& memory) {
                 return "<gradgen.Memory of " + std::to_string(memory.storage->bytes) + " bytes>";
             })
        .def_buffer([](PyMemory& memory) {
            return py::buffer_info(memory.storage->data, 1, "B", 1, {static_cast<py::ssize_t>(memory.storage->bytes)},
                                   {py::ssize_t{1}});
        });
    py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator")
        .def_property_readonly("rank", &Communicator::rank)
        .def_property_readonly("world_size", &Communicator::world_size)
        .def_property_readonly("transport", [](const Communicator& c) { return std::string(c.transport()); })
        .def_property_readonly("shares_memory", &Communicator::shares_memory)
        .def(
            "allocate", [](Communicator& c, std::size_t bytes) { return PyMemory{c.allocate(bytes)}; },
            py::arg("nbytes"), "Memory for gather_in_place.")
        .def("gather_in_place", &gather_in_place, py::arg("memory"), py::arg("owned"),
             "owned: (first byte, bytes) of everything that each rank has written. Copies the others' parts from their "
             "memory, which is laid out alike.")
        .def("barrier", &Communicator::barrier, py::call_guard<py::gil_scoped_release>())
        .def(
            "gather_objects",
            [](Communicator& c, const py::bytes& mine) {
                const std::string bytes = mine;
                std::vector<std::string> all;
                {
                    py::gil_scoped_release release;
                    all = c.gather_objects(bytes);
                }
                py::list out;
                for (const std::string& item : all) out.append(py::bytes(item));
                return out;
            },
            py::arg("mine"), "Every rank's bytes, in rank order.")
        .def(
            "all_gather",
            [](Communicator& c, const py::object& out, const py::object& in) {
                const HostBuffer o = host_buffer(out, "all_gather: out", true),
                                 i = host_buffer(in, "all_gather: in", false);
                require_same(o.bytes == i.bytes * static_cast<std::size_t>(c.world_size()),
                             "all_gather: out must hold world_size times in");
                py::gil_scoped_release release;
                c.all_gather(o.data, i.data, i.bytes);
            },
            py::arg("out"), py::arg("input"), "out = every rank's input, in rank order. Contiguous host memory.")
        .def(
            "all_to_all",
            [](Communicator& c, const py::object& out, const py::object& in) {
                const HostBuffer o = host_buffer(out, "all_to_all: out", true),
                                 i = host_buffer(in, "all_to_all: in", false);
                require_same(o.bytes == i.bytes && i.bytes % static_cast<std::size_t>(c.world_size()) == 0,
                             "all_to_all: out and in must have equal sizes that world_size divides");
                py::gil_scoped_release release;
                c.all_to_all(o.data, i.data, i.bytes / static_cast<std::size_t>(c.world_size()));
            },
            py::arg("out"), py::arg("input"), "Slice r of input goes to rank r. Contiguous host memory.")
        .def(
            "reduce_scatter",
            [](Communicator& c, const py::object& out, const py::object& in) {
                const HostBuffer o = host_buffer(out, "reduce_scatter: out", true),
                                 i = host_buffer(in, "reduce_scatter: in", false);
                require_same(o.dtype == i.dtype && i.numel == o.numel * c.world_size(),
                             "reduce_scatter: in must be world_size times out, of one dtype");
                py::gil_scoped_release release;
                c.reduce_scatter(o.data, i.data, o.numel, o.dtype);
            },
            py::arg("out"), py::arg("input"),
            "out = the sum over ranks of slice `rank` of input: in rank order, in fp32, rounded once.")
        .def(
            "all_reduce",
            [](Communicator& c, const py::object& data) {
                const HostBuffer d = host_buffer(data, "all_reduce", true);
                py::gil_scoped_release release;
                c.all_reduce(d.data, d.numel, d.dtype);
            },
            py::arg("tensor"), "In place: the sum over ranks, in rank order, in fp32, rounded once.")
        .def("abort", &Communicator::abort, py::call_guard<py::gil_scoped_release>())
        .def("reset", &Communicator::reset, py::call_guard<py::gil_scoped_release>())
        .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>());
    m.def("single_communicator", &single_communicator);
    m.def(
        "threads_communicators",
        [](int world, double timeout) { return threads_communicators(world, timeout_from(timeout)); },
        py::arg("world_size"), py::arg("timeout"));
    m.def(
        "shared_communicator",
        [](int rank, int world, double timeout, const py::function& gather) {
            const auto call = [&gather](const std::string& mine) {
                py::gil_scoped_acquire gil;
                std::vector<std::string> out;
                for (const py::handle item : gather(py::bytes(mine))) out.push_back(py::cast<std::string>(item));
                return out;
            };
            py::gil_scoped_release release;
            return shared_communicator(rank, world, timeout_from(timeout), call);
        },
        py::arg("rank"), py::arg("world_size"), py::arg("timeout"), py::arg("gather"));
    m.def(
        "group_communicator",
        [](int rank, int world, py::object transport) -> std::shared_ptr<Communicator> {
            return std::make_shared<GroupCommunicator>(rank, world, std::move(transport));
        },
        py::arg("rank"), py::arg("world_size"), py::arg("transport"));
#ifdef GRADGEN_CUDA
    m.def(
        "nccl_communicator",
        [](std::shared_ptr<Communicator> host, int device, double timeout, const std::string& library) {
            return nccl_communicator(std::move(host), device, timeout_from(timeout), library);
        },
        py::arg("host"), py::arg("device"), py::arg("timeout"), py::arg("library"),
        py::call_guard<py::gil_scoped_release>());
#endif
    // Signals are handled by the main thread alone. Others must not ask for the GIL: at interpreter exit they would
    // never get it.
    Communicator::set_interrupt_check([] {
        if (syscall(SYS_gettid) != getpid()) return;
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    });
}

}  // namespace gradgen::bind
