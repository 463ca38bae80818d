// A network in memory, for worlds of several hosts in one process: it delays messages at random and, like MPI, moves
// them only while a sender or receiver asks.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <tuple>
#include <vector>

#include "link/transport.hpp"

namespace kvstore_hvd {

class MemoryNetwork {
 public:
  explicit MemoryNetwork(std::uint32_t seed) : random_(seed) {}

  class End final : public Transport {
   public:
    End(MemoryNetwork& network, int host) : network_(network), host_(host) {}

    Transfer send(int host, int tag, const void* data, std::size_t bytes) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      if (network_.is_cut_) return network_.start();
      const auto* begin = static_cast<const char*>(data);
      const Transfer transfer = network_.start();
      network_.queues_[{host_, host, tag}].messages.push_back({transfer, {begin, begin + bytes}, network_.delay()});
      return transfer;
    }

    Transfer receive(int host, int tag, void* data, std::size_t bytes) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      const Transfer transfer = network_.start();
      network_.queues_[{host, host_, tag}].receives.push_back({transfer, static_cast<char*>(data), bytes});
      return transfer;
    }

    bool test(Transfer& transfer) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      network_.move();
      bool& is_over = network_.is_over_[transfer];
      if (!is_over) return false;
      network_.is_over_.erase(transfer);
      transfer = 0;
      return true;
    }

    void cancel(Transfer& transfer) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      for (auto& [key, queue] : network_.queues_) {
        const auto is_it = [&](const Receive& one) { return one.transfer == transfer; };
        queue.receives.erase(std::remove_if(queue.receives.begin(), queue.receives.end(), is_it), queue.receives.end());
      }
      transfer = 0;
    }

   private:
    MemoryNetwork& network_;
    const int host_;
  };

  // From now on nothing is delivered.
  void cut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_cut_ = true;
  }

 private:
  struct Message {
    Transport::Transfer transfer;
    std::vector<char> data;
    int delay;  // how often something is asked for until it moves
  };
  struct Receive {
    Transport::Transfer transfer;
    char* data;
    std::size_t bytes;
  };
  struct Queue {
    std::deque<Message> messages;
    std::deque<Receive> receives;
  };

  Transport::Transfer start() {
    is_over_[++last_] = false;
    return last_;
  }
  int delay() { return random_() % 4 == 0 ? static_cast<int>(random_() % 20) : 0; }

  void move() {
    if (is_cut_) return;
    for (auto& [key, queue] : queues_) {
      while (!queue.messages.empty() && !queue.receives.empty() && queue.messages.front().delay-- <= 0) {
        const Message& message = queue.messages.front();
        const Receive& receive = queue.receives.front();
        if (message.data.size() > receive.bytes) std::abort();
        if (!message.data.empty()) std::memcpy(receive.data, message.data.data(), message.data.size());
        is_over_[message.transfer] = is_over_[receive.transfer] = true;
        queue.messages.pop_front();
        queue.receives.pop_front();
      }
    }
  }

  std::mutex mutex_;
  std::mt19937 random_;
  std::map<std::tuple<int, int, int>, Queue> queues_;  // from, to, tag
  std::map<Transport::Transfer, bool> is_over_;
  Transport::Transfer last_ = 0;
  bool is_cut_ = false;
};

}  // namespace kvstore_hvd
