// The outcome of a request: ok, or a code (which picks the Python exception) and the full text that the user reads.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace kvstore_hvd {

enum class ErrorCode : std::uint8_t {
  kOk = 0,
  // User errors: that one operation fails on every rank, no array is changed, the world stays usable.
  kMismatch = 1,     // ranks disagree about an operation
  kInputFailed = 2,  // an operation that should have produced an input failed on some rank
  kInvalid = 3,      // a request that this rank can see is wrong
  // Lost worlds: latched until reset.
  kPeerLost = 4,
  kTimeout = 5,
  kTransport = 6,
  kShutdown = 7,  // the engine was shut down (also: used in a forked child)
};
inline constexpr int kErrorCodes = 8;

// The exception that Python raises, of kvstore_hvd/errors.py.
constexpr const char* class_name(ErrorCode code) {
  constexpr const char* kNames[kErrorCodes] = {"KVHvdError",          "MismatchError", "InputFailedError",
                                               "InvalidRequestError", "PeerLostError", "TimeoutError",
                                               "TransportError",      "ShutdownError"};
  return kNames[static_cast<int>(code)];
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& text() const { return text_; }
  // A lost world fails every later operation too.
  bool latches() const { return code_ >= ErrorCode::kPeerLost; }

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string text_;
};

}  // namespace kvstore_hvd
