// The failure of a world: set once, by any rank, seen by all. Lives in the segment; set through an Alarm.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "base/status.hpp"

namespace kvstore_hvd {

inline constexpr int kMaxRanks = 256;  // of a host

// Unwinds a rank out of whatever it was doing once the world has failed; never leaves the engine.
struct WorldLost : std::exception {
  const char* what() const noexcept override { return "the world has failed"; }
};

class Failure {
 public:
  // The first rank to call decides. A rank calls it one thread at a time. Returns whether this call decided.
  //
  // Each rank writes its text where nobody else writes, and then claims the world with one operation: a rank that dies
  // at any point of this leaves either a complete failure or none.
  bool set(int rank, ErrorCode code, std::string_view fact);

  // Acquires what set() releases: code and text are complete when this is true. Sequentially consistent for
  // DeviceQueue::take(); it costs the same.
  bool is_set() const { return claimed_by_.load(std::memory_order_seq_cst) != 0; }

  void check() const {
    if (is_set()) throw WorldLost();
  }

  // Meaningful once is_set().
  ErrorCode code() const { return note().code; }
  std::string fact() const { return std::string(note().text, note().length); }

 private:
  struct Note {
    ErrorCode code;
    std::uint32_t length;
    char text[2040];
  };
  // Acquire, as in is_set().
  const Note& note() const { return notes_[claimed_by_.load(std::memory_order_acquire) - 1]; }

  std::atomic<std::uint32_t> claimed_by_;  // 1 + rank
  Note notes_[kMaxRanks + 1];              // the last one the link's, if there are so many
};

}  // namespace kvstore_hvd
