#include "mxnet/local.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <stdexcept>

#include "mxnet/errors.hpp"

namespace kvstore_hvd::mxnet {
namespace {

// Elements: from which MXNet's threads share an update; that stay in the cache.
constexpr std::size_t kShared = 64 << 10;
constexpr std::size_t kPart = 2048;
// mshadow's numbers.
constexpr int kFloat32 = 0, kFloat16 = 2;

class LocalOperation final : public AsyncOp {
 public:
  LocalOperation(std::function<void()> work, std::string name, bool naive)
      : work_(std::move(work)), name_(std::move(name)), naive_(naive) {}

  void start(const Completion& completion) noexcept override {
    try {
      work_();
    } catch (const std::exception& error) {
      failure_ = "the " + name_ + " of this worker's own arrays failed: " + error.what();
    }
    // NaiveEngine ignores errors; the caller of the push asks.
    if (failure_.empty() || naive_) {
      completion.succeed();
    } else {
      completion.fail(failure_);
    }
  }

  const std::string& failure() const { return failure_; }
  const char* name() const { return name_.c_str(); }

 private:
  const std::function<void()> work_;
  const std::string name_;
  const bool naive_;
  std::string failure_;
};

Status failed(const std::string& fact) {
  return Status(ErrorCode::kInputFailed, fact + "\n  Fix: see that message; the store stays usable.");
}

void reduce_all(const std::vector<View>& views, Reduction how) {
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
  how.dtype = *dtype;
  kvstore_hvd::reduce(how, inputs.data(), static_cast<int>(inputs.size()), &output, 1, views.back().count());
}

// The arrays of one parameter.
class Tensor {
 public:
  Tensor(const View* views, std::size_t stride, bool is_mixed)
      : views_(views), stride_(stride), states_(stride - (is_mixed ? 3 : 2)), is_mixed_(is_mixed) {}

  std::size_t count() const { return views_->count(); }

  // Calls `part` with elements `begin` to `end`: how many, where, and the float16 weights that are to be written.
  template <class Part>
  void for_each_part(std::size_t begin, std::size_t end, const Part& part) const {
    float gradient[kPart];
    for (std::size_t i = begin; i < end; i += kPart) {
      const std::size_t count = std::min(kPart, end - i);
      Parameter here{floats(is_mixed_ ? stride_ - 1 : 0) + i, gradient, states_ > 0 ? floats(2) + i : nullptr,
                     states_ > 1 ? floats(3) + i : nullptr};
      if (is_mixed_) {
        widen(DType::kFloat16, halves(1) + i, gradient, count);
      } else {
        here.gradient = floats(1) + i;
      }
      part(here, count);
      if (is_mixed_) narrow(DType::kFloat16, here.weight, halves(0) + i, count);
    }
  }

 private:
  float* floats(std::size_t array) const { return static_cast<float*>(views_[array].data()); }
  std::uint16_t* halves(std::size_t array) const { return static_cast<std::uint16_t*>(views_[array].data()); }

