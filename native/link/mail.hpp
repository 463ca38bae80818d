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
  // `epoch`: of both ends; what an earlier world has left behind is none of ours.
  Mail(Transport& transport, int host, std::uint32_t epoch);
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  // What is appended here is sent. Records, see RecordWriter.
  std::vector<char>& outgoing() { return outgoing_; }

  // Sends and receives what it can without waiting; calls `handle` with each record that is complete. Returns whether
  // anything has moved.
  bool progress(const std::function<void(const char*)>& handle);

  // Whether all that was written is with the transport, and out of our hands.
  bool is_sent() const { return outgoing_.empty() && sending_ == 0; }

  // Receives and sends nothing more. Returns whether nothing is under way: else to be called again.
  bool close();

 private:
  struct Head {
    std::uint32_t epoch, bytes;
  };
  // Each message begins with its head; the rest is of the stream.
  static constexpr std::size_t kMessage = std::size_t{32} << 10;

  bool send();
  bool receive(const std::function<void(const char*)>& handle);

  Transport& transport_;
  const int host_;
  const std::uint32_t epoch_;
  std::vector<char> outgoing_, incoming_;
  std::vector<char> sent_, received_;
  Transport::Transfer sending_ = 0, receiving_ = 0;
  bool is_closed_ = false;
};

}  // namespace kvstore_hvd
