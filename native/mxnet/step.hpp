// All gradients of a Trainer's step as operations of MXNet's engine: what is the same in every step is prepared once,
// and small gradients share an operation, which costs several times what their sum does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "engine/engine.hpp"
#include "mxnet/engine_abi.hpp"
#include "mxnet/turns.hpp"
#include "mxnet/unread_errors.hpp"

namespace kvstore_hvd::mxnet {

// An array that is reduced in place.
struct Gradient {
  std::string name, label;
  Array array;
  std::int32_t priority;
  std::string title = {};  // of a group's first one: how MXNet's profiler names the group
};

// Gradients of one operation: none shares memory with another.
using Group = std::vector<Gradient>;

// How the gradients of a step are reduced; see Request.
struct StepReduction {
  ReduceOp op = ReduceOp::kSum;
  bool as_half = false;
  double weight = 1.0;
};

// What the operations of an adapter share. They do not keep the engine alive, see Operation.
struct Links {
  std::shared_ptr<const Api> api;
  std::weak_ptr<Engine> engine;
  std::shared_ptr<UnreadErrors> unread;
  std::shared_ptr<Turns> turns;
};

// Immutable once all gradients are added; may be pushed any number of times, from any thread.
class Step {
 public:
  // The gradients keep their order. `bytes`: of the array's elements.
  void add(Gradient gradient, std::size_t bytes);

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
