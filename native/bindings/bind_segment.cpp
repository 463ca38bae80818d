#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/bind.hpp"
#include "bindings/names.hpp"
#include "bindings/records.hpp"
#include "shm/arena.hpp"
#include "shm/segment.hpp"
#include "shm/world.hpp"

namespace py = pybind11;

namespace kvstore_hvd {

void bind_segment(py::module_& module) {
  py::class_<Segment, std::shared_ptr<Segment>>(module, "Segment", "The shared memory of one world on one host.")
      .def_static(
          "create",
          [](int size, std::size_t arena_bytes, const std::string& thresholds, std::uint32_t set_number,
             int size_of_all, std::vector<int> ranks, std::optional<bool> has_core_for_each, int host,
             std::vector<std::vector<int>> hosts) {
            return Segment::create(size, arena_bytes, parse_thresholds(thresholds),
                                   Inside{set_number, size_of_all, std::move(ranks)}, has_core_for_each,
                                   Hosts{host, std::move(hosts)});
          },
          py::arg("size"), py::arg("arena_bytes") = 0, py::arg("thresholds") = "", py::arg("set_number") = 0,
          py::arg("size_of_all") = 0, py::arg("ranks") = std::vector<int>{},
          py::arg("has_core_for_each").none(true) = py::none(), py::arg("host") = 0,
          py::arg("hosts") = std::vector<std::vector<int>>{})
      .def_static("attach", &Segment::attach, py::arg("fd"))
      .def(
          "introduce",
          [](Segment& segment, int rank, int pid, const py::str& host) { segment.introduce(rank, pid, text_of(host)); },
          py::arg("rank"), py::arg("pid"), py::arg("host"))
      .def_property_readonly("fd", &Segment::fd)
      .def_property_readonly("size", &Segment::size)
      .def_property_readonly("has_core_for_each",
                             [](const Segment& segment) { return segment.world().has_core_for_each != 0; });
  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena", "Memory for arrays that other ranks use in place.")
      .def(py::init<std::shared_ptr<Segment>, int>(), py::arg("segment"), py::arg("rank"))
      .def("allocate",
           [](Arena& arena, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(arena.allocate(bytes)); })
      .def("free", [](Arena& arena, std::uintptr_t memory) { arena.free(reinterpret_cast<void*>(memory)); })
      .def("retire", &Arena::retire, py::call_guard<py::gil_scoped_release>())
      .def("contains", [](const Arena& arena,
                          std::uintptr_t memory) { return arena.contains(reinterpret_cast<const void*>(memory)); })
      .def_property_readonly("capacity", &Arena::capacity)
      .def_property_readonly("used", &Arena::used)
      .def("after_fork_in_child", &Arena::after_fork_in_child);
  // By name, the values with `text`. Raises ValueError.
  module.def(
      "thresholds",
      [](const std::string& text) {
        const Thresholds thresholds = parse_thresholds(text);
        const py::object threshold = record("Threshold");
        py::dict all;
        for (const ThresholdInfo& info : threshold_infos()) {
          all[info.name] = threshold(thresholds.*info.field, info.unit, info.least, info.most);
        }
        return all;
      },
      py::arg("text") = "");
  module.def("abi", &Segment::abi, "What must be equal for two builds to share a segment.");
}

}  // namespace kvstore_hvd
