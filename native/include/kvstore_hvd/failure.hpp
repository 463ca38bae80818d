// The failure of a world: set once, by any rank, seen by all. Lives in the segment.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "kvstore_hvd/status.hpp"

namespace kvstore_hvd {

// Unwinds a rank out of whatever it was doing once the world has failed; never leaves the engine.
struct WorldLost : std::exception {
  const char* what() const noexcept override { return "the world has failed"; }
};

class Failure {
 public:
  // The first caller decides; returns whether it was this one. `fact` says what happened ("rank 2 ... died"), without
  // naming the rank that reads it, and is cut to the space there is.
  bool set(ErrorCode code, std::string_view fact);

  // Acquire: pairs with the release in set(), so that code and text are complete when this is true.
  bool is_set() const { return state_.load(std::memory_order_acquire) == kSet; }

  void check() const {
    if (is_set()) throw WorldLost();
  }

  // Meaningful once is_set().
  ErrorCode code() const { return code_; }
  std::string fact() const { return std::string(text_, length_); }

 private:
  static constexpr std::uint32_t kNone = 0, kWriting = 1, kSet = 2;

  std::atomic<std::uint32_t> state_;
  ErrorCode code_;
  std::uint32_t length_;
  char text_[3 * 1024];
};

}  // namespace kvstore_hvd
