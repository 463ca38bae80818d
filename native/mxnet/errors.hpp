// Errors on their way through MXNet: how a Status travels, errors that no read raises, operations that MXNet refuses,
// and room in MXNet's own list of errors.
#pragma once

#include <mutex>

#include "mxnet/engine_abi.hpp"
#include "request/request.hpp"

namespace kvstore_hvd::mxnet {

// "ClassName: text", where ClassName is a class of kvstore_hvd/errors.py: MXNet, which carries text only, raises the
// class that is registered under the word before the first colon.
std::string error_text(const Status& status);

// Of MXNet's text; the other lines are a stack trace.
std::string first_line(const std::string& text);

// User errors that MXNet holds for the next reader of an array. MXNet raises an error once, and only at a read. A
// program that only trains never reads, so the store asks here.
class UnreadErrors {
 public:
  // `array`: one that the failed operation was to write. Only the first kMost errors are kept.
  void add(std::shared_ptr<const Array> array, Status status);

  // The first error that no read has raised yet, with MXNet's text where that differs, and the number of others; ok
  // when there is none. All count as read then. Waits for operations on the failed arrays: never with the GIL held.
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

// An operation that MXNet's engine refuses is announced nevertheless, as one that failed on this rank: the ranks count
// the requests of one name, and stay in step. It fails with kInputFailed on every rank; here the call returns that.

// What is announced. `why`: MXNet's text.
Request as_refused(Request request, const std::string& why);
// What the call returns. `prefix`: how the error begins. `others`: further refused operations of the same call.
Status refusal(const std::string& prefix, const std::string& why, std::size_t others = 0);

// How many of our operations may fail between two waitall() until MXNet's list of errors has to be moved, at the least.
//
// ThreadedEngine::OnComplete, in 1.9.1 and 2.0.0b1, searches and extends that list without a lock, on every thread that
// ends a failed operation. A lost world ends hundreds within a millisecond; a list that moves meanwhile damages the
// heap. So Completion::fail() is called one at a time, and the list has room before.
constexpr std::size_t kRoomForErrors = 2047;

// Has MXNet's list grow, once in a process, before an operation of ours can fail, by errors that are read at once. Not
// with NaiveEngine, which keeps no errors. Throws Error.
void make_room_for_errors(const std::shared_ptr<const Api>& api);

}  // namespace kvstore_hvd::mxnet
