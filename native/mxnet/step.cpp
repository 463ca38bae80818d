#include "mxnet/step.hpp"

#include <algorithm>
#include <utility>

#include "mxnet/group_operation.hpp"
#include "mxnet/refusal.hpp"

namespace kvstore_hvd::mxnet {

void Step::add(Gradient gradient, std::size_t bytes) {
  const void* chunk = Api::chunk_of(gradient.array.get());
  const bool is_small = bytes <= kSmall;
  // Two gradients in the same memory are two operations, which MXNet carries out one after the other.
  const bool joins = is_small && !chunks_.empty() && chunks_.size() < kMost &&
                     std::find(chunks_.begin(), chunks_.end(), chunk) == chunks_.end();
  if (!joins) {
    groups_.push_back(std::make_shared<Group>());
    chunks_.clear();
  }
  Group& group = *groups_.back();
  group.push_back(std::move(gradient));
  if (is_small) chunks_.push_back(chunk);
  group.front().title = std::string(name_of(Collective::kAllreduce)) + " " + group.front().label;
  if (group.size() > 1) group.front().title += " and " + std::to_string(group.size() - 1) + " more";
}

Status Step::push(const Links& links, const std::string& world, const StepReduction& how) const {
  std::string title, why;  // of the first one that was refused
  std::size_t refused = 0;
  for (const std::shared_ptr<Group>& group : groups_) {
    try {
      GroupOperation::push(std::make_shared<GroupOperation>(links, group, world, how));
    } catch (const Error& error) {
      if (refused++ > 0) continue;
      title = group->front().title;
      why = error.what();
    }
  }
  return refused == 0 ? Status() : refusal(world + title + ": ", why, refused - 1);
}

}  // namespace kvstore_hvd::mxnet
