#include "bind.hpp"
#include "kvstore_hvd/segment.hpp"

namespace py = pybind11;

namespace kvstore_hvd {

void bind_segment(py::module_& module) {
  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment", "The shared memory of one world on one host.")
      .def_static("create", &Segment::create, py::arg("size"))
      .def_static("attach", &Segment::attach, py::arg("fd"))
      .def_property_readonly("fd", &Segment::fd)
      .def_property_readonly("size", &Segment::size);
  module.def("abi", &Segment::abi, "What must be equal for two builds to share a segment.");
}

}  // namespace kvstore_hvd
