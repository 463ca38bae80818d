// A collective operation as one rank submits it.
#pragma once

#include <functional>
#include <memory>

#include "reduce/reduce.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// A part of a rank's input, in bytes, and where it goes in the output of the rank that takes it.
struct Part {
  int rank;
  std::size_t from, bytes, to;
};

struct Request {
  Collective collective = Collective::kAllreduce;
  // Matches the requests of all ranks, whatever their order of submission. Requests of one rank under the same name run
  // one after another, in the order submitted.
  std::string name;
  // How errors name the tensor, e.g. `'dense0_weight' (key 3)`; not compared across ranks.
  std::string label;
  // Contributions of this process (one per device), each `count` elements; reduced in order before the other ranks'.
  // Broadcast: one, read on the root only.
  std::vector<const void*> inputs;
  // Each receives the result. May be an input, otherwise must not overlap one. Not written before every rank has
  // submitted and agreed, nor after a user error.
  std::vector<void*> outputs;
  // The arrays lie in the memory of a device: the engine does not touch them, see DeviceQueue.
  bool on_device = false;
  std::size_t count = 0;
  std::vector<std::int64_t> shape;  // compared across ranks; product == count
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  // kAverage divides by the sum of the ranks' weights, unless none is above 0. kAbsent: this rank contributes nothing,
  // and counts as an average one of the others.
  double weight = 1.0;
  static constexpr double kAbsent = -1.0;
  double prescale = 1.0;
  double postscale = 1.0;
  bool as_half = false;  // allreduce only: see Reduction
  int root = 0;          // broadcast only
  // Allreduce: a hash of the arrays that are reduced together, all of which fail when ranks disagree about one.
  std::uint64_t group = 0;
  // Exchange: the parts that this rank takes. Reduce-scatter: the one part of the result that it receives. One input
  // and one output then; no part is written where the input is read.
  std::vector<Part> parts;
  // Exchange only: the elements of this rank's input; `count` is the largest number of any rank.
  std::size_t contributed = 0;
  std::int32_t priority = 0;  // higher runs first; that of the last rank to submit decides
  // Non-empty: this rank's input failed; every rank gets kInputFailed with this text. Name, label, on_done matter then.
  std::string input_failure;
  // Called once, on a thread of the engine (or inside submit, wait, shutdown), after the outputs are written or the
  // request has failed. Must neither block nor call the engine.
  std::function<void(const Status&)> on_done;
};

// Whether a rank may wait in the operations of this name for any time, as in a Join. They are in no stall report.
inline bool is_patient(std::string_view name) { return name.substr(0, 1) == "~"; }

// The error in the arguments of a request in a world of `ranks`, or an empty text.
std::string fault_of(const Request& request, int ranks);

// An operation here is a Request, or the Signature of its announcement.
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

// The handle of a submitted request.
class Work {
 public:
  explicit Work(std::shared_ptr<const Request> request) : request_(std::move(request)) {}

  const Request& request() const { return *request_; }

  // Acquire: once true, the outputs are written and status() is complete.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Meaningful once done().
  const Status& status() const { return status_; }

  // Once. An exception on the way (out of memory) ends the process; the other ranks then report that this one died.
  void finish(Status status) noexcept {
    status_ = std::move(status);
    if (request_->on_done) request_->on_done(status_);
    // Release: publishes the outputs and the status.
    done_.store(true, std::memory_order_release);
  }

  // For a new submission, which sets the other fields.
  void renew() {
    status_ = Status();
    done_.store(false, std::memory_order_relaxed);  // Relaxed: only the submitting thread sees it.
    is_waited_for.store(false, std::memory_order_relaxed);
    watched_slot = kNoSlot;
    met = scheduled = {};
    record = 0;
    algorithm = Algorithm::kInline;
    on_link = {};
  }

  // Whether a thread sleeps until it is done. Relaxed: looked at again and again.
  std::atomic<bool> is_waited_for{false};

  // The engine's.
  Clock::time_point submitted;
  Clock::time_point since;    // when it was submitted, or became the first of its name
  Clock::time_point met;      // when all ranks were seen to have submitted it, see Pending::overdue
  std::uint32_t round = 0;    // see Rounds
  bool begins_round = false;  // the first one of it
  std::uint64_t record = 0;   // its number in the flight recorder; 0: it has not been announced
  // The slot whose mark tells the thread that waits for this (see TensorTable), and the value of the bell before.
  std::uint32_t watched_slot = kNoSlot, bell_before = 0;
  // Written by the thread that carries out the schedule, which also completes the work.
  Clock::time_point scheduled;               // its first chunk
  Algorithm algorithm = Algorithm::kInline;  // that of what is never scheduled
  World::OnLink on_link{};                   // from its first chunk to its last

 private:
  const std::shared_ptr<const Request> request_;
  std::atomic<bool> done_{false};
  Status status_;
};

// "allreduce 'dense0_weight' (key 3)".
std::string describe_operation(const Request& request);

// The errors of one rank: prefix, operation, fact and fix. docs/errors.md lists their forms.
class Messages {
 public:
  Messages(World& world, int rank) : world_(world), rank_(rank) {}

  // The request is wrong, as this rank alone can see.
  Status invalid(const Request& request, const std::string& fact) const;
  // The disagreement on the slot's operation; ok when the ranks agree.
  Status disagreement(const Request& request, const Slot& slot) const;
  // The world has failed; meaningful once world.failure is set.
  Status lost(const Request& request) const;
  Status lost() const;
  // This rank has left its world.
  Status left(const Request& request) const;

  // From now on the errors of a lost world say that other ranks can still change this rank's arrays.
  void tell_that_arrays_stay_shared() { arrays_stay_shared_.store(true, std::memory_order_relaxed); }

  // The fact that a rank has left for good before an operation that another one waits in.
  static std::string left_early(const std::string& leaver, const std::string& waiter, const std::string& operation);
  // As left(), for what begins with `prefix`.
  static Status left(const std::string& prefix);
  // In a forked child, where there is no world to look at.
  static Status forked(const std::string& prefix = "");

 private:
  // The world has failed by `fact`; `prefix` says who speaks, and of what.
  Status lost(const std::string& prefix, std::string fact) const;
  std::string prefix() const;
  std::string prefix(const Request& request) const;

  World& world_;
  int rank_;
  // Relaxed: the thread that sets it fails the operations next.
  std::atomic<bool> arrays_stay_shared_{false};
};

}  // namespace kvstore_hvd