  const View* const views_;
  const std::size_t stride_, states_;
  const bool is_mixed_;
};

// As in the paper (https://arxiv.org/abs/1904.00962); the sums of squares are those of MXNet, element after element.
void update_by_lamb(Rule rule, const Tensor& tensor, Hyperparameters how) {
  float weight_squares = 0, direction_squares = 0;
  tensor.for_each_part(0, tensor.count(), [&](const Parameter& here, std::size_t count) {
    float direction[kPart];
    std::copy_n(here.weight, count, direction);
    kvstore_hvd::update(rule, how, {direction, here.gradient, here.first, here.second}, count);
    for (std::size_t i = 0; i < count; ++i) {
      weight_squares += here.weight[i] * here.weight[i];
      direction_squares += direction[i] * direction[i];
    }
  });
  float norm = std::sqrt(weight_squares);
  if (how.lower_bound >= 0) norm = std::max(norm, how.lower_bound);
  if (how.upper_bound >= 0) norm = std::min(norm, how.upper_bound);
  const float direction_norm = std::sqrt(direction_squares);
  how.lr *= norm == 0 || direction_norm == 0 ? 1.0F : norm / direction_norm;
  tensor.for_each_part(0, tensor.count(), [&](const Parameter& here, std::size_t count) {
    kvstore_hvd::update(rule == Rule::kLamb1 ? Rule::kLambStep1 : Rule::kLambStep2, how, here, count);
  });
}

}  // namespace

LocalOperations::LocalOperations(const std::string& library_path, bool naive)
    : api_(Api::load(library_path)), naive_(naive) {}

Status LocalOperations::push(const std::vector<Handle>& handles, std::function<void(const std::vector<View>&)> work,
                             const std::string& name) const {
  const auto arrays = std::make_shared<std::vector<Array>>();
  std::vector<Handle> unique;
  std::vector<const void*> chunks;
  try {
    for (Handle handle : handles) arrays->push_back(api_->copy(handle));
    Api::add_new_chunks(*arrays, chunks, unique);
    const auto with_memory = [api = api_, arrays, work = std::move(work)] {
      std::vector<View> views;
      views.reserve(arrays->size());
      for (const Array& array : *arrays) views.push_back(api->open(array.get()));
      work(views);
    };
    const auto operation = std::make_shared<LocalOperation>(with_memory, name, naive_);
    api_->push(operation, std::move(unique), Place::kComputation, 0, operation->name());
    return naive_ && !operation->failure().empty() ? failed(operation->failure()) : Status();
  } catch (const Error& error) {
    return failed("MXNet refused the " + name + " of this worker's own arrays: " + first_line(error.what()));
  }
}

Status LocalOperations::reduce(const std::vector<Handle>& inputs, Handle output, const Reduction& how) const {
  std::vector<Handle> handles = inputs;
  handles.push_back(output);
  return push(handles, [how](const std::vector<View>& views) { reduce_all(views, how); }, "local reduction");
}

bool LocalOperations::applies(const std::vector<Handle>& arrays, std::size_t parameters, bool is_mixed,
                              Handle scale) const {
#if !defined(__x86_64__)
  return false;
#endif
  if (parameters == 0 || arrays.size() % parameters != 0) return false;
  const std::size_t stride = arrays.size() / parameters;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const int dtype = is_mixed && i % stride < 2 ? kFloat16 : kFloat32;
    if (!api_->is_reachable(arrays[i]) || api_->dtype_number(arrays[i]) != dtype ||
        api_->shape_of(arrays[i]) != api_->shape_of(arrays[i - i % stride])) {
      return false;
    }
  }
  return scale == nullptr || (api_->is_reachable(scale) && api_->dtype_number(scale) == kFloat32);
}

Status LocalOperations::update(Rule rule, const std::vector<Handle>& arrays, std::vector<Hyperparameters> how,
                               bool is_mixed, Handle scale, const std::string& name) const {
  std::vector<Handle> handles = arrays;
  const bool has_scale = scale != nullptr;
  if (has_scale) handles.push_back(scale);
  const auto work = [api = api_.get(), rule, how = std::move(how), is_mixed,
                     has_scale](const std::vector<View>& views) {
    const std::size_t stride = (views.size() - (has_scale ? 1 : 0)) / how.size();
    for (std::size_t i = 0; i < how.size(); ++i) {
      Hyperparameters these = how[i];
      if (has_scale) these.rescale_grad = *static_cast<const float*>(views.back().data());
      if (has_scale && (!std::isfinite(these.rescale_grad) || these.rescale_grad == 0)) return;
      const Tensor tensor(&views[i * stride], stride, is_mixed);
      if (rule == Rule::kLamb1 || rule == Rule::kLamb2) {
        update_by_lamb(rule, tensor, these);
        continue;
      }
      const std::size_t count = tensor.count();
      const auto share = [&](std::size_t thread, std::size_t threads) {
        tensor.for_each_part(
            count * thread / threads, count * (thread + 1) / threads,
            [&](const Parameter& here, std::size_t part) { kvstore_hvd::update(rule, these, here, part); });
      };
      if (count < kShared) {
        share(0, 1);
      } else {
        api->on_all_threads(share);
      }
    }
  };
  return push(handles, work, name);
}

}  // namespace kvstore_hvd::mxnet
