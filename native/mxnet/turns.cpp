#include "mxnet/turns.hpp"

#include <memory>
#include <utility>

namespace kvstore_hvd::mxnet {

std::uint64_t Turns::take(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++unused_;
  return rows_[name].taken++;
}

void Turns::use(const std::string& name, std::uint64_t turn, std::function<void()> step) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = rows_.find(name);
  const std::string& key = found->first;  // `name` may be gone once the step is
  Row& row = found->second;
  if (turn != row.used) {
    row.early.emplace(turn, std::move(step));
    return;
  }
  for (;;) {
    lock.unlock();
    step();
    lock.lock();
    ++row.used;
    --unused_;
    const auto next = row.early.find(row.used);
    if (next == row.early.end()) break;
    step = std::move(next->second);
    row.early.erase(next);
  }
  // Bounds the memory of programs that never use a name twice. No turn of the row is left that a row that starts anew
  // could mistake for one of its own.
  if (row.used == row.taken && rows_.size() > kKeptNames) rows_.erase(rows_.find(key));
}

std::future<void> Turns::await(const std::string& name) {
  // Shared: the thread that uses the turn is still inside set_value() when the future is ready.
  auto turn_came = std::make_shared<std::promise<void>>();
  std::future<void> ready = turn_came->get_future();
  use(name, take(name), [turn_came] { turn_came->set_value(); });
  return ready;
}

bool Turns::all_used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return unused_ == 0;
}

std::size_t Turns::names() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rows_.size();
}

}  // namespace kvstore_hvd::mxnet
