// The flight recorder: each rank's last operations, in the segment, where every process of the host can read them, also
// after the rank's death. (The word is that of aircraft; PyTorch uses it, too.) And who came last in them.
#pragma once

#include "request/request.hpp"

namespace kvstore_hvd {

// Writes the records of one rank. One thread at a time.
class FlightRecorder {
 public:
  FlightRecorder(World& world, int rank)
      : records_(world.records(rank)), counts_(world.member(world.rank(rank).rank_of_world).counts) {}

  // The operation has been announced on the slot; it is the rank's n-th under its name, from 0.
  void begin(Work& work, std::uint32_t slot, std::uint32_t version, std::uint64_t operation);
  void end(const Work& work, Clock::time_point now);

 private:
  FlightRecord* const records_;
  Counts& counts_;
  std::uint64_t count_ = 0;
  std::size_t under_way_ = 0;
};

// A record, as it was read.
struct Flight {
  std::uint64_t number, operation;
  std::uint32_t slot, version;
  Collective collective;
  DType dtype;
  ReduceOp op;
  std::optional<Algorithm> algorithm;  // once the operation is over
  std::uint64_t bytes;
  std::int64_t announced, scheduled, completed;  // see FlightRecord
};

// The last `most` operations of a local rank and all under way, oldest first, without those that are being written.
std::vector<Flight> read_flights(World& world, int rank, std::size_t most = kFlightRecords);

// Counts who came last in the operations of a world on one host, see Counts, from the records of its ranks. Of more
// than kFlightRecords operations between two calls it sees the last ones. One thread.
class Arrivals {
 public:
  explicit Arrivals(World& world) : world_(world) {}
  // Does nothing unless half a second is over.
  void count(Clock::time_point now);

 private:
  World& world_;
  std::int64_t counted_until_ = 0;  // operations that were over by then
};

}  // namespace kvstore_hvd
