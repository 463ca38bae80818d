#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvstore_hvd {

// What a process is doing, for the others in each of its worlds. Any thread.
class Activity {
 public:
  struct Wait {
    std::uint32_t ranks = 0;  // see Doing::waits
    std::string operation;
  };

  using Clock = std::chrono::steady_clock;

  // A thread in a call of MXNet, and whether the call was under way at the look before.
  using Caller = std::pair<unsigned long, bool>;

  // Where the program is, and which threads are in calls of MXNet. To be told again and again.
  void set_line(std::string line, const std::vector<Caller>& callers) {
    const auto now = Clock::now();
    std::map<unsigned long, Clock::time_point> all;
    const std::lock_guard<std::mutex> lock(mutex_);
    line_ = std::move(line);
    told_ = now;
    for (const auto& [thread, is_same] : callers) {
      const auto before = callers_.find(thread);
      all[thread] = is_same && before != callers_.end() ? before->second : now;
    }
    callers_ = std::move(all);
  }
  // The first look at the longest call of MXNet that is under way; nothing: there is none, or looks have ceased, as
  // they do while a thread keeps the GIL.
  std::optional<Clock::time_point> in_mxnet_since(Clock::time_point now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::optional<Clock::time_point> first;
    if (now - told_ > kRecent) return first;
    for (const auto& [thread, since] : callers_) first = std::min(first.value_or(since), since);
    return first;
  }
  std::string line() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return line_;
  }
  // How it waits in one of its worlds. Returns what it does in all of them: the longest wait, and a text.
  std::pair<std::uint32_t, std::string> set_wait(const void* world, Wait wait) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_[world] = std::move(wait);
    const auto less = [](const auto& a, const auto& b) { return a.second.ranks < b.second.ranks; };
    const Wait& longest = std::max_element(waits_.begin(), waits_.end(), less)->second;
    std::string text = line_.empty() ? "" : "at " + line_;
    if (!longest.operation.empty()) text += (text.empty() ? "in " : ", in ") + longest.operation;
    return {longest.ranks, std::move(text)};
  }
  void leave(const void* world) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(world);
  }

 private:
  // Looks are taken twice a second.
  static constexpr std::chrono::seconds kRecent{5};

  std::mutex mutex_;
  std::string line_;
  Clock::time_point told_;
  std::map<unsigned long, Clock::time_point> callers_;  // by thread: the first look at its call
  std::map<const void*, Wait> waits_;
};

struct EngineOptions {
  // How long a request may wait for the other ranks, and a rank for another inside a collective.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  // Wait longer for ranks that neither are stopped nor wait for others themselves.
  bool waits_for_busy = false;
  // Of the process, shared by its engines.
  std::shared_ptr<Activity> activity = std::make_shared<Activity>();
  // Watch the other ranks' processes; off when the ranks are threads of one process.
  bool watch_peers = true;
  // How messages name this machine.
  std::string host;
};

}  // namespace kvstore_hvd
