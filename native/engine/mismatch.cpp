// What to tell the user when ranks disagree about an operation.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>

#include "engine/tensor_table.hpp"

namespace kvstore_hvd {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

// The upper half of a group that is a threshold of 2bit compression, whose bits are the lower half: "2bit".
constexpr std::uint64_t kTwoBit = 0x32626974;

std::string two_bit(std::uint64_t group) {
  if (group >> 32 != kTwoBit) return "not 2bit";
  const auto bits = static_cast<std::uint32_t>(group);
  float threshold;
  std::memcpy(&threshold, &bits, sizeof(threshold));
  char text[48];
  std::snprintf(text, sizeof(text), "2bit, threshold %.9g", threshold);
  return text;
}

// The upper half of a group that says of which parameters the optimizer has states: their number is in the lowest 16
// bits, a checksum of them and of the number of updates in the others. "stat".
constexpr std::uint64_t kStates = 0x73746174;

std::string states(std::uint64_t group) {
  if (group >> 32 != kStates) return "none";
  char text[64];
  std::snprintf(text, sizeof(text), "of %u parameters (%04x with the number of updates)",
                static_cast<unsigned>(group & 0xFFFF), static_cast<unsigned>(group >> 16 & 0xFFFF));
  return text;
}

struct Aspect {
  const char* name;
  const char* fix;
  std::function<std::string(World&, const Signature&)> value;
};

const std::vector<Aspect>& aspects() {
  // Never destroyed: threads of the engine may come here while the process ends.
  static const auto& kAspects = *new std::vector<Aspect>{
      {"operation", "call the same operation under this name on every rank.",
       [](World&, const Signature& s) { return std::string(name_of(s.collective)); }},
      {"gradient compression", "call set_gradient_compression with the same type and threshold on every rank.",
       [](World&, const Signature& s) { return two_bit(s.group); }},
      {"the states of the optimizer",
       "call hvd.broadcast_trainer_states(trainer) after load_states on one rank, or load_states on every rank.",
       [](World&, const Signature& s) { return states(s.group); }},
      {"dtype", "use the same dtype on every rank.",
       [](World&, const Signature& s) { return std::string(name_of(s.dtype)); }},
      {"the kind of memory", "keep the array on the same kind of device on every rank.",
       [](World&, const Signature& s) { return std::string(s.on_device != 0 ? "GPU" : "CPU"); }},
      {"shape", "pass an array of the same shape on every rank.",
       [](World&, const Signature& s) { return describe_shape(s); }},
      {"reduce op", "pass the same op on every rank.",
       [](World&, const Signature& s) { return std::string(name_of(s.op)); }},
      {"gradient compression", "call set_gradient_compression with the same type on every rank.",
       [](World&, const Signature& s) { return std::string(s.as_half != 0 ? "fp16" : "none"); }},
      {"root", "pass the same root on every rank.",
       [](World& world, const Signature& s) { return std::to_string(world.member(s.root).rank_of_all); }},
      {"prescale", "pass the same prescale factor on every rank.",
       [](World&, const Signature& s) { return number(s.prescale); }},
      {"postscale", "pass the same postscale factor on every rank.",
       [](World&, const Signature& s) { return number(s.postscale); }},
      {"the other arrays of the group", "see the error of the array that differs.",
       [](World&, const Signature& s) { return "group " + std::to_string(s.group % 100000); }},
  };
  return kAspects;
}

std::string fix_of(const Aspect& aspect, bool of_parameter) {
  const bool is_shape = std::string_view(aspect.name) == "shape";
  return is_shape && of_parameter ? "build the same network on every rank." : aspect.fix;
}

std::string describe_mismatch(World& world, const std::vector<AnnouncedBy>& announced) {
  for (const Aspect& aspect : aspects()) {
    std::vector<std::pair<std::string, std::vector<int>>> groups;  // in order of the first rank
    for (const AnnouncedBy& one : announced) {
      const std::string value = aspect.value(world, one.announcement.signature);
      auto group = groups.begin();
      while (group != groups.end() && group->first != value) ++group;
      if (group == groups.end()) group = groups.insert(group, {value, {}});
      group->second.push_back(static_cast<int>(one.rank));
    }
    if (groups.size() < 2) continue;
    std::string text = std::string("ranks disagree on ") + aspect.name + ".\n ";
    for (const auto& [value, ranks] : groups) text += " " + value + ": " + describe_ranks(ranks) + "   ";
    while (text.back() == ' ') text.pop_back();
    return text + "\n  Nothing was changed. Fix: " + fix_of(aspect, announced[0].announcement.of_parameter != 0);
  }
  return "ranks disagree.\n  Nothing was changed. Fix: pass the same arguments on every rank.";
}

}  // namespace

std::vector<AnnouncedBy> announced_here(World& world, std::uint32_t slot) {
  std::vector<AnnouncedBy> all;
  for (int r = 0; r < world.ranks; ++r) all.push_back({world.rank(r).rank_of_all, world.announcement(slot, r)});
  return all;
}

Disagreement describe_disagreement(World& world, const std::vector<AnnouncedBy>& announced) {
  std::string failed;
  for (const auto& [rank, announcement] : announced) {
    if (!announcement.signature.failed) continue;
    failed += (failed.empty() ? "an array could not be used.\n  rank " : "\n  rank ") + std::to_string(rank) + ": " +
              announcement.note;
  }
  if (failed.empty()) return {ErrorCode::kMismatch, describe_mismatch(world, announced)};
  // An exchange of what a ShardedTrainer has updated in place.
  const bool is_update = std::any_of(announced.begin(), announced.end(), [](const AnnouncedBy& one) {
    return one.announcement.signature.collective == Collective::kExchange && one.announcement.of_parameter != 0;
  });
  const char* const end = is_update
                              ? "Parameters are undefined from this step on. Fix: see the error of that rank, load a "
                                "checkpoint; workers without input need kvstore_hvd.Join."
                              : "Nothing was changed on the other ranks. Fix: see the error of that rank.";
  return {ErrorCode::kInputFailed, failed + "\n  " + end};
}

}  // namespace kvstore_hvd
