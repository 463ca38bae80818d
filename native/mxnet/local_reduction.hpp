// Reductions of one rank's own arrays, for a world of one: with the kernels that several ranks reduce with, so that the
// results have the same bits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "mxnet/engine_abi.hpp"
#include "reduce/reduce.hpp"

namespace kvstore_hvd::mxnet {

// All members may be called from any thread; none needs the GIL.
class LocalReductions {
 public:
  // As MXNetAdapter. Throws Error.
  LocalReductions(const std::string& library_path, bool naive);

  // Reduces `inputs` in order into `output`, which may be one of them; on one of MXNet's threads once the arrays are
  // ready, or at once with NaiveEngine. The dtype is that of the arrays, not of `how`. All are dense, on the CPU, of
  // equal dtype and number of elements. What fails is raised by the next read of `output`; with NaiveEngine, and when
  // MXNet refuses the operation, it is returned.
  Status reduce(const std::vector<Handle>& inputs, Handle output, const Reduction& how) const;

 private:
  std::shared_ptr<const Api> api_;
  const bool naive_;
};

}  // namespace kvstore_hvd::mxnet
