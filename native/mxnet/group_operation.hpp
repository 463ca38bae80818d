// The sums of a group of gradients as one operation of MXNet: it starts when all of them are ready and is over when the
// last sum is. The ranks match every gradient by its own name, so they may group differently.
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
#include "mxnet/step.hpp"
#include "request/request.hpp"

namespace kvstore_hvd::mxnet {

class GroupOperation final : public AsyncOp, public std::enable_shared_from_this<GroupOperation> {
 public:
  // `world`: how errors that arise here begin.
  GroupOperation(Links links, std::shared_ptr<const Group> group, std::string world, const StepReduction& how);

  // Hands the operation to MXNet. Throws Error when MXNet refuses it; it has been announced as failed then.
  static void push(const std::shared_ptr<GroupOperation>& operation);

  void start(const Completion& completion) noexcept override;
  void skipped() noexcept override;
  void refused(const std::string& why) noexcept override;

 private:
  Request request_of(std::size_t place) const;
  void submit(std::size_t place);
  // Tells the other ranks, each gradient in its turn, that it failed here.
  void announce_failed(const std::function<Request(Request)>& failed);
  void finish(std::size_t place, const Status& status);
  // What an error adds that one of several gradients may be to blame for: MXNet does not say which.
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
