#include "link/loop.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/process.hpp"
#include "base/running_time.hpp"
#include "shm/poll.hpp"

namespace kvstore_hvd {
namespace {

using Clock = std::chrono::steady_clock;

// How often the thread yields after the last news before it sleeps: a small operation costs less than waking it, while
// the ranks have work to do for a chunk.
constexpr int kYields = 60, kYieldsForChunks = 10;
// Between calls of a transport whose links are over; and how many of those the end of the thread may take.
constexpr std::chrono::milliseconds kAfterwards{20};
constexpr int kCallsAfterwards = 50;

void progress(Transport& transport) {
  try {
    transport.progress();
  } catch (const TransportError&) {  // every link over it is over
  }
}

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

std::vector<int> LinkLoop::meet(const std::shared_ptr<Link>& link, std::chrono::nanoseconds limit) {
  Patience patience(limit);
  for (;;) {
    const bool has_failed = link->has_failed();  // first: the other host may meet this one and tell of it at once
    std::vector<int> missing = link->missing();
    if (missing.empty() || has_failed || patience.is_over()) return missing;
    std::this_thread::sleep_for(kLook);
  }
}

void LinkLoop::remove(const std::shared_ptr<Link>& link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  links_.erase(std::remove(links_.begin(), links_.end(), link), links_.end());
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
  std::vector<std::uint32_t> seen;
  auto& closing = *new std::vector<std::shared_ptr<Link>>();  // never freed: MPI may use their memory
  std::shared_ptr<Transport> last;
  int calls = 0, yields = 0;
  bool has_moved = false;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (links_.empty() && closing.empty() && calls == 0) {
        changed_.wait(lock, [this] { return stops_ || !links_.empty(); });
      }
      for (const auto& link : links) {
        if (link->is_over()) links_.erase(std::remove(links_.begin(), links_.end(), link), links_.end());
        if (std::find(links_.begin(), links_.end(), link) == links_.end()) closing.push_back(link);
      }
      if (links != links_) doorbell_.expect_connections();
      links = links_;
      if (stops_) is_running_ = false;
      changed_.notify_all();
      if (stops_) return;
    }
    bool moved = false, is_busy = false, has_chunks = false;
    seen.clear();
    for (const auto& link : links) seen.push_back(link->bell().value());
    const auto now = Clock::now();
    for (const auto& link : links) moved = link->step(now) || moved;
    for (const auto& link : links) {
      is_busy = is_busy || link->is_busy();
      has_chunks = has_chunks || link->has_chunks();
      has_moved = link->transport()->has_received() || has_moved;
    }
    const auto is_closed = [](const auto& link) { return link->close(); };
    closing.erase(std::remove_if(closing.begin(), closing.end(), is_closed), closing.end());
    has_moved = has_moved || moved;
    if (moved) yields = yields_of(WaitPolicy{std::chrono::nanoseconds(0), has_chunks ? kYieldsForChunks : kYields});
    if (!links.empty()) {
      last = links.front()->transport();
      calls = last->calls_afterwards();
    } else if (calls > 0) {
      --calls;
      progress(*last);
    }
    if (yields > 0) {
      yields = yield_once() ? yields - 1 : 0;
      continue;
    }
    if (links.empty()) {
      std::this_thread::sleep_for(kAfterwards);
      continue;
    }
    bool may_sleep = true;
    for (std::size_t i = 0; i < links.size(); ++i) may_sleep = links[i]->bell().may_sleep(seen[i]) && may_sleep;
    if (may_sleep) doorbell_.sleep(is_busy, std::exchange(has_moved, false));
  }
}

}  // namespace kvstore_hvd
