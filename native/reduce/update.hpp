// Updates of parameters by an optimizer, in one pass over their memory, with the bits of MXNet's operators.
#pragma once

#include <cstddef>

#include "base/types.hpp"

namespace kvstore_hvd {

// A formula. All are computed in float32 but one, every product and sum rounded. Operators of MXNet 1 and 2 round in
// different places, and so do operators of several arrays (multi) and of a float16 weight (mixed).
enum class Rule {
  kSgd1,
  kMultiSgd1,
  kSgd2,
  kMomentum1,
  kMomentum2,
  kNag1,
  kNag2,
  kMixedNag2,
  kAdam1,
  kAdam2,
  kAdamW,
  kLamb1,  // the moments, and the direction of the step in the weight's place; partly in float64
  kLamb2,
  kLambStep1,  // the step, of a length that depends on all elements
  kLambStep2,
};
constexpr int kRules = 15;

// Arguments of MXNet's operators, by their names there.
struct Hyperparameters {
  float lr = 0, wd = 0, eta = 0;
  float rescale_grad = 1;
  float clip_gradient = -1;  // below 0: gradients are not clipped
  float momentum = 0, beta1 = 0, beta2 = 0, epsilon = 0;
  float lower_bound = -1, upper_bound = -1;  // of a weight's norm; below 0: none
  float first_bias = 1, second_bias = 1;     // what moments are divided by
};

// Elements from the first of each array on; a null array is one that the rule does not have.
struct Parameter {
  float* weight;
  const float* gradient;
  float* first;   // momentum, or mean
  float* second;  // variance
};

// Updates `count` elements. The thread's floating-point modes count, as with MXNet's operators.
void update(Rule rule, const Hyperparameters& how, const Parameter& parameter, std::size_t count);

namespace detail {
// Same contract as kvstore_hvd::update.
using UpdateKernel = void (*)(Rule rule, const Hyperparameters& how, const Parameter& parameter, std::size_t count);
}  // namespace detail

}  // namespace kvstore_hvd
