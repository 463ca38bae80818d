#include "engine/algorithms/algorithm.hpp"

namespace kvstore_hvd {

const Steps& steps_of(Algorithm algorithm) {
  static constexpr Steps kNothing{Steps::Memory::kNone, nullptr, nullptr, nullptr};
  static constexpr Steps kOnDevice{Steps::Memory::kDevice, nullptr, nullptr, nullptr};
  switch (algorithm) {
    case Algorithm::kFail:
    case Algorithm::kInline:
      break;
    case Algorithm::kOneShot:
      return kOneShot;
    case Algorithm::kTwoShot:
      return kTwoShot;
    case Algorithm::kBroadcast:
      return kBroadcast;
    case Algorithm::kDirect:
      return kDirect;
    case Algorithm::kExchange:
      return kExchange;
    case Algorithm::kReduceScatter:
      return kReduceScatter;
    case Algorithm::kLinkSum:
      return kLinkSum;
    case Algorithm::kLinkBroadcast:
      return kLinkBroadcast;
    case Algorithm::kLinkExchange:
      return kLinkExchange;
    case Algorithm::kDevice:
      return kOnDevice;
  }
  return kNothing;
}

}  // namespace kvstore_hvd
