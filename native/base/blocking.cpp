#include "base/blocking.hpp"

namespace kvstore_hvd {
namespace {

thread_local BlockingObserver* innermost = nullptr;

}  // namespace

BlockingObserver::BlockingObserver() : outer_(innermost) { innermost = this; }
BlockingObserver::~BlockingObserver() { innermost = outer_; }

void about_to_block() noexcept {
  for (BlockingObserver* observer = innermost; observer != nullptr; observer = observer->outer_) {
    observer->about_to_block();
  }
}

}  // namespace kvstore_hvd
