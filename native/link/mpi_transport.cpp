// Messages between hosts by MPI, whose functions are called where the library lies that this process has loaded:
// neither its headers nor its name are needed.
//
// Handles are passed as integers of the size of a pointer: what they are in Open MPI and the ABI of MPI 5, while
// MPICH's are ints, of which a callee takes the low half. So requests are tested one by one, never as arrays.
#include <utility>

#include "link/transport.hpp"

namespace kvstore_hvd {
namespace {

using Handle = std::uintptr_t;
using Isend = int (*)(const void*, int, Handle type, int to, int tag, Handle communicator, Handle* request);
using Irecv = int (*)(void*, int, Handle type, int from, int tag, Handle communicator, Handle* request);
using Test = int (*)(Handle* request, int* is_over, void* status);
using Cancel = int (*)(Handle* request);
using Iprobe = int (*)(int from, int tag, Handle communicator, int* found, void* status);
using GetCount = int (*)(const void* status, Handle type, int* count);

// Room for an MPI_Status, of 20 to 32 bytes in today's libraries.
struct alignas(16) MpiStatus {
  char bytes[256];
};

void check(int code, const char* function, int host = -1) {
  if (code != 0) throw TransportError(std::string(function) + ", code " + std::to_string(code), host);
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(const MpiFunctions& functions, std::uintptr_t communicator, std::vector<int> ranks, int first_tag)
      : functions_(functions), communicator_(communicator), ranks_(std::move(ranks)), first_tag_(first_tag) {}

  Transfer send(int host, int tag, const void* data, std::size_t bytes) override {
    Handle request = 0;
    check(reinterpret_cast<Isend>(functions_.isend)(data, static_cast<int>(bytes), functions_.byte, ranks_[host],
                                                    first_tag_ + tag, communicator_, &request),
          "MPI_Isend", host);
    return request;
  }

  Transfer receive(int host, int tag, void* data, std::size_t bytes) override {
    Handle request = 0;
    check(reinterpret_cast<Irecv>(functions_.irecv)(data, static_cast<int>(bytes), functions_.byte, ranks_[host],
                                                    first_tag_ + tag, communicator_, &request),
          "MPI_Irecv", host);
    return request;
  }

  bool test(Transfer& transfer, std::size_t* received) override {
    int is_over = 0, count = 0;
    MpiStatus status;
    check(reinterpret_cast<Test>(functions_.test)(&transfer, &is_over, &status), "MPI_Test");
    if (is_over == 0) return false;
    transfer = 0;
    if (received != nullptr) {
      check(reinterpret_cast<GetCount>(functions_.get_count)(&status, functions_.byte, &count), "MPI_Get_count");
      *received = static_cast<std::size_t>(count);
    }
    return true;
  }

  void cancel(const Transfer& transfer) override {
    Handle request = transfer;
    check(reinterpret_cast<Cancel>(functions_.cancel)(&request), "MPI_Cancel");
  }

  void progress() override {
    int found = 0;
    MpiStatus status;
    check(
        reinterpret_cast<Iprobe>(functions_.iprobe)(ranks_[0], first_tag_ + kTags - 1, communicator_, &found, &status),
        "MPI_Iprobe");
  }

 private:
  const MpiFunctions functions_;
  const std::uintptr_t communicator_;
  const std::vector<int> ranks_;
  const int first_tag_;
};

}  // namespace

std::shared_ptr<Transport> mpi_transport(const MpiFunctions& functions, std::uintptr_t communicator,
                                         std::vector<int> ranks, int first_tag) {
  return std::make_shared<MpiTransport>(functions, communicator, std::move(ranks), first_tag);
}

}  // namespace kvstore_hvd
