// The engine with ranks as processes: those that die.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <new>
#include <optional>

#include "link/loop.hpp"
#include "ranks.hpp"
#include "shm/liveness.hpp"
#include "shm/wait.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {
namespace {

// Runs `body` in a child process as one rank; it must return 0.
pid_t spawn(const Segment& segment, int rank, const std::function<int(Engine&)>& body,
            std::chrono::nanoseconds timeout = std::chrono::seconds(30)) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  int code = 99;
  {
    EngineOptions options = thread_options(timeout);
    options.watch_peers = true;
    Engine engine(Segment::attach(segment.fd()), rank, options);
    code = body(engine);
  }
  _exit(code);
}

// A child process that does nothing, until a signal ends it.
pid_t idle_child() {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  return child;
}

int wait_for(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

void check_survivor(pid_t pid) {
  const int status = wait_for(pid);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "survivor: " + std::to_string(status));
}

const bool end_later = testing::add("a kernel that can tell is asked until the process is reaped", [] {
  int asked = 0;
  // How it ended, where the kernel gives this answer from some question on, and its zombie, if there is one, tells.
  const auto end_of = [&](ExitAnswer answer, std::optional<int> zombie = {}, int from = 1) {
    asked = 0;
    const ExitAnswer not_yet{ExitAnswer::kNotYet, 0};
    return describe_end([&] { return ++asked < from ? not_yet : answer; }, [&] { return zombie; });
  };
  check_equal(end_of({ExitAnswer::kKnown, 0}, 0, 5), std::string("exited with code 0"), "its code");
  check_equal(asked, 5, "questions");
  check_equal(end_of({ExitAnswer::kNotYet, 0}, 3 << 8), std::string("exited with code 3"), "zombie");
  check_equal(asked, 1, "its zombie tells at once");
  check_equal(end_of({ExitAnswer::kNotYet, 0}), std::string("died"), "nobody reaps it");
  check_equal(end_of({}), std::string("died"), "reaped");
  check_equal(asked, 1, "a kernel that cannot tell is asked once");
  for (const auto& [status, text] :
       {std::pair(SIGSEGV | 128, "SIGSEGV"), std::pair(SIGBUS, "SIGBUS"), std::pair(SIGABRT | 128, "SIGABRT"),
        std::pair(SIGTERM + 0, "SIGTERM"), std::pair(SIGRTMAX + 0, "signal 64")}) {
    check_equal(end_of({ExitAnswer::kKnown, status}), "died (" + std::string(text) + ")", text);
  }
});

const bool end_asked = testing::add("this kernel is asked about a process that is there, and one that is reaped", [] {
  const pid_t child = idle_child();
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  if (pidfd >= 0) check(ask_kernel(pidfd).kind != ExitAnswer::kKnown, "it runs");
  kill(child, SIGTERM);
  wait_for(child);
  const ExitAnswer answer = ask_kernel(pidfd);
  check(answer.kind != ExitAnswer::kNotYet, "there is nothing to wait for any more");
  if (answer.kind == ExitAnswer::kKnown) check_equal(answer.status, SIGTERM, "how it ended");
  check(ask_kernel(-1).kind == ExitAnswer::kNever, "no pidfd");
  close(pidfd);
});

const bool debugged = testing::add("a process that a debugger has stopped is stopped", [] {
  const auto segment = Segment::create(1);
  const pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    _exit(0);
  }
  waitpid(child, nullptr, WUNTRACED);
  segment->world().rank(0).pid = child;
  segment->world().rank(0).presence = Presence::kJoined;
  check(Liveness::is_stopped(segment->world(), 0), "it is not");
  kill(child, SIGKILL);
  wait_for(child);
});

const bool lock_holder = testing::add("a rank that stops while it holds a lock is named at the deadline", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(2);
  Alarm alarm(segment->world(), 1, std::chrono::seconds(1));
  segment->world().table_lock.lock(alarm);  // as rank 1, which never goes on
  const pid_t survivor = spawn(
      *segment, 0,
      [](Engine& engine) {
        std::vector<float> data(10);
        const Status status = engine.run(allreduce("x", data));
        const bool named =
            contains(status.text(), "waited too long for rank 1, which stopped inside a critical section");
        return status.code() == ErrorCode::kTimeout && named ? 0 : 1;
      },
      std::chrono::milliseconds(300));
  check_survivor(survivor);
});

