#include "bind.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace kvstore_hvd {

void bind_errors(py::module_& module) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  storage.call_once_and_store_result(
      [&] { return py::object(py::exception<NativeError>(module, "NativeError", PyExc_RuntimeError)); });
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const NativeError& error) {
      const auto arguments = py::make_tuple(static_cast<int>(error.status.code()), error.status.text());
      PyErr_SetObject(storage.get_stored().ptr(), arguments.ptr());
    }
  });
}

}  // namespace kvstore_hvd
