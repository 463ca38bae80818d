// What the checked sources call and is not checked: the kernels, of which a sum of 32-bit integers is enough, and the
// link to other hosts.
#include "reduce/reduce.hpp"
#include "shm/world.hpp"

namespace kvstore_hvd {

void reduce(const Reduction&, const void* const* inputs, int n_inputs, void* const* outputs, int n_outputs,
            std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::int32_t sum = 0;
    for (int k = 0; k < n_inputs; ++k) sum += static_cast<const std::int32_t*>(inputs[k])[i];
    for (int k = 0; k < n_outputs; ++k) static_cast<std::int32_t*>(outputs[k])[i] = sum;
  }
}

// Between hosts only.
void narrow(DType, const void*, void*, std::size_t) {}
void widen(DType, const void*, void*, std::size_t) {}
void ring_link(World&) {}

}  // namespace kvstore_hvd

// A descriptor that no execution leaves open.
extern "C" int __wrap_eventfd(unsigned, int) { return 1 << 20; }
