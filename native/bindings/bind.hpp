// One function for each file of bindings; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>

namespace kvstore_hvd {

// A wait that is longer is cut, to let Python handle its signals.
inline constexpr std::chrono::milliseconds kSignalCheck{100};

void bind_errors(pybind11::module_& module);
void bind_segment(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_reduce(pybind11::module_& module);
void bind_link(pybind11::module_& module);
void bind_mxnet(pybind11::module_& module);

}  // namespace kvstore_hvd
