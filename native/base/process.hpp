// This process and its threads: which process it is, how it ends, futexes, what a thread gives up before it sleeps, and
// the time in which it has run.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

namespace kvstore_hvd {

// getpid() without its system call: a forked child, which has none of its parent's threads, leaves its worlds alone.
pid_t process_id();

// The same for all ranks that share memory.
inline std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// Have this process, which is ending, end with code 1 in place of 0. Another code stays.
void end_as_failed();

// Sleeps while `word`, in shared memory, holds `expected`, at most `limit`. May return early: callers re-check. Returns
// whether it ended by the limit.
bool futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds limit);
void futex_wake_all(const std::atomic<std::uint32_t>& word);
void futex_wake_one(const std::atomic<std::uint32_t>& word);

// What a thread gives up before it waits. A caller that holds Python's interpreter lock keeps it for the microsecond
// that a small operation takes, and gives it up in about_to_block(): a stopped rank may hold a lock for long.
//
// In force from its construction to its destruction, on one thread; nested ones are called from the innermost outwards.
class BlockingObserver {
 public:
  BlockingObserver();
  BlockingObserver(const BlockingObserver&) = delete;
  BlockingObserver& operator=(const BlockingObserver&) = delete;

  // May be called any number of times, with locks of the engine held: must neither block nor call the engine.
  virtual void about_to_block() noexcept = 0;

 protected:
  ~BlockingObserver();

 private:
  friend void about_to_block() noexcept;
  BlockingObserver* const outer_;
};

// To be called before a sleep, and before waiting for a lock under which another thread may sleep.
void about_to_block() noexcept;

// Counts the threads inside an object that ends while other threads may still be on their way out. Any thread.
class Gate {
 public:
  // True: the caller is inside until leave(). False: the gate is closed.
  bool enter() {
    // Acquire: a caller that finds it closed sees what was written before close().
    std::uint32_t state = state_.load(std::memory_order_acquire);
    while ((state & kClosed) == 0) {
      if (state_.compare_exchange_weak(state, state + kOne, std::memory_order_acquire)) return true;
    }
    return false;
  }

  // True for one caller only, the last one out of a closed gate: it cleans up.
  bool leave() {
    // Release: what the caller did inside comes before the clean-up. Acquire: for the one that cleans up.
    return state_.fetch_sub(kOne, std::memory_order_acq_rel) == (kClosed | kOne);
  }

  // By a caller that is inside: no thread enters any more. Release: see enter().
  void close() { state_.fetch_or(kClosed, std::memory_order_release); }

 private:
  static constexpr std::uint32_t kClosed = 1, kOne = 2;
  std::atomic<std::uint32_t> state_{0};
};

// ---- Time in which this process itself has run, in which limits on other ranks are counted ----
//
// A process may be stopped (SIGSTOP, a frozen container, a suspended machine) or get no core for seconds, often
// together with the ranks that it waits for. A thread that reads the clock at least every half second notices: readings
// more than kLongestGap apart mean that the process did not run in between.

using Clock = std::chrono::steady_clock;

inline std::int64_t monotonic_ns() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

inline constexpr std::chrono::seconds kLongestGap{1};
// How long the process may have run before and after such a gap.
inline constexpr std::chrono::milliseconds kMoment{100};

// A limit on the wait of one thread, from now on.
class Patience {
 public:
  explicit Patience(std::chrono::nanoseconds limit) : looked_(Clock::now()), end_(looked_ + limit) {}

  // To be called at least every half second.
  bool is_over() { return is_over(Clock::now()); }
  bool is_over(Clock::time_point now) {
    if (now - looked_ > kLongestGap) end_ += now - looked_ - kMoment;
    looked_ = now;
    return now >= end_;
  }

 private:
  Clock::time_point looked_, end_;
};

// When this process did not run, by one thread that calls look() every half second. Any thread calls between().
class Standstills {
 public:
  explicit Standstills(Clock::time_point now = Clock::now()) : looked_(now) {}

  void look(Clock::time_point now = Clock::now()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (now - looked_ > kLongestGap) {
      all_.push_back({looked_, now - kMoment});
      if (all_.size() > kMost) all_.pop_front();
    }
    looked_ = now;
  }

  // The part of the time from `from` to `until`, which is now, in which the process did not run.
  std::chrono::nanoseconds between(Clock::time_point from, Clock::time_point until) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::chrono::nanoseconds sum{0};
    for (const Standstill& one : all_) sum += overlap(one, from, until);
    // A standstill has just ended, before the other thread called look().
    if (until - looked_ > kLongestGap) sum += overlap({looked_, until - kMoment}, from, until);
    return sum;
  }

 private:
  struct Standstill {
    Clock::time_point begin, end;
  };
  static constexpr std::size_t kMost = 256;

  static std::chrono::nanoseconds overlap(const Standstill& one, Clock::time_point from, Clock::time_point until) {
    const auto begin = one.begin > from ? one.begin : from, end = one.end < until ? one.end : until;
    return end > begin ? end - begin : Clock::duration::zero();
  }

  mutable std::mutex mutex_;
  std::deque<Standstill> all_;
  Clock::time_point looked_;
};

}  // namespace kvstore_hvd
