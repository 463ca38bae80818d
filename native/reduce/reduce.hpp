// Reduction and scaling kernels, chosen once per process for the CPU that runs them.
//
// Every element is reduced in the order of `inputs` (rank order), independently of its neighbours, so that any split of
// an array into pieces gives the same bits, on every instruction set.
#pragma once

#include <cstddef>
#include <string>

#include "base/types.hpp"
#include "reduce/update.hpp"

namespace kvstore_hvd {

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // kAverage reduces like kSum; the caller puts the divisor into postscale
  // Multiplied into every input before, and into the result after, the reduction. float16 and bfloat16 are widened to
  // float32, scaled, rounded to their type (to nearest, ties to even) as Horovod does it, reduced in float32, scaled
  // and rounded once; float32 scales in float32, float64 in float64; integers scale in float64 and truncate toward
  // zero, a product out of range becomes the nearest value of the type, NaN becomes 0. 1.0 leaves the value alone.
  double prescale = 1.0;
  double postscale = 1.0;
  // Sums and averages of float32 and float64 only, without effect on others: as if the inputs were cast to float16
  // (float64 by way of float32; to nearest even, too large to infinity), reduced as float16, and the result cast back.
  bool as_half = false;
};

// Reduces `n_inputs` >= 1 arrays of `count` elements, in order, and writes the result to every one of `n_outputs` >= 1
// arrays. An output may be one of the inputs (the very same address) but must not overlap one otherwise. Pointers need
// only the alignment of the element type. Integer sums and products wrap around.
//
// Infinities, signed zeros and denormals pass through as IEEE 754 says, whatever floating-point modes the calling
// thread has set (on x86-64; elsewhere the thread must be in the default modes). min and max are IEEE 754-2019
// `minimum` and `maximum`: -0 is less than +0, and a NaN input gives NaN. Which NaN an operation returns depends on
// compiler and CPU, so every NaN result is the canonical one: positive, quiet, no payload. Only a single input that is
// neither scaled nor taken as half is copied bit by bit.
void reduce(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            std::size_t count);

// From float32 to float16 or bfloat16 (to nearest, ties to even, too large to infinity; NaNs become the canonical one),
// and back. The arrays must not overlap.
void narrow(DType to, const void* input, void* output, std::size_t count);
void widen(DType from, const void* input, void* output, std::size_t count);

// The instruction set in use: "scalar", "avx2" or "avx512".
const char* simd_target();

// Forces a target, or with "auto" the best one again (tests, KVHVD_SIMD); returns false and changes nothing when the
// name is unknown, or the CPU or the build lacks it. All targets give the same bits; a reduction that is running goes
// on with the one it began with.
bool set_simd_target(const std::string& target);

}  // namespace kvstore_hvd

// The entry point of every instruction set that reduce.cpp chooses between.

namespace kvstore_hvd::detail {

// Same contract as kvstore_hvd::reduce, with n_inputs, n_outputs and count at least 1.
using ReduceKernel = void (*)(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs,
                              int n_outputs, std::size_t count);

// Same contract as kvstore_hvd::narrow and, unless `narrows`, as kvstore_hvd::widen.
using ConvertKernel = void (*)(DType half, bool narrows, const char* input, char* output, std::size_t count);

struct Kernels {
  ReduceKernel reduce = nullptr;
  ConvertKernel convert = nullptr;
  UpdateKernel update = nullptr;
};

// The kernels, or null ones when this build lacks it: the compiler was not given the flags named in the source file, or
// targets another architecture. Asking is safe on every CPU, calling the kernel is not.
Kernels scalar_kernels();
Kernels avx2_kernels();
Kernels avx512_kernels();

}  // namespace kvstore_hvd::detail
