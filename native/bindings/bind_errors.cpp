#include <system_error>

#include "bindings/bind.hpp"
#include "bindings/errors.hpp"

namespace py = pybind11;

namespace kvstore_hvd {
namespace {

// What makes an exception of an error's code and text; never freed, since errors may come as the interpreter ends.
PyObject* factory = nullptr;

}  // namespace

void set_python_error(const Status& status) {
  if (factory == nullptr) {  // the extension by itself
    PyErr_SetString(PyExc_RuntimeError, status.text().c_str());
    return;
  }
  try {
    const py::object error = py::handle(factory)(static_cast<int>(status.code()), status.text());
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  } catch (py::error_already_set& failure) {
    failure.restore();
  }
}

void bind_errors(py::module_& module) {
  module.def("set_error_factory", [](const py::function& made) { factory = py::object(made).release().ptr(); });
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const NativeError& error) {
      set_python_error(error.status);
    } catch (const std::system_error& error) {
      // An OSError, whose number tells what helps: the caller in Python explains it to the user.
      const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
}

}  // namespace kvstore_hvd
