#include "mxnet/local_reduction.hpp"

#include <exception>
#include <optional>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "mxnet/dtypes.hpp"
#include "mxnet/refusal.hpp"

namespace kvstore_hvd::mxnet {
namespace {

class LocalReduction final : public AsyncOp {
 public:
  LocalReduction(std::shared_ptr<const Api> api, std::vector<Array> arrays, const Reduction& how, bool naive)
      : api_(std::move(api)), arrays_(std::move(arrays)), how_(how), naive_(naive) {}

  void start(const Completion& completion) noexcept override {
    try {
      carry_out();
    } catch (const std::exception& error) {
      failure_ = std::string("a reduction of this worker's own arrays failed: ") + error.what();
    }
    // NaiveEngine ignores errors; whoever pushed asks.
    if (failure_.empty() || naive_) {
      completion.succeed();
    } else {
      completion.fail(failure_);
    }
  }

  // MXNet gives the output the error of the operation that failed.
  void skipped() noexcept override {}
  // There is nobody else to tell: whoever pushed is told.
  void refused(const std::string&) noexcept override {}

  const std::string& failure() const { return failure_; }

 private:
  void carry_out() {
    std::vector<View> views;
    views.reserve(arrays_.size());
    for (const Array& array : arrays_) views.push_back(api_->open(array.get()));
    const std::optional<DType> dtype = dtype_of(views.front());
    if (!dtype) throw std::runtime_error("the dtype " + describe_unsupported(views.front()) + " cannot be reduced.");
    std::vector<const void*> inputs;
    for (const View& view : views) {
      if (dtype_of(view) != dtype || view.count() != views.front().count())
        throw std::runtime_error("the arrays differ in dtype or size.");
      inputs.push_back(view.data());
    }
    inputs.pop_back();
    void* output = views.back().data();
    Reduction how = how_;
    how.dtype = *dtype;
    kvstore_hvd::reduce(how, inputs.data(), static_cast<int>(inputs.size()), &output, 1, views.back().count());
  }

  const std::shared_ptr<const Api> api_;
  const std::vector<Array> arrays_;  // the inputs, and the output
  const Reduction how_;
  const bool naive_;
  std::string failure_;
};

Status failed(const std::string& fact) {
  return Status(ErrorCode::kInputFailed, fact + "\n  Fix: see that message; the store stays usable.");
}

}  // namespace

LocalReductions::LocalReductions(const std::string& library_path, bool naive)
    : api_(Api::load(library_path)), naive_(naive) {}

Status LocalReductions::reduce(const std::vector<Handle>& inputs, Handle output, const Reduction& how) const {
  std::vector<Array> arrays;
  std::vector<Handle> unique;
  std::unordered_set<const void*> chunks;
  const auto add = [&](Handle handle) {
    arrays.push_back(api_->copy(handle));
    // As in MXNetAdapter::push(): no chunk twice, and inputs are held like outputs.
    if (chunks.insert(Api::chunk_of(handle)).second) unique.push_back(handle);
  };
  try {
    for (Handle input : inputs) add(input);
    add(output);
    auto operation = std::make_shared<LocalReduction>(api_, std::move(arrays), how, naive_);
    api_->push(operation, std::move(unique), Place::kComputation, 0, "local reduction");
    return naive_ && !operation->failure().empty() ? failed(operation->failure()) : Status();
  } catch (const Error& error) {
    return failed(std::string("MXNet refused a reduction of this worker's own arrays: ") + first_line(error.what()));
  }
}

}  // namespace kvstore_hvd::mxnet
