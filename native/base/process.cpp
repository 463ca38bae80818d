#include "base/process.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

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

}  // namespace kvstore_hvd
