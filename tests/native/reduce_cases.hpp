// What a reduction must give, written for clarity (one element at a time, conversions by arithmetic in float64); arrays
// for tests of the kernels; and the comparison of one reduction with what it must give.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
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
    if (reduction.dtype == DType::kFloat64) return reduced_floats<double>(reduction, parts);
    if (reduction.dtype == DType::kInt8) return reduced_integers<std::int8_t>(reduction, parts);
    if (reduction.dtype == DType::kUInt8) return reduced_integers<std::uint8_t>(reduction, parts);
    if (reduction.dtype == DType::kInt32) return reduced_integers<std::int32_t>(reduction, parts);
    if (reduction.dtype == DType::kInt64) return reduced_integers<std::int64_t>(reduction, parts);
    return reduced_floats<float>(reduction, parts);
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

using testing::check;

constexpr std::size_t kLongest = 4099;

// Floats: one in four is any bit pattern (NaNs with payloads, denormals), one in eight a zero or an infinity, the
// others are of ordinary size and often cancel. Integers: any bit pattern, every other one small.
inline Bytes random_array(DType dtype, std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t bits = random();
    const std::uint64_t kind = random() % 8;
    const double ordinary = std::ldexp(static_cast<double>(static_cast<std::int64_t>(random())), -62);
    const double zero_or_infinity = kind == 2 ? 0.0 : std::numeric_limits<double>::infinity();
    const bool special = kind == 2 || (kind == 3 && random() % 16 == 0);
    const double value = special ? (bits % 2 == 0 ? zero_or_infinity : -zero_or_infinity) : ordinary;
    if (is_float(dtype) && kind >= 2) bits = bits_of(dtype, value);
    if (!is_float(dtype) && kind >= 4) bits = static_cast<std::uint64_t>(static_cast<std::int64_t>(bits % 15) - 7);
    set_element(dtype, bytes, i, bits);
  }
  return bytes;
}

inline std::vector<Bytes> random_arrays(DType dtype, int n, std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Bytes> arrays;
  for (int i = 0; i < n; ++i) arrays.push_back(random_array(dtype, count, random));
  return arrays;
}

// An array of its own allocation, `offset` bytes after an address aligned to 64, with nothing after its end: the
// address sanitizer sees one byte read too many, the guard in front catches a write before the start.
class Placed {
 public:
  Placed(const Bytes& source, std::size_t bytes, std::size_t offset)
      : offset_(offset), bytes_(bytes), memory_(static_cast<unsigned char*>(::operator new(offset + bytes, kAlign))) {
    std::memset(memory_.get(), 0xa5, offset);
    if (bytes != 0) std::memcpy(data(), source.data(), bytes);
  }
  unsigned char* data() const { return memory_.get() + offset_; }
  bool holds(const Bytes& content) const {
    for (std::size_t i = 0; i < offset_; ++i) {
      if (memory_.get()[i] != 0xa5) return false;
    }
    return bytes_ == 0 || std::memcmp(data(), content.data(), bytes_) == 0;
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(unsigned char* memory) const { ::operator delete(memory, kAlign); }
  };
  std::size_t offset_;
  std::size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

// The arrays that a result goes to: inputs, by their place, and kNew.
using Outputs = std::vector<std::size_t>;
constexpr std::size_t kNew = ~std::size_t{0};
inline Outputs all_inputs(std::size_t n) {
  Outputs all(n);
  for (std::size_t i = 0; i < n; ++i) all[i] = i;
  return all;
}

inline const std::vector<std::string>& targets() {
  static const std::vector<std::string> available = [] {
    std::vector<std::string> names;
    for (const char* name : {"scalar", "avx2", "avx512"}) {
      if (set_simd_target(name)) names.push_back(name);
    }
    set_simd_target("auto");
    return names;
  }();
  return available;
}

template <class Body>
void on_each_target(const Body& body) {
  for (const std::string& target : targets()) {
    set_simd_target(target);
    body();
  }
  set_simd_target("auto");
}

inline std::string describe(const Reduction& reduction, std::size_t n_inputs, std::size_t count) {
  return std::string(simd_target()) + " " + name_of(reduction.op) + " of " + std::to_string(n_inputs) + " " +
         name_of(reduction.dtype) + (reduction.as_half ? " as half[" : "[") + std::to_string(count) + "] scaled by " +
         std::to_string(reduction.prescale) + ", " + std::to_string(reduction.postscale);
}

// Reduces the first `count` elements of `sources` and compares every output, and every input that is none.
inline void check_reduction(const Reduction& reduction, const std::vector<Bytes>& sources, const Bytes& result,
                            std::size_t count, std::size_t offset, const Outputs& where) {
  const std::size_t bytes = count * size_of(reduction.dtype);
  std::vector<Placed> inputs;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    inputs.emplace_back(sources[i], bytes, (offset + i * offset * size_of(reduction.dtype)) % 64);
  }
  const Bytes filler(bytes, 0x5a);
  std::vector<Placed> fresh;
  std::vector<void*> outputs;
  std::vector<bool> overwritten(sources.size(), false);
  for (const std::size_t place : where) {
    if (place == kNew) {
      fresh.emplace_back(filler, bytes, offset);
      outputs.push_back(fresh.back().data());
    } else {
      overwritten[place] = true;
      outputs.push_back(inputs[place].data());
    }
  }
  std::vector<const void*> addresses;
  for (const Placed& input : inputs) addresses.push_back(input.data());
  reduce(reduction, addresses.data(), static_cast<int>(addresses.size()), outputs.data(),
         static_cast<int>(outputs.size()), count);

  const auto what = [&] {
    return describe(reduction, sources.size(), count) + ", offset " + std::to_string(offset) + ", " +
           std::to_string(where.size()) + " outputs";
  };
  for (const Placed& output : fresh) {
    if (!output.holds(result)) check(false, what() + ": a new output is wrong");
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].holds(overwritten[i] ? result : sources[i])) {
      check(false, what() + ": input " + std::to_string(i) + (overwritten[i] ? " got a wrong result" : " was changed"));
    }
  }
}

}  // namespace kvstore_hvd::reduce_tests
