// Collective operations on MXNet arrays: submitted through MXNet's engine, so that they start when the arrays are ready
// and no array is read before they are over, and carried out by ours.
#pragma once

#include <sys/types.h>

#include <tuple>

#include "mxnet/operation.hpp"

namespace kvstore_hvd::mxnet {

// All members may be called from any thread; none needs the GIL.
class MXNetAdapter {
 public:
  // `library_path`: see Api::load, whose Error this throws. `naive`: MXNet runs with MXNET_ENGINE_TYPE=NaiveEngine,
  // where an operation is over when its push returns. Operations in flight do not keep `engine` alive: they fail with
  // kShutdown. `arena`: may be null.
  MXNetAdapter(std::shared_ptr<Engine> engine, const std::string& library_path, bool naive,
               std::shared_ptr<Arena> arena);

  // An allreduce reduces `inputs` in order, then with the other ranks', into each of `outputs`. Arrays may occur
  // several times and in both lists, and may be views of one another, as long as no output overlaps another array in
  // part. All must be dense, on the CPU, of equal dtype and number of elements; the first input's shape is compared
  // across ranks. A broadcast has one array, as input and output. `request`: without the fields that depend on the
  // arrays, and without those of `how`. An exchange has one input and one output, of which one may be a view of the
  // other, and a request that has all but dtype and addresses.
  //
  // Returns before the operation is over (naive: after it). What is wrong with an array shows only when it is ready:
  // then every rank's operation fails with kInputFailed, as it does when an operation of MXNet that should have
  // produced an input fails. A failure is raised in Python by the next read of one of the arrays, or taken from
  // take_unread_error(); naive: it is returned. Otherwise the Status returned is not ok only when MXNet refused the
  // operation (kInputFailed, see errors.hpp: it counts as submitted), or when nothing was submitted.
  // Operations of one name take part in the order of the calls, whichever of their arrays are ready first.
  Status push(Request request, const std::vector<Handle>& inputs, const std::vector<Handle>& outputs,
              const StepReduction& how);

  // The common case in one call: `array` reduced in place. Sets `bytes` to its size. Does nothing, and leaves `bytes`
  // empty, when the case needs a closer look: an array without elements, sparse, not on the CPU or of another dtype;
  // NaiveEngine; a lost world, or an error that was not read. Returns as push.
  Status push_in_place(Request request, Handle array, const StepReduction& how, std::optional<std::size_t>& bytes);

  // An array to be summed in place: name, label, handle (as a number) and priority.
  using ToSum = std::tuple<std::string, std::string, std::uintptr_t, int>;
  // What push() of a step takes. It keeps the arrays' memory, so it must go when their owner replaces them. Null when
  // an array needs a closer look, as in push_in_place, or MXNet refuses to copy its handle.
  std::shared_ptr<const Step> prepare(const std::vector<ToSum>& arrays) const;

  // Reduces each array of the step in place. Like push for one after the other, but small arrays may share an operation
  // of MXNet: then they are ready together, and the error of one is raised by all of them.
  Status push(const Step& step, const StepReduction& how);

  // Ready once the operations of `name` that were called before take part: for an operation of this name that does not
  // go through MXNet's engine.
  std::future<void> await_turn(const std::string& name) { return links_.turns->await(name); }

  // A new array in the arena that the adapter was given, of unspecified content: an NDArrayHandle, which the caller
  // frees. `dtype` is a floating-point type. Null when there is no room, or no such array. Throws Error.
  Handle new_array(const std::vector<std::int64_t>& shape, DType dtype) const;

  // Whether the array can be given to push as it is, on the CPU or a GPU. oneDNN's own layouts are no
  // obstacle. Does not wait. Throws Error.
  bool is_dense(Handle array) const { return api().is_dense(array); }
  // The same, and it is on the CPU.
  bool is_plain(Handle array) const { return api().is_reachable(array); }

  // A user error of an earlier operation that no read has raised; see UnreadErrors::take. Lost worlds are not kept
  // here: the engine has latched them.
  Status take_unread_error() { return links_.unread->take(api()); }

  // In a forked child: operations fail with kShutdown from now on.
  void after_fork_in_child();

 private:
  const Api& api() const { return *links_.api; }
  // For what MXNet refused before there was an operation.
  void announce_refused(Request request, const std::string& why);
  // How errors begin: "[rank 0/2] ".
  const std::string& prefix() const { return engine_->error_prefix(); }

  Links links_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Arena> arena_;
  const pid_t owner_;
};

}  // namespace kvstore_hvd::mxnet
