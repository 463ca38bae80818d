// Reduction and scaling kernels, chosen once per process for the CPU that runs them.
//
// Every element is reduced in the order of `inputs` (rank order), independently of its neighbours, so that any split of
// an array into pieces gives the same bits, on every instruction set.
#pragma once

#include <cstddef>
#include <string>

#include "kvstore_hvd/types.hpp"

namespace kvstore_hvd {

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // kAverage reduces like kSum; the caller puts 1/size into postscale
  // Multiplied into every input before, and into the result after, the reduction. float16 and bfloat16 are widened to
  // float32, scaled, reduced and rounded once (to nearest, ties to even); float32 scales in float32, float64 in float64;
  // integers scale in float64 and truncate toward zero. 1.0 leaves the bits alone.
  double prescale = 1.0;
  double postscale = 1.0;
};

// Reduces `n_inputs` arrays of `count` elements, in order, and writes the result to every one of `n_outputs` arrays.
// An output may be one of the inputs (the very same address) but must not overlap one otherwise. Pointers need only the
// alignment of the element type. Infinities, NaNs, signed zeros and denormals pass through as IEEE 754 says; min and max
// return NaN when any input is NaN. Integer sums and products wrap around.
void reduce(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            std::size_t count);

// The instruction set in use: "scalar", "avx2" or "avx512".
const char* simd_target();

// Forces a target (tests, KVHVD_SIMD); returns false and changes nothing when the CPU or the build lacks it.
bool set_simd_target(const std::string& target);

}  // namespace kvstore_hvd
