// What the parts of one rank's engine share, the progress of its operations, and the watcher.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/pipeline.hpp"
#include "shm/arena.hpp"
#include "shm/liveness.hpp"

namespace kvstore_hvd {

using Lock = std::unique_lock<std::mutex>;

// How often the watcher looks at deadlines: while something is pending, and otherwise.
inline constexpr std::chrono::milliseconds kBusyTick{100};
inline constexpr std::chrono::milliseconds kIdleTick{500};

// World and requests of one rank, and the lock of both.
struct EngineState {
  EngineState(std::shared_ptr<Segment> its_segment, int its_rank, EngineOptions its_options)
      : segment(std::move(its_segment)), rank(its_rank), options(std::move(its_options)) {}

  // The holder may block on a SharedLock whose holder is a stopped rank: never wait for this mutex with the GIL.
  Lock locked() {
    Lock lock(mutex, std::defer_lock);
    acquire(lock);
    return lock;
  }

  static void acquire(Lock& lock) {
    // Tries before about_to_block(): as a rule the mutex is held for less than a microsecond.
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
  World& world = segment->world();
  const int rank;
  const EngineOptions options;
  const WaitPolicy policy = WaitPolicy::for_engine(world.has_core_for_each != 0);
  const WaitPolicy callers_policy = WaitPolicy::for_callers(world.has_core_for_each != 0);
  Messages messages{world, rank};
  Alarm alarm{world, rank, options.timeout};

  std::mutex mutex;
  std::shared_ptr<Arena> arena;  // under the mutex; null: there is none to protect
  DeviceQueue devices{world, rank};
  Standstills standstills;                               // the watcher looks
  Pending pending{world, alarm, messages, standstills};  // under the mutex
};

// How often to poll another rank that reduces inline once the world is lost, or whose device is at work.
inline constexpr std::chrono::milliseconds kLook{1};
// How long the device thread may take to end its batches, once the world is lost.
inline constexpr std::chrono::seconds kDevicesEnd{10};

// Carries out the schedule of one rank. At any time at most one thread makes progress (MPI's word): one that waits for
// an operation, one that has just submitted one, or the communication thread. The latter sleeps at the bell; it parks,
// at a condition variable, while another thread makes progress or callers carry out all operations themselves: then the
// bell wakes one thread only.
class Progress {
 public:
  // Starts the communication thread.
  explicit Progress(EngineState& state);
  ~Progress() { stop(); }

  // `work` is pending now. Completes it, carries it out, or wakes the thread that will. `lock` is that of the mutex,
  // held, and given up. `caller_waits`: this thread calls wait() next.
  void on_submitted(Lock& lock, Work& work, const Pending::Added& added, bool caller_waits);

  // Until `done` or `limit` has passed; returns whether it is done. Makes progress meanwhile, if no other thread does.
  template <class Done>
  bool progress_until(const Done& done, std::chrono::nanoseconds limit, const WaitPolicy& policy);
  bool wait(Work& work, std::chrono::nanoseconds limit, const WaitPolicy& policy);

  // Takes no lock, so that the watcher never waits for one before it has looked at the other ranks.
  bool is_idle() const { return state_.pending.count() == 0; }

  // Has the thread that makes progress look for free slots of the table. From any thread; waits for nothing.
  void retry_slots() {
    retries_slots_.store(true, std::memory_order_relaxed);  // Relaxed: the bell publishes it.
    state_.own().bell.ring();
  }

  std::uint64_t bytes_in_place() const { return pipeline_.bytes_in_place(); }

  // Ends the communication thread.
  void stop();

 private:
  void take(Lock& lock, std::uint32_t slot, Clock::time_point when);
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
  std::condition_variable changed_;         // an operation completed, or no thread makes progress
  std::condition_variable parked_changed_;  // unpark_, stopping_
  int waiters_ = 0;
  bool progressing_ = false, callers_progress_ = false, parked_ = false, unpark_ = false, stopping_ = false;

  std::atomic<bool> retries_slots_{false};

  Pipeline pipeline_;      // of the thread that makes progress
  bool finished_ = false;  // likewise: finish_what_is_done() was called
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
      const auto status = changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kMaxSleep, limit));
      if (status == std::cv_status::timeout && limit >= kMaxSleep && done())
        missed_wakes.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    progressing_ = true;
    lock.unlock();
    Flag& bell = state_.own().bell;
    const auto longest = std::min<std::chrono::nanoseconds>(kMaxSleep, limit);
    bool ended_by_limit = false;
    while (!done() && !patience.is_over()) {
      const std::uint32_t seen = bell.value();
      if (progress(policy) || done()) {
        if (std::exchange(ended_by_limit, false)) missed_wakes.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      if (state_.world.failure.is_set()) {
        std::this_thread::sleep_for(kLook);  // for this rank's device, which alone may still be at work
      } else {
        const bool sleeps_at_once = policy.sleeps && pipeline_.waits_long();
        const WaitPolicy& chosen = sleeps_at_once ? WaitPolicy() : policy;
        ended_by_limit = bell.wait_change(seen, chosen, longest, state_.world.failure) && longest == kMaxSleep;
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

// The thread that notices lost ranks and passed deadlines, and makes sure that a failure reaches pending operations.
class Watcher {
 public:
  // Has this rank join its world, and starts the thread.
  Watcher(EngineState& state, Progress& progress);
  ~Watcher() { stop(); }

  // Whether the rank's process is gone. Relaxed: only whether to wait on.
  bool is_dead(int rank) const { return dead_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed); }

  void stop();

 private:
  void watch();
  void look_after_link();
  void look_after_pending();
  void tell(Activity::Wait wait);

  EngineState& state_;
  Progress& progress_;
  Liveness liveness_;
  std::vector<std::atomic<bool>> dead_;  // by rank; written by the thread
  std::uint32_t link_steps_ = 0;
  std::optional<Patience> link_patience_;
  Arrivals arrivals_{state_.world};
  std::string told_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvstore_hvd
