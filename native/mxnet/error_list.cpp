#include "mxnet/error_list.hpp"

#include <mutex>
#include <string>

namespace kvstore_hvd::mxnet {
namespace {

class Fails final : public AsyncOp {
 public:
  void start(const Completion& completion) noexcept override { completion.fail("to make room for errors"); }
  void skipped() noexcept override {}
  void refused(const std::string&) noexcept override {}
};

void grow(const std::shared_ptr<const Api>& api) {
  float value = 0;
  const Array array = api->lend(&value, {1}, View::Kind::kFloat, 32, [] {});
  const auto fails = std::make_shared<Fails>();
  // The list doubles when it is full: after one error more than a power of two, as many less one fit in.
  for (std::size_t errors = 0; errors < kRoomForErrors + 2; ++errors) {
    api->push(fails, {array.get()}, Place::kHere, 0, "kvstore_hvd: room for errors");
    try {
      api->wait_to_read(array.get());
    } catch (const Error&) {
      // That is the error; it is read now, and what is left of it in the list means nothing.
    }
  }
}

}  // namespace

void make_room_for_errors(const std::shared_ptr<const Api>& api) {
  static std::once_flag once;
  std::call_once(once, grow, api);
}

}  // namespace kvstore_hvd::mxnet
