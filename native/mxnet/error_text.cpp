#include "mxnet/error_text.hpp"

namespace kvstore_hvd::mxnet {
std::string error_text(const Status& status) { return std::string(class_name(status.code())) + ": " + status.text(); }

bool is_error_text(const std::string& raised, const Status& status) {
  // MXNet rearranges all lines but the first.
  const std::string expected = error_text(status);
  return raised.substr(0, raised.find('\n')) == expected.substr(0, expected.find('\n'));
}

}  // namespace kvstore_hvd::mxnet
