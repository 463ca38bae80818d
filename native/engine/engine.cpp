#include "engine/engine.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "base/blocking.hpp"
#include "base/process.hpp"
#include "base/running_time.hpp"
#include "engine/inline_reduction.hpp"
#include "engine/lingering.hpp"
#include "engine/pending.hpp"
#include "engine/pipeline.hpp"
#include "request/messages.hpp"
#include "shm/alarm.hpp"
#include "shm/describe.hpp"
#include "shm/liveness.hpp"
#include "shm/poll.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// How often a thread tries to get the engine's mutex, which is held for less than a microsecond as a rule, before it
// says that it waits; as SharedLock.
constexpr int kTries = 64;
// How often the watcher looks at deadlines: while something is pending, and otherwise.
constexpr std::chrono::milliseconds kBusyTick{100};
constexpr std::chrono::milliseconds kIdleTick{500};
// See Engine::submit_and_linger.
constexpr std::chrono::microseconds kLinger{60};
constexpr std::chrono::microseconds kBriefly{5};
// For how long a submitting thread carries out what it made ready itself. It may be a thread that computes: longer, and
// the computation behind it would be late.
constexpr std::chrono::microseconds kInlineTime{200};
// How long the device thread may take to end what it carries out, once the world is lost.
constexpr std::chrono::seconds kDevicesEnd{10};
// How long a rank that leaves waits for the devices of the others: for kernels that run, and wait for nobody any more.
constexpr std::chrono::seconds kDevicesLeave{2};
// How often to look whether another rank is through with what it carries out: inline once the world is lost, or on its
// device.
constexpr std::chrono::milliseconds kLook{1};

}  // namespace

class Engine::Impl {
 public:
  Impl(std::shared_ptr<Segment> segment, int rank, EngineOptions options)
      : segment_(std::move(segment)),
        world_(segment_->world()),
        rank_(rank),
        size_(segment_->size()),
        options_(std::move(options)),
        owner_(process_id()),
        policy_(WaitPolicy::for_engine(world_.has_core_for_each != 0)),
        callers_policy_(WaitPolicy::for_callers(world_.has_core_for_each != 0)),
        messages_(world_, rank),
        alarm_(world_, rank, options_.timeout),
        devices_(world_, rank),
        dead_(static_cast<std::size_t>(size_)),
        pending_(world_, alarm_, messages_, standstills_),
        pipeline_(
            world_, alarm_, [this](std::uint32_t slot) -> const Request& { return pending_.request_on(slot); },
            [this](const Entry& entry) { pending_.scheduled(entry); }, [this](std::uint32_t slot) { complete(slot); },
            devices_),
        liveness_(world_, rank, options_.host, options_.watch_peers) {
    communication_ = std::thread([this] { communicate(); });
    try {
      watcher_ = std::thread([this] { watch(); });
    } catch (...) {
      stop_communicating();
      throw;
    }
  }

  bool forked() const { return process_id() != owner_; }

  std::shared_ptr<Work> submit(std::shared_ptr<const Request> request, bool caller_waits) {
    // What only this rank can see to be wrong is announced all the same, or the others would wait for it.
    if (request->input_failure.empty()) {
      if (std::string fault = fault_of(*request, size_); !fault.empty()) {
        auto faulty = std::make_shared<Request>(*request);
        faulty->input_failure = std::move(fault);
        request = std::move(faulty);
      }
    }
    auto work = std::make_shared<Work>(std::move(request));
    submit(work, caller_waits);
    return work;
  }

