// What the hosts of a world have announced, as one link knows of it: for each tensor the operations of each host that
// are not over, in the order in which the host announced them. The n-th of one host is that of all others.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "link/records.hpp"

namespace kvstore_hvd {

// One operation, as all ranks of a host have announced it.
struct HostAnnouncement {
  std::uint64_t digest = 0;
  WeightSums weights{};
  std::int32_t priority = 0;
  bool disagrees = false;
  bool is_inline = false;
  std::vector<char> sum;  // of the host, if it is inline
};

// One tensor.
struct HostAnnouncements {
  std::uint32_t slot = kNoSlot;  // on this host, while all of its ranks have announced an operation
  std::vector<std::deque<HostAnnouncement>> by_host;
  // How many that are still to come are over already: those of an operation that failed.
  std::vector<std::uint32_t> dropped;
  // When all ranks of this host had announced it, and whether the conductor knows that they wait.
  std::chrono::steady_clock::time_point since{};
  bool is_waiting = false;
  bool is_asked = false;  // the conductor has asked what all ranks have announced
  std::vector<std::vector<AnnouncedBy>> told;
  std::size_t n_told = 0;

  explicit HostAnnouncements(int hosts) : by_host(hosts), dropped(hosts) {}

  bool all_are_here() const {
    for (const auto& one : by_host) {
      if (one.empty()) return false;
    }
    return true;
  }
  bool is_idle() const {
    for (const auto& one : by_host) {
      if (!one.empty()) return false;
    }
    for (const std::uint32_t n : dropped) {
      if (n > 0) return false;
    }
    return slot == kNoSlot;
  }
  // Of the operation that all hosts have announced.
  bool is_inline() const {
    for (const auto& one : by_host) {
      if (!one.front().is_inline) return false;
    }
    return true;
  }
  bool is_the_same() const {
    for (const auto& one : by_host) {
      if (one.front().disagrees || one.front().digest != by_host[0].front().digest) return false;
    }
    return true;
  }
  // As World::weights(), over hosts.
  double weights() const {
    double sum = 0.0;
    double present = 0, absent = 0;
    for (const auto& one : by_host) {
      sum += one.front().weights.sum;
      present += one.front().weights.present;
      absent += one.front().weights.absent;
    }
    return absent == 0 || present == 0 ? sum : sum * (present + absent) / present;
  }
  void add(int host, HostAnnouncement one) {
    if (dropped[host] > 0) {
      --dropped[host];
    } else {
      by_host[host].push_back(std::move(one));
    }
  }
  // The operation of the host is over, also if we have not heard of it yet.
  void drop(int host) {
    if (by_host[host].empty()) {
      ++dropped[host];
    } else {
      by_host[host].pop_front();
    }
  }
};

}  // namespace kvstore_hvd
