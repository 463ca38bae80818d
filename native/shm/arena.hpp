// One rank's arena: memory for arrays that the other ranks of the host read and write in place. A collective on arrays
// that lie in the arenas of all ranks needs no staging memory.
#pragma once

#include <sys/types.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "shm/segment.hpp"

namespace kvstore_hvd {

// All members may be called from any thread. Shared, so that arrays may outlive the engine of their world.
class Arena {
 public:
  Arena(std::shared_ptr<Segment> segment, int rank);

  // Memory for `bytes` >= 0 bytes, aligned to kAlignment; null when the arena is full, and in a forked child.
  void* allocate(std::size_t bytes);
  // `memory` came from allocate().
  void free(void* memory);

  // The world is left: no memory for new arrays, and the segment is released with the last array that lies here.
  void retire();

  bool contains(const void* memory) const;
  std::size_t capacity() const { return capacity_; }
  std::size_t used() const;

  // The world is lost: gives this process a private copy in place of the shared memory. From then on there is no memory
  // for new arrays. False, and nothing changes, where the system has no memory for a copy.
  bool isolate();

  // In a forked child, once: gives it private memory in place of the parent's, with the parent's content at the first
  // access to a page, or later as long as the child only reads. Throws std::system_error; then every access faults.
  void after_fork_in_child();

  static constexpr std::size_t kAlignment = 128;

 private:
  // With the mutex held. Returns the segment if it is to be released, after the mutex.
  std::shared_ptr<Segment> take_unused();
  int map_privately();

  std::shared_ptr<Segment> segment_;  // under mutex_; null when it is gone
  char* const base_;
  const std::size_t capacity_;
  const std::ptrdiff_t place_in_segment_;
  const pid_t owner_;
  mutable std::mutex mutex_;
  bool is_retired_ = false;
  std::atomic<bool> is_isolated_{false};  // changes under mutex_, which a forked child cannot take
  // Whether the memory is gone. Relaxed, as extent_: an array that lies here keeps it.
  std::atomic<bool> is_gone_{false};
  std::size_t used_ = 0;
  // No array ever reached beyond. Relaxed: a child has what its parent's thread saw before the fork.
  std::atomic<std::size_t> extent_{0};
  std::map<std::size_t, std::size_t> free_;                 // offset to bytes; neighbours are always joined
  std::unordered_map<std::size_t, std::size_t> allocated_;  // offset to bytes
};

}  // namespace kvstore_hvd
