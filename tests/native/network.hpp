// A network in memory, for worlds of several hosts in one process. As MPI's at its worst: it delays messages at random,
// moves a host's only while that host calls, reads what is sent when it moves and not before, and a receive that is
// cancelled is over later.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <tuple>

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
      if (tag == network_.shortened_ && host_ > host) bytes /= 2;
      const Transfer transfer = network_.start();
      network_.queues_[{host_, host, tag}].messages.push_back(
          {transfer, static_cast<const char*>(data), bytes, network_.delay()});
      return transfer;
    }

    Transfer receive(int host, int tag, void* data, std::size_t bytes) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      const Transfer transfer = network_.start();
      network_.queues_[{host, host_, tag}].receives.push_back({transfer, static_cast<char*>(data), bytes});
      return transfer;
    }

    bool test(Transfer& transfer, std::size_t* received) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      network_.move(host_);
      const auto over = network_.over_.find(transfer);
      if (over == network_.over_.end()) return false;
      if (received != nullptr) *received = over->second;
      network_.over_.erase(over);
      transfer = 0;
      return true;
    }

    void cancel(const Transfer& transfer) override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      for (auto& [key, queue] : network_.queues_) {
        const auto is_it = [&](const Receive& one) { return one.transfer == transfer; };
        const auto end = std::remove_if(queue.receives.begin(), queue.receives.end(), is_it);
        if (end == queue.receives.end()) continue;
        queue.receives.erase(end, queue.receives.end());
        network_.over_[transfer] = 0;
      }
    }

    void progress() override {
      const std::lock_guard<std::mutex> lock(network_.mutex_);
      network_.move(host_);
    }

    // Hosts with and without sums in arrays, in one world.
    bool copies() const override { return host_ % 2 == 0; }

   private:
    MemoryNetwork& network_;
    const int host_;
  };

  // From now on nothing is delivered.
  void cut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_cut_ = true;
  }
  // Until resume() nothing with this tag is delivered.
  void hold(int tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = tag;
  }
  bool has_message(int host, int tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(queues_.begin(), queues_.end(), [&](const auto& one) {
      return std::get<0>(one.first) == host && std::get<2>(one.first) == tag && !one.second.messages.empty();
    });
  }
  void resume() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_cut_ = false;
    held_ = -1;
  }
  // From now on half of each message with this tag is lost, on its way to a host of a lower number.
  void shorten(int tag) {
    const std::lock_guard<std::mutex> lock(mutex_);
    shortened_ = tag;
  }

 private:
  struct Message {
    Transport::Transfer transfer;
    const char* data;
    std::size_t bytes;
    int delay;  // how often its sender calls until it moves
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

  Transport::Transfer start() { return ++last_; }
  int delay() { return random_() % 4 == 0 ? static_cast<int>(random_() % 20) : 0; }

  void move(int host) {
    if (is_cut_) return;
    for (auto& [key, queue] : queues_) {
      if (std::get<0>(key) != host || std::get<2>(key) == held_) continue;
      while (!queue.messages.empty() && !queue.receives.empty() && queue.messages.front().delay-- <= 0) {
        const Message& message = queue.messages.front();
        const Receive& receive = queue.receives.front();
        if (message.bytes > receive.bytes) std::abort();
        if (message.bytes > 0) std::memcpy(receive.data, message.data, message.bytes);
        over_[message.transfer] = over_[receive.transfer] = message.bytes;
        queue.messages.pop_front();
        queue.receives.pop_front();
      }
    }
  }

  std::mutex mutex_;
  std::mt19937 random_;
  std::map<std::tuple<int, int, int>, Queue> queues_;  // from, to, tag
  std::map<Transport::Transfer, std::size_t> over_;    // and not tested since: their bytes
  Transport::Transfer last_ = 0;
  bool is_cut_ = false;
  int shortened_ = -1, held_ = -1;
};

}  // namespace kvstore_hvd
