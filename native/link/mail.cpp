#include "link/mail.hpp"

#include <algorithm>
#include <cstring>

namespace kvstore_hvd {
namespace {

constexpr std::size_t kLength = sizeof(std::uint64_t);

}  // namespace

Mail::Mail(Transport& transport, int host) : transport_(transport), host_(host), sent_(kMessage), received_(kMessage) {
  receiving_ = transport_.receive(host_, kTag, received_.data(), received_.size());
}

Mail::~Mail() {
  if (receiving_ != 0) transport_.cancel(receiving_);
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
  const std::uint64_t bytes = std::min(outgoing_.size(), kMessage - kLength);
  std::memcpy(sent_.data(), &bytes, kLength);
  std::memcpy(sent_.data() + kLength, outgoing_.data(), bytes);
  outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<std::ptrdiff_t>(bytes));
  sending_ = transport_.send(host_, kTag, sent_.data(), kLength + bytes);
  return true;
}

bool Mail::receive(const std::function<void(const char*)>& handle) {
  if (!transport_.test(receiving_)) return false;
  std::uint64_t bytes;
  std::memcpy(&bytes, received_.data(), kLength);
  incoming_.insert(incoming_.end(), received_.begin() + kLength,
                   received_.begin() + static_cast<std::ptrdiff_t>(kLength + bytes));
  receiving_ = transport_.receive(host_, kTag, received_.data(), received_.size());
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

}  // namespace kvstore_hvd
