// A small world in shared memory, for litmus programs.
#pragma once

#include "checker.hpp"
#include "engine/schedule.hpp"
#include "engine/tensor_table.hpp"

namespace proof {

using namespace kvstore_hvd;

inline const WaitPolicy kSleeps;  // at once

// Of `ranks` on one host. All of it is zeros but for what Segment::create() writes.
inline World& make_world(Program& program, int ranks, std::uint64_t stage_bytes = 64) {
  const auto n = static_cast<std::uint64_t>(ranks);
  Layout at{};
  at.ranks = (sizeof(World) + 127) / 128 * 128;
  at.announcements = at.ranks + n * sizeof(RankState);
  at.marks = (at.announcements + n * kSlots * sizeof(Announcement) + 63) / 64 * 64;
  at.payload_stride = 64;
  at.payloads = at.marks + n * kSlots * sizeof(Mark);
  at.members = at.payloads + n * kSlots * at.payload_stride;
  at.records = at.members + n * sizeof(Member);
  at.records = (at.records + 63) / 64 * 64;
  at.staging = at.records + n * kFlightRecords * sizeof(FlightRecord);
  at.stage_bytes = stage_bytes;
  at.staging_stride = stage_bytes * kStages;
  at.arenas = at.staging + n * at.staging_stride;
  at.arena_bytes = at.arena_stride = 256;
  at.total = at.arenas + n * at.arena_stride;
  World& world = program.shared_zeros<World>(at.total);
  world.layout = at;
  world.ranks = world.parties = world.size = world.size_of_all = ranks;
  world.thresholds = Thresholds{};
  for (int r = 0; r < ranks; ++r) {
    world.rank(r).rank_of_world = world.rank(r).rank_of_all = r;
    for (std::uint32_t slot = 0; slot < 2; ++slot) world.mark(slot, r).place = kNoPlace;
  }
  return world;
}

// What a thread of a rank has of its own.
struct Rank {
  Rank(World& its_world, int number)
      : world(its_world), rank(number), alarm(world, number, std::chrono::hours(1)), table(world, alarm) {}

  // A sum of one 32-bit integer.
  Request sum_of(std::int32_t& value, const char* name = "a") const {
    Request request;
    request.name = name;
    request.dtype = DType::kInt32;
    request.inputs = {&value};
    request.outputs = {&value};
    request.count = 1;
    request.shape = {1};
    return request;
  }

  World& world;
  const int rank;
  Alarm alarm;
  TensorTable table;
  Schedule schedule{world, alarm};
};

// The slot of a name, made before the threads begin.
inline SlotHandle make_slot(World& world, const char* name = "a") { return *Rank(world, 0).table.find(name); }

}  // namespace proof
