// Keeps operations of one name in the order of the calls. MXNet starts operations on different arrays as their inputs
// get ready, in another order on every rank; the ranks match operations by name, the first with the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace kvstore_hvd::mxnet {

// All members may be called from any thread.
class Turns {
 public:
  // The caller's turn among the operations of `name`. Each turn must be used, or the turns after it never come.
  std::uint64_t take(const std::string& name);

  // Calls `step`, which must not block, once all earlier turns have been used: here, or on the thread of the last one.
  void use(const std::string& name, std::uint64_t turn, std::function<void()> step);

  // Ready once all turns of `name` that were taken before this call have been used.
  std::future<void> await(const std::string& name);

  // Whether every turn taken has been used: no operation waits for its arrays.
  bool all_used() const;

  // How many names are remembered: those with turns not used yet, and up to kKeptNames others.
  std::size_t names() const;

  static constexpr std::size_t kKeptNames = 1024;

 private:
  // Its address stays valid while turns of it are unused.
  struct Row {
    std::uint64_t taken = 0;
    std::uint64_t used = 0;  // counts a turn after its step has returned, so that steps never overlap
    std::map<std::uint64_t, std::function<void()>> early;
  };

  mutable std::mutex mutex_;
  std::size_t unused_ = 0;  // turns
  std::unordered_map<std::string, Row> rows_;
};

}  // namespace kvstore_hvd::mxnet
