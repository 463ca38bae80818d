#include "link/mpi_transport.hpp"

#include <string>

namespace kvstore_hvd {
namespace {

using Handle = std::uintptr_t;
using Isend = int (*)(const void*, int, Handle type, int to, int tag, Handle communicator, Handle* request);
using Irecv = int (*)(void*, int, Handle type, int from, int tag, Handle communicator, Handle* request);
using Test = int (*)(Handle* request, int* is_over, void* status);
using Cancel = int (*)(Handle* request);
using Iprobe = int (*)(int from, int tag, Handle communicator, int* found, void* status);

void check(int code, const char* function, int host = -1) {
  if (code != 0) throw TransportError(std::string(function) + ", code " + std::to_string(code), host);
}

}  // namespace

Transport::Transfer MpiTransport::send(int host, int tag, const void* data, std::size_t bytes) {
  Handle request = 0;
  check(reinterpret_cast<Isend>(functions_.isend)(data, static_cast<int>(bytes), functions_.byte, ranks_[host],
                                                  first_tag_ + tag, communicator_, &request),
        "MPI_Isend", host);
  return request;
}

Transport::Transfer MpiTransport::receive(int host, int tag, void* data, std::size_t bytes) {
  Handle request = 0;
  check(reinterpret_cast<Irecv>(functions_.irecv)(data, static_cast<int>(bytes), functions_.byte, ranks_[host],
                                                  first_tag_ + tag, communicator_, &request),
        "MPI_Irecv", host);
  return request;
}

bool MpiTransport::test(Transfer& transfer) {
  int is_over = 0;
  void* const ignored = reinterpret_cast<void*>(functions_.ignored_status);
  check(reinterpret_cast<Test>(functions_.test)(&transfer, &is_over, ignored), "MPI_Test");
  if (is_over != 0) transfer = 0;
  return is_over != 0;
}

void MpiTransport::cancel(const Transfer& transfer) {
  Handle request = transfer;
  check(reinterpret_cast<Cancel>(functions_.cancel)(&request), "MPI_Cancel");
}

void MpiTransport::progress() {
  int found = 0;
  void* const ignored = reinterpret_cast<void*>(functions_.ignored_status);
  check(reinterpret_cast<Iprobe>(functions_.iprobe)(ranks_[0], first_tag_ + kTags - 1, communicator_, &found, ignored),
        "MPI_Iprobe");
}

}  // namespace kvstore_hvd