  void submit(const std::shared_ptr<Work>& work, bool caller_waits) {
    const Request& request = work->request();
    if (forked()) return work->finish(Messages::forked());
    if (request.name.empty() || request.name.size() > kMaxName) {
      const std::string limits = "a name has 1 to " + std::to_string(kMaxName) + " bytes, not ";
      return work->finish(messages_.invalid(request, limits + std::to_string(request.name.size())));
    }
    Lock lock = locked();
    if (left_ || world_.failure.is_set()) {
      Status status = left_ ? messages_.left(request) : messages_.lost(request);
      lock.unlock();
      return work->finish(std::move(status));
    }
    callers_drive_ = caller_waits;
    work->bell_before = world_.rank(rank_).bell.value();
    const Pending::Added added = pending_.add(work, caller_waits);
    if (added.ready == Pending::Ready::kDone) {
      work->scheduled = work->submitted;
      return take(lock, *work, added.slot, work->submitted);
    }
    if (caller_waits && added.ready == Pending::Ready::kNot) work->watched_slot = added.slot;
    const bool wake_communication = parked_ && !driven_ && (!caller_waits || world_.failure.is_set());
    if (wake_communication) unpark_ = true;
    bool driven = driven_;
    lock.unlock();
    if (added.ready == Pending::Ready::kAlone && !caller_waits && bytes_of(request) <= world_.thresholds.submitter) {
      if (drive_inline(*work)) return;
      driven = true;
    }
    if (wake_communication) parked_changed_.notify_one();
    // Who drives may be asleep, and a caller that waits drives if no one does.
    if (added.ready != Pending::Ready::kNot && (driven || !caller_waits)) world_.rank(rank_).bell.ring();
  }

  // Completes what was carried out inline, on the thread that learns of it. `lock` is that of mutex_, and given up.
  void take(Lock& lock, Work& work, std::uint32_t slot, Clock::time_point when) {
    pipeline_.take(slot);
    Pending::Completed completed = pending_.complete(slot, when);
    if (work.request().on_done) lock.unlock();
    work.finish(std::move(completed.status));
    if (!lock.owns_lock()) acquire(lock);
    pending_.settle(1);
    const bool driven = driven_, waited_for = waiters_ > 0;
    lock.unlock();
    if (waited_for) changed_.notify_all();
    if (driven) world_.rank(rank_).bell.ring();  // it may be this that the driver waits for
  }

  // Carries out what has just become ready, for about kInlineTime at most, and without going to sleep for a part that
  // another rank has claimed. Returns false when another thread is at it.
  bool drive_inline(const Work& work) {
    {
      const Lock lock = locked();
      if (driven_) return false;
      driven_ = true;
    }
    const auto end = Clock::now() + kInlineTime;
    WaitPolicy impatient = policy_;
    impatient.sleeps = false;
    while (!work.done() && drive(impatient) && Clock::now() < end) {
    }
    const Lock lock = locked();
    stop_driving();
    return true;
  }

  // With mutex_ held. What is left goes on without this thread.
  void stop_driving() {
    driven_ = false;
    if (waiters_ > 0) changed_.notify_all();
    if (idle()) return;
    if (parked_) {
      unpark_ = true;
      parked_changed_.notify_one();
    } else if (pipeline_.has_work()) {
      world_.rank(rank_).bell.ring();
    }
  }

  bool wait(Work& work, std::chrono::nanoseconds limit, const WaitPolicy& policy) {
    if (work.done() || forked()) return true;
    if (work.watched_slot != kNoSlot && watch(work, policy)) return true;
    return drive_until([&] { return work.done(); }, limit, policy);
  }

  // Looks at the mark of the work's slot until another rank has carried it out, the bell rings, or the policy's time is
  // over; completes the work in the first case. Otherwise returns false: the driver will complete it, or has.
  bool watch(Work& work, const WaitPolicy& policy) {
    const std::uint32_t slot = std::exchange(work.watched_slot, kNoSlot);
    const Flag& bell = world_.rank(rank_).bell;
    poll(policy, [&] { return InlineReduction::is_done(world_, rank_, slot) || bell.value() != work.bell_before; });
    Lock lock = locked();
    // Once the world is lost, another thread may have failed the work already. And the driver completes what was
    // scheduled: the mark may by now be that of the next operation on the slot.
    if (world_.failure.is_set() || !pending_.is_in_flight(slot, work)) return false;
    if (InlineReduction::give_up(world_, rank_, slot)) return false;
    take(lock, work, slot, Clock::now());
    return true;
  }

