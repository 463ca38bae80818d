// Collective operations on MXNet arrays as one operation of MXNet's engine: it starts when all of its arrays are ready,
// and is over when the last collective is. The ranks match every collective by its own name, so they may group
// differently.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.hpp"
#include "engine/engine.hpp"
#include "mxnet/engine_abi.hpp"
#include "mxnet/turns.hpp"
#include "mxnet/unread_errors.hpp"
#include "request/request.hpp"

namespace kvstore_hvd::mxnet {

// One collective. Several of one operation share no memory.
struct Member {
  Request request;  // without what depends on the arrays' contents
  std::vector<Array> outputs;
  std::vector<Array> inputs;  // none: the outputs are the inputs
};

// What one operation carries. Immutable once it has been pushed; then it may be pushed any number of times.
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

class Operation final : public AsyncOp, public std::enable_shared_from_this<Operation> {
 public:
  // `world`: how errors that arise here begin.
  Operation(const Links& links, std::shared_ptr<const Group> group, std::string world, const StepReduction& how);

  // Hands the operation to MXNet. Returns how it ended where MXNet is naive. Throws Error when MXNet refuses it; it has
  // been announced as failed then.
  static Status push(const std::shared_ptr<Operation>& operation);

  void start(const Completion& completion) noexcept override;
  void skipped() noexcept override;
  void refused(const std::string& why) noexcept override;

 private:
  const std::vector<Member>& members() const { return group_->members; }
  Request request_of(std::size_t place) const;
  Request with_arrays(std::size_t place) const;
  void submit(std::size_t place);
  // Tells the other ranks, each collective in its turn, that it failed here.
  void announce_failed(const std::function<Request(Request)>& failed);
  void finish(std::size_t place, const Status& status);
  // An array of the group, and the group with it.
  std::shared_ptr<const Array> written_by(std::size_t place) const;
  // What an error adds that one of several collectives may be to blame for: MXNet does not say which.
  std::string others() const;
  std::string prefix_of(std::size_t place) const;

  const Links links_;
  const std::shared_ptr<const Group> group_;
  const std::string world_;
  const StepReduction how_;
  const std::thread::id pusher_ = std::this_thread::get_id();
  std::vector<std::uint64_t> turns_;

  Completion completion_;
  std::atomic<std::size_t> pending_;
  std::mutex mutex_;
  // Under mutex_: the first of the group that failed, and how.
  std::size_t failed_;
  Status status_;
};

}  // namespace kvstore_hvd::mxnet
