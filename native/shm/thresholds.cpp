#include "shm/thresholds.hpp"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace kvstore_hvd {
namespace {

// Of slices and chunks: pages, so that no element and no cache line is cut.
constexpr std::uint32_t kUnit = 4096;
// No more is staged for a chunk than fits into the staging memory of a world of one rank.
constexpr std::uint32_t kMostStaged = 128 << 10;
constexpr std::uint32_t kMost = 1 << 30;

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

[[noreturn]] void refuse(const std::string& fact) { throw std::invalid_argument(fact); }

void set(Thresholds& thresholds, std::string_view setting) {
  const auto equals = setting.find('=');
  if (equals == std::string_view::npos) refuse("'" + std::string(setting) + "' is not NAME=BYTES.");
  const std::string name(trimmed(setting.substr(0, equals)));
  const std::string_view text = trimmed(setting.substr(equals + 1));
  for (const ThresholdInfo& info : threshold_infos()) {
    if (info.name != name) continue;
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < info.least || value > info.most ||
        value % info.unit != 0) {
      refuse(name + ": '" + std::string(text) + "' is not a multiple of " + std::to_string(info.unit) + " from " +
             std::to_string(info.least) + " to " + std::to_string(info.most) + ".");
    }
    thresholds.*info.field = value;
    return;
  }
  std::string names;
  for (const ThresholdInfo& info : threshold_infos()) names += std::string(names.empty() ? "" : ", ") + info.name;
  refuse("'" + name + "' does not exist; there are " + names + ".");
}

}  // namespace

const std::vector<ThresholdInfo>& threshold_infos() {
  static const std::vector<ThresholdInfo> infos = {
      {"inlined", &Thresholds::inlined, 64, 0, kMaxInline},
      {"inlined_direct", &Thresholds::inlined_direct, 64, 0, kMost},
      {"one_shot", &Thresholds::one_shot, 64, 0, kMostStaged},
      {"large", &Thresholds::large, kUnit, 0, kMost},
      {"min_chunk", &Thresholds::min_chunk, kUnit, kUnit, kMost},
      {"max_slice", &Thresholds::max_slice, kUnit, kUnit, kMostStaged},
      {"max_slice_large", &Thresholds::max_slice_large, kUnit, kUnit, kMostStaged},
      {"broadcast_chunk", &Thresholds::broadcast_chunk, kUnit, kUnit, kMost},
      {"direct_chunk", &Thresholds::direct_chunk, kUnit, kUnit, kMost},
      {"min_part", &Thresholds::min_part, kUnit, kUnit, kMost},
      {"max_part", &Thresholds::max_part, kUnit, kUnit, kMost},
      {"submitter", &Thresholds::submitter, 64, 0, kMost},
      {"device_fusion", &Thresholds::device_fusion, 64, 0, kMost},
      {"linger", &Thresholds::linger, 64, 0, kMost},
  };
  return infos;
}

Thresholds parse_thresholds(std::string_view text) {
  Thresholds thresholds;
  while (!trimmed(text).empty()) {
    const auto comma = text.find(',');
    const std::string_view setting = trimmed(text.substr(0, comma));
    text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
    set(thresholds, setting);
  }
  if (thresholds.min_part > thresholds.max_part) refuse("min_part is above max_part.");
  return thresholds;
}

}  // namespace kvstore_hvd