  // Until nothing of this rank is pending, or `limit` has passed.
  bool wait_for_all(std::chrono::nanoseconds limit) {
    return forked() || drive_until([this] { return idle(); }, limit, policy_);
  }

  bool is_met(const Work& work) {
    if (work.done() || forked()) return true;
    const Lock lock = locked();
    return pending_.is_met(work);
  }

  // Not with more ranks than cores: the others need this one.
  bool wait_briefly(Work& work) {
    if (callers_policy_.spin.count() == 0) return work.done();
    return wait(work, kBriefly, WaitPolicy{kBriefly, 0, false});
  }

  std::shared_ptr<Work> submit_and_linger(std::shared_ptr<const Request> request) {
    const bool linger = !forked() && !request->on_device && bytes_of(*request) <= world_.thresholds.linger && idle() &&
                        lingering_.is_promising();
    auto work = submit(std::move(request), linger);
    if (linger) {
      WaitPolicy policy = callers_policy_;
      policy.spin = std::min<std::chrono::nanoseconds>(policy.spin, kLinger);
      policy.sleeps = false;
      lingering_.ended(wait(*work, kLinger, policy));
    }
    return work;
  }

  void abort(const std::string& text) {
    if (forked()) return;
    alarm_.raise(ErrorCode::kTransport, text);
  }

  std::optional<DeviceBatch> take_batch(std::chrono::nanoseconds limit) {
    if (forked()) return std::nullopt;
    return devices_.take(limit);
  }

  bool end_batch(std::uint64_t number, const Status& status) {
    if (forked()) return false;
    if (!status.ok()) alarm_.raise(status.code(), describe_rank(world_, rank_) + ": " + status.text());
    // The device may have been stopped on the way, because of the failure.
    if (world_.failure.is_set()) devices_.give_up(kDevicesEnd);
    const bool was_out = devices_.done(number);
    world_.rank(rank_).bell.ring();
    return was_out;
  }

  Status health() {
    if (forked()) return Messages::forked();
    return world_.failure.is_set() ? messages_.lost() : Status();
  }

  EngineStatistics report() {
    if (forked()) return {};
    const Lock lock = locked();
    return pending_.report();
  }

  void start_timeline(std::size_t capacity) {
    if (forked()) return;
    const Lock lock = locked();
    pending_.start_timeline(capacity);
  }

  void stop_timeline() {
    if (forked()) return;
    const Lock lock = locked();
    pending_.timeline().stop();
  }

  TimelineEvents take_timeline() {
    if (forked()) return {};
    const Lock lock = locked();
    return pending_.timeline().take();
  }

  std::optional<std::vector<Waiting>> waiting(std::chrono::nanoseconds age) {
    if (forked() || world_.failure.is_set()) return std::vector<Waiting>{};
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return std::nullopt;
    return pending_.waiting(age);
  }

  // Without mutex_: looks at nothing of this rank's but its marks.
  std::optional<std::vector<Missed>> missed(std::size_t most, bool described) const {
    if (forked() || world_.failure.is_set()) return std::vector<Missed>{};
    return pending_.missed(most, described);
  }

  Process process(int rank) const {
    if (forked()) return {};
    const RankState& state = world_.rank(rank);
    // Acquire: the process id was written before.
    const bool joined = state.presence.load(std::memory_order_acquire) != Presence::kAbsent;
    return {joined ? state.pid : 0, describe_rank(world_, rank)};
  }

