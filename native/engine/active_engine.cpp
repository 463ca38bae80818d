#include "engine/active_engine.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/running_time.hpp"
#include "request/messages.hpp"
#include "shm/describe.hpp"

namespace kvstore_hvd {
namespace {

// See Engine::submit_and_linger and wait_briefly.
constexpr std::chrono::microseconds kLinger{60};
constexpr std::chrono::microseconds kBriefly{5};
// How long a rank that leaves waits for the devices of the others: for kernels that run, and wait for nobody any more.
constexpr std::chrono::seconds kDevicesLeave{2};

}  // namespace

void ActiveEngine::protect(std::shared_ptr<Arena> arena) {
  if (state_.forked()) return;
  const Lock lock = state_.locked();
  state_.arena = std::move(arena);
}

std::shared_ptr<Work> ActiveEngine::submit(std::shared_ptr<const Request> request, bool caller_waits) {
  // What only this rank can see to be wrong is announced all the same, or the others would wait for it.
  if (request->input_failure.empty()) {
    if (std::string fault = fault_of(*request, state_.world.size); !fault.empty()) {
      auto faulty = std::make_shared<Request>(*request);
      faulty->input_failure = std::move(fault);
      request = std::move(faulty);
    }
  }
  auto work = std::make_shared<Work>(std::move(request));
  submit(work, caller_waits);
  return work;
}

void ActiveEngine::submit(const std::shared_ptr<Work>& work, bool caller_waits) {
  const Request& request = work->request();
  if (state_.forked()) return work->finish(Messages::forked());
  if (request.name.empty() || request.name.size() > kMaxName) {
    const std::string limits = "a name has 1 to " + std::to_string(kMaxName) + " bytes, not ";
    return work->finish(state_.messages.invalid(request, limits + std::to_string(request.name.size())));
  }
  Lock lock = state_.locked();
  if (left_ || state_.world.failure.is_set()) {
    Status status = left_ ? state_.messages.left(request) : state_.messages.lost(request);
    lock.unlock();
    return work->finish(std::move(status));
  }
  work->bell_before = state_.own().bell.value();
  const Pending::Added added = state_.pending.add(work, caller_waits);
  progress_.added(lock, *work, added, caller_waits);
}

std::shared_ptr<Work> ActiveEngine::submit_and_linger(std::shared_ptr<const Request> request) {
  // Over hosts an operation takes longer than this thread may stay.
  const bool linger = !state_.forked() && !state_.world.has_link() && !request->on_device &&
                      bytes_of(*request) <= state_.world.thresholds.linger && progress_.is_idle() &&
                      lingering_.is_promising();
  auto work = submit(std::move(request), linger);
  if (linger) {
    WaitPolicy policy = state_.callers_policy;
    policy.spin = std::min<std::chrono::nanoseconds>(policy.spin, kLinger);
    policy.sleeps = false;
    lingering_.ended(progress_.wait(*work, kLinger, policy));
  }
  return work;
}

// Not with more ranks than cores: the others need this one.
bool ActiveEngine::wait_briefly(Work& work) {
  if (state_.callers_policy.spin.count() == 0) return work.done();
  return progress_.wait(work, kBriefly, WaitPolicy{kBriefly, 0, false});
}

// Until nothing of this rank is pending, or `limit` has passed.
bool ActiveEngine::wait_for_all(std::chrono::nanoseconds limit) {
  return state_.forked() || progress_.progress_until([this] { return progress_.is_idle(); }, limit, state_.policy);
}

bool ActiveEngine::is_met(const Work& work) {
  if (work.done() || state_.forked()) return true;
  const Lock lock = state_.locked();
  return state_.pending.is_met(work);
}

void ActiveEngine::abort(const std::string& text) {
  if (state_.forked()) return;
  state_.alarm.raise(ErrorCode::kTransport, text);
}

Status ActiveEngine::health() const {
  if (state_.forked()) return Messages::forked();
  return state_.world.failure.is_set() ? state_.messages.lost() : Status();
}

std::optional<DeviceBatch> ActiveEngine::take_batch(std::chrono::nanoseconds limit) {
  if (state_.forked()) return std::nullopt;
  return state_.devices.take(limit);
}

bool ActiveEngine::end_batch(std::uint64_t number, const Status& status) {
  if (state_.forked()) return false;
  if (!status.ok()) {
    state_.alarm.raise(status.code(), describe_rank(state_.world, state_.rank) + ": " + status.text());
  }
  // The device may have been stopped on the way, because of the failure.
  if (state_.world.failure.is_set()) state_.devices.give_up(kDevicesEnd);
  const bool was_out = state_.devices.done(number);
  state_.own().bell.ring();
  return was_out;
}

EngineStatistics ActiveEngine::report() {
  if (state_.forked()) return {};
  const Lock lock = state_.locked();
  return state_.pending.report();
}

void ActiveEngine::start_timeline(std::size_t capacity) {
  if (state_.forked()) return;
  const Lock lock = state_.locked();
  state_.pending.start_timeline(capacity);
}

void ActiveEngine::stop_timeline() {
  if (state_.forked()) return;
  const Lock lock = state_.locked();
  state_.pending.timeline().stop();
}

TimelineEvents ActiveEngine::take_timeline() {
  if (state_.forked()) return {};
  const Lock lock = state_.locked();
  return state_.pending.timeline().take();
}

std::optional<std::vector<Waiting>> ActiveEngine::waiting(std::chrono::nanoseconds age) {
  if (state_.forked() || state_.world.failure.is_set()) return std::vector<Waiting>{};
  const Lock lock(state_.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  return state_.pending.waiting(age);
}

// Without the mutex: looks at nothing of this rank's but its marks.
std::optional<std::vector<Missed>> ActiveEngine::missed(std::size_t most, bool described) const {
  if (state_.forked() || state_.world.failure.is_set()) return std::vector<Missed>{};
  return state_.pending.missed(most, described);
}

Engine::Process ActiveEngine::process(int rank) const {
  if (state_.forked()) return {};
  const World::Home home = state_.world.home(rank);
  if (home.host != state_.world.host) return {0, describe_member(state_.world, rank)};
  const RankState& state = state_.world.rank(home.rank);
  // Acquire: the process id was written before.
  const bool joined = state.presence.load(std::memory_order_acquire) != Presence::kAbsent;
  return {joined ? state.pid : 0, describe_rank(state_.world, home.rank)};
}

bool ActiveEngine::shutdown(const std::string& reason) {
  if (state_.forked()) return true;
  {
    Lock lock = state_.locked();
    if (leaving_) {
      gone_changed_.wait(lock, [this] { return gone_; });  // bounded by what the first caller does
      return are_devices_through_;
    }
    leaving_ = true;
  }
  const auto is_idle = [this] { return progress_.is_idle(); };
  const std::string self = describe_rank(state_.world, state_.rank);
  if (!reason.empty()) state_.alarm.raise(ErrorCode::kPeerLost, self + " ended early: " + reason);
  progress_.progress_until(is_idle, state_.options.timeout + kBusyTick, state_.policy);
  bool is_pending = false;
  {
    const Lock lock = state_.locked();
    left_ = true;  // nothing is accepted any more
    is_pending = !is_idle();
  }
  if (is_pending) {
    state_.alarm.raise(ErrorCode::kPeerLost, self + " left while its operations were pending");
    progress_.progress_until(is_idle, std::chrono::hours(1), state_.policy);  // only fails them: the world is lost
  }
  const bool are_through = await_devices();
  state_.devices.close();
  // Release: this rank has written whatever the others will read from it.
  state_.own().presence.store(Presence::kLeft, std::memory_order_release);
  state_.world.left.fetch_add(1, std::memory_order_release);
  ring_all(state_.world);
  // The watcher last: while the communication thread is about, somebody has to look after the other ranks.
  progress_.stop();
  watcher_.stop();
  {
    const Lock lock = state_.locked();
    gone_ = true;
    are_devices_through_ = are_through;
  }
  gone_changed_.notify_all();
  return are_through;
}

// Whoever calls shutdown() gives the devices' memory back next, which other ranks may still read.
bool ActiveEngine::await_devices() {
  Patience patience(kDevicesLeave);
  while (!state_.devices.others_are_through([this](int rank) { return watcher_.is_dead(rank); })) {
    if (patience.is_over()) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

}  // namespace kvstore_hvd
