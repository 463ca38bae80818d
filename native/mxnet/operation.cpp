#include "mxnet/operation.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>

namespace kvstore_hvd::mxnet {
namespace {

std::string describe(DType dtype, std::size_t count) {
  return std::string(name_of(dtype)) + " x " + std::to_string(count);
}

bool is_on_device(const View& view) { return view.device() == View::Device::kGpu; }

void open_all(const Api& api, const std::vector<Array>& arrays, const char* which, std::vector<View>& views) {
  for (const Array& array : arrays) {
    if (!api.is_dense(array.get())) throw std::runtime_error(std::string(which) + " is sparse or empty.");
    View view = api.open(array.get());
    const std::optional<DType> dtype = dtype_of(view);
    if (!dtype) {
      throw std::runtime_error(std::string(which) + " has dtype " + describe_unsupported(view) +
                               ", which cannot be reduced.");
    }
    if (!views.empty()) {
      const View& first = views.front();
      if (is_on_device(view) != is_on_device(first))
        throw std::runtime_error("its own arrays are partly on a GPU, partly not.");
      if (dtype != dtype_of(first) || view.count() != first.count()) {
        throw std::runtime_error("its own arrays differ: " + describe(*dtype_of(first), first.count()) + " and " +
                                 describe(*dtype, view.count()) + ".");
      }
    }
    views.push_back(std::move(view));
  }
}

// `views` are the inputs (none if they are the outputs), then the outputs.
void check_overlaps(const std::vector<View>& views, std::size_t inputs) {
  const std::size_t bytes = views.front().count() * size_of(*dtype_of(views.front()));
  const auto address = [&](std::size_t i) { return reinterpret_cast<std::uintptr_t>(views[i].data()); };
  for (std::size_t written = inputs; written < views.size(); ++written) {
    for (std::size_t other = 0; other < written; ++other) {
      const std::uintptr_t low = std::min(address(written), address(other));
      const std::uintptr_t high = std::max(address(written), address(other));
      if (low != high && high - low < bytes) throw std::runtime_error("an output overlaps another array in part.");
    }
  }
}

}  // namespace

Operation::Operation(const Links& links, std::shared_ptr<const Group> group, std::string prefix,
                     const StepReduction& how)
    : links_(links), group_(std::move(group)), prefix_(std::move(prefix)), how_(how) {}

Status Operation::push(const std::shared_ptr<Operation>& operation) {
  Operation& self = *operation;
  std::vector<Handle> handles;
  std::vector<const void*> chunks;
  for (const Member& member : self.members()) {
    Api::add_new_chunks(member.inputs, chunks, handles);
    Api::add_new_chunks(member.outputs, chunks, handles);
  }
  // While another operation waits for its arrays, this one will probably wait, too. The first to wait, in a training,
  // is the one whose gradient is ready last: it may wait behind computation.
  const Place place = self.links_.turns->all_used() ? Place::kHere : Place::kCommunication;
  self.turns_.reserve(self.members().size());
  for (const Member& member : self.members()) self.turns_.push_back(self.links_.turns->take(member.request.name));
  self.links_.api->push(operation, std::move(handles), place, self.members().front().request.priority,
                        self.group_->title.c_str());
  return self.links_.naive ? self.status_ : Status();
}

void Operation::start(const Completion& completion) noexcept {
  completion_ = completion;
  // MXNet keeps this object until the completion, which may come before the last of these calls returns.
  const std::shared_ptr<Operation> self = shared_from_this();
  for (std::size_t place = 0; place < turns_.size(); ++place) {
    links_.turns->use(members()[place].request.name, turns_[place], [this, place] { submit(place); });
  }
}

void Operation::skipped() noexcept {
  // MXNet has completed the operation with the error of the one that failed.
  links_.unread->add(
      written_by(0),
      Status(ErrorCode::kInputFailed,
             prefix_of(0) + "an operation that should have produced an input" + others() +
                 " failed.\n  Fix: see that operation's own error, which MXNet raises where its result is read."));
  announce_failed([this](Request request) {
    request.input_failure =
        "an operation that should have produced its input" + others() + " failed; that rank raises the error of it.";
    return request;
  });
}

void Operation::refused(const std::string& why) noexcept {
  announce_failed([&why](Request request) { return as_refused(std::move(request), why); });
}

void Operation::announce_failed(const std::function<Request(Request)>& failed) {
  for (std::size_t place = 0; place < turns_.size(); ++place) {
    links_.turns->use(members()[place].request.name, turns_[place],
                      [self = shared_from_this(), request = failed(request_of(place))] {
                        if (const std::shared_ptr<Engine> engine = self->links_.engine.lock()) engine->submit(request);
                      });
  }
}

Request Operation::request_of(std::size_t place) const {
  Request request = members()[place].request;
  request.op = how_.op;
  request.as_half = how_.as_half;
  request.weight = how_.weight;
  return request;
}

// Throws std::exception: what is wrong with the arrays.
Request Operation::with_arrays(std::size_t place) const {
  const Member& member = members()[place];
  const bool in_place = member.inputs.empty();
  std::vector<View> views;
  if (member.request.collective == Collective::kExchange) {  // it has the sizes, and parts that do not overlap
    std::vector<View> sources;
    open_all(*links_.api, member.inputs, "an input", sources);
    open_all(*links_.api, member.outputs, "an output", views);
    Request request = request_of(place);
    request.dtype = *dtype_of(views.front());
    request.inputs = {(in_place ? views : sources).front().data()};
    request.outputs = {views.front().data()};
    return request;
  }
  views.reserve(member.inputs.size() + member.outputs.size());
  open_all(*links_.api, member.inputs, "an input", views);
  open_all(*links_.api, member.outputs, in_place ? "an input" : "an output", views);
  check_overlaps(views, member.inputs.size());

  Request request = request_of(place);
  request.count = views.front().count();
  request.shape = views.front().shape();
  request.dtype = *dtype_of(views.front());
  request.on_device = is_on_device(views.front());
  for (std::size_t i = 0; i < views.size(); ++i) {
    const bool is_output = i >= member.inputs.size();
    if (!is_output || in_place) request.inputs.push_back(views[i].data());
    if (is_output) request.outputs.push_back(views[i].data());
  }
  return request;
}

void Operation::submit(std::size_t place) {
  Request request;
  try {
    request = with_arrays(place);
  } catch (const std::exception& error) {
    request = request_of(place);
    request.input_failure = first_line(error.what());
  }
  request.on_done = [this, place](const Status& status) { finish(place, status); };
  const std::shared_ptr<Engine> engine = links_.engine.lock();
  if (!engine) {
    finish(place, Messages::left(prefix_of(place)));
  } else if (links_.naive) {
    static_cast<void>(engine->run(std::move(request)));
  } else if (std::this_thread::get_id() == pusher_ && place + 1 == turns_.size()) {
    engine->submit_and_linger(std::move(request));
  } else {
    engine->submit(std::move(request));  // this thread may have computations to do
  }
}

void Operation::finish(std::size_t place, const Status& status) {
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
  // NaiveEngine ignores errors; the caller of push() gets the status.
  if (status_.ok() || links_.naive) {
    completion.succeed();
    return;
  }
  // Before completing: a thread that has waited for the arrays finds it.
  if (!status_.latches()) links_.unread->add(written_by(failed_), status_);
  completion.fail(error_text(Status(status_)));
}

std::shared_ptr<const Array> Operation::written_by(std::size_t place) const {
  return {group_, &members()[place].outputs.front()};
}

std::string Operation::others() const {
  if (members().size() == 1) return "";
  return " (or that of a gradient it is grouped with, " + members().front().request.label + " to " +
         members().back().request.label + ")";
}

std::string Operation::prefix_of(std::size_t place) const {
  return prefix_ + describe_operation(members()[place].request) + ": ";
}

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

Status Step::push(const Links& links, const std::string& prefix, const StepReduction& how) const {
  std::string title, why;  // of the first one that was refused
  std::size_t refused = 0;
  for (const std::shared_ptr<Group>& group : groups_) {
    try {
      static_cast<void>(Operation::push(std::make_shared<Operation>(links, group, prefix, how)));
    } catch (const Error& error) {
      if (refused++ > 0) continue;
      title = group->title;
      why = error.what();
    }
  }
  return refused == 0 ? Status() : refusal(prefix + title + ": ", why, refused - 1);
}

}  // namespace kvstore_hvd::mxnet
