// One collective operation on MXNet arrays, on its way from MXNet's engine to ours and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.hpp"
#include "mxnet/engine_abi.hpp"
#include "mxnet/turns.hpp"
#include "mxnet/unread_errors.hpp"
#include "request/request.hpp"

namespace kvstore_hvd::mxnet {

class Operation final : public AsyncOp, public std::enable_shared_from_this<Operation> {
 public:
  // `request`: everything that does not depend on the arrays' contents. `prefix`: how errors that arise here begin.
  // Operations must not keep the engine alive: the last one may end on a thread of the engine, which cannot wait for
  // itself.
  Operation(std::shared_ptr<const Api> api, std::weak_ptr<Engine> engine, std::shared_ptr<UnreadErrors> unread,
            std::shared_ptr<Turns> turns, Request request, std::string prefix, std::vector<Array> inputs,
            std::vector<Array> outputs, bool naive);

  // To be called in the order of the calls, before MXNet gets the operation.
  void take_turn() { turn_ = turns_->take(request_.name); }

  // How MXNet's profiler names it.
  const char* name() const { return name_.c_str(); }

  void start(const Completion& completion) noexcept override;
  void skipped() noexcept override;
  void refused(const std::string& why) noexcept override;

  // Naive only, after the push: how the operation ended.
  const Status& status() const { return status_; }

 private:
  Request describe_arrays();
  void open_all(const std::vector<Array>& arrays, bool written);
  void check_overlaps() const;
  void submit(Request request);
  // Tells the other ranks, in turn, that the operation failed here.
  void announce_failed(Request request);
  void finish(const Status& status);

  std::shared_ptr<const Api> api_;
  std::weak_ptr<Engine> engine_;
  std::shared_ptr<UnreadErrors> unread_;
  std::shared_ptr<Turns> turns_;
  Request request_;
  std::string prefix_, name_;
  std::vector<Array> inputs_;
  std::vector<Array> outputs_;
  const bool naive_;
  const std::thread::id pusher_ = std::this_thread::get_id();
  std::uint64_t turn_ = 0;

  std::vector<View> views_;  // of inputs_, then of outputs_
  Completion completion_;
  Status status_;
};

}  // namespace kvstore_hvd::mxnet
