// Arrays for tests of the reduction kernels, and the comparison of one reduction with what it must give.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "reduce/reduce.hpp"
#include "reduce_reference.hpp"

namespace kvstore_hvd::reduce_tests {

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