  bool shutdown(const std::string& reason) {
    if (forked()) return true;
    {
      Lock lock = locked();
      if (leaving_) {
        changed_.wait(lock, [this] { return gone_; });  // bounded by what the first caller does
        return true;
      }
      leaving_ = true;
    }
    if (!reason.empty()) {
      alarm_.raise(ErrorCode::kPeerLost, describe_rank(world_, rank_) + " ended early: " + reason);
    }
    drive_until([this] { return idle(); }, options_.timeout + kBusyTick, policy_);
    bool is_pending = false;
    {
      const Lock lock = locked();
      left_ = true;  // nothing is accepted any more
      is_pending = !idle();
    }
    if (is_pending) {
      alarm_.raise(ErrorCode::kPeerLost, describe_rank(world_, rank_) + " left while its operations were pending");
      drive_until([this] { return idle(); }, std::chrono::hours(1), policy_);  // only fails them: the world is lost
    }
    const bool are_through = await_devices();
    devices_.close();
    // Release: this rank has written whatever the others will read from it.
    world_.rank(rank_).presence.store(Presence::kLeft, std::memory_order_release);
    world_.left.fetch_add(1, std::memory_order_release);
    ring_all(world_);
    stop_threads();
    {
      const Lock lock = locked();
      gone_ = true;
    }
    changed_.notify_all();
    return are_through;
  }

 private:
  friend class Engine;

  // mutex_. Whoever has it may wait in a critical section of the world, for a rank that is stopped there.
  Lock locked() {
    Lock lock(mutex_, std::defer_lock);
    acquire(lock);
    return lock;
  }

  static void acquire(Lock& lock) {
    for (int i = 0; i < kTries; ++i) {
      if (lock.try_lock()) return;
      pause_core();
    }
    about_to_block();
    lock.lock();
  }

  // Whoever calls shutdown() gives the devices' memory back next, which other ranks may still read.
  bool await_devices() {
    const auto is_dead = [this](int r) { return dead_[static_cast<std::size_t>(r)].load(std::memory_order_relaxed); };
    Patience patience(kDevicesLeave);
    while (!devices_.others_are_through(is_dead)) {
      if (patience.is_over()) return false;
      std::this_thread::sleep_for(kLook);
    }
    return true;
  }

  void check_left() {
    // Acquire: pairs with the release in shutdown().
    if (world_.left.load(std::memory_order_acquire) == 0) return;
    const Lock lock = locked();
    pending_.check_left();
  }

  // ---- Completing; by the driver only.

  void complete(std::uint32_t slot) {
    Pending::Completed completed;
    {
      const Lock lock = locked();
      completed = pending_.complete(slot, Clock::now());
    }
    completed.work->finish(std::move(completed.status));
    settle(1);
  }

  // `count` operations are over, and their callers may look.
  void settle(std::size_t count) {
    {
      // Under the lock, or a waiter that has just looked would miss the notification.
      const Lock lock = locked();
      pending_.settle(count);
      if (waiters_ == 0) return;
    }
    changed_.notify_all();
  }

