#include "base/process.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace kvstore_hvd {
namespace {

// Relaxed, everywhere: written before there is a second thread, in the first process and in every child.
std::atomic<pid_t> id{0};

void look() { id.store(getpid(), std::memory_order_relaxed); }

// While the library is loaded, before any of its objects exists.
[[gnu::constructor]] void look_after_every_fork() {
  look();
  pthread_atfork(nullptr, nullptr, look);
}

thread_local BlockingObserver* innermost = nullptr;

long futex(const std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* limit) {
  static_assert(sizeof(word) == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
  return syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

}  // namespace

pid_t process_id() { return id.load(std::memory_order_relaxed); }

void end_as_failed() {
  on_exit(
      [](int code, void*) {
        if (code != 0) return;
        std::fflush(nullptr);
        _exit(1);
      },
      nullptr);
}

BlockingObserver::BlockingObserver() : outer_(innermost) { innermost = this; }
BlockingObserver::~BlockingObserver() { innermost = outer_; }

void about_to_block() noexcept {
  for (BlockingObserver* observer = innermost; observer != nullptr; observer = observer->outer_) {
    observer->about_to_block();
  }
}

bool futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds limit) {
  about_to_block();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = seconds.count();
  time.tv_nsec = (limit - seconds).count();
  return futex(word, FUTEX_WAIT, expected, &time) != 0 && errno == ETIMEDOUT;
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void futex_wake_one(const std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, 1, nullptr); }

}  // namespace kvstore_hvd
