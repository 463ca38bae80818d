#include "link/mail.hpp"

#include <algorithm>
#include <random>

namespace kvstore_hvd {
namespace {

std::uint64_t random_number() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) | 1;  // never 0
}

}  // namespace

Mail::Mail(Transport& transport, int host, std::uint64_t build)
    : transport_(transport), host_(host), build_(build), own_(random_number()) {
  receiving_ = transport_.receive(host_, kRecords, receive_buffer_.data(), receive_buffer_.size());
}

bool Mail::progress(const Handle& handle) {
  const bool received = receive(handle);
  return send() || received;
}

bool Mail::send() {
  if (sending_ != 0 && !transport_.test(sending_)) return false;
  const bool is_met = state() == State::kMet;
  if (!greets_ && !(is_met && has_outgoing())) return false;
  const std::size_t bytes = is_met ? std::min(stream_.size(), kMessage) : sizeof(Head);
  const Head head{build_, own_, other_, bytes - sizeof(Head)};
  in_flight_.swap(stream_);
  stream_.resize(sizeof(head));
  stream_.insert(stream_.end(), in_flight_.begin() + static_cast<std::ptrdiff_t>(bytes), in_flight_.end());
  std::memcpy(in_flight_.data(), &head, sizeof(head));
  sending_ = transport_.send(host_, kRecords, in_flight_.data(), bytes);
  greets_ = false;
  return true;
}

bool Mail::receive(const Handle& handle) {
  std::size_t bytes = 0;
  if (!transport_.test(receiving_, &bytes)) return false;
  receive_buffer_.swap(parsing_);
  receiving_ = transport_.receive(host_, kRecords, receive_buffer_.data(), receive_buffer_.size());
  has_received_ = true;
  if (!is_ignored_) read(bytes, handle);
  return true;
}

void Mail::read(std::size_t bytes, const Handle& handle) {
  Head head;
  expect(bytes >= sizeof(head));
  std::memcpy(&head, parsing_.data(), sizeof(head));
  if (!is_for_us(head)) return;
  expect(head.bytes == bytes - sizeof(head));
  const char *at = parsing_.data() + sizeof(head), *end = at + head.bytes;
  if (!partial_record_.empty()) {
    partial_record_.insert(partial_record_.end(), at, end);
    at = partial_record_.data();
    end = at + partial_record_.size();
  }
  RecordHeader header;
  while (end - at >= static_cast<std::ptrdiff_t>(sizeof(header))) {
    std::memcpy(&header, at, sizeof(header));
    expect(header.bytes >= sizeof(header) && header.bytes <= kLongest);
    if (end - at < static_cast<std::ptrdiff_t>(header.bytes)) break;
    handle(header.kind, RecordReader(at + sizeof(header), at + header.bytes));
    at += header.bytes;
  }
  partial_record_ = std::vector<char>(at, end);
}

// The other end's messages come in the order in which they were sent: those of an earlier attempt before those of the
// present one, so another number after both have met is that of a later attempt.
bool Mail::is_for_us(const Head& head) {
  State state = this->state();
  if (state >= State::kMet) {
    if (head.build != build_ || head.from != other_) state = State::kStartedOver;
  } else if (head.build != build_) {
    state = State::kOtherBuild;
  } else if (state == State::kUnknown) {
    if (head.to == own_) state = State::kMet;
    greets_ = greets_ || head.from != other_;
    other_ = head.from;
  }
  state_.store(state, std::memory_order_relaxed);
  return state == State::kMet && head.to == own_;
}

bool Mail::close() {
  if (!std::exchange(is_closed_, true) && receiving_ != 0) transport_.cancel(receiving_);
  if (receiving_ != 0) transport_.test(receiving_);
  if (sending_ != 0) transport_.test(sending_);
  return receiving_ == 0 && sending_ == 0;
}

}  // namespace kvstore_hvd
