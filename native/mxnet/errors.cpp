#include "mxnet/errors.hpp"

namespace kvstore_hvd::mxnet {
namespace {

class Fails final : public AsyncOp {
 public:
  void start(const Completion& completion) noexcept override { completion.fail("to make room for errors"); }
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

void UnreadErrors::add(std::shared_ptr<const Array> array, Status status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.size() < kMost) entries_.push_back({std::move(array), std::move(status)});
}

bool UnreadErrors::empty() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty();
}

Status UnreadErrors::take(const Api& api) {
  std::vector<Entry> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries.swap(entries_);
  }
  Status first;
  std::size_t more = 0;
  for (Entry& entry : entries) {
    try {
      api.wait_to_read(entry.array->get());
    } catch (const Error& error) {
      // MXNet rearranges all lines but the first.
      const std::string text = first_line(error.what());
      if (!first.ok()) {
        ++more;
      } else if (text == first_line(error_text(entry.status))) {
        first = std::move(entry.status);
      } else {
        first = Status(entry.status.code(), entry.status.text() + "\n  " + text);
      }
    }
  }
  if (more == 0) return first;
  return Status(first.code(), first.text() + "\n  (" + std::to_string(more) +
                                  (more == 1 ? " other operation" : " other operations") + " failed too.)");
}

std::string error_text(const Status& status) { return std::string(class_name(status.code())) + ": " + status.text(); }

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

void make_room_for_errors(const std::shared_ptr<const Api>& api) {
  static std::once_flag once;
  std::call_once(once, grow, api);
}

}  // namespace kvstore_hvd::mxnet
