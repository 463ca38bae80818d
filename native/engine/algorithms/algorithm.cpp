#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {

const Steps& steps_of(Algorithm algorithm) {
  static constexpr Steps kNothing{Steps::Memory::kNone, nullptr, nullptr, nullptr};
  static constexpr Steps kOnDevice{Steps::Memory::kDevice, nullptr, nullptr, nullptr};
  // In the order of Algorithm.
  static constexpr const Steps* kSteps[] = {&kNothing,  &kOneShot, &kTwoShot,       &kBroadcast,
                                            &kDirect,   &kNothing, &kExchange,      &kReduceScatter,
                                            &kOnDevice, &kLinkSum, &kLinkBroadcast, &kLinkExchange};
  return *kSteps[static_cast<int>(algorithm)];
}

}  // namespace kvstore_hvd
