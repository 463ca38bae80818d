#include "report/flight.hpp"

#include <algorithm>
#include <unordered_map>

namespace kvstore_hvd {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
// A record is written a little after the time that it tells; the ranks complete an operation within the second time.
// Arrivals are counted this often.
constexpr std::chrono::milliseconds kWritten{10}, kTogether{1000}, kEvery{500};

std::int64_t clock_of(Clock::time_point time) { return std::chrono::nanoseconds(time.time_since_epoch()).count(); }

void add(std::atomic<std::uint64_t>& count, std::uint64_t more) { count.store(count.load(kRelaxed) + more, kRelaxed); }

// Collective, dtype and op, 8 bits each from the lowest on, 8 bits of the algorithm plus one, and the operation's
// number.
std::uint64_t pack(const Work& work, std::uint64_t operation) {
  const Request& request = work.request();
  return static_cast<std::uint64_t>(request.collective) | static_cast<std::uint64_t>(request.dtype) << 8 |
         static_cast<std::uint64_t>(request.op) << 16 | operation << 32;
}

// Nothing while the record is being written.
std::optional<Flight> read(const FlightRecord& record) {
  Flight flight{};
  flight.number = record.number.load(std::memory_order_acquire);
  flight.completed = record.completed.load(std::memory_order_acquire);  // before what belongs to the end
  const std::uint64_t slot = record.slot.load(std::memory_order_acquire);
  const std::uint64_t operation = record.operation.load(std::memory_order_acquire);
  flight.bytes = record.bytes.load(std::memory_order_acquire);
  flight.announced = record.announced.load(std::memory_order_acquire);
  flight.scheduled = record.scheduled.load(std::memory_order_acquire);
  if (flight.number == 0 || record.number.load(kRelaxed) != flight.number) return std::nullopt;
  flight.slot = static_cast<std::uint32_t>(slot);
  flight.version = static_cast<std::uint32_t>(slot >> 32);
  flight.operation = operation >> 32;
  flight.collective = static_cast<Collective>(operation & 0xff);
  flight.dtype = static_cast<DType>(operation >> 8 & 0xff);
  flight.op = static_cast<ReduceOp>(operation >> 16 & 0xff);
  if (const auto algorithm = operation >> 24 & 0xff; algorithm != 0) {
    flight.algorithm = static_cast<Algorithm>(algorithm - 1);
  }
  return flight;
}

}  // namespace

void FlightRecorder::begin(Work& work, std::uint32_t slot, std::uint32_t version, std::uint64_t operation) {
  // What is under way keeps its place, unless that takes half of them. Relaxed: written by this rank only.
  const auto is_under_way = [](const FlightRecord& one) {
    return one.number.load(kRelaxed) != 0 && one.completed.load(kRelaxed) == 0;
  };
  do work.record = ++count_;
  while (under_way_ < kFlightRecords / 2 && is_under_way(records_[count_ % kFlightRecords]));
  ++under_way_;
  FlightRecord& record = records_[count_ % kFlightRecords];
  record.number.store(0, kRelaxed);
  // Release, each: a reader that sees one of these sees that the number has gone.
  record.slot.store(std::uint64_t{version} << 32 | slot, std::memory_order_release);
  record.operation.store(pack(work, operation), std::memory_order_release);
  record.bytes.store(bytes_of(work.request()), std::memory_order_release);
  record.announced.store(clock_of(work.since), std::memory_order_release);
  record.scheduled.store(0, std::memory_order_release);
  record.completed.store(0, std::memory_order_release);
  record.number.store(count_, std::memory_order_release);  // publishes them
}

void FlightRecorder::end(const Work& work, Clock::time_point now) {
  add(counts_.operations, 1);
  add(counts_.bytes, bytes_of(work.request()));
  if (work.record == 0) return;
  --under_way_;
  FlightRecord& record = records_[work.record % kFlightRecords];
  if (record.number.load(kRelaxed) != work.record) return;  // others have taken its place
  const std::uint64_t algorithm = static_cast<std::uint64_t>(work.algorithm) + 1;
  // Release, as above.
  record.operation.store(record.operation.load(kRelaxed) | algorithm << 24, std::memory_order_release);
  record.scheduled.store(clock_of(work.scheduled), std::memory_order_release);
  record.completed.store(clock_of(now), std::memory_order_release);  // publishes them
}

std::vector<Flight> read_flights(World& world, int rank, std::size_t most) {
  std::vector<Flight> all;
  for (std::uint64_t i = 0; i < kFlightRecords; ++i) {
    if (const auto flight = read(world.records(rank)[i])) all.push_back(*flight);
  }
  std::sort(all.begin(), all.end(), [](const Flight& a, const Flight& b) { return a.number < b.number; });
  std::size_t surplus = all.size() - std::min(all.size(), most);
  const auto goes = [&surplus](const Flight& one) { return surplus > 0 && one.completed != 0 && surplus-- > 0; };
  all.erase(std::remove_if(all.begin(), all.end(), goes), all.end());
  return all;
}

void Arrivals::count(Clock::time_point now) {
  const std::int64_t until = clock_of(now - kWritten);
  if (until - counted_until_ < std::chrono::nanoseconds(kEvery).count()) return;
  struct Operation {
    std::vector<std::pair<std::int64_t, int>> arrivals;
    std::int64_t completed = 0;
  };
  std::unordered_map<std::uint64_t, Operation> operations;
  const std::int64_t since = counted_until_ - std::chrono::nanoseconds(kTogether).count();
  for (int r = 0; r < world_.ranks; ++r) {
    for (std::uint64_t i = 0; i < kFlightRecords; ++i) {
      const FlightRecord& record = world_.records(r)[i];
      const std::int64_t completed = record.completed.load(std::memory_order_acquire);
      if (completed <= since) continue;
      const auto flight = read(record);
      if (!flight || flight->completed == 0) continue;
      Operation& one =
          operations[std::uint64_t{flight->slot} << 51 ^ std::uint64_t{flight->version} << 32 ^ flight->operation];
      one.arrivals.emplace_back(flight->announced, r);
      one.completed = std::max(one.completed, flight->completed);
    }
  }
  for (auto& [key, one] : operations) {
    if (one.arrivals.size() != static_cast<std::size_t>(world_.ranks)) continue;
    if (one.completed <= counted_until_ || one.completed > until) continue;
    std::sort(one.arrivals.begin(), one.arrivals.end());
    const auto [last, rank] = one.arrivals.back();
    for (int r = 0; r < world_.ranks; ++r) add(world_.member(world_.rank(r).rank_of_world).counts.compared, 1);
    const std::int64_t median = one.arrivals[(one.arrivals.size() - 1) / 2].first;
    Counts& counts = world_.member(world_.rank(rank).rank_of_world).counts;
    add(counts.last, 1);
    counts.behind.store(counts.behind.load(kRelaxed) + last - median, kRelaxed);
  }
  counted_until_ = until;
}

}  // namespace kvstore_hvd