  // The world is lost; once. Whoever lost it may have done so right after an operation that is complete for it, and so
  // has to be for this rank. The caller is the driver.
  void finish_what_is_done(const WaitPolicy& policy) {
    try {
      while (pipeline_.finish(policy)) {
      }
    } catch (const WorldLost&) {
    }
    Patience patience(kMaxSleep);
    for (;;) {
      Pending::CarriedOut found;
      {
        const Lock lock = locked();
        found = pending_.carried_out();
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

  // The world is lost, or this rank leaves: nothing that is pending will happen. The caller is the driver.
  void fail_pending() {
    std::deque<std::shared_ptr<Work>> lost;
    {
      const Lock lock = locked();
      lost = pending_.take_all([this](std::uint32_t slot) { return devices_.holds(slot); });
    }
    for (const auto& work : lost) {
      work->finish(world_.failure.is_set() ? messages_.lost(work->request()) : messages_.left(work->request()));
    }
    settle(lost.size());
  }

  // ---- Driving: at any time at most one thread of this rank carries out the schedule.

  // Takes no lock, so that the watcher never waits for one before it has looked at the other ranks.
  bool idle() const { return pending_.count() == 0; }

  // One step as the driver, or a wait of about kMaxSleep for other ranks. Returns whether there was anything to do.
  // Exceptions: as Work::finish().
  bool drive(const WaitPolicy& policy) noexcept {
    try {
      if (!world_.failure.is_set()) {
        if (pipeline_.advance(policy)) return true;
        check_left();
        if (!world_.failure.is_set()) return false;
      }
    } catch (const WorldLost&) {
    }
    devices_.give_up(kDevicesEnd);
    if (!std::exchange(finished_, true)) finish_what_is_done(policy);
    fail_pending();
    return false;
  }

  template <class Done>
  bool drive_until(const Done& done, std::chrono::nanoseconds limit, const WaitPolicy& policy) {
    Patience patience(limit);
    Lock lock = locked();
    ++waiters_;
    for (bool waited = false;; waited = true) {
      lock.unlock();
      if (done()) break;
      if (waited && patience.is_over()) break;
      acquire(lock);
      if (driven_) {
        if (done()) continue;
        about_to_block();
        changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(kMaxSleep, limit));
        continue;
      }
      driven_ = true;
      lock.unlock();
      Flag& bell = world_.rank(rank_).bell;
      const auto longest = std::min<std::chrono::nanoseconds>(kMaxSleep, limit);
      while (!done() && !patience.is_over()) {
        const std::uint32_t seen = bell.value();
        if (!drive(policy) && !done()) bell.wait_change(seen, policy, longest, world_.failure);
      }
      acquire(lock);
      stop_driving();
    }
    acquire(lock);
    --waiters_;
    lock.unlock();
    return done();
  }

  // The communication thread: listens to the bell, and drives when no other thread does. When it finds another thread
  // driving it parks, so that the bell then wakes one thread only.
  void communicate() {
    request_short_slice();
    Flag& bell = world_.rank(rank_).bell;
    for (;;) {
      const std::uint32_t seen = bell.value();
      {
        Lock lock = locked();
        // After a failure there is nothing to listen for; and as long as callers do the driving, the bell shall not
        // wake this thread as well.
        if (driven_ || world_.failure.is_set() || (callers_drive_ && idle())) {
          parked_ = true;
          unpark_ = false;
          parked_changed_.wait(lock, [&] { return stopping_ || unpark_; });
          parked_ = false;
        }
        if (stopping_) return;
        if (driven_) continue;
        driven_ = true;
      }
      while (drive(policy_)) {
      }
      {
        const Lock lock = locked();
        stop_driving();
      }
      // Without spinning: it would take the core from whoever submits the next operation.
      bell.wait_change(seen, WaitPolicy{}, kIdleTick, world_.failure);
    }
  }

  // The watcher: notices lost ranks and passed deadlines, and makes sure that a failure reaches what is pending.
  void watch() {
    while (!stop_watching_.load(std::memory_order_relaxed)) {  // Relaxed: interrupt() ends the sleep soon enough.
      const bool busy = !idle();
      if (const auto death = liveness_.poll(busy ? kBusyTick : kIdleTick)) {
        // Relaxed: only whether to wait on.
        dead_[static_cast<std::size_t>(death->rank)].store(true, std::memory_order_relaxed);
        alarm_.raise(ErrorCode::kPeerLost, describe_rank(world_, death->rank) + " " + death->how);
      }
      standstills_.look();
      if (busy && !world_.failure.is_set()) look_after_pending();
      if (world_.failure.is_set()) drive_until([this] { return idle(); }, kBusyTick, policy_);
    }
  }

  void look_after_pending() {
    std::string fact;
    {
      // Whoever has the lock may wait in a critical section for a rank that has just died there, and this thread is the
      // one that would notice: it tries again at the next tick.
      const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
      if (!lock.owns_lock()) return;
      pending_.check_left();
      fact = pending_.describe_overdue(options_.timeout, [this](std::uint32_t slot) { return devices_.holds(slot); });
      pending_.retry_slots();
    }
    if (fact.empty()) return;
    // Whom this rank waits for may itself wait for one that is stopped.
    for (const int r : liveness_.stopped()) {
      const std::string whole = describe_rank(world_, r);  // host and process are told once
      const bool is_told = fact.find(whole) != std::string::npos;
      fact += ".\n  " + (is_told ? rank_name(world_, r) : whole) + " is stopped";
    }
    alarm_.raise(ErrorCode::kTimeout, fact);
  }

  void stop_communicating() {
    {
      const Lock lock = locked();
      stopping_ = true;
    }
    parked_changed_.notify_all();
    world_.rank(rank_).bell.ring();
    communication_.join();
  }

  void stop_threads() {
    // The watcher last: while the communication thread is about, somebody has to look after the other ranks.
    stop_communicating();
    stop_watching_.store(true, std::memory_order_relaxed);
    liveness_.interrupt();
    watcher_.join();
  }

  const std::shared_ptr<Segment> segment_;
  World& world_;
  const int rank_, size_;
  const EngineOptions options_;
  const pid_t owner_;
  const WaitPolicy policy_, callers_policy_;
  const Messages messages_;
  Alarm alarm_;

  std::mutex mutex_;
  std::condition_variable changed_;         // something completed, or the driver's place is free
  std::condition_variable parked_changed_;  // unpark_, stopping_

  DeviceQueue devices_;
  std::vector<std::atomic<bool>> dead_;  // by rank; written by the watcher
  Standstills standstills_;              // the watcher looks
  Pending pending_;                      // under mutex_
  int waiters_ = 0;
  Lingering lingering_;
  bool driven_ = false, callers_drive_ = false, parked_ = false, unpark_ = false, stopping_ = false;
  bool leaving_ = false, left_ = false, gone_ = false;
  bool finished_ = false;  // the driver's: finish_what_is_done() was called

  Pipeline pipeline_;  // the driver's
  Liveness liveness_;  // the watcher's
  std::atomic<bool> stop_watching_{false};
  std::thread communication_, watcher_;
};

// A call into the world. The last one out of a world that was left gives back what it held: memory, descriptors, and
// the threads' stacks, however long the Engine itself is kept.
class Engine::Visit {
 public:
  explicit Visit(const Engine& engine) : engine_(engine), inside_(engine.gate_.enter()) {}
  ~Visit() {
    if (!inside_ || !engine_.gate_.leave()) return;
    // In a forked child there is nothing to give back, as in ~Engine.
    if (engine_.forked()) return;
    engine_.impl_.reset();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  explicit operator bool() const { return inside_; }
  Impl* operator->() const { return engine_.impl_.get(); }

 private:
  const Engine& engine_;
  const bool inside_;
};

Engine::Engine(std::shared_ptr<Segment> segment, int rank, EngineOptions options)
    : rank_(rank),
      size_(segment->size()),
      owner_(process_id()),
      speaker_(describe_speaker(segment->world(), rank)),
      impl_(std::make_unique<Impl>(std::move(segment), rank, std::move(options))) {}

Engine::~Engine() {
  // The threads and the memory of the parent do not exist in a forked child: there is nothing to release.
  if (forked()) {
    static_cast<void>(impl_.release());
  } else {
    shutdown("");
  }
}

bool Engine::forked() const { return process_id() != owner_; }

Status Engine::why_outside(const Request& request) const {
  return forked() ? Messages::forked() : Messages::left(speaker_ + describe_operation(request) + ": ");
}

std::shared_ptr<Segment> Engine::segment() const {
  const Visit visit(*this);
  return visit ? visit->segment_ : nullptr;
}

std::shared_ptr<Work> Engine::submit(std::shared_ptr<const Request> request) {
  if (const Visit visit(*this); visit) return visit->submit(std::move(request), false);
  return refuse(std::move(request));
}

std::shared_ptr<Work> Engine::submit_and_linger(std::shared_ptr<const Request> request) {
  if (const Visit visit(*this); visit) return visit->submit_and_linger(std::move(request));
  return refuse(std::move(request));
}

std::shared_ptr<Work> Engine::submit_to_wait(std::shared_ptr<const Request> request) {
  if (const Visit visit(*this); visit) return visit->submit(std::move(request), true);
  return refuse(std::move(request));
}

void Engine::submit_to_wait(const std::shared_ptr<Work>& work) {
  work->renew();
  if (const Visit visit(*this); visit) return visit->submit(work, true);
  work->finish(why_outside(work->request()));
}

std::shared_ptr<Work> Engine::refuse(std::shared_ptr<const Request> request) const {
  auto work = std::make_shared<Work>(std::move(request));
  work->finish(why_outside(work->request()));
  return work;
}

// Whoever leaves completes all works first, so outside there is nothing to wait for.
bool Engine::wait(Work& work, std::chrono::nanoseconds limit) {
  if (work.done()) return true;
  const Visit visit(*this);
  return !visit || visit->wait(work, limit, visit->callers_policy_);
}

bool Engine::wait_briefly(Work& work) {
  if (work.done()) return true;
  const Visit visit(*this);
  return !visit || visit->wait_briefly(work);
}

bool Engine::is_met(const Work& work) const {
  const Visit visit(*this);
  return !visit || visit->is_met(work);
}

const Status& Engine::wait(Work& work) {
  while (!wait(work, std::chrono::seconds(1))) {
  }
  return work.status();
}

bool Engine::wait_for_all(std::chrono::nanoseconds limit) {
  const Visit visit(*this);
  return !visit || visit->wait_for_all(limit);
}

void Engine::abort(const std::string& text) {
  if (const Visit visit(*this); visit) visit->abort(text);
}

EngineStatistics Engine::report() const {
  const Visit visit(*this);
  return visit ? visit->report() : EngineStatistics();
}

void Engine::start_timeline(std::size_t capacity) {
  if (const Visit visit(*this); visit) visit->start_timeline(capacity);
}

void Engine::stop_timeline() {
  if (const Visit visit(*this); visit) visit->stop_timeline();
}

TimelineEvents Engine::take_timeline() {
  if (const Visit visit(*this); visit) return visit->take_timeline();
  if (forked()) return {};
  const std::lock_guard<std::mutex> lock(remains_mutex_);
  return std::exchange(remains_.timeline, {});
}

std::optional<std::vector<Waiting>> Engine::waiting(std::chrono::nanoseconds age) const {
  const Visit visit(*this);
  return visit ? visit->waiting(age) : std::vector<Waiting>{};
}

std::optional<std::vector<Missed>> Engine::missed(std::size_t most, bool described) const {
  const Visit visit(*this);
  return visit ? visit->missed(most, described) : std::vector<Missed>{};
}

Engine::Process Engine::process(int rank) const {
  const Visit visit(*this);
  return visit ? visit->process(rank) : Process();
}

Status Engine::health() const {
  if (const Visit visit(*this); visit) return visit->health();
  if (forked()) return Messages::forked();
  return remains_.health;
}

std::optional<DeviceBatch> Engine::take_batch(std::chrono::nanoseconds limit) {
  const Visit visit(*this);
  return visit ? visit->take_batch(limit) : std::nullopt;
}

bool Engine::end_batch(std::uint64_t number, const Status& status) {
  const Visit visit(*this);
  return visit && visit->end_batch(number, status);
}

std::uint64_t Engine::bytes_in_place() const {
  const Visit visit(*this);
  return visit ? visit->pipeline_.bytes_in_place() : remains_.bytes_in_place;
}

bool Engine::shutdown(const std::string& reason) {
  const Visit visit(*this);
  if (!visit || forked()) return true;
  const bool are_through = visit->shutdown(reason);
  const std::lock_guard<std::mutex> lock(remains_mutex_);
  if (!is_left_) {
    remains_ = {visit->health(), visit->pipeline_.bytes_in_place(), visit->take_timeline()};
    is_left_ = true;
    gate_.close();
  }
  return are_through;
}

}  // namespace kvstore_hvd
