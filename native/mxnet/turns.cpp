#include "mxnet/turns.hpp"

#include <utility>

namespace kvstore_hvd::mxnet {

std::uint64_t Turns::take(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rows_[name].taken++;
}

void Turns::use(const std::string& name, std::uint64_t turn, std::function<void()> step) {
  std::unique_lock<std::mutex> lock(mutex_);
  Row& row = rows_[name];
  if (turn != row.used) {
    row.early.emplace(turn, std::move(step));
    return;
  }
  for (;;) {
    lock.unlock();
    step();
    lock.lock();
    ++row.used;
    const auto next = row.early.find(row.used);
    if (next == row.early.end()) return;
    step = std::move(next->second);
    row.early.erase(next);
  }
}

}  // namespace kvstore_hvd::mxnet
