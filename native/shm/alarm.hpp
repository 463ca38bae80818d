// One rank's way to fail its world, and how long it waits before it does.
#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>

#include "base/status.hpp"
#include "shm/failure.hpp"

namespace kvstore_hvd {

struct World;

// All members may be called from any thread of the rank.
class Alarm {
 public:
  // `timeout`: how long an operation may wait for another rank.
  Alarm(World& world, int rank, std::chrono::nanoseconds timeout) : world_(world), rank_(rank), timeout_(timeout) {}

  // Fails the world, unless it has failed already, and wakes everyone who waits. `fact` says what happened ("rank 2 ...
  // died"), without naming the rank that reads it.
  void raise(ErrorCode code, std::string_view fact);

  const Failure& failure() const;
  int rank() const { return rank_; }
  // As messages name a rank: "rank 3".
  std::string name_of(int rank) const;
  std::chrono::nanoseconds timeout() const { return timeout_; }

 private:
  World& world_;
  const int rank_;
  const std::chrono::nanoseconds timeout_;
  std::mutex mutex_;
};

}  // namespace kvstore_hvd
