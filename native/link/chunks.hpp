// The entries of the schedule between publication and collection by the last rank of this host (chunks).
//
// A sum over H hosts: each host's ranks reduce their arrays into the link's memory. Slice h of that goes to host h,
// whose link sums the slices of all hosts, in the order of the hosts, and returns the result: 2(H-1)/H of the bytes
// cross each link. A small sum is not sliced: every link gets all and sums for itself, which saves a hop. Broadcasts
// and exchanges are sent as they are.
//
// The only rank of a host does not reduce: sums of its arrays in the arena are sent, made and received where they lie.
// The link has a mapping of the arena of its own. So nothing reaches the rank's arrays once the rank has isolated them
// (Arena::isolate()), as it does before operations of a lost world fail.
//
// Up to kLinkSlots chunks are under way: while one crosses the network, the ranks reduce the next, and copy the one
// before. Receives are posted before an entry is published, so that no message comes before its receive. The root's
// host keeps a chunk of a broadcast until the other hosts have acknowledged it: it waits for nothing else of theirs.
#pragma once

#include <deque>

#include "engine/schedule.hpp"
#include "link/transport.hpp"
#include "shm/segment.hpp"

namespace kvstore_hvd {

class LinkChunks {
 public:
  // Throws std::system_error.
  LinkChunks(Segment& segment, Transport& transport);
  ~LinkChunks();
  LinkChunks(const LinkChunks&) = delete;
  LinkChunks& operator=(const LinkChunks&) = delete;

  bool has_room() const { return chunks_.size() < kLinkSlots; }
  bool is_empty() const { return chunks_.empty(); }
  // Entries with bytes that have arrived so far.
  std::uint64_t arrived() const { return arrived_; }
  // Bytes that are published and have not arrived.
  std::uint64_t bytes_under_way() const { return bytes_under_way_; }

  // Publishes it as the next entry of this host's schedule.
  void publish(const Entry& entry);

  // Makes progress without waiting; returns whether anything has moved. Once the world has failed the ranks' bytes are
  // not sent, since arrays may be in use again; partials that were sent before are summed and returned, for the other
  // hosts. `tells`: whether the ranks of this host are told of entries that arrive.
  bool progress(bool tells);

  // Whether a message of that host has come since the last call.
  bool has_received(int host) { return std::exchange(received_[static_cast<std::size_t>(host)], 0) != 0; }

  // Sends and receives nothing more. Returns whether nothing is under way: else to be called again.
  bool close();

 private:
  struct Bytes {
    std::uint64_t begin, count;
  };
  // A message under way.
  struct Message {
    Transport::Transfer transfer;
    int host;  // the other one
    std::uint64_t bytes;
  };
  struct Chunk {
    std::uint64_t index;  // of the log
    Entry entry;
    bool is_whole;                                  // not sliced
    bool is_narrow;                                 // see link_sum.cpp
    char* array;                                    // of the only rank, where sum and result lie; or null
    std::vector<Message> sends, partials, results;  // the latter two are received
  };

  bool all_ranks(Flag RankState::* flag, std::uint64_t index);
  bool is_sum(const Chunk& chunk) const { return chunk.entry.algorithm == Algorithm::kLinkSum; }
  bool is_broadcast(const Chunk& chunk) const { return chunk.entry.algorithm == Algorithm::kLinkBroadcast; }
  bool moves(const Chunk& chunk, int host) const;
  char* memory(const Chunk& chunk) { return world_.link_memory(chunk.index); }
  // The sum of this host's ranks, and the result.
  char* sum_of(const Chunk& chunk);
  char* result_of(const Chunk& chunk) {
    return chunk.array != nullptr ? chunk.array : memory(chunk) + chunk.entry.staged_bytes;
  }
  char* array_of(const Chunk& chunk);
  // The part of either that a host's link sums.
  Bytes slice_of(const Chunk& chunk, int host) const;
  // Where the bytes of a host lie in an exchange or broadcast.
  Bytes place_of(const Chunk& chunk, int host) const;
  // Where a host's part of this host's slice lies.
  char* partial_of(const Chunk& chunk, int host);
  void receive(Chunk& chunk);
  void send(Chunk& chunk);
  void sum(Chunk& chunk);
  void acknowledge(Chunk& chunk);
  void receive_from(int host, int tag, char* to, std::uint64_t bytes, std::vector<Message>& messages);
  void send_to(int host, int tag, const char* data, std::uint64_t bytes, Chunk& chunk);
  // Drops messages that are over; returns whether all are.
  bool test_sends(Chunk& chunk);
  bool test_receives(std::vector<Message>& messages);
  template <class Call>
  void to_others(const Call& call) {
    // In rotation, so that not all hosts send to the same one first.
    for (int i = 1; i < world_.hosts; ++i) call((world_.host + i) % world_.hosts);
  }

  World& world_;
  Transport& transport_;
  char* arena_ = nullptr;  // of the only rank, mapped again; null: there are several, or messages are not copied
  std::uint64_t published_ = 0, sent_ = 0, summed_ = 0, told_ = 0;  // the next one's index
  std::uint64_t arrived_ = 0;
  std::uint64_t bytes_under_way_ = 0;
  std::vector<std::uint64_t> places_;  // by host: of its first rank, see Member::position; and the number of all ranks
  std::deque<Chunk> chunks_;           // in order, of consecutive numbers
  std::vector<char> received_;         // by host
  char receipt_ = 0;                   // what others acknowledge chunks with
  bool is_closed_ = false;
};

}  // namespace kvstore_hvd
