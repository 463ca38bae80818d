// Waiting for other ranks: the failure of a world, which ends every wait; flags and locks in shared memory; inboxes.
// Zero-initialised memory is a valid Failure, Flag, SharedLock and Inbox.
#pragma once

#include <exception>
#include <mutex>
#include <optional>
#include <string_view>

#include "base/process.hpp"
#include "base/types.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvstore_hvd {

struct World;

inline constexpr int kMaxRanks = 256;  // of a host

// Unwinds a rank once the world has failed; never leaves the engine.
struct WorldLost : std::exception {
  const char* what() const noexcept override { return "the world has failed"; }
};

// The failure of a world: set once, by any rank through its Alarm, seen by all. Each rank writes its text into a note
// of its own, and then claims the world with one compare-and-swap: a rank that dies on the way leaves no failure.
class Failure {
 public:
  // The first rank to call decides. Returns whether this call decided. One thread of a rank at a time.
  bool set(int rank, ErrorCode code, std::string_view fact);

  // Acquires what set() releases: code and text are complete. Sequentially consistent for DeviceQueue::take().
  bool is_set() const { return claimed_by_.load(std::memory_order_seq_cst) != 0; }

  void check() const {
    if (is_set()) throw WorldLost();
  }

  // Meaningful once is_set().
  ErrorCode code() const { return note().code; }
  std::string fact() const { return std::string(note().text, note().length); }

 private:
  struct Note {
    ErrorCode code;
    std::uint32_t length;
    char text[2040];
  };
  // Relaxed: the caller has called is_set(), and the value never changes again.
  const Note& note() const { return notes_[claimed_by_.load(std::memory_order_relaxed) - 1]; }

  std::atomic<std::uint32_t> claimed_by_;  // 1 + rank
  Note notes_[kMaxRanks + 1];              // by rank; the link's follows the last rank's
};

// One rank's way to fail its world, and how long it waits before it does. Any thread of the rank.
class Alarm {
 public:
  // `timeout`: how long an operation may wait for another rank.
  Alarm(World& world, int rank, std::chrono::nanoseconds timeout) : world_(world), rank_(rank), timeout_(timeout) {}

  // Fails the world, unless it has failed already, and wakes all sleepers. `fact` says what happened ("rank 2 ...
  // died"), without naming the rank that reads it.
  void raise(ErrorCode code, std::string_view fact);

  const Failure& failure() const;
  int rank() const { return rank_; }
  std::chrono::nanoseconds timeout() const { return timeout_; }

 private:
  friend class SharedLock;

  World& world_;
  const int rank_;
  const std::chrono::nanoseconds timeout_;
  std::mutex mutex_;
};

// The longest sleep within an operation without a look at the failure and the condition: the bound where a wake-up is
// missed, as by a rank that is stopped before it wakes a sleeper.
inline constexpr std::chrono::milliseconds kMaxSleep{100};

// Sleeps of this process that ended by their limit although there was something to do: wake-ups that were missed. Each
// costs time, and nothing fails. For tests. Relaxed.
inline std::atomic<std::uint64_t> missed_wakes{0};

// How a thread waits before it sleeps.
struct WaitPolicy {
  std::chrono::nanoseconds spin{0};  // busy; only while every rank has a core of its own
  int yields = 0;                    // sched_yield() calls after that; given up early when one costs a time slice
  bool sleeps = true;                // false: gives up instead

  // For threads of the engine, which share a core with computations.
  static WaitPolicy for_engine(bool has_core_for_each);
  // For callers that wait anyway: for longer than waking a sleeper takes. Otherwise a rank that was woken late would
  // find the next one asleep, and every operation would cost a wake-up.
  static WaitPolicy for_callers(bool has_core_for_each);
};

// Asks the scheduler for a short time slice for the calling thread, so that a woken rank runs soon between busy compute
// threads. Unprivileged; ignored by kernels that do not know it.
void request_short_slice();

inline void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How many yields a wait of the calling thread may begin with: none for a while after one that met a computation.
int yields_of(const WaitPolicy& policy);

// One sched_yield(). False: it gave the core away for so long that sleeping is cheaper than the next one.
bool yield_once();

// Calls `done` while spinning and yielding as the policy says; returns whether it became true.
template <class Done>
bool poll(const WaitPolicy& policy, const Done& done) {
  constexpr int kPausesPerClock = 8;
  if (policy.spin.count() > 0) {
    // The clock is read late: it costs as much as the whole wait where the others come at the same time.
    Clock::time_point end;
    do {
      for (int i = 0; i < kPausesPerClock; ++i) {
        if (done()) return true;
        pause_core();
      }
      if (end == Clock::time_point()) end = Clock::now() + policy.spin;
    } while (Clock::now() < end);
  }
  const int yields = yields_of(policy);
  for (int i = 0; i < yields; ++i) {
    const bool more = yield_once();
    if (done()) return true;
    if (!more) break;
  }
  return done();
}

