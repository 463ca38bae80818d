// What the files of bindings share: texts, enumerations by name, errors, and waiting without the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <exception>
#include <optional>
#include <vector>

#include "base/types.hpp"

namespace kvstore_hvd {

namespace py = pybind11;
using Address = std::uintptr_t;

class Segment;

void bind_engine(py::module_& module);
// What the ranks of a host do and have done, as kvstore_hvd/native.py's Snapshot.
py::object snapshot(const Segment& segment, std::size_t most);

// A wait that is longer is cut, to let Python handle its signals.
inline constexpr std::chrono::milliseconds kSignalCheck{100};

using WithoutGil = py::call_guard<py::gil_scoped_release>;
template <class Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release release;
  return call();
}

inline std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

// Between addresses, as Python has them, and pointers.
template <class To, class From>
std::vector<To> cast_all(const std::vector<From>& all) {
  std::vector<To> result;
  for (const From one : all) result.push_back(reinterpret_cast<To>(one));
  return result;
}

// To UTF-8, which has no lone surrogates: those become \udc80 and the like. From it: invalid bytes are replaced.
std::string text_of(const py::str& text);
py::str text_of(const std::string& text);

// Enumerations by their names in base/types.hpp. The second raises ValueError.
template <class Enum>
std::optional<Enum> find_value(const std::string& name, int values) {
  for (int value = 0; value < values; ++value) {
    if (name == name_of(static_cast<Enum>(value))) return static_cast<Enum>(value);
  }
  return std::nullopt;
}
template <class Enum>
Enum value_of(const std::string& name, int values, const char* kind) {
  const std::optional<Enum> found = find_value<Enum>(name, values);
  if (!found) throw py::value_error("unknown " + std::string(kind) + " " + name);
  return *found;
}
inline DType dtype_of(const std::string& name) { return value_of<DType>(name, kDTypes, "dtype"); }
inline ReduceOp op_of(const std::string& name) { return value_of<ReduceOp>(name, kReduceOps, "reduce op"); }

// A Status as an exception of kvstore_hvd/errors.py.
struct NativeError : std::exception {
  explicit NativeError(Status s) : status(std::move(s)) {}
  const char* what() const noexcept override { return status.text().c_str(); }
  Status status;
};
inline void check(const Status& status) {
  if (!status.ok()) throw NativeError(status);
}
// For functions that pybind11 does not call.
void set_python_error(const Status& status);
// The exception, not raised; None when the status is ok.
py::object exception_of(const Status& status);
// What loses a world by `error`, an exception: of the code of its class, else a kTransport.
Status loss_by(const py::handle& error);

// A class of kvstore_hvd/native.py, to be called with its fields in their order.
inline py::object record(const char* name) { return py::module_::import("kvstore_hvd.native").attr(name); }

}  // namespace kvstore_hvd
