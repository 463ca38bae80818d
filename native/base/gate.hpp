// Counts who is inside something that ends while other threads may still be on their way out of it.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvstore_hvd {

// All members may be called from any thread.
class Gate {
 public:
  // True: the caller is inside until leave(). False: the gate is closed.
  bool enter() {
    // Acquire: whoever finds it closed sees what was written before close().
    std::uint32_t state = state_.load(std::memory_order_acquire);
    while ((state & kClosed) == 0) {
      if (state_.compare_exchange_weak(state, state + kOne, std::memory_order_acquire)) return true;
    }
    return false;
  }

  // True for one caller only, the last one out of a closed gate: it cleans up.
  bool leave() {
    // Release: what the caller did inside comes before the clean-up. Acquire: for the one that cleans up.
    return state_.fetch_sub(kOne, std::memory_order_acq_rel) == (kClosed | kOne);
  }

  // By a caller that is inside: nobody enters any more. Release: see enter().
  void close() { state_.fetch_or(kClosed, std::memory_order_release); }

 private:
  static constexpr std::uint32_t kClosed = 1, kOne = 2;
  std::atomic<std::uint32_t> state_{0};
};

}  // namespace kvstore_hvd
