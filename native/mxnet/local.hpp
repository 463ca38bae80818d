// Operations on one rank's own arrays, as operations of MXNet's engine: reductions, and updates of parameters.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "mxnet/engine_abi.hpp"
#include "reduce/reduce.hpp"

namespace kvstore_hvd::mxnet {

// Any thread; without the GIL. An operation runs on one of MXNet's threads once its arrays are ready, or at once with
// NaiveEngine. What fails is raised by the next read of its arrays; with NaiveEngine, and when MXNet refuses the
// operation, it is returned.
class LocalOperations {
 public:
  // As MXNetAdapter. Throws Error.
  LocalOperations(const std::string& library_path, bool naive);

  // Reduces `inputs` in order into `output`, which may be one of them: for a world of one, with the kernels that
  // several ranks reduce with, so that the results have the same bits. The dtype is that of the arrays, not of `how`.
  // All are dense, on the CPU, of equal dtype and number of elements.
  Status reduce(const std::vector<Handle>& inputs, Handle output, const Reduction& how) const;

  // Updates parameters, each as its `how` says. `arrays` has for each its weight, its gradient and its states and, if
  // `is_mixed`, the float32 copy of a float16 weight with a float16 gradient. `scale`, if not null, is an array whose
  // first element becomes every rescale_grad; nothing is changed if that is 0 or not finite. Only on x86-64, where
  // MXNet's operators contract no product and sum; `applies` says whether MXNet's operator would do the same with such
  // arrays. `name`: of MXNet's operator.
  bool applies(const std::vector<Handle>& arrays, std::size_t parameters, bool is_mixed, Handle scale) const;
  Status update(Rule rule, const std::vector<Handle>& arrays, std::vector<Hyperparameters> how, bool is_mixed,
                Handle scale, const std::string& name) const;

 private:
  // `work` gets the arrays' memory in the order of `handles`, and throws std::exception.
  Status push(const std::vector<Handle>& handles, std::function<void(const std::vector<View>&)> work,
              const std::string& name) const;

  std::shared_ptr<const Api> api_;
  const bool naive_;
};

}  // namespace kvstore_hvd::mxnet
