// How a process that is gone ended, as far as anybody can still tell.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace kvstore_hvd {

// What the kernel says of a process behind a pidfd (PIDFD_GET_INFO, Linux 6.15).
struct ExitAnswer {
  enum Kind {
    kKnown,   // `status` is that of waitpid(2)
    kNotYet,  // it waits for its parent, who reaps it any moment now, or a little later on a busy machine
    kNever,   // this kernel does not know, or may not tell
  };
  Kind kind = kNever;
  int status = 0;
};

ExitAnswer ask_kernel(int pidfd);

// "died (SIGKILL)", "exited with code 3"; "died" where nobody can tell. Asks `kernel` for about 0.3 s while it has no
// answer yet, but will. `zombie` is the status that the process table has (0: none that is to be believed), or nothing
// once the process is no longer there.
std::string describe_end(const std::function<ExitAnswer()>& kernel, const std::function<std::optional<int>()>& zombie);

}  // namespace kvstore_hvd
