// Carrying out the schedule of one rank. At any time at most one thread makes progress (MPI's word for it): whichever
// waits for an operation, one that has just submitted one, or the communication thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include "base/blocking.hpp"
#include "base/running_time.hpp"
#include "engine/engine_state.hpp"
#include "engine/pipeline.hpp"
#include "request/work.hpp"

namespace kvstore_hvd {

// How often to look whether another rank is through with what it carries out: inline once the world is lost, or on its
// device.
inline constexpr std::chrono::milliseconds kLook{1};
// How long the device thread may take to end what it carries out, once the world is lost.
inline constexpr std::chrono::seconds kDevicesEnd{10};

class Progress {
 public:
  // Starts the communication thread.
  explicit Progress(EngineState& state);
  ~Progress() { stop(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // A work was added to the pending ones, with the lock held, which this gives up: completes it, carries it out, or
  // wakes who will. `caller_waits`: this thread calls wait() next.
  void added(Lock& lock, Work& work, const Pending::Added& added, bool caller_waits);

  // Until `done` or `limit` has passed; returns whether it is done. Drives meanwhile, if no other thread does.
  template <class Done>
  bool progress_until(const Done& done, std::chrono::nanoseconds limit, const WaitPolicy& policy);
  bool wait(Work& work, std::chrono::nanoseconds limit, const WaitPolicy& policy);

  // Takes no lock, so that the watcher never waits for one before it has looked at the other ranks.
  bool is_idle() const { return state_.pending.count() == 0; }

  // Whoever makes progress is to look for slots of the table that have become free. From any thread; waits for nothing.
  void retry_slots() {
    retries_slots_.store(true, std::memory_order_relaxed);  // Relaxed: the bell publishes it.
    state_.own().bell.ring();
  }

  std::uint64_t bytes_in_place() const { return pipeline_.bytes_in_place(); }

  // Ends the communication thread.
  void stop();

 private:
  void take(Lock& lock, std::uint32_t slot, std::chrono::steady_clock::time_point when);
  bool watch(Work& work, const WaitPolicy& policy);
  bool progress_inline(const Work& work);
  bool progress(const WaitPolicy& policy) noexcept;
  void stop_progressing();
  void communicate();

  void complete(std::uint32_t slot);
  bool finish(Lock& lock, Pending::Completed over);
  void finish_what_is_done(const WaitPolicy& policy);
  void protect_arena();
  void fail_pending();
  void check_left();

  EngineState& state_;
  // With the engine's mutex, as are the flags.
  std::condition_variable changed_;         // something completed, or nobody makes progress any more
  std::condition_variable parked_changed_;  // unpark_, stopping_
  int waiters_ = 0;
  bool progressing_ = false, callers_progress_ = false, parked_ = false, unpark_ = false, stopping_ = false;

  std::atomic<bool> retries_slots_{false};

  Pipeline pipeline_;      // of the thread that makes progress
  bool finished_ = false;  // likewise: what comes once when the world is lost is over
  std::thread communication_;
};

template <class Done>
bool Progress::progress_until(const Done& done, std::chrono::nanoseconds limit, const WaitPolicy& policy) {
  Patience patience(limit);
  Lock lock = state_.locked();
  ++waiters_;
  for (bool waited = false;; waited = true) {
    lock.unlock();
    if (done()) break;
    if (waited && patience.is_over()) break;
    EngineState::acquire(lock);
    if (progressing_) {
      if (done()) continue;
      about_to_block();
      changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kMaxSleep, limit));
      continue;
    }
    progressing_ = true;
    lock.unlock();
    Flag& bell = state_.own().bell;
    const auto longest = std::min<std::chrono::nanoseconds>(kMaxSleep, limit);
    while (!done() && !patience.is_over()) {
      const std::uint32_t seen = bell.value();
      if (progress(policy) || done()) continue;
      if (state_.world.failure.is_set()) {
        std::this_thread::sleep_for(kLook);  // for this rank's device, which alone may still be at work
      } else {
        bell.wait_change(seen, policy, longest, state_.world.failure);
      }
    }
    EngineState::acquire(lock);
    stop_progressing();
  }
  EngineState::acquire(lock);
  --waiters_;
  lock.unlock();
  return done();
}

}  // namespace kvstore_hvd
