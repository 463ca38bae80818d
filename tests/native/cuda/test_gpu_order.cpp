// The kernels' memory order: random operations with threads of the operating system, for ThreadSanitizer. In other
// builds a short run, which shows at least that they end.
#include "host/threads.hpp"
#include "streams.hpp"

namespace kvstore_hvd::gpu::tests {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr double kSeconds = 15.0;
#else
constexpr double kSeconds = 2.0;
#endif

const bool registered = testing::add("random operations with real threads", [] {
  Limits limits;
  limits.threads = 4;
  limits.blocks = 2;
  limits.timeout_ns = 60'000'000'000;
  run_seeds<host::Threads>({2, 3, 4, 8}, kSeconds, limits);
});

}  // namespace
}  // namespace kvstore_hvd::gpu::tests
