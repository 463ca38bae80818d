// The shared memory of one world of ranks on one host: a memfd without a name, so nothing is ever left behind.
#pragma once

#include <memory>

#include "shm/world.hpp"

namespace kvstore_hvd {

// A world of some ranks within the world of all, whose numbers messages use.
struct Inside {
  std::uint32_t number = 0;  // of the process set; 0: this is the world of all
  int size = 0;              // of the world of all
  std::vector<int> ranks;    // there
};

// The hosts of a world, and which of its ranks are where.
struct Hosts {
  int host = 0;                                             // this one
  std::vector<std::vector<int>> ranks;                      // by host; empty: all are here
  std::vector<std::pair<std::string, int>> processes = {};  // by rank: how messages name its machine, and its pid

  bool are_several() const { return ranks.size() > 1; }
};

class Segment {
 public:
  // A fresh segment for `size` ranks of this host, 1 <= size <= kMaxRanks, each with an arena of `arena_bytes` of
  // address space; memory is taken when it is first written to. `has_core_for_each`: whether the ranks may use as many
  // cores as there are ranks; by default as this thread may. Throws std::invalid_argument, std::system_error.
  static std::shared_ptr<Segment> create(int size, std::size_t arena_bytes = 0, const Thresholds& thresholds = {},
                                         const Inside& inside = {},
                                         std::optional<bool> has_core_for_each = std::nullopt, const Hosts& hosts = {});

  // The segment behind `fd`, which is duplicated. Throws std::invalid_argument when it is not one of this build.
  static std::shared_ptr<Segment> attach(int fd);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int fd() const { return fd_; }
  int size() const { return world_->ranks; }  // ranks on this host
  // Absent in a forked child: the mapping is not inherited.
  World& world() const { return *world_; }

  // What must be equal for two builds to share a segment.
  static std::string abi();

 private:
  explicit Segment(int fd);
  void map(std::size_t bytes);

  const int fd_;
  const int owner_;  // pid: a forked child has no mapping to release
  World* world_ = nullptr;
  std::size_t bytes_ = 0;
};

// What a threshold may be: a multiple of `unit`, from `least` to `most`.
struct ThresholdInfo {
  const char* name;
  std::uint32_t Thresholds::* field;
  std::uint32_t unit, least, most;
};
const std::vector<ThresholdInfo>& threshold_infos();

// The defaults with the changes of `text`: "one_shot=4096,direct_chunk=2097152"; may be empty. Throws
// std::invalid_argument, with a text for the user, when a name does not exist, a value is not allowed, or a least size
// is above the most.
Thresholds parse_thresholds(std::string_view text);

}  // namespace kvstore_hvd
