// Waiting without sleeping.
#pragma once

#include <chrono>

#include "shm/wait.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvstore_hvd {

inline void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How many yields a wait of the calling thread may begin with: none for a while after one that met a thread which
// computes.
int yields_of(const WaitPolicy& policy);

// One sched_yield(). False: it gave the core to a busy thread for so long that sleeping is cheaper than the next one.
bool yield_once();

// Calls `done` while spinning and yielding as the policy says; returns whether it became true.
template <class Done>
bool poll(const WaitPolicy& policy, const Done& done) {
  using Clock = std::chrono::steady_clock;
  constexpr int kPausesPerClock = 8;
  if (policy.spin.count() > 0) {
    // The clock costs as much as the whole wait where the others come at the same time.
    Clock::time_point end;
    do {
      for (int i = 0; i < kPausesPerClock; ++i) {
        if (done()) return true;
        pause_core();
      }
      if (end == Clock::time_point()) end = Clock::now() + policy.spin;
    } while (Clock::now() < end);
  }
  const int yields = yields_of(policy);
  for (int i = 0; i < yields; ++i) {
    const bool more = yield_once();
    if (done()) return true;
    if (!more) break;
  }
  return done();
}

}  // namespace kvstore_hvd
