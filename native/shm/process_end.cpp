#include "shm/process_end.hpp"

#include <sys/ioctl.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
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

const char* signal_name(int number) {
  switch (number) {
    case SIGABRT:
      return "SIGABRT";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGHUP:
      return "SIGHUP";
    case SIGILL:
      return "SIGILL";
    case SIGINT:
      return "SIGINT";
    case SIGKILL:
      return "SIGKILL";
    case SIGPIPE:
      return "SIGPIPE";
    case SIGQUIT:
      return "SIGQUIT";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGTERM:
      return "SIGTERM";
    default:
      return nullptr;
  }
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
  if (WIFSIGNALED(*status)) {
    const char* name = signal_name(WTERMSIG(*status));
    return std::string("died (") + (name != nullptr ? name : "signal " + std::to_string(WTERMSIG(*status))) + ")";
  }
  return "exited with code " + std::to_string(WEXITSTATUS(*status));
}

}  // namespace kvstore_hvd
