#include "bind.hpp"
#include "kvstore_hvd/arena.hpp"
#include "kvstore_hvd/segment.hpp"

namespace py = pybind11;

namespace kvstore_hvd {

void bind_segment(py::module_& module) {
  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment", "The shared memory of one world on one host.")
      .def_static("create", &Segment::create, py::arg("size"), py::arg("arena_bytes") = 0)
      .def_static("attach", &Segment::attach, py::arg("fd"))
      .def_property_readonly("fd", &Segment::fd)
      .def_property_readonly("size", &Segment::size);
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena", "Memory for arrays that other ranks use in place.")
      .def(py::init<std::shared_ptr<Segment>, int>(), py::arg("segment"), py::arg("rank"))
      .def("allocate",
           [](Arena& arena, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(arena.allocate(bytes)); })
      .def("free", [](Arena& arena, std::uintptr_t memory) { arena.free(reinterpret_cast<void*>(memory)); })
      .def("contains", [](const Arena& arena,
                          std::uintptr_t memory) { return arena.contains(reinterpret_cast<const void*>(memory)); })
      .def_property_readonly("capacity", &Arena::capacity)
      .def_property_readonly("used", &Arena::used)
      .def("after_fork_in_child", &Arena::after_fork_in_child);
  module.def("abi", &Segment::abi, "What must be equal for two builds to share a segment.");
}

}  // namespace kvstore_hvd
