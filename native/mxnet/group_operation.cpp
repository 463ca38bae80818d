#include "mxnet/group_operation.hpp"

#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>

#include "mxnet/dtypes.hpp"
#include "mxnet/error_text.hpp"
#include "mxnet/refusal.hpp"
#include "request/messages.hpp"

namespace kvstore_hvd::mxnet {

GroupOperation::GroupOperation(Links links, std::shared_ptr<const Group> group, std::string world,
                               const StepReduction& how)
    : links_(std::move(links)),
      group_(std::move(group)),
      world_(std::move(world)),
      how_(how),
      pending_(group_->size()),
      failed_(group_->size()) {}

void GroupOperation::push(const std::shared_ptr<GroupOperation>& operation) {
  GroupOperation& self = *operation;
  std::vector<Handle> arrays;
  arrays.reserve(self.group_->size());
  self.turns_.reserve(self.group_->size());
  // As in MXNetAdapter::push().
  const Place place = self.links_.turns->all_used() ? Place::kHere : Place::kCommunication;
  for (const Gradient& gradient : *self.group_) {
    arrays.push_back(gradient.array.get());
    self.turns_.push_back(self.links_.turns->take(gradient.name));
  }
  const Gradient& first = self.group_->front();
  self.links_.api->push(operation, std::move(arrays), place, first.priority, first.title.c_str());
}

void GroupOperation::start(const Completion& completion) noexcept {
  completion_ = completion;
  // MXNet keeps this object until the completion, which may come before the last of these calls returns.
  const std::shared_ptr<GroupOperation> self = shared_from_this();
  for (std::size_t place = 0; place < turns_.size(); ++place) {
    links_.turns->use((*group_)[place].name, turns_[place], [this, place] { submit(place); });
  }
}

void GroupOperation::skipped() noexcept {
  // As in Operation::skipped(). Which of the gradients failed, MXNet does not say.
  const Gradient& first = group_->front();
  links_.unread->add(links_.api->copy(first.array.get()), failed_input(prefix_of(0), others()));
  announce_failed([this](Request request) {
    request.input_failure =
        "an operation that should have produced its input" + others() + " failed; that rank raises the error of it.";
    return request;
  });
}

void GroupOperation::refused(const std::string& why) noexcept {
  announce_failed([&why](Request request) { return as_refused(std::move(request), why); });
}

void GroupOperation::announce_failed(const std::function<Request(Request)>& failed) {
  for (std::size_t place = 0; place < turns_.size(); ++place) {
    links_.turns->use((*group_)[place].name, turns_[place],
                      [self = shared_from_this(), request = failed(request_of(place))] {
                        if (const std::shared_ptr<Engine> engine = self->links_.engine.lock()) engine->submit(request);
                      });
  }
}

Request GroupOperation::request_of(std::size_t place) const {
  const Gradient& gradient = (*group_)[place];
  Request request;
  request.collective = Collective::kAllreduce;
  request.name = gradient.name;
  request.label = gradient.label;
  request.op = how_.op;
  request.as_half = how_.as_half;
  request.weight = how_.weight;
  request.priority = gradient.priority;
  return request;
}

void GroupOperation::submit(std::size_t place) {
  Request request = request_of(place);
  try {
    const View view = links_.api->open((*group_)[place].array.get());
    const std::optional<DType> dtype = dtype_of(view);
    if (!dtype) throw std::runtime_error("the gradient has dtype " + describe_unsupported(view) + ".");
    request.dtype = *dtype;
    request.shape = view.shape();
    request.count = view.count();
    request.inputs = {view.data()};
    request.outputs = {view.data()};
  } catch (const std::exception& error) {
    const std::string text = error.what();
    request.input_failure = text.substr(0, text.find('\n'));
  }
  request.on_done = [this, place](const Status& status) { finish(place, status); };
  const std::shared_ptr<Engine> engine = links_.engine.lock();
  if (!engine) {
    finish(place, Messages::left(prefix_of(place)));
  } else if (std::this_thread::get_id() == pusher_ && place + 1 == turns_.size()) {
    engine->submit_and_linger(std::move(request));
  } else {
    engine->submit(std::move(request));
  }
}

void GroupOperation::finish(std::size_t place, const Status& status) {
  if (!status.ok()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (place < failed_) {
      failed_ = place;
      status_ = status;
    }
  }
  // Acquire and release: the last one sees the failures of the others, and what they wrote to the arrays.
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  // MXNet may release this object before the completion returns.
  const Completion completion = completion_;
  if (status_.ok()) {
    completion.succeed();
    return;
  }
  // Before completing: whoever has waited for the arrays then finds it.
  if (!status_.latches()) links_.unread->add(links_.api->copy((*group_)[failed_].array.get()), status_);
  completion.fail(error_text(Status(status_)));
}

std::string GroupOperation::others() const {
  if (group_->size() == 1) return "";
  return " (or that of a gradient it is grouped with, " + group_->front().label + " to " + group_->back().label + ")";
}

std::string GroupOperation::prefix_of(std::size_t place) const {
  return world_ + name_of(Collective::kAllreduce) + " " + (*group_)[place].label + ": ";
}

}  // namespace kvstore_hvd::mxnet
