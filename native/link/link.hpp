// The link of one host of a world: one thread, of a rank's process or of a process of its own, that is one more party
// of the host's segment. It announces an operation to the other hosts when all ranks of this one have, and lays what
// the others contribute where these ranks find it.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/running_time.hpp"
#include "link/chunks.hpp"
#include "link/conductor.hpp"
#include "link/host_table.hpp"
#include "link/stragglers.hpp"
#include "shm/segment.hpp"

namespace kvstore_hvd {

class Link {
 public:
  // `timeout`: as EngineOptions::timeout.
  Link(std::shared_ptr<Segment> segment, Transport& transport, std::chrono::nanoseconds timeout);

  // Until the ranks of all hosts have left, or the world has failed and the other hosts have been told.
  void run();

 private:
  bool step();
  void handle(int host, const char* record);
  void announced_here(std::uint32_t slot);
  void announced(const TensorId& id, int host, HostAnnouncement one);
  void carry_out(const TensorId& id);
  void ordered(RecordReader reader, const OrderRecord& order);
  void say_goodbye();
  void has_left(int host);
  void raise_abort();
  void abort();
  const TensorId& id_of_slot(std::uint32_t slot);

  const std::shared_ptr<Segment> segment_;
  World& world_;
  HostTable hosts_;
  Conductor conductor_;
  Stragglers stragglers_;
  LinkChunks chunks_;
  std::deque<Entry> orders_;            // of another host's conductor, that are not published
  std::uint32_t taken_ = 0;             // from the inbox, modulo 2^32
  std::vector<std::uint64_t> inlined_;  // announcements so far, by host
  // What another host has told of its failure.
  struct Abort {
    ErrorCode error;
    std::string text;
    std::uint64_t arrived;
    std::vector<std::uint64_t> inlined;
    Patience patience;
  };
  std::optional<Abort> abort_;
  std::vector<bool> knows_;  // by host: that the world has failed
  struct Known {
    std::uint32_t version = 0;
    bool is_known = false;
    TensorId id{};
  };
  std::vector<Known> known_;  // by slot
};

}  // namespace kvstore_hvd