const bool dead_holder = testing::add("a rank that dies while it holds a lock is noticed before the deadline", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(2);
  const pid_t victim = spawn(
      *segment, 1,
      [&](Engine& engine) {
        Alarm alarm(segment->world(), 1, std::chrono::seconds(1));
        if (!barrier(engine).ok()) return 1;
        segment->world().table_lock.lock(alarm);
        if (!barrier(engine).ok()) return 2;  // its slot is known: this needs no lock
        usleep(400000);                       // some looks of the survivor's watcher
        kill(getpid(), SIGKILL);
        return 3;
      },
      std::chrono::seconds(60));
  const pid_t survivor = spawn(
      *segment, 0,
      [](Engine& engine) {
        if (!barrier(engine).ok() || !barrier(engine).ok()) return 1;
        std::vector<float> data(10);
        return engine.run(allreduce("x", data)).code() == ErrorCode::kPeerLost ? 0 : 2;
      },
      std::chrono::seconds(60));
  wait_for(victim);
  check_survivor(survivor);
});

const bool full_table = testing::add("so is one that dies with the table's lock while others wait for a slot", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(2);
  void* const shared =
      mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& is_full = *new (shared) std::atomic<bool>(false);
  const auto survivor = [&](Engine& engine) {
    std::vector<float> data(1);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < kSlots + 2; ++i) works.push_back(engine.submit(allreduce("n" + std::to_string(i), data)));
    is_full = true;
    return engine.wait(*works[0]).code() == ErrorCode::kPeerLost ? 0 : 1;
  };
  const pid_t surviving = spawn(*segment, 0, survivor, std::chrono::seconds(15));
  const pid_t victim = spawn(*segment, 1, [&](Engine&) {
    while (!is_full) usleep(1000);
    Alarm alarm(segment->world(), 1, std::chrono::seconds(1));
    segment->world().table_lock.lock(alarm);
    usleep(1500000);  // some looks of the survivor's watcher, on a busy machine too
    kill(getpid(), SIGKILL);
    return 1;
  });
  check_survivor(surviving);
  wait_for(victim);
  munmap(shared, sizeof(std::atomic<bool>));
});

const bool closed_connection = testing::add("a closed connection that a child holds wakes nobody for ever", [] {
  const auto sockets = tcp_connections(2);
  Doorbell doorbell;
  const pid_t child = idle_child();
  doorbell.sleep(true, true);        // finds both
  shutdown(sockets[1][0], SHUT_WR);  // so that the other end stays readable
  close(sockets[1][0]);
  close(sockets[0][1]);
  for (int i = 0; i < 1000; ++i) doorbell.sleep(true, false);
  rusage before{}, after{};
  getrusage(RUSAGE_THREAD, &before);
  for (int i = 0; i < 50; ++i) doorbell.sleep(true, false);
  getrusage(RUSAGE_THREAD, &after);
  check(after.ru_nvcsw - before.ru_nvcsw >= 25, "it does not sleep");
  kill(child, SIGKILL);
  wait_for(child);
});

const bool late_rank = testing::add("a rank watches the others before it takes part in anything", [] {
  const auto segment = Segment::create(2);
  RankState& late = segment->world().rank(1);
  std::thread joining([&] {
    usleep(50000);
    late.pid = getpid();
    late.presence = Presence::kJoined;
  });
  const Liveness watcher(segment->world(), 0, "testhost", true);
  check(late.presence == Presence::kJoined, "the other rank has joined");
  joining.join();
});

const bool has_left = testing::add("a rank that has left in good order wakes nobody when its process ends", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(2);
  const pid_t leaver = spawn(*segment, 1, [&](Engine& engine) {
    while (segment->world().rank(0).presence != Presence::kLeft) usleep(1000);
    return engine.shutdown() ? 0 : 1;
  });
  Liveness watcher(segment->world(), 0, "testhost", true);
  segment->world().rank(0).presence = Presence::kLeft;  // the other one may go
  while (waitpid(leaver, nullptr, WNOHANG) == 0) check(!watcher.poll(std::chrono::milliseconds(1)), "it has left");
  const auto begun = Clock::now();
  for (int i = 0; i < 2; ++i) check(!watcher.poll(std::chrono::milliseconds(100)), "it has not died");
  check(Clock::now() - begun >= std::chrono::milliseconds(100), "nothing wakes the watcher");
});

const bool another_process = testing::add("another process with the pid of a rank that is gone is not that rank", [] {
  if (thread_sanitizer()) return;
  const auto segment = Segment::create(2);
  World& world = segment->world();
  int opened = -1;
  {
    RankState& gone = world.rank(1);
    gone.pid = getpid();
    gone.start_time = 1;
    gone.presence = Presence::kJoined;
    Liveness watcher(world, 0, "testhost", true);
    const auto death = watcher.poll(std::chrono::milliseconds(0));
    check(death && death->rank == 1, "the rank is gone");
    opened = open("/dev/null", O_RDONLY | O_CLOEXEC);
  }
  check(fcntl(opened, F_GETFD) >= 0, "the watcher closes its own descriptors only, and each once");
  close(opened);
});

}  // namespace
}  // namespace kvstore_hvd
