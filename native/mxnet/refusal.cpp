#include "mxnet/refusal.hpp"

#include <utility>

namespace kvstore_hvd::mxnet {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

Request as_refused(Request request, const std::string& why) {
  request.input_failure = "MXNet refused the operation: " + first_line(why);
  return request;
}

Status refusal(const std::string& prefix, const std::string& why, std::size_t others) {
  std::string text = prefix + "MXNet refused the operation: " + first_line(why);
  if (others > 0) text += "\n  (" + std::to_string(others) + " more of this call.)";
  text += "\n  It failed on every rank; nothing was changed. Fix: see MXNet's message; the store stays usable.";
  return Status(ErrorCode::kInputFailed, text);
}

Status failed_input(const std::string& prefix, const std::string& whose) {
  return Status(ErrorCode::kInputFailed,
                prefix + "an operation that should have produced an input" + whose +
                    " failed.\n  Fix: see that operation's own error, which MXNet raises where its result is read.");
}

}  // namespace kvstore_hvd::mxnet
