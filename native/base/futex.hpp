// The one place that calls futex(2). Words are process-shared: they live in the segment.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvstore_hvd {

// Sleeps while `word` holds `expected`, at most `limit`. May return early, for any reason; callers re-check.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds limit);

// Wakes every sleeper on `word`.
void futex_wake_all(const std::atomic<std::uint32_t>& word);

// Wakes one sleeper on `word`.
void futex_wake_one(const std::atomic<std::uint32_t>& word);

}  // namespace kvstore_hvd
