// The operations that one rank completes, one by one, kept in bounded memory until somebody takes them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.hpp"
#include "request/work.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

// One operation. Its times never decrease from member to member.
struct TimelineEvent {
  std::string name, label;  // of the request
  Collective collective;
  Algorithm algorithm;
  DType dtype;
  ReduceOp op;
  bool failed;
  std::uint32_t round;  // see Rounds
  std::uint64_t bytes;  // of this rank's array; kExchange: of the largest of all ranks
  std::chrono::steady_clock::time_point submitted;
  std::chrono::steady_clock::time_point since;      // and those before it under its name are over on this rank
  std::chrono::steady_clock::time_point scheduled;  // as Times::queued ends; `completed` if it never was
  std::chrono::steady_clock::time_point completed;
  World::OnLink on_link;  // 0: it never was
};

struct TimelineEvents {
  std::vector<TimelineEvent> events;  // in the order of completion
  std::uint64_t lost = 0;             // found no room
};

// One thread at a time.
class Timeline {
 public:
  // Keeps up to `capacity` operations that complete from now on; those kept before are dropped.
  void start(std::size_t capacity);
  // Keeps nothing more. What was kept can still be taken.
  void stop() { capacity_ = 0; }

  void record(const Work& work, std::chrono::steady_clock::time_point completed, bool failed) {
    if (capacity_ != 0) add(work, completed, failed);
  }

  // What was kept since the last call.
  TimelineEvents take();

 private:
  void add(const Work& work, std::chrono::steady_clock::time_point completed, bool failed);

  std::size_t capacity_ = 0;  // 0: off
  TimelineEvents kept_;
};

}  // namespace kvstore_hvd
