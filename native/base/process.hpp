// This process: which one it is, and how it ends.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>

namespace kvstore_hvd {

// A forked child has the parent's objects, but none of its threads, and must leave its worlds alone. This is
// getpid(), without the system call that it costs on every collective operation. The one global of the core: a process
// has one id, however many ranks it hosts.
pid_t process_id();

// Of this machine, and so the same for all ranks that share memory.
inline std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// Have this process end with code 1 where it would end with 0; a failure that it tells of itself stays. To be called as
// it ends: the code is not known to anybody before exit() is called.
void end_as_failed();

}  // namespace kvstore_hvd
