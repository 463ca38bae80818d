// What a reduction must give, written for clarity: one element at a time, conversions by arithmetic in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "reduce/reduce.hpp"

namespace kvstore_hvd::reduce_tests {

using Bytes = std::vector<unsigned char>;

inline bool is_float(DType dtype) { return dtype <= DType::kFloat64; }

// The value of a float with these widths of exponent and fraction.
inline double decode(unsigned bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const unsigned fraction = bits & ((1U << fraction_bits) - 1);
  const double sign = (bits >> (exponent_bits + fraction_bits)) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + std::ldexp(1.0, fraction_bits), exponent - bias - fraction_bits);
}

// Rounds to nearest even; nearbyint does in the default environment.
inline std::uint16_t encode(double value, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const unsigned infinity = ((1U << exponent_bits) - 1) << fraction_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1U << (fraction_bits - 1)));
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0.0) return static_cast<std::uint16_t>(sign);
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | infinity);
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  // In units of the last place; a denormal's exponent field is one less than that of the smallest normal number, and
  // the leading one of a normal number adds one to its field.
  const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
  const long long bits = (static_cast<long long>(exponent + bias - 1) << fraction_bits) + units;
  return static_cast<std::uint16_t>(sign | static_cast<unsigned>(std::min<long long>(bits, infinity)));
}

// The number that bits stand for in a type of floats, and back; every NaN becomes the canonical one.
inline double number_of(DType dtype, std::uint64_t bits) {
  if (dtype == DType::kFloat16) return decode(bits & 0xffff, 5, 10);
  if (dtype == DType::kBFloat16) return decode(bits & 0xffff, 8, 7);
  float single = 0;
  double wide = 0;
  std::memcpy(&single, &bits, sizeof(single));  // little endian, as every supported machine
  std::memcpy(&wide, &bits, sizeof(wide));
  return dtype == DType::kFloat32 ? static_cast<double>(single) : wide;
}
inline std::uint64_t bits_of(DType dtype, double value) {
  if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
  if (dtype == DType::kFloat16) return encode(value, 5, 10);
  if (dtype == DType::kBFloat16) return encode(value, 8, 7);
  const auto single = static_cast<float>(value);
  std::uint64_t bits = 0;
  std::memcpy(&bits, dtype == DType::kFloat32 ? static_cast<const void*>(&single) : &value, size_of(dtype));
  return bits;
}

inline std::uint64_t element(DType dtype, const Bytes& array, std::size_t i) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, array.data() + i * size_of(dtype), size_of(dtype));
  return bits;
}
inline void set_element(DType dtype, Bytes& array, std::size_t i, std::uint64_t bits) {
  std::memcpy(array.data() + i * size_of(dtype), &bits, size_of(dtype));
}

template <typename T>
T combined(ReduceOp op, T a, T b) {
  constexpr bool kIsFloat = std::numeric_limits<T>::is_iec559;
  using Wrapping = std::conditional_t<kIsFloat, T, std::uint64_t>;
  if (op == ReduceOp::kSum || op == ReduceOp::kAverage) {
    return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
  }
  if (op == ReduceOp::kProduct) return static_cast<T>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
  bool a_is_less = a < b;
  if constexpr (kIsFloat) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    a_is_less = a_is_less || (a == b && std::signbit(a));
  }
  return a_is_less == (op == ReduceOp::kMin) ? a : b;
}

template <typename T>
T scaled(T value, double scale) {
  if (scale == 1.0) return value;
  const double product = static_cast<double>(value) * scale;
  if (std::isnan(product)) return 0;
  if (product <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (product >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(std::trunc(product));
}

// One element; F is the type that a type of floats is reduced in.
template <typename F>
std::uint64_t reduced_floats(const Reduction& reduction, const std::vector<std::uint64_t>& parts) {
  const DType dtype = reduction.dtype;
  F value = 0;
  for (std::size_t r = 0; r < parts.size(); ++r) {
    const F product = static_cast<F>(number_of(dtype, parts[r])) * static_cast<F>(reduction.prescale);
    const auto part = static_cast<F>(number_of(dtype, bits_of(dtype, static_cast<double>(product))));
    value = r == 0 ? part : combined(reduction.op, value, part);
  }
  return bits_of(dtype, static_cast<double>(value * static_cast<F>(reduction.postscale)));
}

template <typename T>
std::uint64_t reduced_integers(const Reduction& reduction, const std::vector<std::uint64_t>& parts) {
  T value = scaled(static_cast<T>(parts[0]), reduction.prescale);
  for (std::size_t r = 1; r < parts.size(); ++r) {
    value = combined(reduction.op, value, scaled(static_cast<T>(parts[r]), reduction.prescale));
  }
  return static_cast<std::uint64_t>(scaled(value, reduction.postscale));
}

inline Bytes expected(Reduction reduction, const std::vector<Bytes>& inputs) {
  const DType dtype = reduction.dtype;
  // The inputs cast to float16, reduced, and the result cast back.
  const bool as_half = reduction.as_half && (dtype == DType::kFloat32 || dtype == DType::kFloat64) &&
                       (reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage);
  // The one case in which nothing is computed.
  if (inputs.size() == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0 && !as_half) return inputs[0];
  const auto reduce_one = [&](const std::vector<std::uint64_t>& parts) {
    switch (reduction.dtype) {
      case DType::kFloat64:
        return reduced_floats<double>(reduction, parts);
      case DType::kInt8:
        return reduced_integers<std::int8_t>(reduction, parts);
      case DType::kUInt8:
        return reduced_integers<std::uint8_t>(reduction, parts);
      case DType::kInt32:
        return reduced_integers<std::int32_t>(reduction, parts);
      case DType::kInt64:
        return reduced_integers<std::int64_t>(reduction, parts);
      default:
        return reduced_floats<float>(reduction, parts);
    }
  };
  if (as_half) reduction.dtype = DType::kFloat16;
  Bytes result(inputs[0].size());
  std::vector<std::uint64_t> parts(inputs.size());
  for (std::size_t i = 0; i < result.size() / size_of(dtype); ++i) {
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      parts[r] = element(dtype, inputs[r], i);
      if (as_half) parts[r] = encode(static_cast<float>(number_of(dtype, parts[r])), 5, 10);
    }
    // As half, a single one that is not scaled is cast only.
    const bool is_cast = as_half && parts.size() == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0;
    const std::uint64_t bits = is_cast ? parts[0] : reduce_one(parts);
    set_element(dtype, result, i, as_half ? bits_of(dtype, number_of(DType::kFloat16, bits)) : bits);
  }
  return result;
}

}  // namespace kvstore_hvd::reduce_tests
