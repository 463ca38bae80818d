// User errors that MXNet holds for the next reader of an array. MXNet raises an error once, and only if somebody reads:
// a program that never reads (it only trains) would not hear of it, so the store asks here.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/status.hpp"
#include "mxnet/engine_abi.hpp"

namespace kvstore_hvd::mxnet {

class UnreadErrors {
 public:
  // `array`: one that the failed operation was to write. Beyond kMost errors nothing is kept: the first ones tell most.
  void add(std::shared_ptr<const Array> array, Status status);

  // The first error that no read has raised yet, completed with what MXNet says when that is something else, and with
  // the number of others; ok when there is none. All of them count as read then. Waits for the operations in flight on
  // the failed arrays, so never with the GIL held.
  Status take(const Api& api);

  bool empty();

  static constexpr std::size_t kMost = 1024;

 private:
  struct Entry {
    std::shared_ptr<const Array> array;
    Status status;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace kvstore_hvd::mxnet
