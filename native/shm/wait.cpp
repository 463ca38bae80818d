
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

constexpr std::chrono::microseconds kSpin{10};
constexpr std::chrono::microseconds kCallersSpin{100};
constexpr std::chrono::microseconds kLongYield{50};  // the core went to a busy thread: sleeping is cheaper
constexpr std::chrono::microseconds kSlice{100};
constexpr int kYields = 3;
constexpr int kCallersYields = 60;  // on an idle core about as long as kCallersSpin: waking a sleeper
// A yield that took so long has met a computation. So many waits then do without: each would cost a slice.
constexpr std::chrono::microseconds kSliceYield{1500};
constexpr int kWaitsWithoutYields = 100;

thread_local int waits_without_yields = 0;

}  // namespace

int yields_of(const WaitPolicy& policy) {
  if (policy.yields == 0 || waits_without_yields == 0) return policy.yields;
  --waits_without_yields;
  return 0;
}

bool yield_once() {
  const auto start = Clock::now();
  sched_yield();
  const auto yielded = Clock::now() - start;
  if (yielded > kSliceYield) waits_without_yields = kWaitsWithoutYields;
  return yielded <= kLongYield;
}

WaitPolicy WaitPolicy::for_engine(bool has_core_for_each) {
  return has_core_for_each ? WaitPolicy{kSpin, 0} : WaitPolicy{std::chrono::nanoseconds(0), kYields};
}

WaitPolicy WaitPolicy::for_callers(bool has_core_for_each) {
  return has_core_for_each ? WaitPolicy{kCallersSpin, 0} : WaitPolicy{std::chrono::nanoseconds(0), kCallersYields};
}

void request_short_slice() {
#if defined(SYS_sched_setattr)
  // struct sched_attr of sched_setattr(2); since Linux 6.12 sched_runtime is the slice of a SCHED_OTHER thread.
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime, deadline, period;
  } attributes{};
  if (sched_getscheduler(0) != SCHED_OTHER) return;  // the user chose another policy: leave it
  attributes.size = sizeof(attributes);
  attributes.policy = SCHED_OTHER;
  attributes.nice = getpriority(PRIO_PROCESS, 0);
  attributes.runtime = static_cast<std::uint64_t>(std::chrono::nanoseconds(kSlice).count());
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

bool Flag::wait_slow(std::uint32_t target, const WaitPolicy& policy, const Failure& failure) {
  if (poll(policy, [&] { return reached(target); })) return true;
  if (policy.sleeps) {
    const std::uint32_t sleeps = begin_sleep();
    const std::uint32_t now = value_.load(std::memory_order_seq_cst);  // see post()
    if (static_cast<std::int32_t>(now - target) < 0 && !failure.is_set() && futex_wait(sleeps_, sleeps, kMaxSleep) &&
        reached(target)) {
      missed_wakes.fetch_add(1, std::memory_order_relaxed);
    }
  }
  failure.check();
  return reached(target);
}

bool Flag::wait_change(std::uint32_t seen, const WaitPolicy& policy, std::chrono::nanoseconds limit,
                       const Failure& failure) {
  if (poll(policy, [&] { return value() != seen; }) || !policy.sleeps) return false;
  const std::uint32_t sleeps = begin_sleep();  // As in wait_slow().
  return value_.load(std::memory_order_seq_cst) == seen && !failure.is_set() && futex_wait(sleeps_, sleeps, limit);
}

void Flag::wake_sleepers() const { futex_wake_all(sleeps_); }

bool SharedLock::try_lock(int rank) {
  std::uint32_t expected = 0;
  // Acquire on success: sees what the last holder wrote. Relaxed otherwise: nothing is read.
  if (!word_.compare_exchange_strong(expected, 1, std::memory_order_acquire, std::memory_order_relaxed)) return false;
  holder_.store(rank, std::memory_order_relaxed);
  return true;
}

void SharedLock::lock(Alarm& alarm) {
  bool locked = try_lock(alarm.rank());
  for (int i = 0; !locked && i < 64; ++i) {
    pause_core();
    locked = try_lock(alarm.rank());
  }
  Patience patience(alarm.timeout());
  while (!locked) {
    // Acquire, as above. From here on the word says that a rank may sleep.
    locked = word_.exchange(2, std::memory_order_acquire) == 0;
    if (locked) break;
    alarm.failure().check();
    if (patience.is_over()) {
      const int holder = holder_.load(std::memory_order_relaxed);
      alarm.raise(ErrorCode::kTimeout, rank_name(alarm.world_, alarm.rank()) + " waited too long for " +
                                           rank_name(alarm.world_, holder) +
                                           ", which stopped inside a critical section");
    }
    futex_wait(word_, 2, kMaxSleep);
  }
  holder_.store(alarm.rank(), std::memory_order_relaxed);
}

void SharedLock::unlock() {
  // Release: publishes what the holder wrote to the next one.
  if (word_.exchange(0, std::memory_order_release) == 2) futex_wake_one(word_);
}

void SharedLock::wake() const { futex_wake_all(word_); }

bool Failure::set(int rank, ErrorCode code, std::string_view fact) {
  if (is_set()) return false;  // the note may be the one that everybody reads
  Note& own = notes_[rank];
  own.code = code;
  fact = utf8_prefix(fact, sizeof(own.text));
  own.length = static_cast<std::uint32_t>(fact.size());
  std::memcpy(own.text, fact.data(), fact.size());
  std::uint32_t nobody = 0;
  // Publishes the note. Sequentially consistent: whoever goes to sleep sees the failure, or is seen by wake_all().
  // Relaxed when another rank was first: nothing is read.
  return claimed_by_.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank) + 1, std::memory_order_seq_cst,
                                             std::memory_order_relaxed);
}

const Failure& Alarm::failure() const { return world_.failure; }

void Alarm::raise(ErrorCode code, std::string_view fact) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!world_.failure.set(rank_, code, fact)) return;
  }
  wake_all(world_);
}

}  // namespace kvstore_hvd
