#include "shm/liveness.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <thread>

namespace kvstore_hvd {
namespace {

constexpr int kAttempts = 300;
constexpr std::chrono::milliseconds kPause{1};

std::optional<int> wait_status(const std::function<ExitAnswer()>& kernel,
                               const std::function<std::optional<int>()>& zombie) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const ExitAnswer answer = kernel();
    if (answer.kind == ExitAnswer::kKnown) return answer.status;
    const auto status = zombie();
    if (status && *status != 0) return status;
    if (answer.kind == ExitAnswer::kNever) return std::nullopt;
    std::this_thread::sleep_for(kPause);
  }
  return std::nullopt;
}

std::string signal_name(int number) {
  constexpr std::pair<int, const char*> kNames[] = {{SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
                                                    {SIGHUP, "SIGHUP"},   {SIGILL, "SIGILL"},   {SIGINT, "SIGINT"},
                                                    {SIGKILL, "SIGKILL"}, {SIGPIPE, "SIGPIPE"}, {SIGQUIT, "SIGQUIT"},
                                                    {SIGSEGV, "SIGSEGV"}, {SIGTERM, "SIGTERM"}};
  for (const auto& [signal, name] : kNames) {
    if (signal == number) return name;
  }
  return "signal " + std::to_string(number);
}

// How often to look for ranks that join.
constexpr std::chrono::milliseconds kJoinTick{5};
// How long a rank that joins waits for the others, which have all met already. A process that dies before it is watched
// leaves nothing to ask how; and no collective succeeds before this rank is through here.
constexpr std::chrono::seconds kJoinLimit{2};

// proc(5), /proc/[pid]/stat: fields counted from the state, which is the first one behind the command's name. Start
// time 0 is unknown: this process's own entry could not be read, and the others then go without.
struct ProcessStat {
  char state = 0;
  std::uint64_t start_time = 0;
  int exit_code = 0;
};

// Nothing when it cannot be read, which does not mean that the process is gone: the table of descriptors may be full.
std::optional<ProcessStat> read_stat(int pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return std::nullopt;
  const std::size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = '\0';
  const char* field = std::strrchr(text, ')');  // the name may hold anything, blanks and parentheses too
  if (field == nullptr) return std::nullopt;
  ProcessStat stat;
  stat.state = field[2];
  field += 2;
  for (int number = 3; *field != '\0'; ++number) {
    if (number == 22) stat.start_time = std::strtoull(field, nullptr, 10);
    if (number == 52) stat.exit_code = std::atoi(field);
    field = std::strchr(field, ' ');
    if (field == nullptr) break;
    ++field;
  }
  return stat;
}

bool is_of(const ProcessStat& stat, const RankState& state) {
  return state.start_time == 0 || stat.start_time == state.start_time;
}

// Whether the process of a rank is gone, by what needs no pidfd. Only what proves it counts: a zombie, another process
// with its pid, or ESRCH, which kill(2) answers without a descriptor.
bool has_ended(const RankState& state) {
  const auto stat = read_stat(state.pid);
  if (stat) return stat->state == 'Z' || stat->state == 'X' || !is_of(*stat, state);
  return kill(state.pid, 0) != 0 && errno == ESRCH;
}

// As describe_end() asks for it.
std::optional<int> zombie_status(const RankState& state) {
  const auto stat = read_stat(state.pid);
  if (!stat || !is_of(*stat, state) || stat->state != 'Z') return std::nullopt;
  return stat->exit_code;
}

}  // namespace

ExitAnswer ask_kernel(int pidfd) {
  // struct pidfd_info of pidfd(2), as far as every kernel that has it.
  struct {
    std::uint64_t mask, cgroup;
    std::uint32_t ids[11];
    std::int32_t exit_code;
  } info{};
  static_assert(sizeof(info) == 64);
  constexpr std::uint64_t kExit = 1 << 3;
  constexpr unsigned long kGetInfo = _IOC(_IOC_READ | _IOC_WRITE, 0xff, 11, sizeof(info));
  info.mask = kExit;
  if (pidfd < 0) return {};
  int result = -1;
  do {
    result = ioctl(pidfd, kGetInfo, &info);
  } while (result != 0 && errno == EINTR);
  // ENOTTY, EINVAL: before Linux 6.13. ESRCH: before 6.15, and the process is reaped. Others: a sandbox.
  if (result != 0) return {};
  if ((info.mask & kExit) != 0) return {ExitAnswer::kKnown, info.exit_code};
  return {ExitAnswer::kNotYet, 0};
}

std::string describe_end(const std::function<ExitAnswer()>& kernel, const std::function<std::optional<int>()>& zombie) {
  const auto status = wait_status(kernel, zombie);
  if (!status) return "died";
  if (WIFSIGNALED(*status)) return "died (" + signal_name(WTERMSIG(*status)) + ")";
  return "exited with code " + std::to_string(WEXITSTATUS(*status));
}

