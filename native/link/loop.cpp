#include "link/loop.hpp"

#include <dirent.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <system_error>
#include <thread>

namespace kvstore_hvd {
namespace {

// The longest sleep while something is under way: where messages do not wake the thread, and where connections do.
constexpr std::chrono::nanoseconds kPoll{50'000}, kMostPoll{2'000'000};
constexpr std::chrono::nanoseconds kIdlePoll{10'000'000};  // the longest sleep otherwise
// After so many wake-ups in a row without a message, readable connections are ignored: they are the user's program's,
// or closed here and open in a forked child.
constexpr int kVain = 100;
constexpr std::chrono::milliseconds kFirstSearch{1};
constexpr int kEvents = 16;

int open_socket() { return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

// In the abstract namespace, see unix(7): no file, and gone with its socket.
struct BellName {
  sockaddr_un name{};
  socklen_t bytes;

  explicit BellName(std::uint64_t number) {
    name.sun_family = AF_UNIX;
    const int length = std::snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "kvstore_hvd-%016llx",
                                     static_cast<unsigned long long>(number));
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

bool is_tcp(int descriptor) {
  int domain = 0, type = 0;
  socklen_t size = sizeof(int);
  return getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
         getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM &&
         (domain == AF_INET || domain == AF_INET6);
}

// How often the thread yields after the last news before it sleeps: a small operation costs less than waking it, while
// the ranks have work to do for a chunk.
constexpr int kYields = 60, kYieldsForChunks = 10;
// A transport whose links are over is called now and then: what MPI sends may need it.
constexpr std::chrono::milliseconds kAfterwards{20};
constexpr int kCallsAfterwards = 50;

}  // namespace

Doorbell::Doorbell()
    : socket_(open_socket()),
      readable_(epoll_create1(EPOLL_CLOEXEC)),
      writable_(epoll_create1(EPOLL_CLOEXEC)),
      look_(kPoll) {
  std::random_device device;
  number_ = (std::uint64_t{device()} << 32 | device()) | 1;
  const BellName address(number_);
  if (readable_ < 0 || writable_ < 0 || bind(socket_, address.get(), address.bytes) != 0) {
    throw std::system_error(errno, std::generic_category(), "the thread for other hosts cannot open its files");
  }
}

Doorbell::~Doorbell() {
  for (const int descriptor : {socket_, readable_, writable_}) close(descriptor);
}

void Doorbell::sleep(bool is_busy, bool found_news) {
  learn(found_news);
  hears_ = is_busy;
  // MPI opens connections when they are first needed: searches, of a few microseconds, become rarer with time.
  const auto now = Clock::now();
  if (now >= next_search_) {
    find_connections();
    next_search_ = now + std::max<std::chrono::nanoseconds>(kFirstSearch, (now - begun_) / 4);
  }
  if (found_news) last_news_ = now;
  // What has taken long may take a little longer.
  const auto patience = std::min<std::chrono::nanoseconds>((now - last_news_) / 8, kMostPoll);
  woken_ = wait(is_busy ? std::max(look_, patience) : kIdlePoll);
}

void Doorbell::expect_connections() {
  begun_ = next_search_ = Clock::now();
  ignored_.clear();
}

void Doorbell::learn(bool found_news) {
  if (found_news) vain_ = 0;
  if (!found_news && woken_ == Woken::kByConnection && ++vain_ >= kVain) ignore_readable();
  if (!found_news || !hears_) return;
  if (woken_ == Woken::kByConnection) look_ = std::min(2 * look_, kMostPoll);
  if (woken_ == Woken::kNot) look_ = std::max(look_ / 2, kPoll);
}

// While bytes wait to be read there is something to do; that a connection can take bytes again is news once. What is
// closed leaves by itself, unless a child has it open.
void Doorbell::find_connections() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    const int descriptor = std::atoi(entry->d_name);
    if (!is_tcp(descriptor) || ignored_.count(descriptor) != 0) continue;
    epoll_event event{};
    event.data.fd = descriptor;
    event.events = EPOLLIN;
    epoll_ctl(readable_, EPOLL_CTL_ADD, descriptor, &event);
    event.events = EPOLLOUT | EPOLLET;
    epoll_ctl(writable_, EPOLL_CTL_ADD, descriptor, &event);
  }
  closedir(folder);
}

void Doorbell::ignore_readable() {
  epoll_event events[kEvents];
  const int found = epoll_wait(readable_, events, kEvents, 0);
  for (int i = 0; i < found; ++i) {
    pollfd one{events[i].data.fd, POLLIN, 0};
    if (is_tcp(one.fd) && poll(&one, 1, 0) > 0) ignored_.insert(one.fd);
  }
  // What a child has open stays in the set, and only a new set is without it.
  close(readable_);
  readable_ = epoll_create1(EPOLL_CLOEXEC);
  find_connections();
  vain_ = 0;
}

Doorbell::Woken Doorbell::wait(std::chrono::nanoseconds limit) {
  const timespec longest{0, limit.count()};
  pollfd sources[] = {{socket_, POLLIN, 0}, {writable_, POLLIN, 0}, {readable_, POLLIN, 0}};
  if (ppoll(sources, hears_ ? 3 : 1, &longest, nullptr) <= 0) return Woken::kNot;
  char byte;
  while (sources[0].revents != 0 && recv(socket_, &byte, sizeof(byte), 0) >= 0) {
  }
  epoll_event events[kEvents];
  while (sources[1].revents != 0 && epoll_wait(writable_, events, kEvents, 0) == kEvents) {
  }
  return sources[0].revents != 0 ? Woken::kByRing : Woken::kByConnection;
}

void Doorbell::ring(std::uint64_t number) {
  static std::atomic<int> shared{-1};  // relaxed: nothing else depends on it
  int socket = shared.load(std::memory_order_relaxed);
  if (socket < 0) {
    int none = -1;
    socket = open_socket();  // again with the next ring, while the process has no descriptors
    if (!shared.compare_exchange_strong(none, socket, std::memory_order_relaxed)) socket = (close(socket), none);
  }
  const BellName address(number);
  sendto(socket, "", 1, MSG_DONTWAIT, address.get(), address.bytes);
}

void ring_link(World& world) {
  if (world.link_number == 0) {
    world.link().bell.ring();
  } else if (world.link().bell.ring_and_is_asleep()) {
    Doorbell::ring(world.link_number);
  }
}

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
  link->sleeps_at(doorbell_.number());
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
    const auto now = Clock::now();
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
