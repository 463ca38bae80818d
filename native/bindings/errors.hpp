// How a Status becomes a Python exception: by the function that kvstore_hvd/native/__init__.py sets, which knows the
// classes of kvstore_hvd/errors.py.
#pragma once

#include <exception>
#include <utility>

#include "base/status.hpp"

namespace kvstore_hvd {

struct NativeError : std::exception {
  explicit NativeError(Status s) : status(std::move(s)) {}
  const char* what() const noexcept override { return status.text().c_str(); }
  Status status;
};

[[noreturn]] inline void raise(const Status& status) { throw NativeError(status); }

// For functions that pybind11 does not call.
void set_python_error(const Status& status);

}  // namespace kvstore_hvd
