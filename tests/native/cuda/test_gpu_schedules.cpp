// The kernels' logic: random operations under random schedules of fibers.
#include "host/fibers.hpp"
#include "streams.hpp"

namespace kvstore_hvd::gpu::tests {
namespace {

const bool registered = testing::add("random operations under random schedules",
                                     [] { run_seeds<host::Fibers>({1, 2, 3, 4, 8}, 15.0, Limits()); });

}  // namespace
}  // namespace kvstore_hvd::gpu::tests

int main(int argc, char** argv) { return testing::run(argc, argv); }
