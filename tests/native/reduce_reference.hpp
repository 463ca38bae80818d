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

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

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

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(Half value) { return static_cast<float>(decode(value.bits, 5, 10)); }
inline float widen(Brain value) { return static_cast<float>(decode(value.bits, 8, 7)); }

inline void narrow(float value, float* to) {
  *to = std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
}
inline void narrow(double value, double* to) {
  *to = std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}
inline void narrow(float value, Half* to) { to->bits = encode(value, 5, 10); }
inline void narrow(float value, Brain* to) { to->bits = encode(value, 8, 7); }

template <typename F>
F combine_float(ReduceOp op, F a, F b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return a + b;
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      break;
  }
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<F>::quiet_NaN();
  const bool a_is_less = a < b || (a == b && std::signbit(a));
  return a_is_less == (op == ReduceOp::kMin) ? a : b;
}

template <typename T>
T combine_integer(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return a < b ? b : a;
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
    case ReduceOp::kProduct:
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  return 0;
}

template <typename T>
T scale_integer(T value, double scale) {
  if (scale == 1.0) return value;
  const double product = static_cast<double>(value) * scale;
  if (std::isnan(product)) return 0;
  if (product <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (product >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(std::trunc(product));
}

template <typename T>
Bytes expected(const Reduction& reduction, const std::vector<Bytes>& inputs) {
  const auto element = [&](const Bytes& input, std::size_t i) {
    T value;
    std::memcpy(&value, input.data() + i * sizeof(T), sizeof(T));
    return value;
  };
  // The one case in which nothing is computed.
  if (inputs.size() == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0) return inputs[0];
  Bytes result(inputs[0].size());
  for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
    T rounded;
    if constexpr (std::is_integral_v<T>) {
      T value = scale_integer(element(inputs[0], i), reduction.prescale);
      for (std::size_t r = 1; r < inputs.size(); ++r) {
        value = combine_integer(reduction.op, value, scale_integer(element(inputs[r], i), reduction.prescale));
      }
      rounded = scale_integer(value, reduction.postscale);
    } else {
      using F = decltype(widen(T()));
      const auto product = [&](const Bytes& input) {
        T part;
        narrow(widen(element(input, i)) * static_cast<F>(reduction.prescale), &part);
        return widen(part);
      };
      F value = product(inputs[0]);
      for (std::size_t r = 1; r < inputs.size(); ++r) value = combine_float(reduction.op, value, product(inputs[r]));
      narrow(value * static_cast<F>(reduction.postscale), &rounded);
    }
    std::memcpy(result.data() + i * sizeof(T), &rounded, sizeof(T));
  }
  return result;
}

template <typename T>
Bytes expected_as_half(Reduction reduction, const std::vector<Bytes>& inputs);

inline Bytes expected(const Reduction& reduction, const std::vector<Bytes>& inputs) {
  const bool as_half = reduction.as_half && (reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage);
  if (as_half && reduction.dtype == DType::kFloat32) return expected_as_half<float>(reduction, inputs);
  if (as_half && reduction.dtype == DType::kFloat64) return expected_as_half<double>(reduction, inputs);
  switch (reduction.dtype) {
    case DType::kFloat16:
      return expected<Half>(reduction, inputs);
    case DType::kBFloat16:
      return expected<Brain>(reduction, inputs);
    case DType::kFloat32:
      return expected<float>(reduction, inputs);
    case DType::kFloat64:
      return expected<double>(reduction, inputs);
    case DType::kInt8:
      return expected<std::int8_t>(reduction, inputs);
    case DType::kUInt8:
      return expected<std::uint8_t>(reduction, inputs);
    case DType::kInt32:
      return expected<std::int32_t>(reduction, inputs);
    case DType::kInt64:
      return expected<std::int64_t>(reduction, inputs);
  }
  return {};
}

// The inputs cast to float16, reduced, and the result cast back.
template <typename T>
Bytes expected_as_half(Reduction reduction, const std::vector<Bytes>& inputs) {
  std::vector<Bytes> halves;
  for (const Bytes& input : inputs) {
    halves.emplace_back(input.size() / sizeof(T) * sizeof(Half));
    for (std::size_t i = 0; i < input.size() / sizeof(T); ++i) {
      T value;
      std::memcpy(&value, input.data() + i * sizeof(T), sizeof(T));
      const std::uint16_t half = encode(static_cast<float>(value), 5, 10);
      std::memcpy(halves.back().data() + i * sizeof(Half), &half, sizeof(Half));
    }
  }
  reduction.dtype = DType::kFloat16;
  const Bytes sums = expected(reduction, halves);
  Bytes result(inputs[0].size());
  for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
    Half half;
    std::memcpy(&half, sums.data() + i * sizeof(Half), sizeof(Half));
    const T value = widen(half);
    std::memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
  }
  return result;
}

}  // namespace kvstore_hvd::reduce_tests
