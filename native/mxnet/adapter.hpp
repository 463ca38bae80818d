// Collective operations on MXNet arrays: submitted through MXNet's engine, so that they start when the arrays are ready
// and nobody reads an array before they are over, and carried out by ours.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "base/types.hpp"
#include "engine/engine.hpp"
#include "mxnet/engine_abi.hpp"
#include "mxnet/operation.hpp"
#include "mxnet/step.hpp"
#include "shm/arena.hpp"

namespace kvstore_hvd::mxnet {

// All members may be called from any thread; none needs the GIL.
class MXNetAdapter {
 public:
  // `library_path`: see Api::load, whose Error this throws. `naive`: MXNet runs with MXNET_ENGINE_TYPE=NaiveEngine,
  // where an operation is over when its push returns. Operations in flight do not keep `engine` alive: they fail with
  // kShutdown. `arena`: may be null.
  MXNetAdapter(std::shared_ptr<Engine> engine, const std::string& library_path, bool naive,
               std::shared_ptr<Arena> arena);

  // Reduces `inputs` in order, then with the other ranks', into each of `outputs`. Arrays may occur several times and
  // in both lists, and may be views of one another, as long as no output overlaps another array in part. All must be
  // dense, on the CPU, of equal dtype and number of elements; the first input's shape is compared across ranks.
  //
  // Returns before the operation is over (naive: after it). What is wrong with an array shows only when it is ready:
  // then every rank's operation fails with kInputFailed, and so it does when an operation of MXNet that should have
  // produced an input fails. A failure is raised in Python by the next read of one of the arrays, or taken from
  // take_unread_error(); naive: it is returned. Otherwise the Status returned is not ok only when MXNet refused the
  // operation (kInputFailed, see refusal.hpp: it counts as submitted), or when nothing was submitted.
  // Operations of one name take part in the order of the calls, whichever of their arrays are ready first.
  Status pushpull(const std::string& name, const std::string& label, const std::vector<Handle>& inputs,
                  const std::vector<Handle>& outputs, double prescale, double postscale, int priority,
                  std::uint64_t group, const StepReduction& how);

  // The common case in one call: `array` reduced in place. Sets `bytes` to its size. Does nothing, and leaves `bytes`
  // empty, when there is anything about the case that needs a closer look: an array without elements, sparse, not on
  // the CPU or of another dtype; NaiveEngine; a lost world, or an error that nobody has read. Returns as pushpull.
  Status pushpull_in_place(const std::string& name, const std::string& label, Handle array, double prescale,
                           double postscale, int priority, const StepReduction& how, std::optional<std::size_t>& bytes);

  // An array to be summed in place.
  struct ToSum {
    std::string name, label;
    Handle array;
    int priority;
  };
  // What pushpull() of a step takes. It keeps the arrays' memory, so it must go when their owner replaces them. Null
  // when there is anything about an array that needs a closer look, as in pushpull_in_place, or MXNet refuses to copy
  // its handle.
  std::shared_ptr<const Step> prepare(const std::vector<ToSum>& arrays) const;

  // Reduces each array of the step in place. Like pushpull for one after the other, but small arrays may share an
  // operation of MXNet: then they are ready together, and the error of one is raised by all of them.
  Status pushpull(const Step& step, const StepReduction& how);

  // Overwrites `array` with the root's, in place. Otherwise like pushpull.
  Status broadcast(const std::string& name, const std::string& label, Handle array, int root, int priority);

  // Ready once the operations of `name` that were called before take part: for an operation of this name that does not
  // go through MXNet's engine.
  std::future<void> await_turn(const std::string& name) { return links_.turns->await(name); }

  // A new array in the arena that the adapter was given, of unspecified content: an NDArrayHandle, which the caller
  // frees. `dtype` is a floating-point type. Null when there is no room, or no such array. Throws Error.
  Handle new_array(const std::vector<std::int64_t>& shape, DType dtype) const;

  // Whether the array can be given to pushpull and broadcast as it is, on the CPU or a GPU. oneDNN's own layouts are no
  // obstacle. Does not wait. Throws Error.
  bool is_dense(Handle array) const { return api().is_dense(array); }
  // The same, and it is on the CPU.
  bool is_plain(Handle array) const { return api().is_reachable(array); }

  static const void* chunk_id(Handle array) { return Api::chunk_of(array); }

  // A user error of an earlier operation that no read has raised; see UnreadErrors::take. Lost worlds are not kept
  // here: the engine has latched them.
  Status take_unread_error();

  // In a forked child: operations fail with kShutdown from now on.
  void after_fork_in_child();

 private:
  const Api& api() const { return *links_.api; }
  Status push(Request request, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs,
              const StepReduction& how);
  // For what MXNet refused before there was an operation.
  void announce_refused(Request request, const std::string& why);
  // How errors begin: "[rank 0/2] ".
  const std::string& world() const;

  Links links_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Arena> arena_;
  const pid_t owner_;
};

}  // namespace kvstore_hvd::mxnet
