// Messages between hosts by MPI, whose functions are called where the library lies that this process has loaded:
// neither its headers nor its name are needed.
//
// Handles are passed as integers of the size of a pointer: what they are in Open MPI and the ABI of MPI 5, while
// MPICH's are ints, of which a callee takes the low half. So requests are tested one by one, never as arrays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "link/transport.hpp"

namespace kvstore_hvd {

// Addresses, and what tells the one kind of handles from the other.
struct MpiFunctions {
  std::uintptr_t isend = 0, irecv = 0, test = 0, cancel = 0, iprobe = 0;
  std::uintptr_t byte = 0;            // the datatype
  std::uintptr_t ignored_status = 0;  // MPI_STATUS_IGNORE
};

class MpiTransport final : public Transport {
 public:
  // `ranks`: by host, that of its link in the communicator. Messages have kTags tags, from `first_tag` on.
  MpiTransport(const MpiFunctions& functions, std::uintptr_t communicator, std::vector<int> ranks, int first_tag)
      : functions_(functions), communicator_(communicator), ranks_(std::move(ranks)), first_tag_(first_tag) {}

  Transfer send(int host, int tag, const void* data, std::size_t bytes) override;
  Transfer receive(int host, int tag, void* data, std::size_t bytes) override;
  bool test(Transfer& transfer) override;
  void cancel(const Transfer& transfer) override;
  void progress() override;

 private:
  const MpiFunctions functions_;
  const std::uintptr_t communicator_;
  const std::vector<int> ranks_;
  const int first_tag_;
};

}  // namespace kvstore_hvd
