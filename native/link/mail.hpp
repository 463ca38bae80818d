// The records that one link exchanges with another: a stream of bytes each way, of which one message each way is under
// way at a time. What is written meanwhile goes together with the next.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "link/records.hpp"
#include "link/transport.hpp"

namespace kvstore_hvd {

class Mail {
 public:
  Mail(Transport& transport, int host);
  ~Mail();
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  // What is appended here is sent. Records, see RecordWriter.
  std::vector<char>& outgoing() { return outgoing_; }

  // Sends and receives what it can without waiting; calls `handle` with each record that is complete. Returns whether
  // anything has moved.
  bool progress(const std::function<void(const char*)>& handle);

  // Whether all that was written is with the transport, and out of our hands.
  bool is_sent() const { return outgoing_.empty() && sending_ == 0; }

 private:
  // Each message begins with its length, 8 bytes; the rest is of the stream.
  static constexpr std::size_t kMessage = std::size_t{32} << 10;
  static constexpr int kTag = 1;

  bool send();
  bool receive(const std::function<void(const char*)>& handle);

  Transport& transport_;
  const int host_;
  std::vector<char> outgoing_, incoming_;
  std::vector<char> sent_, received_;
  Transport::Transfer sending_ = 0, receiving_ = 0;
};

}  // namespace kvstore_hvd
