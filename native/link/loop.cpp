#include "link/loop.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "base/running_time.hpp"
#include "shm/poll.hpp"

namespace kvstore_hvd {
namespace {

// How often the thread yields after the last news before it sleeps: a small operation costs less than waking it, while
// the ranks have work to do for a chunk.
constexpr int kYields = 60, kYieldsForChunks = 10;
// A transport whose links are over is called now and then: what MPI sends may need it.
constexpr std::chrono::milliseconds kAfterwards{20};
constexpr int kCallsAfterwards = 50;

}  // namespace

LinkLoop& LinkLoop::of_this_process() {
  // No lock: another thread might hold it while the process forks.
  static std::atomic<LinkLoop*> shared{nullptr};
  LinkLoop* found = shared.load();
  while (found == nullptr || found->owner_ != process_id()) {  // a forked child has none
    std::unique_ptr<LinkLoop> made(new LinkLoop());
    if (shared.compare_exchange_strong(found, made.get())) return *made.release();
  }
  return *found;
}

void LinkLoop::add(const std::shared_ptr<Link>& link) {
  link->sleeps_at(doorbell_);
  const std::lock_guard<std::mutex> lock(mutex_);
  links_.push_back(link);
  if (!is_running_) {
    stops_ = false;
    std::thread([this] { run(); }).detach();
    is_running_ = true;
  }
  changed_.notify_all();
}

bool LinkLoop::stop(std::chrono::nanoseconds limit) {
  if (owner_ != process_id()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto until = [&](std::chrono::nanoseconds longest, const auto& condition) {
    for (Patience patience(longest); !condition();) {
      if (patience.is_over()) return false;
      changed_.wait_for(lock, kAfterwards);
    }
    return true;
  };
  const bool are_over = until(limit, [this] { return links_.empty() || !is_running_; });
  stops_ = true;
  changed_.notify_all();
  return until(kAfterwards * kCallsAfterwards, [this] { return !is_running_; }) && are_over;
}

void LinkLoop::run() {
  request_short_slice();
  prctl(PR_SET_NAME, "kvhvd-link");  // for top -H
  prctl(PR_SET_TIMERSLACK, 1UL);     // ns, in place of 50 us
  std::vector<std::shared_ptr<Link>> links;
  std::vector<std::uint32_t> seen;  // at their bells
  std::shared_ptr<Transport> last;
  int calls = 0, yields = 0;
  bool has_moved = false;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto is_wanted = [this] { return stops_ || !links_.empty(); };
      if (closing_.empty() && calls == 0) {
        changed_.wait(lock, is_wanted);
      } else {
        changed_.wait_for(lock, kAfterwards, is_wanted);
      }
      // Each is asked once: Link::give_up() may come at any time.
      const auto over = std::stable_partition(links_.begin(), links_.end(), [](auto& one) { return !one->is_over(); });
      closing_.insert(closing_.end(), over, links_.end());
      links_.erase(over, links_.end());
      if (links != links_) doorbell_.expect_connections();
      links = links_;
      if (stops_) is_running_ = false;
      changed_.notify_all();
      if (stops_) return;
    }
    const auto now = Link::Clock::now();
    bool moved = false, is_busy = false, has_chunks = false;
    seen.clear();
    for (const auto& link : links) {
      seen.push_back(link->bell().value());
      moved = link->step(now) || moved;
      is_busy = is_busy || link->is_busy();
      has_chunks = has_chunks || link->has_chunks();
      has_moved = link->has_received() || has_moved;
    }
    const auto is_closed = [](const auto& link) { return link->close(); };
    closing_.erase(std::remove_if(closing_.begin(), closing_.end(), is_closed), closing_.end());
    if (links.empty()) {
      if (calls > 0) {
        --calls;
        try {
          last->progress();
        } catch (const TransportError&) {  // every link over it is over
        }
      }
      continue;
    }
    last = links.front()->transport();
    calls = kCallsAfterwards;
    has_moved = has_moved || moved;
    if (moved) yields = yields_of(WaitPolicy{std::chrono::nanoseconds(0), has_chunks ? kYieldsForChunks : kYields});
    if (yields > 0) {
      yields = yield_once() ? yields - 1 : 0;
      continue;
    }
    bool may_sleep = true;
    for (std::size_t i = 0; i < links.size(); ++i) may_sleep = links[i]->bell().may_sleep(seen[i]) && may_sleep;
    if (may_sleep) doorbell_.sleep(is_busy, std::exchange(has_moved, false));
  }
}

}  // namespace kvstore_hvd
