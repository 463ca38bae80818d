// How what hosts have announced is reduced: as a Request is, see request.hpp.
#pragma once

#include "reduce/reduce.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// What a host's ranks contribute, and then all hosts.
inline Reduction reduction_within_host(const Signature& agreed) {
  return {agreed.dtype, agreed.op, agreed.prescale, 1.0, agreed.as_half != 0};
}
inline Reduction reduction_over_hosts(const Signature& agreed, double weights) {
  const bool divides = agreed.op == ReduceOp::kAverage && weights != 0.0;
  return {agreed.dtype, agreed.op, 1.0, divides ? agreed.postscale / weights : agreed.postscale, agreed.as_half != 0};
}
inline std::size_t bytes_of(const Signature& signature) { return signature.count * size_of(signature.dtype); }

}  // namespace kvstore_hvd
