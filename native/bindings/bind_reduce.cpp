#include <pybind11/stl.h>

#include "bind.hpp"
#include "kvstore_hvd/reduce.hpp"

namespace py = pybind11;

namespace kvstore_hvd {

void bind_reduce(py::module_& module) {
  module.def("simd_target", &simd_target, "The instruction set in use: scalar, avx2 or avx512.");
  module.def("set_simd_target", &set_simd_target, py::arg("target"),
             "Choose the instruction set; False, and no change, when the CPU or the build lacks it.");
}

}  // namespace kvstore_hvd
