#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings/bind.hpp"
#include "bindings/names.hpp"
#include "reduce/reduce.hpp"

namespace py = pybind11;

namespace kvstore_hvd {

void bind_reduce(py::module_& module) {
  module.def("simd_target", &simd_target, "The instruction set in use: scalar, avx2 or avx512.");
  module.def("set_simd_target", &set_simd_target, py::arg("target"),
             "Choose the instruction set; False, and no change, when the CPU or the build lacks it.");
  module.def(
      "scale",
      [](const std::string& dtype, std::uintptr_t input, std::uintptr_t output, std::size_t count, double prescale,
         double postscale) {
        const void* from = reinterpret_cast<const void*>(input);
        void* to = reinterpret_cast<void*>(output);
        reduce({dtype_of(dtype), ReduceOp::kSum, prescale, postscale}, &from, 1, &to, 1, count);
      },
      py::arg("dtype"), py::arg("source"), py::arg("target"), py::arg("count"), py::arg("prescale"),
      py::arg("postscale"), py::call_guard<py::gil_scoped_release>(), "One array times both factors.");
}

}  // namespace kvstore_hvd
