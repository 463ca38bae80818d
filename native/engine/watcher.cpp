#include "engine/watcher.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "shm/describe.hpp"

namespace kvstore_hvd {

Watcher::Watcher(EngineState& state, Progress& progress)
    : state_(state),
      progress_(progress),
      liveness_(state.world, state.rank, state.options.host, state.options.watch_peers),
      dead_(static_cast<std::size_t>(state.size)) {
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
  for (const int r : liveness_.stopped()) {
    if (r == 0) fact += ": that process is stopped";
  }
  state_.alarm.raise(ErrorCode::kPeerLost, fact);
}

void Watcher::look_after_pending() {
  Pending::Overdue overdue;
  {
    // Whoever has the lock may wait in a critical section for a rank that has just died there, and this thread is the
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
  // Whom this rank waits for may itself wait for one that is stopped.
  for (const int r : liveness_.stopped()) {
    if (fact.find(rank_name(state_.world, r) + " is stopped") != std::string::npos) continue;
    const std::string whole = describe_rank(state_.world, r);  // host and process are told once
    const bool is_told = fact.find(whole) != std::string::npos;
    stopped += ".\n  " + (is_told ? rank_name(state_.world, r) : whole) + " is stopped";
  }
  if (!stopped.empty()) fact.replace(end, std::string::npos, stopped);
  state_.alarm.raise(ErrorCode::kTimeout, fact);
}

// What this rank does, to the others of this world.
void Watcher::tell(Activity::Wait wait) {
  auto [ranks, text] = state_.options.activity->set_wait(&state_.world, std::move(wait));
  Doing& doing = state_.own().doing;
  doing.waits.store(ranks, std::memory_order_relaxed);  // looked at again and again
  if (text == told_) return;
  doing.text.write(text);
  told_ = std::move(text);
}

}  // namespace kvstore_hvd
