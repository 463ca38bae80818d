// Which process this is. A forked child has the parent's objects, but none of its threads, and must leave its worlds
// alone.
#pragma once

#include <sys/types.h>

namespace kvstore_hvd {

// getpid(), without the system call that it costs on every collective operation. The one global of the core: a process
// has one id, however many ranks it hosts.
pid_t process_id();

}  // namespace kvstore_hvd
