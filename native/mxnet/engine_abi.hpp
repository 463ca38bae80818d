// MXNet as this package sees it: a handful of functions of the libmxnet.so that Python has already loaded, found at run
// time. Nothing of MXNet is compiled in, so one binary serves 1.x and 2.x; everything that differs between them, and
// every memory layout we rely on, stands in this header and its source.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvstore_hvd::mxnet {

// An NDArrayHandle: what Python calls `array.handle.value`.
using Handle = void*;

// A call into MXNet failed; the text is MXNet's own.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Tells MXNet's engine that an operation is over: exactly one of the two calls, once, on any thread, without the GIL.
// The operation's arrays may be read by others, and its AsyncOp may be released by MXNet, before the call returns.
class Completion {
 public:
  Completion() = default;
  Completion(void (*function)(void*, void*, const void*), void* engine, void* operation)
      : function_(function), engine_(engine), operation_(operation) {}

  void succeed() const;
  // `text` becomes the message of the exception that the next read of one of the operation's arrays raises in Python;
  // when it starts with "Name: ", the class is the one registered with MXNet under that name.
  void fail(const std::string& text) const;

 private:
  void (*function_)(void*, void*, const void*) = nullptr;
  void* engine_ = nullptr;
  void* operation_ = nullptr;
};

// An operation given to MXNet's engine. Exactly one of the three members is called, once, on a thread of MXNet or the
// one that pushed it.
class AsyncOp {
 public:
  virtual ~AsyncOp() = default;
  // The arrays are ready and belong to this operation until `completion` is called. Must not wait for other operations
  // of MXNet.
  virtual void start(const Completion& completion) noexcept = 0;
  // MXNet gave the operation up because an operation that produces one of its arrays failed.
  virtual void skipped() noexcept = 0;
  // MXNet's engine did not take the operation; `why` is MXNet's text. On the thread that pushed it, before Api::push()
  // throws.
  virtual void refused(const std::string& why) noexcept = 0;
};

class Api;

// Another handle of the same array: keeps its memory and its engine variable alive. Movable; empty after a move.
class Array {
 public:
  Array(std::shared_ptr<const Api> api, Handle handle) : api_(std::move(api)), handle_(handle) {}
  ~Array();
  Array(Array&& other) noexcept : api_(std::move(other.api_)), handle_(std::exchange(other.handle_, nullptr)) {}
  Array& operator=(Array&& other) noexcept;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  Handle get() const { return handle_; }
  // The handle, which the caller frees.
  Handle release() { return std::exchange(handle_, nullptr); }

 private:
  std::shared_ptr<const Api> api_;
  Handle handle_;
};

// The memory of an array, kept alive while this exists. Obtained from Api::open.
class View {
 public:
  // DLPack's numbers.
  enum class Device : std::int32_t { kCpu = 1, kGpu = 2, kCpuPinned = 3 };
  enum class Kind : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4 };

  View(std::shared_ptr<const Api> api, void* tensor) : api_(std::move(api)), tensor_(tensor) {}
  ~View();
  View(View&& other) noexcept : api_(std::move(other.api_)), tensor_(std::exchange(other.tensor_, nullptr)) {}
  View& operator=(View&&) = delete;
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  void* data() const;  // dense, row-major; may be null when there are no elements
  std::vector<std::int64_t> shape() const;
  std::size_t count() const;  // elements; 1 for a 0-d array
  Device device() const;
  Kind kind() const;
  int bits() const;  // per element; MXNet's bool is an unsigned integer of 1 bit

 private:
  std::shared_ptr<const Api> api_;
  void* tensor_;
};

// Where an operation starts.
enum class Place {
  kHere,           // inside push() when its arrays are ready; otherwise behind whatever computation is queued then
  kCommunication,  // on a thread that computes nothing
  kComputation,    // where MXNet computes
};

// The resolved functions; immutable, so any thread may use it.
class Api : public std::enable_shared_from_this<Api> {
 public:
  // `library_path`: the libmxnet.so that this process has loaded (mxnet.base._LIB._name). Throws Error when it is not
  // loaded or lacks a function.
  static std::shared_ptr<const Api> load(const std::string& library_path);

  int version() const { return version_; }  // 10901 is 1.9.1, 20000 is 2.0.0

  // Identity of the storage behind an array: equal for views of one array. Null for an array without storage.
  static const void* chunk_of(Handle array) { return *static_cast<const void* const*>(array); }

  // Throws Error.
  Array copy(Handle array) const;

  // Whether open() can succeed for this array: it has storage, dense. Does not wait, so the array's own operations may
  // still be in flight. Throws Error.
  bool is_dense(Handle array) const;
  // The same, in memory that the CPU reaches.
  bool is_reachable(Handle array) const;

  // The bytes of an array's elements; 0 also when MXNet does not know its shape or this package its dtype. Does not
  // wait. Throws Error.
  std::size_t bytes_of(Handle array) const;

  // An array on the CPU in memory of ours; `release` is called once MXNet no longer needs it, on whichever thread that
  // shows. Throws Error; `release` has been called then.
  Array lend(void* data, const std::vector<std::int64_t>& shape, View::Kind kind, int bits,
             std::function<void()> release) const;

  // Only inside an operation that holds the array (see AsyncOp::start): never waits. An array in one of oneDNN's own
  // layouts is brought into the plain one in place. Throws std::exception, with MXNet's text.
  View open(Handle array) const;

  // Waits until all operations pushed so far on the array are over; throws Error when one of them failed and nobody has
  // been told yet. Never with the GIL held or inside an operation.
  void wait_to_read(Handle array) const;

  // Has MXNet start `op` at `place` when `arrays` (no two of one chunk) are ready, and keeps others from them until it
  // completes. Never waits, except with NaiveEngine, which runs the operation at once. `name` is what MXNet's profiler
  // calls the operation; it must live as long as `op`. Throws Error when MXNet refuses; op->refused() has been called
  // then.
  void push(std::shared_ptr<AsyncOp> op, std::vector<Handle> arrays, Place place, int priority, const char* name) const;

 private:
  friend class Array;
  friend class View;

  Api() = default;
  void check(int status) const;
  Error last_error() const;

  int version_ = 0;
  int (*get_version_)(int*) = nullptr;
  const char* (*get_last_error_)() = nullptr;
  int (*push_async_)(void*, void*, void (*)(void*), const void*, void**, int, void**, int, const void*, int,
                     const char*, bool) = nullptr;
  int (*shallow_copy_)(void*, void**) = nullptr;
  int (*free_)(void*) = nullptr;
  int (*get_storage_type_)(void*, int*) = nullptr;
  int (*get_context_)(void*, int*, int*) = nullptr;
  int (*get_dtype_)(void*, int*) = nullptr;
  int (*get_shape_)(void*, int*, const std::int64_t**) = nullptr;
  int (*wait_to_read_)(void*) = nullptr;
  int (*to_dlpack_)(void*, void**) = nullptr;
  int (*delete_dlpack_)(void*) = nullptr;
  int (*from_dlpack_)(void*, bool, void**) = nullptr;
  // Null in a build without oneDNN, which has no other layouts.
  void (*make_plain_)(void* chunk) = nullptr;
};

}  // namespace kvstore_hvd::mxnet
