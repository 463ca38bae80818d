#include "mxnet/error_text.hpp"

namespace kvstore_hvd::mxnet {
namespace {

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      break;
    case ErrorCode::kMismatch:
      return "MismatchError";
    case ErrorCode::kInputFailed:
      return "InputFailedError";
    case ErrorCode::kInvalid:
      return "InvalidRequestError";
    case ErrorCode::kPeerLost:
      return "PeerLostError";
    case ErrorCode::kTimeout:
      return "TimeoutError";
    case ErrorCode::kTransport:
      return "TransportError";
    case ErrorCode::kShutdown:
      return "ShutdownError";
  }
  return "KVHvdError";
}

}  // namespace

std::string error_text(const Status& status) { return std::string(class_of(status.code())) + ": " + status.text(); }

bool is_error_text(const std::string& raised, const Status& status) {
  // MXNet rearranges all lines but the first.
  const std::string expected = error_text(status);
  return raised.substr(0, raised.find('\n')) == expected.substr(0, expected.find('\n'));
}

}  // namespace kvstore_hvd::mxnet
