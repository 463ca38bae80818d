#include "mxnet/unread_errors.hpp"

#include <string>
#include <utility>

#include "mxnet/error_text.hpp"

namespace kvstore_hvd::mxnet {

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
      if (!first.ok()) {
        ++more;
      } else if (is_error_text(error.what(), entry.status)) {
        first = std::move(entry.status);
      } else {
        const std::string text = error.what();
        first = Status(entry.status.code(), entry.status.text() + "\n  " + text.substr(0, text.find('\n')));
      }
    }
  }
  if (more == 0) return first;
  return Status(first.code(), first.text() + "\n  (" + std::to_string(more) +
                                  (more == 1 ? " other operation" : " other operations") + " failed too.)");
}

}  // namespace kvstore_hvd::mxnet
