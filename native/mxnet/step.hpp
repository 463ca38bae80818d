// All gradients of a Trainer's step as operations of MXNet's engine: what is the same in every step is prepared once,
// and small gradients share an operation, which costs several times what their sum does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "mxnet/engine_abi.hpp"
#include "mxnet/operation.hpp"

namespace kvstore_hvd::mxnet {

// Immutable once all gradients are added; may be pushed any number of times, from any thread.
class Step {
 public:
  // A gradient that is reduced in place. They keep their order. `bytes`: of the array's elements.
  void add(std::string name, std::string label, Array gradient, std::int32_t priority, std::size_t bytes);

  // Hands everything to MXNet. `world`: how errors that arise here begin. Returns the first refusal, see refusal.hpp;
  // the gradients of other operations were handed over then.
  Status push(const Links& links, const std::string& world, const StepReduction& how) const;

  // A group waits for the last of its gradients: so it takes only those of up to kSmall bytes, and kMost of them, of
  // neighbouring parameters.
  static constexpr std::size_t kSmall = 16 << 10;
  static constexpr std::size_t kMost = 8;

 private:
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<const void*> chunks_;  // of the last group, if its gradients are small
};

}  // namespace kvstore_hvd::mxnet
