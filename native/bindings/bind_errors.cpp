#include <array>
#include <string>
#include <system_error>

#include "bindings/bind.hpp"
#include "bindings/errors.hpp"
#include "bindings/names.hpp"

namespace py = pybind11;

namespace kvstore_hvd {
namespace {

// The classes by their codes; never freed, since errors may come as the interpreter ends.
std::array<py::handle, kErrorCodes> classes;

py::handle class_of(ErrorCode code) { return classes[static_cast<std::size_t>(code)]; }

}  // namespace

std::string text_of(const py::str& text) {
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

py::str text_of(const std::string& text) {
  const auto decoded = py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (!decoded) throw py::error_already_set();
  return decoded;
}

py::object exception_of(const Status& status) {
  return status.ok() ? py::object(py::none()) : class_of(status.code())(text_of(status.text()));
}

void set_python_error(const Status& status) {
  try {
    PyErr_SetObject(class_of(status.code()).ptr(), exception_of(status).ptr());
  } catch (py::error_already_set& failure) {
    failure.restore();
  }
}

Status loss_by(const py::handle& error) {
  ErrorCode found = ErrorCode::kTransport;
  for (const ErrorCode code : {ErrorCode::kPeerLost, ErrorCode::kTimeout}) {
    if (py::isinstance(error, class_of(code))) found = code;
  }
  return Status(found, text_of(py::str(error)));
}

void bind_errors(py::module_&) {
  const py::module_ errors = py::module_::import("kvstore_hvd.errors");
  for (std::size_t code = 0; code < classes.size(); ++code) {
    classes[code] = py::object(errors.attr(class_name(static_cast<ErrorCode>(code)))).release();
  }
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
