#include "engine/progress.hpp"

namespace kvstore_hvd {
namespace {

// Limit on the progress that a submitting thread makes: it may be a thread that computes.
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

void Progress::on_submitted(Lock& lock, Work& work, const Pending::Added& added, bool caller_waits) {
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
  // The thread that makes progress may be asleep; a caller that waits makes progress itself if no other thread does.
  if (added.ready != Pending::Ready::kNot && (progressing || !caller_waits)) state_.own().bell.ring();
}

// Completes an operation that was reduced inline. `lock` is that of the mutex, and given up.
void Progress::take(Lock& lock, std::uint32_t slot, Clock::time_point when) {
  pipeline_.take_inline_result(slot);
  // The thread that makes progress may wait for this operation.
  if (finish(lock, state_.pending.complete(slot, when))) state_.own().bell.ring();
}

bool Progress::wait(Work& work, std::chrono::nanoseconds limit, const WaitPolicy& policy) {
  if (work.done()) return true;
  if (work.watched_slot != kNoSlot && watch(work, policy)) return true;
  return progress_until([&] { return work.done(); }, limit, policy);
}

// Polls the mark of the work's slot until another rank has reduced it inline, the bell rings, or the policy's time is
// over; completes the work in the first case. Otherwise returns false: the thread that makes progress completes it.
bool Progress::watch(Work& work, const WaitPolicy& policy) {
  const std::uint32_t slot = std::exchange(work.watched_slot, kNoSlot);
  World& world = state_.world;
  const Flag& bell = state_.own().bell;
  poll(policy, [&] { return is_done_inline(world, state_.rank, slot) || bell.value() != work.bell_before; });
  Lock lock = state_.locked();
  // Once the world is lost, another thread may have failed the work already. If it was scheduled and completed, the
  // mark may by now be that of the next operation on the slot.
  if (world.failure.is_set() || !state_.pending.is_in_flight(slot, work)) return false;
  if (stop_watching(world, state_.rank, slot)) return false;
  take(lock, slot, Clock::now());
  return true;
}

// Makes progress for about kInlineTime at most, without sleeping for parts that other ranks have claimed. Returns false
// when another thread makes progress.
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

// With the mutex held.
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

// The communication thread.
void Progress::communicate() {
  request_short_slice();
  bool ended_by_limit = false;
  Flag& bell = state_.own().bell;
  for (;;) {
    const std::uint32_t seen = bell.value();
    {
      Lock lock = state_.locked();
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
      if (std::exchange(ended_by_limit, false)) missed_wakes.fetch_add(1, std::memory_order_relaxed);
    }
    {
      const Lock lock = state_.locked();
      stop_progressing();
    }
    // Without spinning: it would take the core from the thread that submits next.
    ended_by_limit = bell.wait_change(seen, WaitPolicy{}, kIdleTick, state_.world.failure);
  }
}

void Progress::complete(std::uint32_t slot) {
  Lock lock = state_.locked();
  finish(lock, state_.pending.complete(slot, Clock::now()));
}

// Ends a pending operation: the only way. `lock` is that of the mutex, and given up, before on_done is called. Returns
// whether a thread makes progress.
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

// The world is lost; once. An operation that is complete on the rank that lost it has to complete on this rank.
void Progress::finish_what_is_done(const WaitPolicy& policy) {
  try {
    while (pipeline_.drain(policy)) {
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
      pipeline_.take_inline_result(slot);
      complete(slot);
    }
    // The rank that reduces inline tells one rank after the other.
    if (!found.may_come || patience.is_over()) return;
    about_to_block();
    std::this_thread::sleep_for(kLook);
  }
}

// The world is lost. Other ranks can only write to arrays of operations that are pending here, which are not used
// before they fail. From now on none of them completes, whatever the others say: their results might be missing.
void Progress::protect_arena() {
  std::shared_ptr<Arena> arena;
  {
    const Lock lock = state_.locked();
    arena = state_.arena;
  }
  if (arena != nullptr && !arena->isolate()) state_.messages.tell_that_arrays_stay_shared();
}

// The world is lost, or this rank leaves.
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

Watcher::Watcher(EngineState& state, Progress& progress)
    : state_(state),
      progress_(progress),
      liveness_(state.world, state.rank, state.options.host, state.options.watch_peers),
      dead_(static_cast<std::size_t>(state.world.ranks)) {
  thread_ = std::thread([this] { watch(); });
}

void Watcher::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_relaxed);  // Relaxed: interrupt() ends the sleep soon enough.
  liveness_.interrupt();
  thread_.join();
  state_.options.activity->leave(&state_.world);
}

