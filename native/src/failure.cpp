#include "kvstore_hvd/failure.hpp"

#include <algorithm>
#include <cstring>

namespace kvstore_hvd {

bool Failure::set(ErrorCode code, std::string_view fact) {
  std::uint32_t expected = kNone;
  // Relaxed: winning the right to write publishes nothing; the store below does.
  if (!state_.compare_exchange_strong(expected, kWriting, std::memory_order_relaxed)) return false;
  code_ = code;
  length_ = static_cast<std::uint32_t>(std::min(fact.size(), sizeof(text_)));
  std::memcpy(text_, fact.data(), length_);
  // Release: publishes code and text to is_set().
  state_.store(kSet, std::memory_order_release);
  return true;
}

}  // namespace kvstore_hvd
