// The reduction kernels as templates over an instruction set, included once by each reduce_<isa>.cpp.
//
// Those files are compiled with different -m flags and linked together. A function that two of them emitted under one
// name would be merged by the linker into one copy, perhaps the one a lesser CPU cannot run. Hence everything here is
// in an anonymous namespace, and nothing here may call an inline function of another header (of the C++ library
// included). The test `isa_objects_share_no_symbols` watches over it.
#pragma once

#include <cstddef>
#include <cstring>

#include "reduce/reduce.hpp"
#include "reduce/reduce_elements.hpp"

namespace kvstore_hvd::detail {
namespace {

// Sums of a few arrays: pointers and accumulators stay in registers.
template <int kInputs, int kOutputs>
class FewArrays {
 public:
  // Copied: the compiler must assume that a store through an output changes what `inputs` points to.
  FewArrays(const void* const* inputs, void* const* outputs) {
    for (int i = 0; i < kInputs; ++i) inputs_[i] = static_cast<const char*>(inputs[i]);
    for (int i = 0; i < kOutputs; ++i) outputs_[i] = static_cast<char*>(outputs[i]);
  }
  static constexpr int n_inputs() { return kInputs; }
  static constexpr int n_outputs() { return kOutputs; }
  const char* input(int i) const { return inputs_[i]; }
  char* output(int i) const { return outputs_[i]; }
  static constexpr int kVectors = 1;

 private:
  const char* inputs_[kInputs];
  char* outputs_[kOutputs];
};

// Any number of arrays. Strips of several vectors make up for the reloaded pointers, and take whole cache lines from
// each array in turn; with 16 vectors two inputs in DRAM were slower, with 1 or 4 many inputs were (Zen 5).
class ManyArrays {
 public:
  ManyArrays(const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs)
      : inputs_(inputs), outputs_(outputs), n_inputs_(n_inputs), n_outputs_(n_outputs) {}
  int n_inputs() const { return n_inputs_; }
  int n_outputs() const { return n_outputs_; }
  const char* input(int i) const { return static_cast<const char*>(inputs_[i]); }
  char* output(int i) const { return static_cast<char*>(outputs_[i]); }
  static constexpr int kVectors = 8;

