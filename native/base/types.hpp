// The vocabulary of every other header: element types, reduction operations, collectives, and how a request ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace kvstore_hvd {

// Numeric values are part of the shared-memory protocol and of the Python binding.
enum class DType : std::uint8_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat32 = 2,
  kFloat64 = 3,
  kInt8 = 4,
  kUInt8 = 5,
  kInt32 = 6,
  kInt64 = 7,
};
inline constexpr int kDTypes = 8;

// An average is a sum whose postscale is divided by the ranks' weights. It has a value of its own for error texts only.
enum class ReduceOp : std::uint8_t { kSum = 0, kAverage = 1, kMin = 2, kMax = 3, kProduct = 4 };
inline constexpr int kReduceOps = 5;

// Whether Reduction::as_half has an effect.
constexpr bool can_be_half(DType type, ReduceOp op) {
  return (type == DType::kFloat32 || type == DType::kFloat64) && (op == ReduceOp::kSum || op == ReduceOp::kAverage);
}

// Exchange: every rank takes parts of every rank's input (allgather, alltoall), see Request::parts.
enum class Collective : std::uint8_t { kAllreduce = 0, kBroadcast = 1, kExchange = 2, kReduceScatter = 3 };
inline constexpr int kCollectives = 4;

constexpr std::size_t size_of(DType type) {
  constexpr std::size_t kBytes[kDTypes] = {2, 2, 4, 8, 1, 1, 4, 8};
  return kBytes[static_cast<int>(type)];
}

constexpr const char* name_of(DType type) {
  constexpr const char* kNames[kDTypes] = {"float16", "bfloat16", "float32", "float64",
                                           "int8",    "uint8",    "int32",   "int64"};
  return kNames[static_cast<int>(type)];
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* kNames[kReduceOps] = {"sum", "average", "min", "max", "product"};
  return kNames[static_cast<int>(op)];
}

constexpr const char* name_of(Collective collective) {
  constexpr const char* kNames[kCollectives] = {"allreduce", "broadcast", "exchange", "reducescatter"};
  return kNames[static_cast<int>(collective)];
}

enum class ErrorCode : std::uint8_t {
  kOk = 0,
  // User errors: one operation fails on every rank, no array is changed, the world stays usable.
  kMismatch = 1,     // ranks disagree about an operation
  kInputFailed = 2,  // an operation that should have produced an input failed on some rank
  kInvalid = 3,      // a request that this rank can see is wrong
  // Lost worlds: latched until reset.
  kPeerLost = 4,
  kTimeout = 5,
  kTransport = 6,
  kShutdown = 7,  // the engine was shut down, or this is a forked child
};
inline constexpr int kErrorCodes = 8;

// The exception of kvstore_hvd/errors.py.
constexpr const char* class_name(ErrorCode code) {
  constexpr const char* kNames[kErrorCodes] = {"KVHvdError",          "MismatchError", "InputFailedError",
                                               "InvalidRequestError", "PeerLostError", "TimeoutError",
                                               "TransportError",      "ShutdownError"};
  return kNames[static_cast<int>(code)];
}

// The outcome of a request: ok, or a code and the full text that the user reads.
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
