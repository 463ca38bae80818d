// Time in which this process itself has run: what a limit on other ranks is counted in.
//
// A process may be stopped (SIGSTOP, a frozen container, a suspended machine) or get no core for seconds, often
// together with the ranks that it waits for. It has not waited for them meanwhile. A thread that looks at the clock at
// least every half second sees that by itself: readings more than kLongestGap apart mean that the process did not run
// in between.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

namespace kvstore_hvd {

inline std::int64_t monotonic_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline constexpr std::chrono::seconds kLongestGap{1};
// For how long the process may have run before and after such a gap.
inline constexpr std::chrono::milliseconds kMoment{100};

// A limit on how long one thread waits, from now on.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Patience(std::chrono::nanoseconds limit) : looked_(Clock::now()), end_(looked_ + limit) {}

  // To be asked at least every half second.
  bool is_over() { return is_over(Clock::now()); }
  bool is_over(Clock::time_point now) {
    if (now - looked_ > kLongestGap) end_ += now - looked_ - kMoment;
    looked_ = now;
    return now >= end_;
  }

 private:
  Clock::time_point looked_, end_;
};

// When this process did not run, as one thread that looks at least every half second finds out. Any thread may ask.
class Standstills {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Standstills(Clock::time_point now = Clock::now()) : looked_(now) {}

  void look(Clock::time_point now = Clock::now()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (now - looked_ > kLongestGap) {
      all_.push_back({looked_, now - kMoment});
      if (all_.size() > kMost) all_.pop_front();
    }
    looked_ = now;
  }

  // How much of the time from `from` to `until`, which is now, the process did not run.
  std::chrono::nanoseconds between(Clock::time_point from, Clock::time_point until) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::chrono::nanoseconds sum{0};
    for (const Standstill& one : all_) sum += overlap(one, from, until);
    // It has just ended, and the other thread has not looked since.
    if (until - looked_ > kLongestGap) sum += overlap({looked_, until - kMoment}, from, until);
    return sum;
  }

 private:
  struct Standstill {
    Clock::time_point begin, end;
  };
  // More than matter for any one operation.
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
