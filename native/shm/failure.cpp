#include "shm/failure.hpp"

#include <cstring>

#include "shm/describe.hpp"

namespace kvstore_hvd {

bool Failure::set(int rank, ErrorCode code, std::string_view fact) {
  if (is_set()) return false;  // the note may be the one that everybody reads
  Note& own = notes_[rank];
  own.code = code;
  fact = utf8_prefix(fact, sizeof(own.text));
  own.length = static_cast<std::uint32_t>(fact.size());
  std::memcpy(own.text, fact.data(), fact.size());
  std::uint32_t nobody = 0;
  // Release: publishes the note. Relaxed when another rank was first: nothing is read.
  return claimed_by_.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank) + 1, std::memory_order_release,
                                             std::memory_order_relaxed);
}

}  // namespace kvstore_hvd
