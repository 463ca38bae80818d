// Algorithm selection thresholds: one table, measured, and overridable without a rebuild.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvstore_hvd {

inline constexpr std::uint32_t kMaxInline = 4096;  // what an announcement can carry in a world of up to 16 ranks

// All in bytes. Part of a segment: the ranks of a world decide alike, by what the rank that created it was told.
struct Thresholds {
  std::uint32_t inlined = 4096;               // up to here whoever comes last reduces at once, without a schedule
  std::uint32_t inlined_direct = 128 << 10;   // the same, of arrays in arenas, all ranks' together
  std::uint32_t one_shot = 2048;              // up to here one synchronisation costs less than halving the bytes
  std::uint32_t large = 16 << 20;             // from here on the memory, not the latency, is the limit
  std::uint32_t min_chunk = 64 << 10;         // two-shot: of all ranks together; less is not worth its synchronisations
  std::uint32_t max_slice = 64 << 10;         // two-shot: of one rank
  std::uint32_t max_slice_large = 128 << 10;  // the same, of large tensors
  std::uint32_t broadcast_chunk = 256 << 10;
  std::uint32_t direct_chunk = 1 << 20;  // what a tensor of higher priority may have to wait for
  std::uint32_t min_part = 8 << 10;      // direct, what is claimed at a time: less is done sooner than divided
  std::uint32_t max_part = 256 << 10;
  std::uint32_t submitter = 4 << 20;       // direct: up to here the last rank begins on the thread that submits
  std::uint32_t device_fusion = 64 << 20;  // arrays of devices that are carried out together
  std::uint32_t linger = 1 << 20;          // up to here a submitting thread may stay until the others have come
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
