// What the parts of one rank's engine share: its world, its requests, and the lock of both.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "base/blocking.hpp"
#include "base/running_time.hpp"
#include "engine/device_queue.hpp"
#include "engine/engine_options.hpp"
#include "engine/pending.hpp"
#include "request/messages.hpp"
#include "shm/alarm.hpp"
#include "shm/arena.hpp"
#include "shm/poll.hpp"
#include "shm/segment.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

using Lock = std::unique_lock<std::mutex>;

// How often the watcher looks at deadlines: while something is pending, and otherwise.
inline constexpr std::chrono::milliseconds kBusyTick{100};
inline constexpr std::chrono::milliseconds kIdleTick{500};

struct EngineState {
  EngineState(std::shared_ptr<Segment> its_segment, int its_rank, EngineOptions its_options)
      : segment(std::move(its_segment)),
        world(segment->world()),
        rank(its_rank),
        size(segment->size()),
        options(std::move(its_options)),
        policy(WaitPolicy::for_engine(world.has_core_for_each != 0)),
        callers_policy(WaitPolicy::for_callers(world.has_core_for_each != 0)),
        messages(world, rank),
        alarm(world, rank, options.timeout),
        devices(world, rank),
        pending(world, alarm, messages, standstills) {}

  // Whoever has the mutex may wait in a critical section of the world, for a rank that is stopped there.
  Lock locked() {
    Lock lock(mutex, std::defer_lock);
    acquire(lock);
    return lock;
  }

  static void acquire(Lock& lock) {
    // How often to try to get it, which is held for less than a microsecond as a rule, before saying that this thread
    // waits; as SharedLock.
    constexpr int kTries = 64;
    for (int i = 0; i < kTries; ++i) {
      if (lock.try_lock()) return;
      pause_core();
    }
    about_to_block();
    lock.lock();
  }

  RankState& own() { return world.rank(rank); }
  Status health() const { return world.failure.is_set() ? messages.lost() : Status(); }

  const std::shared_ptr<Segment> segment;
  World& world;
  const int rank, size;
  const EngineOptions options;
  const WaitPolicy policy, callers_policy;
  Messages messages;
  Alarm alarm;

  std::mutex mutex;
  std::shared_ptr<Arena> arena;  // under the mutex; null: there is none to protect
  DeviceQueue devices;
  Standstills standstills;  // the watcher looks
  Pending pending;          // under the mutex
};

}  // namespace kvstore_hvd
