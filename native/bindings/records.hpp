// What is told to Python in more than one number: the classes of kvstore_hvd/native.py.
#pragma once

#include <pybind11/pybind11.h>

namespace kvstore_hvd {

// A class of that module, to be called with its fields in their order.
inline pybind11::object record(const char* name) { return pybind11::module_::import("kvstore_hvd.native").attr(name); }

}  // namespace kvstore_hvd