Liveness::Liveness(World& world, int rank, const std::string& host, bool watch)
    : world_(world), rank_(rank), watch_(watch), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), peers_(world.ranks) {
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "creating an eventfd");
  RankState& self = world_.rank(rank_);
  self.pid = getpid();
  const auto stat = read_stat(self.pid);
  self.start_time = stat ? stat->start_time : 0;
  const std::string_view name = utf8_prefix(host, sizeof(self.host) - 1);
  std::memcpy(self.host, name.data(), name.size());
  self.host[name.size()] = '\0';
  // Release: publishes pid, start time and host.
  self.presence.store(Presence::kJoined, std::memory_order_release);
  const auto limit = Clock::now() + kJoinLimit;
  for (open_new_peers(); watch_ && !all_joined_ && Clock::now() < limit; open_new_peers()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Liveness::~Liveness() {
  for (const Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
  close(wake_fd_);
}

void Liveness::interrupt() {
  const std::uint64_t one = 1;
  // The counter cannot overflow; there is nothing to do about any other failure, and poll() has a limit.
  [[maybe_unused]] const auto written = write(wake_fd_, &one, sizeof(one));
}

bool Liveness::has_pidfds() {
  const int own = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  if (own >= 0) close(own);
  return own >= 0;
}

void Liveness::open_new_peers() {
  all_joined_ = all_watched_ = true;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    Peer& peer = peers_[r];
    RankState& state = world_.rank(r);
    // Acquire: pid and start time are complete.
    const Presence presence = state.presence.load(std::memory_order_acquire);
    if (presence == Presence::kLeft) peer.ignored = true;
    if (presence == Presence::kAbsent) all_joined_ = false;
    if (r == rank_ || peer.ignored || peer.pidfd >= 0 || presence != Presence::kJoined) continue;
    peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, state.pid, 0));
    // A table of descriptors that is full now may have room later.
    if (peer.pidfd < 0 && (errno == EMFILE || errno == ENFILE)) all_watched_ = false;
    const auto stat = read_stat(state.pid);
    if (peer.pidfd >= 0 && stat && !is_of(*stat, state)) {
      close(peer.pidfd);  // the rank is gone, and another process has its pid
      peer.pidfd = -1;
    }
  }
}

std::optional<Liveness::Death> Liveness::find_death() {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    Peer& peer = peers_[r];
    const RankState& state = world_.rank(r);
    // Acquire: pid and start time are complete.
    const Presence presence = state.presence.load(std::memory_order_acquire);
    if (presence == Presence::kLeft) peer.ignored = true;
    if (r == rank_ || peer.ignored || presence != Presence::kJoined) continue;
    pollfd request{peer.pidfd, POLLIN, 0};
    const bool signalled = peer.pidfd >= 0 && ::poll(&request, 1, 0) > 0;
    // Without a pidfd (an old kernel, a sandbox, no descriptor, or an early end) the process table tells.
    if (!signalled && (peer.pidfd >= 0 || !has_ended(state))) continue;
    peer.ignored = true;
    // A rank that left in good order may have done so after the look above.
    if (state.presence.load(std::memory_order_acquire) == Presence::kLeft) continue;
    return Death{r, describe_end([&] { return ask_kernel(peer.pidfd); }, [&] { return zombie_status(state); })};
  }
  return std::nullopt;
}

bool Liveness::is_stopped(World& world, int rank) {
  const RankState& state = world.rank(rank);
  // Acquire: pid and start time are complete.
  if (state.presence.load(std::memory_order_acquire) != Presence::kJoined) return false;
  const auto stat = read_stat(state.pid);
  return stat && is_of(*stat, state) && (stat->state == 'T' || stat->state == 't');
}

std::vector<int> Liveness::stopped() const {
  std::vector<int> ranks;
  for (int r = 0; watch_ && r < world_.ranks; ++r) {
    if (is_stopped(world_, r)) ranks.push_back(r);
  }
  return ranks;
}

std::optional<Liveness::Death> Liveness::poll(std::chrono::milliseconds limit) {
  std::vector<pollfd> requests{{wake_fd_, POLLIN, 0}};
  if (watch_) {
    if (!all_joined_ || !all_watched_) open_new_peers();
    if (!all_joined_) limit = std::min(limit, kJoinTick);
    for (const Peer& peer : peers_) {
      if (peer.pidfd >= 0 && !peer.ignored) requests.push_back({peer.pidfd, POLLIN, 0});
    }
  }
  ::poll(requests.data(), requests.size(), static_cast<int>(limit.count()));
  if ((requests[0].revents & POLLIN) != 0) {
    std::uint64_t count;
    [[maybe_unused]] const auto got = read(wake_fd_, &count, sizeof(count));
  }
  return watch_ ? find_death() : std::nullopt;
}

}  // namespace kvstore_hvd
