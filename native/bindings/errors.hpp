// How a Status becomes an exception of kvstore_hvd/errors.py, and the other way round.
#pragma once

#include <pybind11/pybind11.h>

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

// The exception, not raised; None when the status is ok.
pybind11::object exception_of(const Status& status);

// What loses a world by `error`, an exception: of the code of its class, else a kTransport.
Status loss_by(const pybind11::handle& error);

}  // namespace kvstore_hvd