 private:
  const void* const* inputs_;
  void* const* outputs_;
  int n_inputs_;
  int n_outputs_;
};

// How a strip reaches memory: a vector, or the first bytes of one.
template <class Type>
struct WholeVector {
  using Raw = typename Type::Raw;
  Raw get(const char* from) const { return load<Raw>(from); }
  void put(char* to, Raw raw) const { store(to, raw); }
};
template <class Isa, class Type>
struct PartOfVector {
  using Raw = typename Type::Raw;
  Raw get(const char* from) const { return Isa::template load_partial<Raw>(from, bytes); }
  void put(char* to, Raw raw) const { Isa::store_partial(to, raw, bytes); }
  std::size_t bytes;
};

// kVectors vectors of every array, `offset` bytes from its start. All are read before any is written, for outputs in
// place.
template <class Type, auto kCombine, bool kScaled, int kVectors, class Arrays, class Memory>
inline __attribute__((always_inline)) void reduce_strip(const Reduction& reduction, const Arrays& arrays,
                                                        std::size_t offset, Memory memory) {
  using Raw = typename Type::Raw;
  const auto get = [&](int input, int vector) {
    const typename Type::Reg wide = Type::widen(memory.get(arrays.input(input) + offset + vector * sizeof(Raw)));
    if constexpr (kScaled) return Type::prescaled(wide, reduction.prescale);
    return wide;
  };
  typename Type::Reg accumulators[kVectors] = {};  // initialised for GCC 12, which cannot see that it is filled
  for (int v = 0; v < kVectors; ++v) accumulators[v] = get(0, v);
  for (int i = 1; i < arrays.n_inputs(); ++i) {
    for (int v = 0; v < kVectors; ++v) accumulators[v] = kCombine(accumulators[v], get(i, v));
  }
  Raw results[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kScaled) accumulators[v] = Type::scaled(accumulators[v], reduction.postscale);
    results[v] = Type::narrow(accumulators[v]);
  }
  for (int i = 0; i < arrays.n_outputs(); ++i) {
    for (int v = 0; v < kVectors; ++v) memory.put(arrays.output(i) + offset + v * sizeof(Raw), results[v]);
  }
}

// `kCombine`: what is done with two vectors.
template <class Isa, class Type, auto kCombine, bool kScaled, class Arrays>
void reduce_arrays(const Reduction& caller_reduction, const Arrays& caller_arrays, std::size_t count) {
  // Copied, like the pointers of FewArrays, so that they can stay in registers across stores.
  const Reduction reduction = caller_reduction;
  const Arrays arrays = caller_arrays;
  constexpr std::size_t kVector = sizeof(typename Type::Raw);
  constexpr std::size_t kStrip = kVector * Arrays::kVectors;
  const std::size_t bytes = count * sizeof(typename Type::Element);
  std::size_t offset = 0;
  for (; bytes - offset >= kStrip; offset += kStrip) {
    reduce_strip<Type, kCombine, kScaled, Arrays::kVectors>(reduction, arrays, offset, WholeVector<Type>());
  }
  if constexpr (Arrays::kVectors > 1) {
    for (; bytes - offset >= kVector; offset += kVector) {
      reduce_strip<Type, kCombine, kScaled, 1>(reduction, arrays, offset, WholeVector<Type>());
    }
  }
  if (offset == bytes) return;
  reduce_strip<Type, kCombine, kScaled, 1>(reduction, arrays, offset, PartOfVector<Isa, Type>{bytes - offset});
}

// Returns false when it has no kernel for these numbers of arrays.
template <class Isa, class Type, bool kScaled>
bool sum_few(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
             std::size_t count) {
  const auto sum = [&](const auto& arrays) {
    reduce_arrays<Isa, Type, &Type::add, kScaled>(reduction, arrays, count);
    return true;
  };
  if (n_outputs == 1) {
    if (n_inputs == 2) return sum(FewArrays<2, 1>(inputs, outputs));
    if (n_inputs == 3) return sum(FewArrays<3, 1>(inputs, outputs));
    if (n_inputs == 4) return sum(FewArrays<4, 1>(inputs, outputs));
  } else if (n_outputs == n_inputs) {
    if (n_inputs == 2) return sum(FewArrays<2, 2>(inputs, outputs));
    if (n_inputs == 3) return sum(FewArrays<3, 3>(inputs, outputs));
    if (n_inputs == 4) return sum(FewArrays<4, 4>(inputs, outputs));
  }
  return false;
}

template <class Isa, class Type, bool kScaled>
void reduce_many(const Reduction& reduction, const ManyArrays& arrays, std::size_t count) {
  switch (reduction.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return reduce_arrays<Isa, Type, &Type::add, kScaled>(reduction, arrays, count);
    case ReduceOp::kMin:
      return reduce_arrays<Isa, Type, &Type::minimum, kScaled>(reduction, arrays, count);
    case ReduceOp::kMax:
      return reduce_arrays<Isa, Type, &Type::maximum, kScaled>(reduction, arrays, count);
    case ReduceOp::kProduct:
      return reduce_arrays<Isa, Type, &Type::multiply, kScaled>(reduction, arrays, count);
  }
}

template <class Isa, class Type, bool kScaled>
void reduce_type(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs,
                 int n_outputs, std::size_t count) {
  const bool sums = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAverage;
  if (sums && sum_few<Isa, Type, kScaled>(reduction, inputs, n_inputs, outputs, n_outputs, count)) return;
  reduce_many<Isa, Type, kScaled>(reduction, ManyArrays(inputs, n_inputs, outputs, n_outputs), count);
}

// Sums as half. Always scaled, and float64 with one kernel for all numbers of arrays: memory is the limit, and every
// further kernel makes the library larger. Returns false when the reduction is none of these.
template <class Isa>
bool sum_as_half(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs,
                 int n_outputs, std::size_t count) {
  if (!reduction.as_half || (reduction.op != ReduceOp::kSum && reduction.op != ReduceOp::kAverage)) return false;
  if (reduction.dtype != DType::kFloat32 && reduction.dtype != DType::kFloat64) return false;
  const ManyArrays arrays(inputs, n_inputs, outputs, n_outputs);
  const auto as = [&](auto type) {
    using Type = decltype(type);
    using Rounded = RoundedProducts<Type>;
    if (reduction.prescale != 1.0) return reduce_arrays<Isa, Rounded, &Rounded::add, true>(reduction, arrays, count);
    reduce_arrays<Isa, Type, &Type::add, true>(reduction, arrays, count);
  };
  if (reduction.dtype == DType::kFloat64) {
    as(Float64AsHalf<Isa>());
  } else if (reduction.prescale != 1.0 ||
             !sum_few<Isa, Float32AsHalf<Isa>, true>(reduction, inputs, n_inputs, outputs, n_outputs, count)) {
    as(Float32AsHalf<Isa>());
  }
  return true;
}

template <class From, class To, class Convert>
void convert_arrays(const char* input, char* output, std::size_t count, std::size_t vector, std::size_t from_bytes,
                    std::size_t to_bytes, const Convert& convert) {
  for (std::size_t done = 0; done < count; done += vector) {
    const std::size_t n = count - done < vector ? count - done : vector;
    From from{};
    std::memcpy(&from, input + done * from_bytes, n * from_bytes);
    const To to = convert(from);
    std::memcpy(output + done * to_bytes, &to, n * to_bytes);
  }
}

template <class Isa>
void convert_with(DType half, bool narrows, const char* input, char* output, std::size_t count) {
  const auto as = [&](auto type) {
    using Type = decltype(type);
    using Reg = typename Type::Reg;
    using Raw = typename Type::Raw;
    constexpr std::size_t kVector = sizeof(Raw) / sizeof(typename Type::Element);
    if (narrows) return convert_arrays<Reg, Raw>(input, output, count, kVector, 4, 2, &Type::narrow);
    return convert_arrays<Raw, Reg>(input, output, count, kVector, 2, 4, &Type::widen);
  };
  return half == DType::kFloat16 ? as(Float16<Isa>()) : as(BFloat16<Isa>());
}

template <class Isa>
void reduce_with(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs,
                 int n_outputs, std::size_t count) {
  if (sum_as_half<Isa>(reduction, inputs, n_inputs, outputs, n_outputs, count)) return;
  const bool scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  const auto as = [&](auto type) {
    using Type = decltype(type);
    if (scaled) return reduce_type<Isa, Type, true>(reduction, inputs, n_inputs, outputs, n_outputs, count);
    return reduce_type<Isa, Type, false>(reduction, inputs, n_inputs, outputs, n_outputs, count);
  };
  // Of 16-bit floats with a first factor, rare enough for one kernel for all numbers of arrays.
  const auto with_products_of = [&](auto type) {
    using Type = RoundedProducts<decltype(type)>;
    reduce_many<Isa, Type, true>(reduction, ManyArrays(inputs, n_inputs, outputs, n_outputs), count);
  };
  switch (reduction.dtype) {
    case DType::kFloat16:
      return reduction.prescale != 1.0 ? with_products_of(Float16<Isa>()) : as(Float16<Isa>());
    case DType::kBFloat16:
      return reduction.prescale != 1.0 ? with_products_of(BFloat16<Isa>()) : as(BFloat16<Isa>());
    case DType::kFloat32:
      return as(Float32<Isa>());
    case DType::kFloat64:
      return as(Float64<Isa>());
    case DType::kInt8:
      return as(Integer<Isa, std::int8_t>());
    case DType::kUInt8:
      return as(Integer<Isa, std::uint8_t>());
    case DType::kInt32:
      return as(Integer<Isa, std::int32_t>());
    case DType::kInt64:
      return as(Integer<Isa, std::int64_t>());
  }
}

}  // namespace
}  // namespace kvstore_hvd::detail
