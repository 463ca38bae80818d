#include "mxnet/operation.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>

#include "mxnet/dtypes.hpp"
#include "mxnet/error_text.hpp"
#include "mxnet/refusal.hpp"
#include "request/messages.hpp"

namespace kvstore_hvd::mxnet {
namespace {

std::string describe(DType dtype, std::size_t count) {
  return std::string(name_of(dtype)) + " x " + std::to_string(count);
}

bool is_on_device(const View& view) { return view.device() == View::Device::kGpu; }

}  // namespace

Operation::Operation(std::shared_ptr<const Api> api, std::weak_ptr<Engine> engine, std::shared_ptr<UnreadErrors> unread,
                     std::shared_ptr<Turns> turns, Request request, std::string prefix, std::vector<Array> inputs,
                     std::vector<Array> outputs, bool naive)
    : api_(std::move(api)),
      engine_(std::move(engine)),
      unread_(std::move(unread)),
      turns_(std::move(turns)),
      request_(std::move(request)),
      prefix_(std::move(prefix)),
      name_(describe_operation(request_)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      naive_(naive) {}

void Operation::start(const Completion& completion) noexcept {
  completion_ = completion;
  Request request;
  try {
    request = describe_arrays();
  } catch (const std::exception& error) {
    views_.clear();
    request = request_;
    request.input_failure = first_line(error.what());
  }
  request.on_done = [self = shared_from_this()](const Status& status) { self->finish(status); };
  turns_->use(request_.name, turn_,
              [self = shared_from_this(), request = std::move(request)] { self->submit(request); });
}

void Operation::skipped() noexcept {
  // MXNet has completed the operation with the error of the one that failed. What is left is to tell the other ranks,
  // and our own caller, should nobody read the arrays.
  unread_->add(std::move(outputs_.front()), failed_input(prefix_));
  Request request = request_;
  request.input_failure = "an operation that should have produced its input failed; that rank raises the error of it.";
  announce_failed(std::move(request));
}

void Operation::refused(const std::string& why) noexcept { announce_failed(as_refused(request_, why)); }

void Operation::announce_failed(Request request) {
  turns_->use(request_.name, turn_, [self = shared_from_this(), request = std::move(request)] {
    if (const std::shared_ptr<Engine> engine = self->engine_.lock()) engine->submit(request);
  });
}

void Operation::submit(Request request) {
  const std::shared_ptr<Engine> engine = engine_.lock();
  if (!engine) {
    finish(Messages::left(prefix_));
  } else if (naive_) {
    static_cast<void>(engine->run(std::move(request)));
  } else if (std::this_thread::get_id() == pusher_) {
    engine->submit_and_linger(std::move(request));
  } else {
    engine->submit(std::move(request));  // this thread may have computations to do
  }
}

Request Operation::describe_arrays() {
  views_.reserve(inputs_.size() + outputs_.size());
  open_all(inputs_, false);
  open_all(outputs_, true);
  check_overlaps();

  Request request = request_;
  request.count = views_.front().count();
  request.shape = views_.front().shape();
  request.dtype = *dtype_of(views_.front());
  request.on_device = is_on_device(views_.front());
  for (std::size_t i = 0; i < inputs_.size(); ++i) request.inputs.push_back(views_[i].data());
  for (std::size_t i = inputs_.size(); i < views_.size(); ++i) request.outputs.push_back(views_[i].data());
  return request;
}

void Operation::open_all(const std::vector<Array>& arrays, bool written) {
  const std::string which = written ? "an output" : "an input";
  for (const Array& array : arrays) {
    if (!api_->is_dense(array.get())) throw std::runtime_error(which + " is sparse or empty.");
    View view = api_->open(array.get());
    if (!views_.empty() && is_on_device(view) != is_on_device(views_.front()))
      throw std::runtime_error("its own arrays are partly on a GPU, partly not.");
    const std::optional<DType> dtype = dtype_of(view);
    if (!dtype)
      throw std::runtime_error(which + " has dtype " + describe_unsupported(view) + ", which cannot be reduced.");
    if (!views_.empty()) {
      const View& first = views_.front();
      if (dtype != dtype_of(first) || view.count() != first.count()) {
        throw std::runtime_error("its own arrays differ: " + describe(*dtype_of(first), first.count()) + " and " +
                                 describe(*dtype, view.count()) + ".");
      }
    }
    views_.push_back(std::move(view));
  }
}

void Operation::check_overlaps() const {
  const std::size_t bytes = views_.front().count() * size_of(*dtype_of(views_.front()));
  const auto address = [this](std::size_t i) { return reinterpret_cast<std::uintptr_t>(views_[i].data()); };
  for (std::size_t written = inputs_.size(); written < views_.size(); ++written) {
    for (std::size_t other = 0; other < written; ++other) {
      const std::uintptr_t low = std::min(address(written), address(other));
      const std::uintptr_t high = std::max(address(written), address(other));
      if (low != high && high - low < bytes) throw std::runtime_error("an output overlaps another array in part.");
    }
  }
}

void Operation::finish(const Status& status) {
  views_.clear();
  if (naive_) {
    // NaiveEngine ignores errors; the caller of push() asks for the status.
    status_ = status;
    completion_.succeed();
  } else if (status.ok()) {
    completion_.succeed();
  } else {
    // Before completing: whoever has waited for the arrays then finds it.
    if (!status.latches()) unread_->add(std::move(outputs_.front()), status);
    completion_.fail(error_text(status));
  }
}

}  // namespace kvstore_hvd::mxnet
