// Enumerations by the names that Python has for their values: those of base/types.hpp.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "base/types.hpp"

namespace kvstore_hvd {

// In UTF-8, which has no lone surrogates: those become \udc80 and the like.
std::string text_of(const pybind11::str& text);
// And back; what is no UTF-8 is replaced.
pybind11::str text_of(const std::string& text);

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
  if (!found) throw pybind11::value_error("unknown " + std::string(kind) + " " + name);
  return *found;
}

inline DType dtype_of(const std::string& name) { return value_of<DType>(name, kDTypes, "dtype"); }
inline ReduceOp op_of(const std::string& name) { return value_of<ReduceOp>(name, kReduceOps, "reduce op"); }
inline Collective collective_of(const std::string& name) {
  return value_of<Collective>(name, kCollectives, "collective");
}

}  // namespace kvstore_hvd
