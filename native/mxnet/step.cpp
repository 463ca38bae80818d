#include "mxnet/step.hpp"

#include <algorithm>
#include <utility>

#include "mxnet/refusal.hpp"
#include "request/messages.hpp"

namespace kvstore_hvd::mxnet {

void Step::add(std::string name, std::string label, Array gradient, std::int32_t priority, std::size_t bytes) {
  const void* chunk = Api::chunk_of(gradient.get());
  const bool is_small = bytes <= kSmall;
  // Two gradients in the same memory are two operations, which MXNet carries out one after the other.
  const bool joins = is_small && !chunks_.empty() && chunks_.size() < kMost &&
                     std::find(chunks_.begin(), chunks_.end(), chunk) == chunks_.end();
  if (!joins) {
    groups_.push_back(std::make_shared<Group>());
    chunks_.clear();
  }
  Group& group = *groups_.back();
  Member member;
  member.request.name = std::move(name);
  member.request.label = std::move(label);
  member.request.priority = priority;
  member.outputs.push_back(std::move(gradient));
  group.members.push_back(std::move(member));
  if (is_small) chunks_.push_back(chunk);
  group.title = describe_operation(group.members.front().request);
  if (group.members.size() > 1) group.title += " and " + std::to_string(group.members.size() - 1) + " more";
}

Status Step::push(const Links& links, const std::string& world, const StepReduction& how) const {
  std::string title, why;  // of the first one that was refused
  std::size_t refused = 0;
  for (const std::shared_ptr<Group>& group : groups_) {
    try {
      static_cast<void>(Operation::push(std::make_shared<Operation>(links, group, world, how)));
    } catch (const Error& error) {
      if (refused++ > 0) continue;
      title = group->title;
      why = error.what();
    }
  }
  return refused == 0 ? Status() : refusal(world + title + ": ", why, refused - 1);
}

}  // namespace kvstore_hvd::mxnet
