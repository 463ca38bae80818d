// The entry point of every instruction set that reduce.cpp chooses between.
#pragma once

#include <cstddef>

#include "reduce/reduce.hpp"

namespace kvstore_hvd::detail {

// Same contract as kvstore_hvd::reduce, with n_inputs, n_outputs and count at least 1.
using ReduceKernel = void (*)(const Reduction& reduction, const void* const* inputs, int n_inputs, void* const* outputs,
                              int n_outputs, std::size_t count);

// The kernel, or nullptr when this build lacks it: the compiler was not given the flags named in the source file, or
// targets another architecture. Asking is safe on every CPU, calling the kernel is not.
ReduceKernel scalar_kernel();
ReduceKernel avx2_kernel();
ReduceKernel avx512_kernel();

}  // namespace kvstore_hvd::detail
