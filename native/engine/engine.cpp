#include "engine/engine.hpp"

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "engine/progress.hpp"

namespace kvstore_hvd {
namespace {

// See submit_and_linger and wait_briefly. For longer than a sleeper takes to wake up beside other processes: otherwise
// ranks sleep in turn, and every operation costs a wake-up.
constexpr std::chrono::microseconds kLinger{200};
constexpr std::chrono::microseconds kBriefly{5};
// How long a rank that leaves waits for the devices of the others: for kernels that run.
constexpr std::chrono::seconds kDevicesLeave{2};

}  // namespace

// Whether a submitting thread should stay until the other ranks have come, see submit_and_linger. Any thread. Relaxed,
// everywhere: hints that nothing depends on.
class Lingering {
 public:
  // Whether the others are likely to come in a moment, as they did the last times; tried anew now and then.
  bool is_promising() {
    if (credit_.load(std::memory_order_relaxed) > 0) return true;
    return refusals_.fetch_add(1, std::memory_order_relaxed) % kRetry == 0;
  }
  void ended(bool done) {
    credit_.store(done ? kCredit : credit_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
  }

 private:
  static constexpr int kCredit = 4;      // failures in a row after which it is given up
  static constexpr unsigned kRetry = 8;  // how many requests then go by before it is tried again

  std::atomic<int> credit_{kCredit};
  std::atomic<unsigned> refusals_{0};
};

// What an engine has for as long as it is in its world.
struct Engine::Inner : EngineState {
  Inner(std::shared_ptr<Segment> its_segment, int its_rank, EngineOptions its_options)
      : EngineState(std::move(its_segment), its_rank, std::move(its_options)),
        progress(*this),
        watcher(*this, progress) {}

  std::shared_ptr<Work> submit(std::shared_ptr<const Request> request, bool caller_waits);
  void submit(const std::shared_ptr<Work>& work, bool caller_waits);
  bool leave(const std::string& reason);
  bool await_devices();

