// The shared memory of one world of ranks on one host: a memfd without a name, so nothing is ever left behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/thresholds.hpp"

namespace kvstore_hvd {

struct World;

// The place of a world of some of the ranks in the world of all, whose ranks messages name.
struct Inside {
  std::uint32_t number = 0;  // of the process set; 0: this is the world of all
  int size = 0;              // of the world of all
  std::vector<int> ranks;    // there
};

// The hosts of a world, and which of its ranks are where.
struct Hosts {
  int host = 0;                         // this one
  std::vector<std::vector<int>> ranks;  // by host; empty: all are here

  bool are_several() const { return ranks.size() > 1; }
};

class Segment {
 public:
  // A fresh segment for `size` ranks, 1 <= size <= kMaxRanks (failure.hpp), each with an arena of `arena_bytes` of
  // address space; memory is taken when it is first written to. `has_core_for_each`: whether the ranks may use as many
  // cores as there are ranks; by default as this thread may. With several hosts `size` is the number of ranks on this
  // one. Throws std::invalid_argument, std::system_error.
  static std::shared_ptr<Segment> create(int size, std::size_t arena_bytes = 0, const Thresholds& thresholds = {},
                                         const Inside& inside = {},
                                         std::optional<bool> has_core_for_each = std::nullopt, const Hosts& hosts = {});

  // The segment behind `fd`, which is duplicated. Throws std::invalid_argument when it is not one of this build.
  static std::shared_ptr<Segment> attach(int fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Tells messages who a rank of another host is; nothing for one of this host.
  void introduce(int rank, int pid, const std::string& host);

  int fd() const { return fd_; }
  // Of the ranks on this host.
  int size() const;
  // Absent in a forked child: the mapping is not inherited.
  World& world() const { return *world_; }

  // What must be equal for two builds to share a segment.
  static std::string abi();

 private:
  Segment(int fd, World* world, std::size_t bytes);
  static std::shared_ptr<Segment> map(int fd, std::size_t bytes);

  int fd_;
  int owner_;  // pid: a forked child has no mapping to release
  World* world_;
  std::size_t bytes_;
};

}  // namespace kvstore_hvd
