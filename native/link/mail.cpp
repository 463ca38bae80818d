#include "link/mail.hpp"

#include <algorithm>
#include <cstring>

namespace kvstore_hvd {

Mail::Mail(Transport& transport, int host, std::uint32_t epoch)
    : transport_(transport), host_(host), epoch_(epoch), sent_(kMessage), received_(kMessage) {
  receiving_ = transport_.receive(host_, kRecords, received_.data(), received_.size());
}

bool Mail::progress(const std::function<void(const char*)>& handle) {
  const bool received = receive(handle);
  return send() || received;
}

bool Mail::send() {
  if (sending_ != 0) {
    if (!transport_.test(sending_)) return false;
    sending_ = 0;
  }
  if (outgoing_.empty()) return false;
  const Head head{epoch_, static_cast<std::uint32_t>(std::min(outgoing_.size(), kMessage - sizeof(Head)))};
  std::memcpy(sent_.data(), &head, sizeof(head));
  std::memcpy(sent_.data() + sizeof(head), outgoing_.data(), head.bytes);
  outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<std::ptrdiff_t>(head.bytes));
  sending_ = transport_.send(host_, kRecords, sent_.data(), sizeof(head) + head.bytes);
  return true;
}

bool Mail::receive(const std::function<void(const char*)>& handle) {
  if (!transport_.test(receiving_)) return false;
  Head head;
  std::memcpy(&head, received_.data(), sizeof(head));
  if (head.epoch == epoch_) {
    const char* const begin = received_.data() + sizeof(head);
    incoming_.insert(incoming_.end(), begin, begin + head.bytes);
  }
  receiving_ = transport_.receive(host_, kRecords, received_.data(), received_.size());
  std::size_t at = 0;
  RecordHeader header;
  while (incoming_.size() - at >= sizeof(header)) {
    std::memcpy(&header, incoming_.data() + at, sizeof(header));
    if (incoming_.size() - at < header.bytes) break;
    handle(incoming_.data() + at);
    at += header.bytes;
  }
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<std::ptrdiff_t>(at));
  return true;
}

bool Mail::close() {
  if (!is_closed_ && receiving_ != 0) transport_.cancel(receiving_);
  is_closed_ = true;
  if (receiving_ != 0) transport_.test(receiving_);
  if (sending_ != 0) transport_.test(sending_);
  return receiving_ == 0 && sending_ == 0;
}

}  // namespace kvstore_hvd