  Progress progress;
  Watcher watcher;
  Lingering lingering;
  bool leaving = false, left = false, gone = false;  // under the mutex, as is the next one
  bool are_devices_through = true;
  std::condition_variable gone_changed;  // gone
};

// A call into the world, of which there is none once it is left, and in a forked child. The last one out of a world
// that was left gives back memory, descriptors, and the threads' stacks, however long the Engine itself is kept.
class Engine::Visit {
 public:
  explicit Visit(const Engine& engine) : engine_(engine), inside_(!engine.forked() && engine.gate_.enter()) {}
  ~Visit() {
    if (inside_ && engine_.gate_.leave()) engine_.inner_.reset();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  explicit operator bool() const { return inside_; }
  Inner* operator->() const { return engine_.inner_.get(); }

 private:
  const Engine& engine_;
  const bool inside_;
};

Engine::Engine(std::shared_ptr<Segment> segment, int rank, EngineOptions options)
    : rank_(segment->world().rank(rank).rank_of_world),
      size_(segment->world().size),
      local_rank_(rank),
      owner_(process_id()),
      error_prefix_(kvstore_hvd::error_prefix(segment->world(), rank)),
      inner_(std::make_unique<Inner>(std::move(segment), rank, std::move(options))) {}

Engine::~Engine() {
  // The threads and the memory of the parent do not exist in a forked child: there is nothing to release.
  if (forked()) {
    static_cast<void>(inner_.release());
  } else {
    shutdown("");
  }
}

bool Engine::forked() const { return process_id() != owner_; }

std::shared_ptr<Segment> Engine::segment() const {
  const Visit in(*this);
  return in ? in->segment : nullptr;
}

// Outside of the world nothing is called, and an empty result is returned.
template <class Call>
auto Engine::with_lock(const Call& call) const {
  const Visit in(*this);
  using Result = decltype(call(*in.operator->()));
  if (!in) return Result();
  const Lock lock = in->locked();
  return call(*in.operator->());
}

void Engine::protect(std::shared_ptr<Arena> arena) {
  with_lock([&](Inner& in) { in.arena = std::move(arena); });
}

// ---- Submitting ----

Status Engine::why_outside(const Request& request) const {
  return forked() ? Messages::forked() : Messages::left(error_prefix_ + describe_operation(request) + ": ");
}

std::shared_ptr<Work> Engine::refuse(std::shared_ptr<const Request> request) const {
  auto work = std::make_shared<Work>(std::move(request));
  work->finish(why_outside(work->request()));
  return work;
}

std::shared_ptr<Work> Engine::submit(std::shared_ptr<const Request> request) {
  if (const Visit in(*this); in) return in->submit(std::move(request), false);
  return refuse(std::move(request));
}

std::shared_ptr<Work> Engine::submit_to_wait(std::shared_ptr<const Request> request) {
  if (const Visit in(*this); in) return in->submit(std::move(request), true);
  return refuse(std::move(request));
}

void Engine::submit_to_wait(const std::shared_ptr<Work>& work) {
  work->renew();
  if (const Visit in(*this); in) return in->submit(work, true);
  work->finish(why_outside(work->request()));
}

std::shared_ptr<Work> Engine::submit_and_linger(std::shared_ptr<const Request> request) {
  const Visit in(*this);
  if (!in) return refuse(std::move(request));
  // Over hosts an operation takes longer than this thread may stay.
  const bool linger = !in->world.has_link() && !request->on_device &&
                      bytes_of(*request) <= in->world.thresholds.linger && in->progress.is_idle() &&
                      in->lingering.is_promising();
  auto work = in->submit(std::move(request), linger);
  if (linger) {
    WaitPolicy policy = in->callers_policy;
    policy.spin = std::min<std::chrono::nanoseconds>(policy.spin, kLinger);
    policy.sleeps = false;
    in->lingering.ended(in->progress.wait(*work, kLinger, policy));
  }
  return work;
}

std::shared_ptr<Work> Engine::Inner::submit(std::shared_ptr<const Request> request, bool caller_waits) {
  // What only this rank can see to be wrong is announced all the same, or the others would wait for it.
  if (request->input_failure.empty()) {
    if (std::string fault = fault_of(*request, world.size); !fault.empty()) {
      auto faulty = std::make_shared<Request>(*request);
      faulty->input_failure = std::move(fault);
      request = std::move(faulty);
    }
  }
  auto work = std::make_shared<Work>(std::move(request));
  submit(work, caller_waits);
  return work;
}

void Engine::Inner::submit(const std::shared_ptr<Work>& work, bool caller_waits) {
  const Request& request = work->request();
  if (request.name.empty() || request.name.size() > kMaxName) {
    const std::string limits = "a name has 1 to " + std::to_string(kMaxName) + " bytes, not ";
    return work->finish(messages.invalid(request, limits + std::to_string(request.name.size())));
  }
  Lock lock = locked();
  if (left || world.failure.is_set()) {
    Status status = left ? messages.left(request) : messages.lost(request);
    lock.unlock();
    return work->finish(std::move(status));
  }
  work->bell_before = own().bell.value();
  const Pending::Added added = pending.add(work, caller_waits);
  progress.on_submitted(lock, *work, added, caller_waits);
}

// ---- Waiting. A rank that leaves completes all works first, so outside there is nothing to wait for. ----

bool Engine::wait(Work& work, std::chrono::nanoseconds limit) {
  if (work.done()) return true;
  work.is_waited_for.store(true, std::memory_order_relaxed);
  const Visit in(*this);
  return !in || in->progress.wait(work, limit, in->callers_policy);
}

const Status& Engine::wait(Work& work) {
  while (!wait(work, std::chrono::seconds(1))) {
  }
  return work.status();
}

// Not with more ranks than cores: the others need this one.
bool Engine::wait_briefly(Work& work) {
  if (work.done()) return true;
  const Visit in(*this);
  if (!in) return true;
  return in->callers_policy.spin.count() > 0 && in->progress.wait(work, kBriefly, WaitPolicy{kBriefly, 0, false});
}

bool Engine::wait_for_all(std::chrono::nanoseconds limit) {
  const Visit in(*this);
  if (!in) return true;
  {
    const Lock lock = in->locked();
    in->pending.wait_for_all();
  }
  return in->progress.progress_until([&in] { return in->progress.is_idle(); }, limit, in->policy);
}

bool Engine::is_met(const Work& work) const {
  const Visit in(*this);
  if (!in || work.done()) return true;
  const Lock lock = in->locked();
  return in->pending.is_met(work);
}

// ---- Failures, and the device thread ----

void Engine::abort(const std::string& text) {
  if (const Visit in(*this); in) in->alarm.raise(ErrorCode::kTransport, text);
}

Status Engine::health() const {
  if (const Visit in(*this); in) return in->health();
  return forked() ? Messages::forked() : remains_.health;
}

std::optional<DeviceBatch> Engine::take_batch(std::chrono::nanoseconds limit) {
  const Visit in(*this);
  return in ? in->devices.take(limit) : std::nullopt;
}

bool Engine::end_batch(std::uint64_t number, const Status& status) {
  const Visit in(*this);
  if (!in) return false;
  if (!status.ok()) in->alarm.raise(status.code(), describe_rank(in->world, in->rank) + ": " + status.text());
  // The device may have been stopped on the way, because of the failure.
  if (in->world.failure.is_set()) in->devices.give_up(kDevicesEnd);
  const bool was_out = in->devices.done(number);
  in->own().bell.ring();
  return was_out;
}

// ---- What can be asked ----

std::uint64_t Engine::bytes_in_place() const {
  const Visit in(*this);
  return in ? in->progress.bytes_in_place() : remains_.bytes_in_place;
}

EngineStatistics Engine::report() const {
  return with_lock([](Inner& in) { return in.pending.report(); });
}

void Engine::start_timeline(std::size_t capacity) {
  with_lock([=](Inner& in) { in.pending.start_timeline(capacity); });
}

void Engine::stop_timeline() {
  with_lock([](Inner& in) { in.pending.timeline().stop(); });
}

TimelineEvents Engine::take_timeline() {
  if (const Visit in(*this); in) {
    const Lock lock = in->locked();
    return in->pending.timeline().take();
  }
  if (forked()) return {};
  const std::lock_guard<std::mutex> lock(remains_mutex_);
  return std::exchange(remains_.timeline, {});
}

std::optional<std::vector<Waiting>> Engine::waiting(std::chrono::nanoseconds age) const {
  const Visit in(*this);
  if (!in || in->world.failure.is_set()) return std::vector<Waiting>{};
  const Lock lock(in->mutex, std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  return in->pending.waiting(age);
}

// Without the mutex: looks at nothing of this rank's but its marks.
std::optional<std::vector<Missed>> Engine::missed(std::size_t most, bool described) const {
  const Visit in(*this);
  if (!in || in->world.failure.is_set()) return std::vector<Missed>{};
  // Relaxed: a hint.
  if (in->world.has_link()) in->world.asked_at.store(monotonic_ns(), std::memory_order_relaxed);
  return in->pending.missed(most, described);
}

Engine::Process Engine::process(int rank) const {
  const Visit in(*this);
  if (!in) return {};
  const Member& member = in->world.member(rank);
  if (member.host != in->world.host) return {0, describe_member(in->world, rank)};
  const RankState& state = in->world.rank(member.local_rank);
  // Acquire: the process id was written before.
  const bool joined = state.presence.load(std::memory_order_acquire) != Presence::kAbsent;
  return {joined ? state.pid : 0, describe_rank(in->world, member.local_rank)};
}

std::pair<std::uint64_t, std::size_t> Engine::counts() const {
  const Visit in(*this);
  if (!in) return {};
  return {in->pending.settled(), in->pending.count()};
}

void Engine::tell_line(std::string line, const std::vector<Activity::Caller>& callers, bool is_blocked) {
  const Visit in(*this);
  if (!in) return;
  in->options.activity->set_line(std::move(line), callers);
  if (const Lock lock(in->mutex, std::try_to_lock); lock.owns_lock()) in->pending.look(is_blocked);
}

// ---- Leaving ----

bool Engine::shutdown(const std::string& reason) {
  const Visit in(*this);
  if (!in) return forked() || remains_.are_devices_through;
  const bool are_through = in->leave(reason);
  const std::lock_guard<std::mutex> lock(remains_mutex_);
  if (is_left_) return are_through;
  const Lock of_timeline = in->locked();
  remains_ = {in->health(), in->progress.bytes_in_place(), are_through, in->pending.timeline().take()};
  is_left_ = true;
  gate_.close();
  return are_through;
}

bool Engine::Inner::leave(const std::string& reason) {
  {
    Lock lock = locked();
    if (leaving) {
      gone_changed.wait(lock, [this] { return gone; });  // bounded by what the first caller does
      return are_devices_through;
    }
    leaving = true;
  }
  const auto is_idle = [this] { return progress.is_idle(); };
  const std::string self = describe_rank(world, rank);
  if (!reason.empty()) alarm.raise(ErrorCode::kPeerLost, self + " ended early: " + reason);
  progress.progress_until(is_idle, options.timeout + kBusyTick, policy);
  bool is_pending = false;
  {
    const Lock lock = locked();
    left = true;  // nothing is accepted any more
    is_pending = !is_idle();
  }
  if (is_pending) {
    alarm.raise(ErrorCode::kPeerLost, self + " left while its operations were pending");
    progress.progress_until(is_idle, std::chrono::hours(1), policy);  // only fails them: the world is lost
  }
  const bool are_through = await_devices();
  devices.close();
  // Release: this rank has written whatever the others will read from it.
  own().presence.store(Presence::kLeft, std::memory_order_release);
  world.left.fetch_add(1, std::memory_order_release);
  ring_all(world);
  // The watcher last: while the communication thread runs, the other ranks are watched.
  progress.stop();
  watcher.stop();
  {
    const Lock lock = locked();
    gone = true;
    are_devices_through = are_through;
  }
  gone_changed.notify_all();
  return are_through;
}

// The caller of shutdown() releases the devices' memory next, which other ranks may still read.
bool Engine::Inner::await_devices() {
  Patience patience(kDevicesLeave);
  while (!devices.others_are_through([this](int r) { return watcher.is_dead(r); })) {
    if (patience.is_over()) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

}  // namespace kvstore_hvd