// A counter that one rank advances and others wait for. It only grows, by less than 2^31 between a writer and a waiter,
// and is compared with wrap-around. Padded: two flags never share a cache line, nor a pair that is prefetched together.
class alignas(128) Flag {
 public:
  // Acquire: what the poster wrote before post() is visible once the value is seen.
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  bool reached(std::uint32_t target) const { return static_cast<std::int32_t>(value() - target) >= 0; }

  // As reached(), after posting another flag: of two that post and then look, one at least sees the other.
  bool reached_after_post(std::uint32_t target) const {
    return static_cast<std::int32_t>(value_.load(std::memory_order_seq_cst) - target) >= 0;
  }

  // Stores `value` and wakes the sleepers. One writer at a time.
  void post(std::uint32_t value) {
    // Sequentially consistent, with the load in take_sleepers() and the pair in wait(): either the waiter sees the new
    // value before it sleeps, or we see the waiter. As a release it publishes what was written before.
    value_.store(value, std::memory_order_seq_cst);
    if (take_sleepers()) wake_sleepers();
  }

  // Adds one and wakes the sleepers. Any number of writers.
  void ring() {
    value_.fetch_add(1, std::memory_order_seq_cst);  // as in post()
    if (take_sleepers()) wake_sleepers();
  }

  // For the only sleeper of a flag, which sleeps elsewhere: whether its value is still `seen`. If so the next
  // ring_and_is_asleep() returns true.
  bool may_sleep(std::uint32_t seen) {
    begin_sleep();
    return value_.load(std::memory_order_seq_cst) == seen;  // as in post()
  }
  // Adds one. Returns whether the sleeper has to be woken.
  bool ring_and_is_asleep() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    return take_sleepers();
  }

  // Until reached(target), or for about kMaxSleep; returns whether it is reached. Throws WorldLost.
  bool wait(std::uint32_t target, const WaitPolicy& policy, const Failure& failure) {
    return reached(target) || wait_slow(target, policy, failure);
  }

  // Until value() != seen or `limit` has passed; returns early when `failure` is set. Returns whether it ended by the
  // limit.
  bool wait_change(std::uint32_t seen, const WaitPolicy& policy, std::chrono::nanoseconds limit,
                   const Failure& failure);

  // Wakes the sleepers without a new value, also those that a rank took before it died.
  void wake() {
    take_sleepers();
    wake_sleepers();
  }

 private:
  // An eventcount: a sleeper makes sleeps_ odd, looks at the flag, and sleeps while sleeps_ stays as it is. Waking
  // makes it even, and another number than ever: a sleeper of before that is not asleep yet does not fall asleep.
  std::uint32_t begin_sleep() { return sleeps_.fetch_or(1, std::memory_order_seq_cst) | 1; }  // as in post()
  // Whether there are sleepers, which the caller then wakes. One call of a row, however long the sleepers take to look.
  bool take_sleepers() {
    std::uint32_t sleeps = sleeps_.load(std::memory_order_seq_cst);  // as in post()
    return sleeps % 2 != 0 && sleeps_.compare_exchange_strong(sleeps, sleeps + 1, std::memory_order_relaxed);
  }
  void wake_sleepers() const;
  bool wait_slow(std::uint32_t target, const WaitPolicy& policy, const Failure& failure);

  std::atomic<std::uint32_t> value_;
  std::atomic<std::uint32_t> sleeps_;  // a futex
};
static_assert(sizeof(Flag) == 128);

// A mutual exclusion lock between ranks, held for microseconds only.
class alignas(128) SharedLock {
 public:
  // Throws WorldLost when the world fails meanwhile; fails it at the alarm's timeout: the holder may be stopped.
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

// A queue of slots with many writers and one reader, for operations that others have completed for a rank. `Capacity`,
// a power of two, is no less than what may be in it at a time.
template <std::uint32_t Capacity>
class Inbox {
 public:
  // Release: what the writer wrote before is visible to the reader of the slot. Any thread.
  void put(std::uint32_t slot) {
    // Relaxed: only gives each writer a place of its own.
    const std::uint32_t index = end_.fetch_add(1, std::memory_order_relaxed);
    places_[index % Capacity].store(content(index, slot), std::memory_order_release);
  }

  // The `index`-th slot that was put here (modulo 2^32), or nothing as long as it was not. Acquire, as above.
  std::optional<std::uint32_t> get(std::uint32_t index) const {
    const std::uint32_t found = places_[index % Capacity].load(std::memory_order_acquire);
    if (found - content(index, 0) >= Capacity) return std::nullopt;
    return found % Capacity;
  }

 private:
  // A slot with the lap of its writer, so that no place needs clearing; not 0 in the first lap.
  static constexpr std::uint32_t content(std::uint32_t index, std::uint32_t slot) {
    return index / Capacity * Capacity + Capacity + slot;
  }
  static_assert((Capacity & (Capacity - 1)) == 0);

  alignas(128) std::atomic<std::uint32_t> end_;
  alignas(128) std::atomic<std::uint32_t> places_[Capacity];
};

}  // namespace kvstore_hvd