void Watcher::watch() {
  while (!stopping_.load(std::memory_order_relaxed)) {  // as above
    const bool busy = !progress_.is_idle();
    if (const auto death = liveness_.poll(busy ? kBusyTick : kIdleTick)) {
      dead_[static_cast<std::size_t>(death->rank)].store(true, std::memory_order_relaxed);
      state_.alarm.raise(ErrorCode::kPeerLost, describe_rank(state_.world, death->rank) + " " + death->how);
    }
    if (state_.world.has_link()) look_after_link();
    state_.standstills.look();
    if (state_.rank == 0 && !state_.world.has_link()) arrivals_.count(Clock::now());
    const bool looks = busy && !state_.world.failure.is_set();
    if (looks) look_after_pending();
    if (!looks) tell({});
    if (state_.world.failure.is_set()) {
      progress_.progress_until([this] { return progress_.is_idle(); }, kBusyTick, state_.policy);
    }
  }
}

// The link may stand still in MPI, which need not return once a peer of its own is gone.
void Watcher::look_after_link() {
  World& world = state_.world;
  // Relaxed, both: looked at again and again.
  const std::uint32_t steps = world.link_steps.load(std::memory_order_relaxed);
  const std::chrono::nanoseconds silence(world.link_silence_ns.load(std::memory_order_relaxed));
  if (silence.count() == 0) return;  // there is no link yet
  if (!link_patience_ || steps != link_steps_) link_patience_.emplace(silence);
  link_steps_ = steps;
  if (!link_patience_->is_over()) return;
  std::string fact = "the link of this host, a thread of " + describe_rank(world, 0) + ", has stood still for " +
                     std::to_string(std::chrono::duration_cast<std::chrono::seconds>(silence).count()) + " s";
  if (Liveness::is_stopped(world, 0)) fact += ": that process is stopped";
  state_.alarm.raise(ErrorCode::kPeerLost, fact);
}

void Watcher::look_after_pending() {
  Pending::Overdue overdue;
  {
    // The holder may wait in a critical section for a rank that has just died there, and this thread is the
    // one that would notice: it tries again at the next tick.
    const Lock lock(state_.mutex, std::try_to_lock);
    if (!lock.owns_lock()) return;
    Pending& pending = state_.pending;
    pending.check_left();
    const auto held = [this](std::uint32_t slot) { return state_.devices.holds(slot); };
    overdue = pending.overdue(state_.options, held);
    // Not here: the lock of the table may be that of a rank that has just died.
    if (pending.waits_for_slots()) progress_.retry_slots();
  }
  tell(std::move(overdue.wait));
  std::string& fact = overdue.fact;
  if (fact.empty()) return;
  const std::size_t end = std::min(fact.find("\n  Fix: "), fact.size());
  std::string stopped;
  // The late rank may itself wait for a stopped one.
  for (const int r : liveness_.stopped()) {
    if (fact.find(rank_name(state_.world, r) + " is stopped") != std::string::npos) continue;
    const std::string whole = describe_rank(state_.world, r);  // host and process appear once
    const bool is_told = fact.find(whole) != std::string::npos;
    stopped += ".\n  " + (is_told ? rank_name(state_.world, r) : whole) + " is stopped";
  }
  if (!stopped.empty()) fact.replace(end, std::string::npos, stopped);
  state_.alarm.raise(ErrorCode::kTimeout, fact);
}

// What this rank does, to the others of this world.
void Watcher::tell(Activity::Wait wait) {
  auto [ranks, text] = state_.options.activity->set_wait(&state_.world, std::move(wait));
  Doing& doing = state_.world.member(state_.own().rank_of_world).doing;
  doing.waits.store(ranks, std::memory_order_relaxed);  // looked at again and again
  if (text == told_) return;
  doing.text.write(text);
  told_ = std::move(text);
}

}  // namespace kvstore_hvd
