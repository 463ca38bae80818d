// Whether a thread that submits a tensor does well to stay until the other ranks have come: see
// Engine::submit_and_linger().
#pragma once

#include <atomic>

namespace kvstore_hvd {

// Any thread. Relaxed, everywhere: hints that nothing depends on.
class Lingering {
 public:
  // Whether the others are likely to be here in a moment: as they were the last times; tried anew now and then.
  bool is_promising() {
    if (credit_.load(std::memory_order_relaxed) > 0) return true;
    return refusals_.fetch_add(1, std::memory_order_relaxed) % kRetry == 0;
  }

  // How one ended. One rank that was interrupted once is no reason to give up.
  void ended(bool done) {
    credit_.store(done ? kCredit : credit_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
  }

 private:
  static constexpr int kCredit = 4;      // failures in a row after which it is given up
  static constexpr unsigned kRetry = 8;  // how many requests then go by before it is tried again

  std::atomic<int> credit_{kCredit};
  std::atomic<unsigned> refusals_{0};
};

}  // namespace kvstore_hvd
