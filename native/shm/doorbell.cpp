#include "shm/doorbell.hpp"

#include <dirent.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <system_error>

namespace kvstore_hvd {
namespace {

// How long a sleep is at most: while something is under way, if messages come without waking the thread and if
// connections tell of them; and else.
constexpr std::chrono::nanoseconds kLook{50'000}, kMostLook{2'000'000}, kIdleLook{10'000'000};
// So many times in a row may connections wake the thread for nothing; then those that can still be read are none of
// MPI's, and are not heard any more. Or they are closed here, and open in a forked child.
constexpr int kVain = 100;
constexpr std::chrono::milliseconds kFirstSearch{1};
constexpr int kEvents = 16;

int open_socket() { return socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

// In the abstract namespace, see unix(7): no file, and gone with its socket.
struct Address {
  sockaddr_un name{};
  socklen_t bytes;

  explicit Address(std::uint64_t number) {
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

}  // namespace

Doorbell::Doorbell()
    : socket_(open_socket()),
      readable_(epoll_create1(EPOLL_CLOEXEC)),
      writable_(epoll_create1(EPOLL_CLOEXEC)),
      look_(kLook) {
  std::random_device device;
  number_ = (std::uint64_t{device()} << 32 | device()) | 1;
  const Address address(number_);
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
  const auto now = std::chrono::steady_clock::now();
  if (now >= next_search_) {
    find_connections();
    next_search_ = now + std::max<std::chrono::nanoseconds>(kFirstSearch, (now - begun_) / 4);
  }
  if (found_news) last_news_ = now;
  // What has taken long may take a little longer.
  const auto patience = std::min<std::chrono::nanoseconds>((now - last_news_) / 8, kMostLook);
  woken_ = wait(is_busy ? std::max(look_, patience) : kIdleLook);
}

void Doorbell::expect_connections() {
  begun_ = next_search_ = std::chrono::steady_clock::now();
  ignored_.clear();
}

void Doorbell::learn(bool found_news) {
  if (found_news) vain_ = 0;
  if (!found_news && woken_ == Woken::kByConnection && ++vain_ >= kVain) ignore_readable();
  if (!found_news || !hears_) return;
  if (woken_ == Woken::kByConnection) look_ = std::min(2 * look_, kMostLook);
  if (woken_ == Woken::kNot) look_ = std::max(look_ / 2, kLook);
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
  const Address address(number);
  sendto(socket, "", 1, MSG_DONTWAIT, address.get(), address.bytes);
}

}  // namespace kvstore_hvd
