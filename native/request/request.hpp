// A collective operation as one rank submits it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "base/types.hpp"
#include "reduce/reduce.hpp"

namespace kvstore_hvd {

// A part of a rank's input, in bytes, and where it goes in the output of the rank that takes it.
struct Part {
  int rank;
  std::size_t from, bytes, to;
};

struct Request {
  Collective collective = Collective::kAllreduce;
  // Matches the request with those of the other ranks; equal on all ranks, whatever the order of submission. Requests
  // of one rank under the same name run one after another, in the order submitted.
  std::string name;
  // How errors name the tensor, e.g. `'dense0_weight' (key 3)`; not compared across ranks.
  std::string label;
  // Contributions of this process (one per device), each `count` elements; summed in order before they meet the other
  // ranks' (with op, for min/max/product). Broadcast: one, read on the root only.
  std::vector<const void*> inputs;
  // Each receives the result. May be the same address as an input, otherwise must not overlap one. Not written before
  // every rank has submitted and agreed; left as they were after a user error.
  std::vector<void*> outputs;
  // The arrays lie in the memory of a device: the engine does not touch them, see DeviceQueue.
  bool on_device = false;
  std::size_t count = 0;
  std::vector<std::int64_t> shape;  // compared across ranks; product == count
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  // kAverage divides the sum by that of the ranks' weights, unless there is none above 0. kAbsent: this rank
  // contributes nothing, and counts as an average one of the others.
  double weight = 1.0;
  static constexpr double kAbsent = -1.0;
  double prescale = 1.0;
  double postscale = 1.0;
  bool as_half = false;  // allreduce only: see Reduction
  int root = 0;          // broadcast only
  // Allreduce: a hash of what is reduced together with it, so that all of it fails when ranks disagree about a part.
  std::uint64_t group = 0;
  // Exchange: what this rank takes. Reduce-scatter: the one part of the result that it receives (of no rank's input).
  // One input and one output then, which do not overlap.
  std::vector<Part> parts;
  // Exchange only: the elements of this rank's input; `count` is the largest number of any rank.
  std::size_t contributed = 0;
  std::int32_t priority = 0;  // higher runs first; that of the last rank to submit decides
  // Non-empty: this rank cannot take part because its input failed; every rank gets kInputFailed with this text. Only
  // name, label and on_done matter then.
  std::string input_failure;
  // Called exactly once, on a thread of the engine (or inside submit, wait, shutdown), after the outputs are written or
  // the request has failed. Must not block and must not call the engine.
  std::function<void(const Status&)> on_done;
};

// Whether a rank may wait in the operations of this name for any time: for what depends on the length of a program.
// They are in no stall report.
inline bool is_patient(std::string_view name) { return name.substr(0, 1) == "~"; }

// What is wrong with the arguments of a request in a world of `ranks`; empty when nothing is.
std::string fault_of(const Request& request, int ranks);

// An operation here is a Request, or the Signature that a rank announces it with.
template <class Operation>
std::size_t bytes_of(const Operation& operation) {
  return operation.count * size_of(operation.dtype);
}

// How the contributions of all ranks are reduced. `weights`: see World::weights().
template <class Operation>
Reduction reduction_of(const Operation& operation, double weights) {
  const bool divides = operation.op == ReduceOp::kAverage && weights != 0.0;
  const double postscale = divides ? operation.postscale / weights : operation.postscale;
  return {operation.dtype, operation.op, operation.prescale, postscale, operation.as_half != 0};
}

// The same in steps, each of which rounds to the dtype: the devices of a rank, the ranks of a host, the hosts.
inline Reduction reduction_of_devices(const Request& request) {
  return {request.dtype, request.op, 1.0, 1.0, request.as_half};
}
template <class Operation>
Reduction reduction_within_host(const Operation& operation) {
  return {operation.dtype, operation.op, operation.prescale, 1.0, operation.as_half != 0};
}
template <class Operation>
Reduction reduction_over_hosts(const Operation& operation, double weights) {
  Reduction reduction = reduction_of(operation, weights);
  reduction.prescale = 1.0;
  return reduction;
}

}  // namespace kvstore_hvd
