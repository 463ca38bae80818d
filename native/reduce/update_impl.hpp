// The updates as loops that the compiler turns into vectors, included once by each reduce_<isa>.cpp; see the rules
// there, in reduce_impl.hpp.
#pragma once

#include "reduce/update.hpp"

namespace kvstore_hvd::detail {
namespace {

inline float clipped(float x, float bound) { return x > bound ? bound : x < -bound ? -bound : x; }

// One element.
template <Rule kRule, bool kClips>
inline __attribute__((always_inline)) void update_element(const Hyperparameters& how, float g, float& w, float& m,
                                                          float& v) {
  const float lr_wd = how.lr * how.wd;
  const auto clip = [&](float x) { return kClips ? clipped(x, how.clip_gradient) : x; };
  const float scaled = clip(how.rescale_grad * g);
  const float step = kClips ? how.lr * scaled : how.lr * how.rescale_grad * g;
  const float decayed = scaled + how.wd * w;
  const auto moments = [&](float x) {
    m = how.beta1 * m + (1.F - how.beta1) * x;
    v = how.beta2 * v + (1.F - how.beta2) * x * x;
  };
  const auto direction = [&] {
    const float mean = m / how.first_bias, variance = v / how.second_bias, decay = how.wd * w;
    if constexpr (kRule == Rule::kLamb1 || kRule == Rule::kLambStep1)
      return static_cast<float>(mean / (__builtin_sqrt(double{variance}) + how.epsilon) + decay);
    return mean / (__builtin_sqrtf(variance) + how.epsilon) + decay;
  };
  if constexpr (kRule == Rule::kSgd1) w = (1.F - lr_wd) * w - step;
  if constexpr (kRule == Rule::kMultiSgd1) w = w + (0.F - lr_wd * w - step);
  if constexpr (kRule == Rule::kSgd2) w = w - how.lr * decayed;
  if constexpr (kRule == Rule::kMomentum1) {
    m = how.momentum * m - lr_wd * w - step;
    w = w + m;
  }
  if constexpr (kRule == Rule::kMomentum2) {
    m = how.momentum * m - how.lr * decayed;
    w = w + m;
  }
  if constexpr (kRule == Rule::kNag1) {
    m = how.momentum * m;
    w = w - m + (how.momentum + 1.F) * (m - how.lr * decayed);
    m = m - how.lr * (scaled + how.wd * w);  // of the new weight
  }
  if constexpr (kRule == Rule::kNag2) {
    m = how.momentum * m - how.lr * decayed;
    w = w + how.momentum * m - how.lr * decayed;
  }
  if constexpr (kRule == Rule::kMixedNag2) {
    m = how.momentum * m - how.lr * decayed;
    w = w + (how.momentum * m - how.lr * decayed);
  }
  if constexpr (kRule == Rule::kAdam1) {
    moments(clip(how.rescale_grad * g + how.wd * w));
    w = w - how.lr * m / (__builtin_sqrtf(v) + how.epsilon);
  }
  if constexpr (kRule == Rule::kAdam2) {
    moments(decayed);
    w = w - how.lr * m / (__builtin_sqrtf(v) + how.epsilon);
  }
  if constexpr (kRule == Rule::kAdamW) {
    const float square = scaled * scaled;
    m = how.beta1 * (m - scaled) + scaled;
    v = how.beta2 * (v - square) + square;
    w = w - how.eta * (how.lr * m / (__builtin_sqrtf(v) + how.epsilon) + how.wd * w);
  }
  if constexpr (kRule == Rule::kLamb1 || kRule == Rule::kLamb2) {
    moments(scaled);
    w = direction();
  }
  if constexpr (kRule >= Rule::kLambStep1) w = w - how.lr * direction();
}

template <Rule kRule, bool kClips>
void update_by(const Hyperparameters& given, const Parameter& parameter, std::size_t count) {
  const Hyperparameters how = given;  // the compiler must assume that a store changes what is referred to
  const auto [weight, gradient, first, second] = parameter;
  constexpr int kStates = kRule >= Rule::kAdam1 ? 2 : kRule >= Rule::kMomentum1 ? 1 : 0;
  for (std::size_t i = 0; i < count; ++i) {
    float w = weight[i], m = 0, v = 0, g = 0;
    if constexpr (kRule < Rule::kLambStep1) g = gradient[i];
    if constexpr (kStates > 0) m = first[i];
    if constexpr (kStates > 1) v = second[i];
    update_element<kRule, kClips>(how, g, w, m, v);
    weight[i] = w;
    if constexpr (kStates > 0) first[i] = m;
    if constexpr (kStates > 1) second[i] = v;
  }
}

template <int kRule = 0>
void update_with(Rule rule, const Hyperparameters& how, const Parameter& parameter, std::size_t count) {
  constexpr auto kThis = static_cast<Rule>(kRule);
  if (rule == kThis)
    return how.clip_gradient >= 0 ? update_by<kThis, true>(how, parameter, count)
                                  : update_by<kThis, false>(how, parameter, count);
  if constexpr (kRule + 1 < kRules) update_with<kRule + 1>(rule, how, parameter, count);
}

}  // namespace
}  // namespace kvstore_hvd::detail
