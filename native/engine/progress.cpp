#include "engine/progress.hpp"

#include <utility>

#include "engine/inline_reduction.hpp"
#include "shm/poll.hpp"

namespace kvstore_hvd {
namespace {

using Clock = std::chrono::steady_clock;

// For how long a submitting thread carries out what it made ready itself. It may be a thread that computes: longer, and
// the computation behind it would be late.
constexpr std::chrono::microseconds kInlineTime{200};

}  // namespace

Progress::Progress(EngineState& state)
    : state_(state), pipeline_(state.world, state.alarm, state.pending, state.devices, [this](std::uint32_t slot) {
        complete(slot);
      }) {
  communication_ = std::thread([this] { communicate(); });
}

void Progress::stop() {
  if (!communication_.joinable()) return;
  {
    const Lock lock = state_.locked();
    stopping_ = true;
  }
  parked_changed_.notify_all();
  state_.own().bell.ring();
  communication_.join();
}

void Progress::added(Lock& lock, Work& work, const Pending::Added& added, bool caller_waits) {
  callers_progress_ = caller_waits;
  if (added.ready == Pending::Ready::kDone) {
    work.scheduled = work.submitted;
    return take(lock, added.slot, work.submitted);
  }
  if (caller_waits && added.ready == Pending::Ready::kNot) work.watched_slot = added.slot;
  const bool wake_communication = parked_ && !progressing_ && (!caller_waits || state_.world.failure.is_set());
  if (wake_communication) unpark_ = true;
  bool progressing = progressing_;
  lock.unlock();
  if (added.ready == Pending::Ready::kAlone && !caller_waits &&
      bytes_of(work.request()) <= state_.world.thresholds.submitter) {
    if (progress_inline(work)) return;
    progressing = true;
  }
  if (wake_communication) parked_changed_.notify_one();
  // Who makes progress may be asleep, and a caller that waits does so itself if no one does.
  if (added.ready != Pending::Ready::kNot && (progressing || !caller_waits)) state_.own().bell.ring();
}

// Completes what was carried out inline, on the thread that learns of it. `lock` is that of the mutex, and given up.
void Progress::take(Lock& lock, std::uint32_t slot, Clock::time_point when) {
  pipeline_.take(slot);
  // It may be this that the thread that makes progress waits for.
  if (finish(lock, state_.pending.complete(slot, when))) state_.own().bell.ring();
}

bool Progress::wait(Work& work, std::chrono::nanoseconds limit, const WaitPolicy& policy) {
  if (work.done()) return true;
  if (work.watched_slot != kNoSlot && watch(work, policy)) return true;
  return progress_until([&] { return work.done(); }, limit, policy);
}

// Looks at the mark of the work's slot until another rank has carried it out, the bell rings, or the policy's time is
// over; completes the work in the first case. Otherwise returns false: whoever makes progress will complete it, or has.
bool Progress::watch(Work& work, const WaitPolicy& policy) {
  const std::uint32_t slot = std::exchange(work.watched_slot, kNoSlot);
  World& world = state_.world;
  const Flag& bell = state_.own().bell;
  poll(policy, [&] { return InlineReduction::is_done(world, state_.rank, slot) || bell.value() != work.bell_before; });
  Lock lock = state_.locked();
  // Once the world is lost, another thread may have failed the work already. And whoever makes progress completes what
  // was scheduled: the mark may by now be that of the next operation on the slot.
  if (world.failure.is_set() || !state_.pending.is_in_flight(slot, work)) return false;
  if (InlineReduction::give_up(world, state_.rank, slot)) return false;
  take(lock, slot, Clock::now());
  return true;
}

// Carries out what has just become ready, for about kInlineTime at most, and without going to sleep for a part that
// another rank has claimed. Returns false when another thread is at it.
bool Progress::progress_inline(const Work& work) {
  {
    const Lock lock = state_.locked();
    if (progressing_) return false;
    progressing_ = true;
  }
  const auto end = Clock::now() + kInlineTime;
  WaitPolicy impatient = state_.policy;
  impatient.sleeps = false;
  while (!work.done() && progress(impatient) && Clock::now() < end) {
  }
  const Lock lock = state_.locked();
  stop_progressing();
  return true;
}

// One step, or a wait of about kMaxSleep for other ranks. Returns whether there was anything to do.
// Exceptions: as Work::finish().
bool Progress::progress(const WaitPolicy& policy) noexcept {
  try {
    if (!state_.world.failure.is_set()) {
      if (pipeline_.advance(policy)) return true;
      check_left();
      if (retries_slots_.load(std::memory_order_relaxed)) {
        retries_slots_.store(false, std::memory_order_relaxed);
        const Lock lock = state_.locked();
        state_.pending.retry_slots();
      }
      if (!state_.world.failure.is_set()) return false;
    }
  } catch (const WorldLost&) {
  }
  state_.devices.give_up(kDevicesEnd);
  if (!std::exchange(finished_, true)) {
    finish_what_is_done(policy);
    protect_arena();
  }
  fail_pending();
  return false;
}

// With the mutex held. What is left goes on without this thread.
void Progress::stop_progressing() {
  progressing_ = false;
  if (waiters_ > 0) changed_.notify_all();
  if (is_idle()) return;
  if (parked_) {
    unpark_ = true;
    parked_changed_.notify_one();
  } else if (pipeline_.has_work()) {
    state_.own().bell.ring();
  }
}

// The communication thread: listens to the bell, and makes progress when no other thread does. When it finds
// another one at it, it parks, so that the bell then wakes one thread only.
void Progress::communicate() {
  request_short_slice();
  Flag& bell = state_.own().bell;
  for (;;) {
    const std::uint32_t seen = bell.value();
    {
      Lock lock = state_.locked();
      // After a failure there is nothing to listen for; and as long as callers make the progress, the bell shall not
      // wake this thread as well.
      if (progressing_ || state_.world.failure.is_set() || (callers_progress_ && is_idle())) {
        parked_ = true;
        unpark_ = false;
        parked_changed_.wait(lock, [&] { return stopping_ || unpark_; });
        parked_ = false;
      }
      if (stopping_) return;
      if (progressing_) continue;
      progressing_ = true;
    }
    while (progress(state_.policy)) {
    }
    {
      const Lock lock = state_.locked();
      stop_progressing();
    }
    // Without spinning: it would take the core from whoever submits the next operation.
    bell.wait_change(seen, WaitPolicy{}, kIdleTick, state_.world.failure);
  }
}

void Progress::complete(std::uint32_t slot) {
  Lock lock = state_.locked();
  finish(lock, state_.pending.complete(slot, Clock::now()));
}

// The only way in which a pending operation ends. `lock` is that of the mutex, and given up: whoever is told that the
// operation is over is told without it. Returns whether a thread makes progress.
bool Progress::finish(Lock& lock, Pending::Completed over) {
  if (over.work->request().on_done) lock.unlock();
  over.work->finish(std::move(over.status));
  // Under the lock, or a waiter that has just looked would miss the notification.
  if (!lock.owns_lock()) EngineState::acquire(lock);
  state_.pending.settle();
  const bool progressing = progressing_, waited_for = waiters_ > 0;
  lock.unlock();
  if (waited_for) changed_.notify_all();
  return progressing;
}

void Progress::check_left() {
  // Acquire: pairs with the release in shutdown().
  if (state_.world.left.load(std::memory_order_acquire) == 0) return;
  const Lock lock = state_.locked();
  state_.pending.check_left();
}

// The world is lost; once. Whoever lost it may have done so right after an operation that is complete for it, and so
// has to be for this rank.
void Progress::finish_what_is_done(const WaitPolicy& policy) {
  try {
    while (pipeline_.finish(policy)) {
    }
  } catch (const WorldLost&) {
  }
  Patience patience(kMaxSleep);
  for (;;) {
    Pending::CarriedOut found;
    {
      const Lock lock = state_.locked();
      found = state_.pending.carried_out();
    }
    for (const std::uint32_t slot : found.slots) {
      pipeline_.take(slot);
      complete(slot);
    }
    // Whoever carries it out tells one rank after the other, and may have told the one that lost the world.
    if (!found.may_come || patience.is_over()) return;
    about_to_block();
    std::this_thread::sleep_for(kLook);
  }
}

// The world is lost. Other ranks can only write to arrays of operations that are pending here, which nobody uses before
// they are failed; and from now on none of them is completed, whatever the others say: their results might be missing.
void Progress::protect_arena() {
  std::shared_ptr<Arena> arena;
  {
    const Lock lock = state_.locked();
    arena = state_.arena;
  }
  if (arena != nullptr && !arena->isolate()) state_.messages.tell_that_arrays_stay_shared();
}

// The world is lost, or this rank leaves: nothing that is pending will happen.
void Progress::fail_pending() {
  Lock lock = state_.locked();
  const auto lost = state_.pending.take_all([this](std::uint32_t slot) { return state_.devices.holds(slot); });
  lock.unlock();
  const Messages& messages = state_.messages;
  for (const auto& work : lost) {
    const Request& request = work->request();
    Status status = state_.world.failure.is_set() ? messages.lost(request) : messages.left(request);
    EngineState::acquire(lock);
    finish(lock, {work, std::move(status)});
  }
}

}  // namespace kvstore_hvd
