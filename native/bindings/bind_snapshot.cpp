#include <cstring>

#include "bindings/bind.hpp"
#include "report/flight.hpp"
#include "shm/liveness.hpp"
#include "shm/segment.hpp"

namespace kvstore_hvd {
namespace {

// The name on a slot, and how messages name its tensor; '' once the slot has gone to another name. Any moment.
std::pair<std::string, std::string> names_of(World& world, int rank, const Flight& flight) {
  const Slot& slot = world.slots[flight.slot];
  // Relaxed: for messages.
  if (slot.state.load(std::memory_order_relaxed) >> 32 != flight.version) return {};
  const char* const note = world.announcement(flight.slot, rank).note;
  return {std::string(slot.name, std::min<std::size_t>(slot.name_length, kMaxName)),
          std::string(note, strnlen(note, sizeof(Announcement::note)))};
}

py::object operation_of(World& world, int rank, const Flight& flight) {
  static const py::handle make = py::object(record("Operation")).release();
  const auto [name, label] = names_of(world, rank, flight);
  return make(text_of(name), text_of(label), flight.operation, name_of(flight.collective), name_of(flight.dtype),
              name_of(flight.op), flight.algorithm ? name_of(*flight.algorithm) : "", flight.bytes, flight.announced,
              flight.scheduled, flight.completed);
}

py::object counts_of(const Counts& counts) {
  const auto get = [](const auto& figure) { return figure.load(std::memory_order_relaxed); };  // figures
  return record("Counts")(get(counts.operations), get(counts.bytes), get(counts.waited), get(counts.compared),
                          get(counts.last), get(counts.behind));
}

}  // namespace

py::object snapshot(const Segment& segment, std::size_t most) {
  World& world = segment.world();
  py::list workers;
  for (int rank = 0; rank < world.size; ++rank) {
    const Member& member = world.member(rank);
    const bool is_here = member.host == world.host;
    const RankState* const state = is_here ? &world.rank(member.local_rank) : nullptr;
    // Acquire: the process was written before.
    const Presence presence = is_here ? state->presence.load(std::memory_order_acquire) : Presence::kJoined;
    constexpr const char* kStates[] = {"absent", "joined", "left"};
    const bool is_known = presence != Presence::kAbsent;
    const char* const host = is_here ? (is_known ? state->host : "") : member.host_name;
    const int pid = is_here ? (is_known ? state->pid : 0) : member.pid;
    py::list operations;
    if (is_here && most > 0) {
      for (const Flight& flight : read_flights(world, member.local_rank, most)) {
        operations.append(operation_of(world, member.local_rank, flight));
      }
    }
    const std::uint32_t waits = member.doing.waits.load(std::memory_order_relaxed);  // for messages
    const bool is_stopped = is_here ? Liveness::is_stopped(world, member.local_rank) : waits == kStopped;
    workers.append(record("Worker")(member.rank_of_all, text_of(std::string(host)), pid,
                                    is_here ? kStates[static_cast<int>(presence)] : "", is_stopped,
                                    text_of(member.doing.text.read()), counts_of(member.counts), operations));
  }
  py::object failure = py::none();
  if (world.failure.is_set()) {
    failure = py::make_tuple(class_name(world.failure.code()), text_of(world.failure.fact()));
  }
  return record("Snapshot")(std::string(world.job), world.generation, world.host, world.hosts, world.set_number,
                            world.created, monotonic_ns(), failure, workers);
}

}  // namespace kvstore_hvd
