// Collective operations on MXNet arrays as operations of MXNet's engine: one by one, or all gradients of a step.
#pragma once

#include <functional>
#include <mutex>
#include <thread>

#include "engine/engine.hpp"
#include "mxnet/errors.hpp"
#include "mxnet/turns.hpp"

namespace kvstore_hvd::mxnet {

// One collective. Several of one operation share no memory.
struct Member {
  Request request;  // without what depends on the arrays' contents
  std::vector<Array> outputs;
  std::vector<Array> inputs;  // none: the outputs are the inputs
};

// The collectives of an operation. Immutable once it has been pushed; may be pushed any number of times.
struct Group {
  std::vector<Member> members;
  std::string title;  // how MXNet's profiler names it
};

// How allreduces are reduced, which may change from one push to the next; see Request.
struct StepReduction {
  ReduceOp op = ReduceOp::kSum;
  bool as_half = false;
  double weight = 1.0;
};

// What the operations of an adapter share. They must not keep the engine alive: the last one may end on a thread of the
// engine, which cannot wait for itself.
struct Links {
  std::shared_ptr<const Api> api;
  std::weak_ptr<Engine> engine;
  std::shared_ptr<UnreadErrors> unread;
  std::shared_ptr<Turns> turns;
  // MXNet runs with NaiveEngine: an operation is over when its push returns, and errors are returned, not kept.
  bool naive = false;
};

// One or several collectives: it starts when all of its arrays are ready, and is over when the last collective is. The
// ranks match every collective by its own name, so they may group differently.
class Operation final : public AsyncOp, public std::enable_shared_from_this<Operation> {
 public:
  // `prefix`: how errors that arise here begin.
  Operation(const Links& links, std::shared_ptr<const Group> group, std::string prefix, const StepReduction& how);

  // Hands the operation to MXNet. Returns how it ended where MXNet is naive. Throws Error when MXNet refuses it; it has
  // been announced as failed then.
  static Status push(const std::shared_ptr<Operation>& operation);

  void start(const Completion& completion) noexcept override;
  void skipped() noexcept override;
  void refused(const std::string& why) noexcept override;

 private:
  const std::vector<Member>& members() const { return group_->members; }
  Request request_of(std::size_t i) const;
  Request with_arrays(std::size_t i) const;
  void submit(std::size_t i);
  // Tells the other ranks, each collective in its turn, that it failed here.
  void announce_failed(const std::function<Request(Request)>& failed);
  void finish(std::size_t i, const Status& status);
  // An array of the group, and the group with it.
  std::shared_ptr<const Array> written_by(std::size_t i) const;
  // For errors of a group, of which MXNet does not say which collective failed.
  std::string others() const;
  std::string prefix_of(std::size_t i) const;

  const Links links_;
  const std::shared_ptr<const Group> group_;
  const std::string prefix_;
  const StepReduction how_;
  const std::thread::id pusher_ = std::this_thread::get_id();
  std::vector<std::uint64_t> turns_;

  Completion completion_;
  std::atomic<std::size_t> pending_{members().size()};
  std::mutex mutex_;
  // Under mutex_: the first of the group that failed, and how.
  std::size_t failed_ = members().size();
  Status status_;
};

// All gradients of a Trainer's step as operations of MXNet's engine: what is the same in every step is prepared once,
// and small gradients share an operation, which costs several times what their sum does.
//
// Immutable once all gradients are added; may be pushed any number of times, from any thread.
class Step {
 public:
  // A gradient that is reduced in place. They keep their order. `bytes`: of the array's elements.
  void add(std::string name, std::string label, Array gradient, std::int32_t priority, std::size_t bytes);

  // Hands everything to MXNet. `prefix`: how errors that arise here begin. Returns the first refusal, see errors.hpp;
  // the gradients of other operations were handed over then.
  Status push(const Links& links, const std::string& prefix, const StepReduction& how) const;

  // A group waits for the last of its gradients: so it takes at most kMost neighbours of up to kSmall bytes.
  static constexpr std::size_t kSmall = 16 << 10;
  static constexpr std::size_t kMost = 8;

 private:
  std::vector<std::shared_ptr<Group>> groups_;
  std::vector<const void*> chunks_;  // of the last group, if its gradients are small
};

}  // namespace kvstore_hvd::mxnet
