#include "link/loop.hpp"

#include <algorithm>

#include "base/process.hpp"
#include "base/running_time.hpp"
#include "shm/wait.hpp"

namespace kvstore_hvd {
namespace {

using Clock = std::chrono::steady_clock;

// How long the thread looks on after the last news, and then how often it looks while something is under way, and else.
constexpr std::chrono::microseconds kSpin{20}, kBusyLook{100};
constexpr std::chrono::milliseconds kIdleLook{1};
// What this process has handed over may move only while it calls, also when the last link is over.
constexpr std::chrono::milliseconds kAfterwards{20};
constexpr int kCallsAfterwards = 50;

}  // namespace

LinkLoop& LinkLoop::of_this_process() {
  static std::mutex mutex;
  static LinkLoop* loop = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loop == nullptr || loop->owner_ != process_id()) loop = new LinkLoop();  // a forked child has none
  return *loop;
}

LinkLoop::LinkLoop() : owner_(process_id()) {}

void LinkLoop::add(const std::shared_ptr<Link>& link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  links_.push_back(link);
  if (stopped_) {
    if (thread_.joinable()) thread_.join();
    stopping_ = stopped_ = false;
    thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

std::vector<int> LinkLoop::meet(const std::shared_ptr<Link>& link, std::chrono::nanoseconds limit) {
  Patience patience(limit);
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const std::vector<int> missing = link->missing();
      if (missing.empty() || link->has_failed() || patience.is_over()) return missing;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void LinkLoop::remove(const std::shared_ptr<Link>& link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  removed_.push_back(link);
}

bool LinkLoop::stop(std::chrono::nanoseconds limit) {
  if (owner_ != process_id()) return true;
  Patience patience(limit);
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) return true;
      if (links_.empty() || patience.is_over()) {
        stopping_ = true;
        break;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  changed_.notify_all();
  thread_.join();
  return links_.empty();
}

void LinkLoop::run() {
  request_short_slice();
  std::vector<std::shared_ptr<Link>> links;
  auto& closing = *new std::vector<std::shared_ptr<Link>>();  // never freed: what MPI has in its hands stays
  std::shared_ptr<Transport> last;
  int calls = 0;
  auto last_news = Clock::now();
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (stopping_) {
        stopped_ = true;
        return;
      }
      for (const auto& link : links) {
        if (link->is_over() || std::find(removed_.begin(), removed_.end(), link) != removed_.end()) {
          closing.push_back(link);
          links_.erase(std::remove(links_.begin(), links_.end(), link), links_.end());
        }
      }
      removed_.clear();
      links = links_;
    }
    const std::uint32_t seen = links.empty() ? 0 : links.front()->bell().value();
    const bool moved = serve(links);
    const auto is_closed = [](const auto& link) { return link->close(); };
    if (!links.empty()) {
      last = links.front()->transport();
      calls = kCallsAfterwards;
    } else if (last != nullptr && calls-- > 0) {
      last->progress();
    } else {
      last.reset();
    }
    if (links.empty() && closing.empty()) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, kAfterwards, [&] { return stopping_ || !links_.empty(); });
      continue;
    }
    closing.erase(std::remove_if(closing.begin(), closing.end(), is_closed), closing.end());
    const auto now = Clock::now();
    if (moved) last_news = now;
    if (now - last_news < kSpin) continue;
    bool is_busy = false;
    for (const auto& link : links) is_busy = is_busy || link->is_busy();
    const auto idle_look = links.empty() ? kAfterwards : kIdleLook;
    const auto longest = is_busy ? std::chrono::nanoseconds(kBusyLook) : std::chrono::nanoseconds(idle_look);
    if (links.empty() || links.front()->has_failed()) {  // a bell would not let it sleep
      std::this_thread::sleep_for(longest);
    } else {
      links.front()->bell().wait_change(seen, WaitPolicy{}, longest, links.front()->failure());
    }
  }
}

bool LinkLoop::serve(const std::vector<std::shared_ptr<Link>>& links) {
  bool moved = false;
  const auto now = Clock::now();
  for (const auto& link : links) {
    const std::lock_guard<std::mutex> lock(mutex_);  // missing() of another thread
    if (link->step(now)) moved = true;
  }
  return moved;
}

}  // namespace kvstore_hvd
