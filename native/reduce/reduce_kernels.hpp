// The entry point of every instruction set that reduce.cpp chooses between.
#pragma once

#include <cstddef>

#include "reduce/reduce.hpp"

namespace kvstore_hvd::detail {

// Same contract as kvstore_hvd::reduce, with n_inputs, n_outputs and count at least 1.
using ReduceKernel = void (*)(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs,
                              int n_outputs, std::size_t count);

// Same contract as kvstore_hvd::narrow and, unless `narrows`, as kvstore_hvd::widen.
using ConvertKernel = void (*)(DType half, bool narrows, const char* input, char* output, std::size_t count);

struct Kernels {
  ReduceKernel reduce = nullptr;
  ConvertKernel convert = nullptr;
};

// The kernels, or null ones when this build lacks it: the compiler was not given the flags named in the source file, or
// targets another architecture. Asking is safe on every CPU, calling the kernel is not.
Kernels scalar_kernels();
Kernels avx2_kernels();
Kernels avx512_kernels();

}  // namespace kvstore_hvd::detail
