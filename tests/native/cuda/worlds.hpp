// Ranks of one process that run the kernels on a machine of host/, and what their arrays must hold then.
#pragma once

#include "../reduce_cases.hpp"
#include "layout.cuh"

namespace kvstore_hvd::gpu::tests {

using kvstore_hvd::reduce_tests::Bytes;
using testing::check;

// An array of its own, `offset` bytes after an aligned address, with guards on both sides.
class Array {
 public:
  Array(std::size_t bytes, std::size_t offset)
      : offset_(kGuard + offset), bytes_(bytes), memory_((offset_ + bytes + kGuard + 127) / 128 * 8) {
    std::memset(memory_.data(), kFill, memory_.size() * sizeof(memory_[0]));
  }
  u8* data() { return reinterpret_cast<u8*>(memory_.data()) + offset_; }
  void set(const Bytes& content) { std::copy(content.begin(), content.begin() + static_cast<long>(bytes_), data()); }
  Bytes content() { return Bytes(data(), data() + bytes_); }
  bool guarded() const {
    const u8* all = reinterpret_cast<const u8*>(memory_.data());
    for (std::size_t i = 0; i < memory_.size() * sizeof(memory_[0]); ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && all[i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 128;
  static constexpr u8 kFill = 0xa5;
  std::size_t offset_;
  std::size_t bytes_;
  std::vector<Vector> memory_;
};

// What the ranks share: control, FIFO and staging memory. Counters begin shortly before they wrap around.
class Ranks {
 public:
  Ranks(u32 n, u32 slot_vectors, u64 staging_bytes, u32 channels) : n_(n), worlds_(n), aborts_(n), statuses_(n) {
    for (u32 rank = 0; rank < n; ++rank) {
      controls_.push_back(std::make_unique<Control>());
      fifos_.emplace_back(u64{channels} * kSlots * slot_vectors, Vector{{1, 2, 3, 4}});
      stagings_.emplace_back(2 * staging_bytes / sizeof(Vector), Vector{{5, 6, 7, 8}});
    }
    staging_bytes_ = staging_bytes;
    for (u32 rank = 0; rank < n; ++rank) {
      World& world = worlds_[rank];
      world = {};
      world.rank = rank;
      world.ranks = n;
      world.slot_vectors = slot_vectors;
      world.abort = &aborts_[rank];
      world.status = &statuses_[rank];
      for (u32 other = 0; other < n; ++other) {
        world.control[other] = controls_[other].get();
        world.fifo[other] = reinterpret_cast<u8*>(fifos_[other].data());
        world.staging[other] = reinterpret_cast<u8*>(stagings_[other].data());
      }
    }
    reset(0xfffffff5U);
  }

  // As the host does it after a stop, though with another number.
  void reset(u32 counter) {
    for (u32 rank = 0; rank < n_; ++rank) {
      Control& control = *controls_[rank];
      std::memset(static_cast<void*>(&control), 0, sizeof(control));
      for (u32 channel = 0; channel < kMaxChannels; ++channel) {
        control.filled[channel].value = counter;
        control.freed[channel].value = counter;
        control.steps[channel].value = counter;
      }
      // Meetings have twice the number of launches, so these wrap around too.
      control.launches.value = counter;
      for (Counter& met : control.met) met.value = 2 * counter;
      aborts_[rank] = 0;
      statuses_[rank] = 0;
    }
    half_ = 0;
  }

  // To be called once for each launch that meets.
  u64 next_staging_offset() {
    half_ ^= 1;
    return half_ * staging_bytes_;
  }

  u32 size() const { return n_; }
  World* worlds() { return worlds_.data(); }
  u8* staging(u32 rank) { return reinterpret_cast<u8*>(stagings_[rank].data()); }
  u32& abort(u32 rank) { return aborts_[rank]; }
  u32 status(u32 rank) const { return statuses_[rank]; }

 private:
  u32 n_;
  u64 staging_bytes_ = 0;
  u32 half_ = 0;
  std::vector<World> worlds_;
  std::vector<u32> aborts_;
  std::vector<u32> statuses_;
  std::vector<std::unique_ptr<Control>> controls_;
  std::vector<std::vector<Vector>> fifos_;
  std::vector<std::vector<Vector>> stagings_;
};

// The segments of all ranks of a launch, rank after rank, and the arrays that they point to.
class Table {
 public:
  Table(u32 ranks, u32 segments) : n_(segments), segments_(u64{ranks} * segments) {}
  void set(u32 rank, u32 i, u8* pointer, u64 offset, u64 count, u32 from = 0) {
    segments_[u64{rank} * n_ + i] = {pointer, offset, count, 0, from};
  }
  const Segment* finish(u32 tile) {
    u32 first = 0;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      if (i % n_ == 0) first = 0;
      segments_[i].first_tile = first;
      first += static_cast<u32>((segments_[i].count + tile - 1) / tile);
    }
    return segments_.data();
  }

 private:
  u32 n_;
  std::vector<Segment> segments_;
};

inline Launch launch_of(const Reduction& reduction, u64 timeout_ns) {
  Launch launch = {};
  launch.timeout_ns = timeout_ns;
  launch.prescale = reduction.prescale;
  launch.postscale = reduction.postscale;
  launch.prescale32 = static_cast<float>(reduction.prescale);
  launch.postscale32 = static_cast<float>(reduction.postscale);
  launch.op = static_cast<u32>(reduction.op);
  launch.meet = 1;
  return launch;
}

inline u64 rounded(u64 bytes) { return (bytes + sizeof(Vector) - 1) / sizeof(Vector) * sizeof(Vector); }

}  // namespace kvstore_hvd::gpu::tests
