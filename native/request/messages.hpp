// What the user reads when a request fails: who speaks, the operation, the fact, and what to do about it. The forms are
// listed in docs/errors.md.
#pragma once

#include <atomic>
#include <string>

#include "base/status.hpp"
#include "request/request.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// "allreduce 'dense0_weight' (key 3)".
std::string describe_operation(const Request& request);

// The errors of one rank.
class Messages {
 public:
  Messages(World& world, int rank) : world_(world), rank_(rank) {}

  // The request is wrong, as this rank alone can see.
  Status invalid(const Request& request, const std::string& fact) const;
  // What the ranks found out when they compared their announcements of the slot; ok when they agree.
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
  static Status forked();

 private:
  // The world has failed by `fact`; `prefix` says who speaks, and of what.
  Status lost(const std::string& prefix, std::string fact) const;
  std::string prefix() const;
  std::string prefix(const Request& request) const;

  World& world_;
  int rank_;
  // Relaxed: the thread that sets it fails the operations next, and an error that another thread makes meanwhile may
  // lack the sentence.
  std::atomic<bool> arrays_stay_shared_{false};
};

}  // namespace kvstore_hvd
