// The handle of a submitted request.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/status.hpp"
#include "request/request.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

class Work {
 public:
  explicit Work(std::shared_ptr<const Request> request) : request_(std::move(request)) {}

  const Request& request() const { return *request_; }

  // Acquire: once true, the outputs are written and status() is complete.
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Meaningful once done().
  const Status& status() const { return status_; }

  // Once. An exception on the way (out of memory) ends the process: nobody could be told that the operation is over,
  // and the other ranks are told that this one died.
  void finish(Status status) noexcept {
    status_ = std::move(status);
    if (request_->on_done) request_->on_done(status_);
    // Release: publishes the outputs and the status.
    done_.store(true, std::memory_order_release);
  }

  // Makes it that of a new submission, which sets the other times and counts itself.
  void renew() {
    status_ = Status();
    done_.store(false, std::memory_order_relaxed);  // Relaxed: seen by the thread that submits it only, as yet.
    is_waited_for.store(false, std::memory_order_relaxed);
    watched_slot = kNoSlot;
    met = scheduled = {};
    algorithm = Algorithm::kInline;
    on_link = {};
  }

  // Whether a thread sleeps until it is done. Relaxed: looked at again and again.
  std::atomic<bool> is_waited_for{false};

  // The engine's.
  std::chrono::steady_clock::time_point submitted;
  std::chrono::steady_clock::time_point since;  // when it was submitted, or became the first of its name
  std::chrono::steady_clock::time_point met;    // when all ranks were seen to have submitted it, see Pending::overdue
  std::uint32_t round = 0;                      // see Rounds
  // The slot whose mark tells the thread that waits for this, see InlineReduction; and what the bell was at before.
  std::uint32_t watched_slot = kNoSlot, bell_before = 0;
  // Written by the thread that carries out the schedule, which also completes the work.
  std::chrono::steady_clock::time_point scheduled;  // its first chunk
  Algorithm algorithm = Algorithm::kInline;         // that of what is never scheduled
  World::OnLink on_link{};                          // from its first chunk to its last

 private:
  const std::shared_ptr<const Request> request_;
  std::atomic<bool> done_{false};
  Status status_;
};

}  // namespace kvstore_hvd
