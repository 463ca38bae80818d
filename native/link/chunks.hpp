// The entries of the schedule that are between publication and the last rank that has collected them: moves this host's
// bytes to the other hosts, and theirs into the link's memory.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/schedule_log.hpp"
#include "link/transport.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

class LinkChunks {
 public:
  LinkChunks(World& world, Transport& transport);
  ~LinkChunks() { cancel(); }
  LinkChunks(const LinkChunks&) = delete;
  LinkChunks& operator=(const LinkChunks&) = delete;

  // Whether there is memory for one more.
  bool has_room() const { return chunks_.size() < kLinkSlots; }
  bool is_empty() const { return chunks_.empty(); }
  // How many entries there were for which all has come.
  std::uint64_t arrived() const { return arrived_; }
  // Bytes of one host's that are published and have not arrived.
  std::uint64_t bytes_under_way() const { return bytes_under_way_; }

  // Makes it the next entry of this host's schedule.
  void publish(const Entry& entry);

  // Does what can be done without waiting; returns whether anything was. Once the world has failed nothing is sent.
  bool progress();

 private:
  struct Chunk {
    std::uint64_t index;
    Algorithm algorithm;
    int root_host;
    std::uint64_t bytes;  // of one sum, or of one rank's input
    bool is_sent = false, has_arrived = false;
    std::vector<Transport::Transfer> sends, receives;
  };

  bool all_ranks(Flag RankState::* flag, std::uint64_t index);
  // Where the bytes of a host lie in the link's memory of a chunk, and how many.
  struct Part {
    std::uint64_t offset, bytes;
  };
  Part part_of(const Chunk& chunk, int host);
  bool moves(const Chunk& chunk, int host) const;
  void receive(Chunk& chunk);
  void send(Chunk& chunk);
  bool test(std::vector<Transport::Transfer>& transfers);
  void cancel();

  // The places of a host's ranks, see World::Home.
  struct Places {
    std::uint64_t first, count;
  };

  World& world_;
  Transport& transport_;
  ScheduleLog log_;
  std::uint64_t published_ = 0;
  std::uint64_t arrived_ = 0;
  std::uint64_t bytes_under_way_ = 0;
  std::vector<Places> places_;  // by host
  std::deque<Chunk> chunks_;    // in order, of consecutive numbers
};

}  // namespace kvstore_hvd
