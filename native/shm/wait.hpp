// Waiting for another rank: a counter in the segment that one rank advances and others wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "shm/alarm.hpp"
#include "shm/failure.hpp"

namespace kvstore_hvd {

// No sleep within an operation is longer than this without a look at the failure and at what it waits for: the bound
// for noticing either when its wake-up was missed, as by a rank that is stopped before it wakes a sleeper. An idle
// communication thread looks at its bell every kIdleTick (engine_state.hpp).
inline constexpr std::chrono::milliseconds kMaxSleep{100};

// How a rank waits before it goes to sleep.
struct WaitPolicy {
  std::chrono::nanoseconds spin{0};  // busy, only sensible while every rank has a core of its own
  int yields = 0;                    // sched_yield() calls after that; given up early when one costs a time slice
  bool sleeps = true;                // false: gives up then, for a thread that has other things to do

  // The policy of a thread of the engine, which shares a core with computations. `has_core_for_each`: whether the ranks
  // may use as many cores as there are ranks.
  static WaitPolicy for_engine(bool has_core_for_each);
  // The policy of a caller that would wait anyway: it spins for longer than waking a sleeper takes. Otherwise a rank
  // that was woken late would find the next one asleep, and every operation would cost a wake-up.
  static WaitPolicy for_callers(bool has_core_for_each);
};

// Asks the scheduler for a short time slice for the calling thread, so that a woken rank runs soon between busy compute
// threads. Unprivileged; ignored by kernels that do not know it.
void request_short_slice();

// A counter that only grows (compared with wrap-around, so it may run for ever) and never by more than 2^31 between a
// writer and a waiter. Zero-initialised memory is a valid Flag. Padded so that two flags never share a cache line, nor
// the pair of lines that the prefetcher fetches together.
class alignas(128) Flag {
 public:
  // Acquire: what the poster wrote before post() is visible once the value is seen.
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  bool reached(std::uint32_t target) const { return static_cast<std::int32_t>(value() - target) >= 0; }

  // As reached(), for one that has posted another flag: of two that post and then look, one at least sees the other.
  bool reached_after_post(std::uint32_t target) const {
    return static_cast<std::int32_t>(value_.load(std::memory_order_seq_cst) - target) >= 0;
  }

  // Stores `value` and wakes the sleepers. One writer at a time.
  void post(std::uint32_t value) {
    // Sequentially consistent, with the load below and the pair in wait(): either the waiter sees the new value before
    // it sleeps, or we see the waiter. As a release it publishes what was written before.
    value_.store(value, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) != 0) wake_sleepers();
  }

  // Adds one and wakes the sleepers. Any number of writers.
  void ring() {
    value_.fetch_add(1, std::memory_order_seq_cst);  // as in post()
    if (asleep_.load(std::memory_order_seq_cst) != 0) wake_sleepers();
  }

  // For the only sleeper of a flag, which something else wakes: whether its value is still `seen`. If so the next
  // ring_and_is_asleep() returns true.
  bool may_sleep(std::uint32_t seen) {
    // Sequentially consistent, as in post().
    asleep_.store(1, std::memory_order_seq_cst);
    return value_.load(std::memory_order_seq_cst) == seen;
  }
  // Adds one. Returns whether the sleeper has to be woken.
  bool ring_and_is_asleep() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    return asleep_.load(std::memory_order_seq_cst) != 0 && asleep_.exchange(0, std::memory_order_seq_cst) != 0;
  }

  // Until reached(target), or for about kMaxSleep; returns whether it is reached. Throws WorldLost when `failure` is
  // set.
  bool wait(std::uint32_t target, const WaitPolicy& policy, const Failure& failure) {
    return reached(target) || wait_slow(target, policy, failure);
  }

  // Until value() != seen or `limit` has passed; returns early when `failure` is set. For waits that have other things
  // to look at.
  void wait_change(std::uint32_t seen, const WaitPolicy& policy, std::chrono::nanoseconds limit,
                   const Failure& failure);

  // Wakes the sleepers without a new value.
  void wake() const;

 private:
  // One system call for a row of posts, however long those woken take to look: they say anew that they sleep.
  void wake_sleepers();
  bool wait_slow(std::uint32_t target, const WaitPolicy& policy, const Failure& failure);

  std::atomic<std::uint32_t> value_;
  std::atomic<std::uint32_t> asleep_;  // whether somebody may be
};
static_assert(sizeof(Flag) == 128);

// A mutual exclusion lock between ranks. Zero-initialised memory is an unlocked one. Held for microseconds only.
class alignas(128) SharedLock {
 public:
  // Throws WorldLost when the world fails while waiting; raises the alarm itself at its timeout, since the holder may
  // be stopped.
  void lock(Alarm& alarm);
  // Returns whether it was free. Never waits.
  bool try_lock(int rank);
  void unlock();
  void wake() const;

 private:
  std::atomic<std::uint32_t> word_;  // 0 free, 1 held, 2 held and others may sleep
  std::atomic<int> holder_;          // Relaxed: the rank that locked last, for the message only
};

class SharedLockGuard {
 public:
  SharedLockGuard(SharedLock& lock, Alarm& alarm) : lock_(&lock) { lock.lock(alarm); }
  // Only if the lock is free: owns_lock() says whether it was.
  SharedLockGuard(SharedLock& lock, int rank, std::try_to_lock_t) : lock_(lock.try_lock(rank) ? &lock : nullptr) {}
  ~SharedLockGuard() {
    if (owns_lock()) lock_->unlock();
  }
  SharedLockGuard(const SharedLockGuard&) = delete;
  SharedLockGuard& operator=(const SharedLockGuard&) = delete;

  bool owns_lock() const { return lock_ != nullptr; }

 private:
  SharedLock* const lock_;
};

}  // namespace kvstore_hvd
