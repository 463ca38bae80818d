// What other ranks have completed for a rank: a queue of slots in the segment, with many writers and one reader.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace kvstore_hvd {

// Zero-initialised memory is an empty Inbox. `Capacity`, a power of two, is no less than what may be in it at a time.
template <std::uint32_t Capacity>
class Inbox {
 public:
  // Release: what the writer wrote before is visible to the reader that takes the slot. Any thread.
  void put(std::uint32_t slot) {
    // Relaxed: only gives each writer a place of its own.
    const std::uint32_t index = end_.fetch_add(1, std::memory_order_relaxed);
    places_[index % Capacity].store(content(index, slot), std::memory_order_release);
  }

  // The `index`-th slot that was put here (modulo 2^32), or nothing as long as it was not. Acquire, as above.
  std::optional<std::uint32_t> get(std::uint32_t index) const {
    const std::uint32_t found = places_[index % Capacity].load(std::memory_order_acquire);
    if (found - content(index, 0) >= Capacity) return std::nullopt;
    return found % Capacity;
  }

 private:
  // A slot with the lap of its writer, so that nobody needs to clear a place; not 0 in the first lap.
  static constexpr std::uint32_t content(std::uint32_t index, std::uint32_t slot) {
    return index / Capacity * Capacity + Capacity + slot;
  }
  static_assert((Capacity & (Capacity - 1)) == 0);

  alignas(128) std::atomic<std::uint32_t> end_;
  alignas(128) std::atomic<std::uint32_t> places_[Capacity];
};

}  // namespace kvstore_hvd
