// MXNet as this package sees it: functions of the libmxnet.so that Python has loaded, found at run time. One binary
// serves 1.x and 2.x; their differences, and the memory layouts we rely on, are here only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "base/types.hpp"

namespace kvstore_hvd::mxnet {

// An NDArrayHandle: what Python calls `array.handle.value`.
using Handle = void*;

// A call into MXNet failed; the text is MXNet's own.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Ends an operation of MXNet's engine: exactly one of the two calls, once, on any thread, without the GIL. Its arrays
// may be read by others, and its AsyncOp may be released by MXNet, before the call returns. The memory layout is that
// of engine::CallbackOnComplete and engine::CallbackOnStart.
struct Completion {
  void succeed() const;
  // `text` becomes the message of the exception that the next read of one of the operation's arrays raises in Python;
  // when it starts with "Name: ", the class is the one registered with MXNet under that name.
  void fail(const std::string& text) const;

  void (*function)(void* engine, void* operation, const void* error) = nullptr;
  void* engine = nullptr;
  void* operation = nullptr;
};

// An operation given to MXNet's engine. One of the members is called, once, on a thread of MXNet or that of the push.
class AsyncOp {
 public:
  virtual ~AsyncOp() = default;
  // The arrays belong to this operation until `completion` is called. Must not wait for other operations of MXNet.
  virtual void start(const Completion& completion) noexcept = 0;
  // MXNet gave the operation up because an operation that produces one of its arrays failed.
  virtual void skipped() noexcept {}
  // MXNet refused the operation; `why` is MXNet's text. On the thread of the push, before Api::push() throws.
  virtual void refused(const std::string& /*why*/) noexcept {}
};

class Api;

// What releases a handle of MXNet's.
struct Release {
  std::shared_ptr<const Api> api;
  int (*Api::*function)(void*);
  void operator()(void* handle) const { static_cast<void>(((*api).*function)(handle)); }
};
// Another handle of the same array: keeps its memory and its engine variable alive.
using Array = std::unique_ptr<void, Release>;

// DLManagedTensor begins with its tensor.
struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t dimensions;
  std::uint8_t kind;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

// The memory of an array, kept alive while this exists. Obtained from Api::open.
class View {
 public:
  // DLPack's numbers.
  enum class Device : std::int32_t { kCpu = 1, kGpu = 2, kCpuPinned = 3 };
  enum class Kind : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4 };

  explicit View(std::unique_ptr<void, Release> tensor) : tensor_(std::move(tensor)) {}

  // Dense, row-major; may be null when there are no elements.
  void* data() const {
    return tensor().data == nullptr ? nullptr : static_cast<char*>(tensor().data) + tensor().byte_offset;
  }
  std::vector<std::int64_t> shape() const { return {tensor().shape, tensor().shape + tensor().dimensions}; }
  // Of elements; 1 for a 0-d array.
  std::size_t count() const {
    std::size_t count = 1;
    for (int i = 0; i < tensor().dimensions; ++i) count *= static_cast<std::size_t>(tensor().shape[i]);
    return count;
  }
  Device device() const { return static_cast<Device>(tensor().device_type); }
  Kind kind() const { return static_cast<Kind>(tensor().kind); }
  int bits() const {
    return tensor().bits * tensor().lanes;
  }  // of an element; MXNet's bool is an unsigned integer of 1 bit

 private:
  const DlTensor& tensor() const { return *static_cast<const DlTensor*>(tensor_.get()); }

  std::unique_ptr<void, Release> tensor_;
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

  // Adds the arrays whose chunks are not among `chunks` to `handles`, and their chunks: MXNet's engine deadlocks when
  // one operation names a chunk twice. Inputs are held like outputs: open() may rearrange their memory.
  static void add_new_chunks(const std::vector<Array>& arrays, std::vector<const void*>& chunks,
                             std::vector<Handle>& handles);

  // Throws Error.
  Array copy(Handle array) const;

  // Whether open() can succeed for this array: it has dense storage. Does not wait for operations on it. Throws Error.
  bool is_dense(Handle array) const;
  // The same, in memory that the CPU reaches.
  bool is_reachable(Handle array) const;

  // {-1} while it is not known; so is an extent that is not known. Does not wait. Throws Error.
  std::vector<std::int64_t> shape_of(Handle array) const;
  // mshadow's number of the elements' type: 0 is float32, 2 float16. Throws Error.
  int dtype_number(Handle array) const;

  // Bytes of the elements; 0 also for an unknown shape or unsupported dtype. Does not wait. Throws Error.
  std::size_t bytes_of(Handle array) const;

  // An array on the CPU in memory of ours; `release` is called, on any thread, when MXNet is done with it. Throws
  // Error.
  Array lend(void* data, const std::vector<std::int64_t>& shape, View::Kind kind, int bits,
             std::function<void()> release) const;

  // Only inside an operation that holds the array (see AsyncOp::start): never waits. Converts oneDNN's own layouts to
  // the plain one in place. Throws std::exception, with MXNet's text.
  View open(Handle array) const;

  // Waits until all operations pushed so far on the array are over; throws Error when one failed and its error was not
  // raised yet. Never with the GIL held or inside an operation.
  void wait_to_read(Handle array) const;

  // Calls `part` with a thread's number and the number of threads, on each of the threads that one of MXNet's own
  // operators would use here; does not throw.
  void on_all_threads(const std::function<void(int thread, int threads)>& part) const;

  // MXNet starts `op` at `place` when `arrays` (no two of one chunk) are ready, and keeps others from them until it
  // completes. Never waits, except with NaiveEngine, which runs the operation at once. `name`, for MXNet's profiler,
  // must live as long as `op`. Throws Error when MXNet refuses, after op->refused().
  void push(std::shared_ptr<AsyncOp> op, std::vector<Handle> arrays, Place place, int priority, const char* name) const;

 private:
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
  const pid_t owner_ = process_id();
  // Of libgomp, which MXNet's wheels use; null in a build with another OpenMP.
  void (*parallel_)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_)() = nullptr;
  int (*threads_)() = nullptr;
  // Null in a build without oneDNN, which has no other layouts.
  void (*make_plain_)(void* chunk) = nullptr;
};

// Nothing for a dtype that cannot be reduced.
std::optional<DType> dtype_of(const View& view);

// How errors name a dtype that cannot be reduced.
std::string describe_unsupported(const View& view);

}  // namespace kvstore_hvd::mxnet
