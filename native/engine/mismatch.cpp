// What to tell the user when ranks disagree about an operation.
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/tensor_table.hpp"
#include "shm/describe.hpp"

namespace kvstore_hvd {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
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
       [](World& world, const Signature& s) { return std::to_string(world.rank(s.root).rank_of_all); }},
      {"prescale", "pass the same prescale factor on every rank.",
       [](World&, const Signature& s) { return number(s.prescale); }},
      {"postscale", "pass the same postscale factor on every rank.",
       [](World&, const Signature& s) { return number(s.postscale); }},
      {"the other arrays of the group", "see the error of the array that differs.",
       [](World&, const Signature& s) { return "group " + std::to_string(s.group % 100000); }},
  };
  return kAspects;
}

// A tensor that has a name and a key, as in "'dense0_weight' (key 3)", is a parameter of a network, or its gradient.
bool is_parameter(const std::string& label) { return label.find("' (key ") != std::string::npos; }

std::string fix_of(const Aspect& aspect, const std::string& label) {
  const bool is_shape = std::string_view(aspect.name) == "shape";
  return is_shape && is_parameter(label) ? "build the same network on every rank." : aspect.fix;
}

}  // namespace

std::string describe_mismatch(World& world, std::uint32_t slot, const std::string& label) {
  for (const Aspect& aspect : aspects()) {
    std::vector<std::pair<std::string, std::vector<int>>> groups;  // in order of the first rank
    for (int r = 0; r < world.parties; ++r) {
      const std::string value = aspect.value(world, world.announcement(slot, r).signature);
      auto group = groups.begin();
      while (group != groups.end() && group->first != value) ++group;
      if (group == groups.end()) {
        groups.push_back({value, {r}});
      } else {
        group->second.push_back(r);
      }
    }
    if (groups.size() < 2) continue;
    std::string text = std::string("ranks disagree on ") + aspect.name + ".\n ";
    for (const auto& [value, ranks] : groups) text += " " + value + ": " + describe_ranks(world, ranks) + "   ";
    while (text.back() == ' ') text.pop_back();
    return text + "\n  Nothing was changed. Fix: " + fix_of(aspect, label);
  }
  return "ranks disagree.\n  Nothing was changed. Fix: pass the same arguments on every rank.";
}

}  // namespace kvstore_hvd
