"""The KVStore ``'horovod'``: MXNet's store interface on top of this package's engine.

Nothing here waits: an operation is handed to MXNet's engine, which starts it when its inputs are ready, and blocks
reads of its outputs until it is complete. Only `Horovod.barrier` and the constructor wait for other workers.

Needs MXNet, and is imported as soon as MXNet is: importing it registers the store, and makes all changes to MXNet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from kvstore_hvd import log, mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, UnsupportedMethodError
from kvstore_hvd.store import divergence
from kvstore_hvd.store.arrays import buffer_like, copy
from kvstore_hvd.store.compression import arrays_from, parse_compression, values_of
from kvstore_hvd.store.keys import (
    MAX_KEYS,
    SUM,
    Call,
    Group,
    Key,
    Reduction,
    check_group,
    group_arguments,
    group_of_states,
    priority_of,
    unique,
    wire_name,
)
from kvstore_hvd.store.operations import Operations, Step
from kvstore_hvd.store.usage import Report, Usage
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member

__all__ = ["Horovod"]


class Horovod(mx.kvstore.KVStoreBase):
    """A KVStore that sums over all workers with allreduce and needs no servers.

    Created with ``mx.kv.create('horovod')``, any number of times; every store has its own keys, so two Trainers never
    meet. All workers must create their stores in the same order. A key is an int or a str (3 and '3' are the same),
    and needs no initialisation. Values are arrays of MXNet, one for each device of this worker; dtypes: float16,
    bfloat16, float32, float64, int8, uint8, int32, int64. Sums are formed in the order of ranks, and have equal bits on
    all workers.

    Operations are asynchronous: an error that involves other workers is raised where the result is read, or by the next
    call of any store, which submits its own operation all the same. Operations of one key are carried out in the order
    of the calls, which must be the same on all workers; between keys, order does not matter. Once the world of workers
    is lost, every call raises the same `HorovodInternalError` until `reset`.
    """

    def __init__(self, world: Member | None = None, reduction: Reduction = SUM) -> None:
        # MXNet passes nothing.
        if world is None:
            process.current().init()
        self._member = world or process.current().member
        self._names: dict[str, str] = {}
        self._namespace = self._member.next_namespace(self._label)
        self._wire_names: dict[Key, tuple[str, str]] = {}  # of keys that take the short way: name, label
        self._reduction = reduction  # see set_gradient_compression()
        self._left_out: Collection[Key] = ()
        self._stored: dict[str, Any] = {}  # by str(key): what pull() hands out
        self._staged_reasons: dict[str, str] = {}  # by str(key), of gradients of Trainers
        self._usage = Usage()
        self._count = self._usage.add
        self._operations = Operations(self._member, self._namespace, self._count)

    def __repr__(self) -> str:
        return f"<kvstore_hvd Horovod store {self._namespace}: rank {self.rank} of {self.num_workers}>"

    # -- Who takes part ---------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """``'horovod'``."""
        return "horovod"

    @property
    def rank(self) -> int:
        """This worker's rank: 0 to ``num_workers - 1``."""
        return self._member.topology.rank

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._member.topology.size

    @property
    def local_rank(self) -> int:
        """This worker's rank on its host: 0 to ``local_size - 1``."""
        return self._member.topology.local_rank

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self._member.topology.local_size

    @property
    def cross_rank(self) -> int:
        """This host's number, among the hosts that have a worker with this local rank."""
        return self._member.topology.cross_rank

    @property
    def cross_size(self) -> int:
        """Number of hosts that have a worker with this local rank."""
        return self._member.topology.cross_size

    # -- Collectives ------------------------------------------------------------------------------------------------

    def broadcast(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Copy rank 0's value into every out of every worker. Asynchronous.

        Parameters
        ----------
        value : NDArray, or a list with one
            Read on rank 0 only; of the same shape and dtype on all workers.
        out : NDArray or list of NDArray, optional
            By default the result is written to `value`.
        key, priority
            As `pushpull`, which raises the same errors but MismatchError.
        """
        with self._member.submitting():
            call, groups = self._check("broadcast", key, value, out)
            self._operations.broadcast(call, groups, priority_of(call, priority))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum values over all devices and workers, and write the sum to every out. Asynchronous.

        Of row_sparse arrays the rows that any worker has are summed; the call waits for them. Workers must come to the
        keys of such arrays in the same order.

        Parameters
        ----------
        key : int or str, or a list of them
            With a list, value and out have one entry for each key.
        value : NDArray or list of NDArray
            One for each device of this worker, all of one shape and dtype; the same ones on all workers.
        out : NDArray or list of NDArray, optional
            May be on other devices and have other dtypes (the result is cast), but must have the value's shape. By
            default the sum is written to every value. All values of all keys are read before anything is written.
        priority : int
            Higher ones are executed first.

        Raises
        ------
        InvalidTypeError, InvalidRequestError, UnsupportedDtypeError
            The arguments are wrong; nothing was submitted.
        InputFailedError
            MXNet refused an operation, which failed on all workers; those of other keys were submitted.
        MismatchError
            The workers disagree about row_sparse arrays (about dense ones: when the result is read).
        HorovodInternalError
            The world is lost.
        """
        if (self._left_out and key in self._left_out) or (out is None and self._push_in_place(key, value, priority)):
            return
        with self._member.submitting():
            call, groups = self._check("pushpull", key, value, out, allow_rows=True)
            self._operations.pushpull(call, groups, priority_of(call, priority), self._reduction)

    def barrier(self) -> None:
        """Wait until every worker has called it, but not for operations on arrays. Raises HorovodInternalError."""
        self._member.barrier(self._namespace)

    _barrier = barrier

    # -- The older interface: init, push, pull ----------------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Broadcast rank 0's value in place, and keep it for `pull`. Raises as `broadcast`."""
        with self._member.submitting():
            call, groups = self._check("init", key, value)
            self._operations.broadcast(call, groups, 0)
            for group in groups:
                stored = self._stored[str(group.key)] = buffer_like(group.values[0])
                copy(group.values[0], stored)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Start to sum values over all devices and workers; `pull` hands out the sum of the last push.

        Parameters and exceptions as `pushpull`.
        """
        if self._left_out and key in self._left_out:
            return
        with self._member.submitting():
            call, groups = self._check("push", key, value, allow_rows=True)
            priority = priority_of(call, priority)
            groups = [dataclasses.replace(each, outs=[buffer_like(each.values[0])]) for each in groups]
            self._operations.pushpull(call, groups, priority, self._reduction)
            self._stored.update((str(group.key), group.outs[0]) for group in groups)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write what was last pushed (or initialised) under a key to every out.

        Parameters
        ----------
        key, out
            As `pushpull`, which raises the same errors; values are cast to the dtype of `out`. InvalidRequestError also
            means that nothing was pushed under a key.
        priority, ignore_sparse
            Without effect.
        """
        if self._left_out and key in self._left_out:
            return
        with self._member.submitting():
            call = self._call("pull")
            groups = group_arguments(call, key, out, role="out")
            for group in groups:
                stored = self._stored.get(str(group.key))
                if stored is None:
                    fact, fix = "nothing was pushed under this key.", "call push() or init() first."
                    raise InvalidRequestError(call.message(group.key, fact, fix))
                group.values, group.outs = [stored], group.values
                check_group(call, group, allow_rows=True)
            for group in groups:
                for array in unique(group.outs):
                    copy(group.values[0], array)

    # -- What a store without servers does not do -------------------------------------------------------------------

    @staticmethod
    def is_capable(capability: str) -> bool:
        """False: this store has no optimizer; workers update their own weights."""
        return False

    def set_optimizer(self, optimizer: Any) -> None:
        """Without effect: workers update their own weights."""
        self._no_servers("set_optimizer")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Without effect: use ``Trainer.save_states``."""
        self._no_servers("save_optimizer_states")

    def load_optimizer_states(self, fname: str) -> None:
        """Without effect: use ``Trainer.load_states``."""
        self._no_servers("load_optimizer_states")

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Not supported: raises UnsupportedMethodError."""
        call = self._call("row_sparse_pull")
        fact, fix = "row_sparse weights are not supported.", "use dense weights; their gradients may be row_sparse."
        raise UnsupportedMethodError(call.message(None, fact, fix))

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Choose how gradients are summed from now on; all workers must choose the same.

        Parameters
        ----------
        compression_params : dict
            ``{'type': 'fp16'}``: every value of float32 and float64 is rounded to float16; they are summed in float32,
            and the sum is rounded once (with several devices, that of each worker too); what is beyond 65504 becomes
            infinite. Workers share memory, in which arrays stay as they are, so it is no faster than
            ``{'type': 'none'}``: no rounding. With one worker nothing is rounded.

            ``{'type': '2bit', 'threshold': t}`` (t is 0.5 by default): each worker adds its gradient (the sum over its
            devices) to its residual of that key, which begins with 0; sends t where that is at least t, -t where it is
            at most -t, and 0 elsewhere; and subtracts what it has sent. So does a worker alone, as with MXNet's 'dist'
            stores. A value travels as one byte. For dense float32 gradients only: others are refused. Choosing another
            type or threshold sets residuals to 0. ``Trainer.save_states`` and `GluonState` save them; ``load_states``
            takes them from a file that a worker of the same rank wrote among as many, and otherwise sets them to 0.

            Applies to `pushpull` and `push`.

        Raises
        ------
        InvalidTypeError, InvalidRequestError
            The parameters are wrong; nothing was changed.
        """
        as_half, threshold = parse_compression(compression_params)
        if threshold != self._reduction.threshold:
            self._operations.residuals.clear()
        self._reduction = dataclasses.replace(self._reduction, as_half=as_half, threshold=threshold)

    # -- State ------------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What this store has done so far, and how long it took on this worker. Ends a round, see below.

        Returns
        -------
        Report
            A dict that prints as a table.

            - ``'workers'``: their number.
            - ``'operations'``: calls of each kind. ``'bytes'``: of this worker's arrays.
            - ``'arena'``: bytes ``'used'`` and ``'capacity'`` of the memory for gradients that workers sum in place; of
              all stores of this worker.
            - ``'rounds'``: ``'count'``; ``'exposed_ms'``: milliseconds in which an operation was exposed;
              ``'reducing_ms'``: the part of these in which something was being reduced, the most that faster
              communication could gain; the rest was spent waiting for other workers, the most that workers of equal
              speed could gain. Updates of other parameters fill a part of both. All operations of this worker since
              the workers met count, also barriers and those on NumPy arrays.
            - ``'ranks'``: for each worker, at most a second old: ``'operations'``, and ``'bytes'`` of its arrays;
              ``'waited_ms'``, in which it only waited for other workers; ``'compared'``: operations in which the
              arrivals of workers were compared (some, of thousands a second); ``'last'``: those in which it came last;
              ``'behind_ms'``: in these, all together, after the median worker.
            - ``'ms'``: milliseconds ``'queued'``, ``'reducing'`` and ``'exposed'``, of all operations.
            - ``'keys'``: for each key, under the parameter's name where it is known (those after the first 10,000
              together): ``'operations'``, ``'bytes'``, and what the engine measured since the workers met:
              ``'algorithm'`` of the last operation ('inline', 'one-shot', 'two-shot', 'direct', 'broadcast';
              'link-sum' and 'link-broadcast' over hosts; 'device' on a GPU, 'failed', or '' when nothing is known);
              ``'staged'``: why arrays are copied through staging memory ('': they are not); ``'submitted'``: when the
              last operation was, in seconds of ``time.monotonic()``; ``'ms'``: ``'mean'`` and ``'last'`` of each time.

            *queued*: from when the array is ready until all workers have theirs ready and the first chunk is scheduled.
            *reducing*: from then on until the sum is there. *exposed*: the part of both that no computation of this
            worker's hid. A round is a series of operations in which no key occurs twice: in training, a step. An
            operation is exposed from the last submission of its round until it is complete (or the next round begins),
            so not at all if it completes before. The exposed times of a round overlap: a step waits for their maximum
            at most, not for their sum.
        """
        memory = self._member.arena
        arena = {"used": memory.used, "capacity": memory.capacity} if memory else {"used": 0, "capacity": 0}
        measured = self._member.report()
        keys = self._usage.report(self._namespace, self._names, measured.names, self._staged_reasons)
        times = {"exposed_ms": measured.exposed * 1e3, "reducing_ms": measured.reducing * 1e3}
        rounds = {"count": measured.rounds, **times}
        ranks = self._member.figures()
        return Report({"workers": self.num_workers, "arena": arena, "rounds": rounds, "ranks": ranks, **keys})

    def reset(self) -> None:
        """Meet the same workers in a fresh world, after this one was lost; every worker must call it.

        Pending operations fail. All stores of the process stay usable. Raises LaunchError if a worker does not come
        back in time.
        """
        process.current().reset()

    # -- The second interface: for Trainers, Modules, elastic states and Joins ---------------------------------------

    def _set_key_labels(self, names: Mapping[Any, str]) -> None:
        """Name keys in messages and reports: a mapping of key to parameter name."""
        self._names.update((str(key), name) for key, name in names.items())
        self._wire_names = {}

    def _set_staged_reasons(self, reasons: Mapping[Any, str]) -> None:
        """Record by key why gradients go through staging memory ('': they do not)."""
        self._staged_reasons.update((str(key), why) for key, why in reasons.items())

    def _residuals(self) -> dict[str, Any]:
        """Copies of the residuals of 2bit compression, as NumPy arrays; waits for them."""
        return values_of(self._operations.residuals)

    def _set_residuals(self, values: Mapping[str, Any]) -> None:
        """Take back what `_residuals` returned."""
        self._operations.residuals = arrays_from(values)

    def _save_residuals(self, path: str) -> None:
        """Append this worker's residuals to a file of states, a pickle, whose other readers stop at its end."""
        if self._operations.residuals:
            with open(path, "ab") as file:
                pickle.dump(((self.rank, self.num_workers), self._residuals()), file)

    def _load_residuals(self, path: str) -> None:
        """Take this worker's residuals from a file of states; none if a worker of another rank or world wrote it."""
        if self._reduction.threshold:
            writer, residuals = None, {}
            with open(path, "rb") as file, contextlib.suppress(EOFError):
                pickle.load(file)
                writer, residuals = pickle.load(file)
            self._set_residuals(residuals if writer == (self.rank, self.num_workers) else {})

    def _verify(self, parameters: Sequence[tuple[str, Any]], when: str) -> None:
        """Compare parameters, given as (label, parameter), with the other workers'."""
        divergence.compare(parameters, self._namespace, when, self._member)

    def _anywhere(self, facts: Sequence[bool], label: str) -> list[bool]:
        """Which of these facts hold on any worker; waits for all. A worker in ``hvd.join()`` has none of them."""
        table = np.array(facts, np.int32)
        if table.size and not self._member.is_alone:
            with self._member.submitting():
                self._member.allreduce(f"{self._namespace}/{label}", f"'{label}'", table)
        return [bool(each) for each in table]

    @contextlib.contextmanager
    def _without(self, keys: Collection[Key]) -> Iterator[None]:
        """Within, calls leave the arrays of these keys alone, on all workers."""
        self._left_out = keys
        try:
            yield
        finally:
            self._left_out = ()

    @contextlib.contextmanager
    def _reducing(self, **changes: Any) -> Iterator[None]:
        """Within, values are reduced with these changes of the `Reduction`."""
        before = self._reduction
        self._reduction = dataclasses.replace(before, **changes)
        try:
            yield
        finally:
            self._reduction = before

    @contextlib.contextmanager
    def _comparing_states(self, states: Sequence[int]) -> Iterator[None]:
        """Within, reductions fail unless all workers have these, see `group_of_states`."""
        self._member.hold_unread(1)  # the mismatch of one gradient must not keep this worker from submitting the others
        try:
            with self._reducing(group=group_of_states(states)):
                yield
        finally:
            self._member.hold_unread(-1)

    def _broadcast_from(self, root: int, key: Key, arrays: Sequence[Any]) -> None:
        """Copy the first of another worker's arrays into all."""
        with self._member.submitting():
            self._operations.broadcast(*self._check("broadcast", key, arrays[0], list(arrays)), 0, root)

    def _make_step(self, gradients: Sequence[tuple[Key, Any, int]]) -> Step | None:
        """The argument of `_exchange`, of (key, array, priority); None if there is none."""
        is_plain = all(
            array.stype == "default" and mxnet_compat.dtype_name(array) in native.DTYPES for _, array, _ in gradients
        )
        return Step(gradients) if gradients and is_plain else None

    def _exchange(self, step: Step) -> bool:
        """Do what `pushpull` does for each gradient of a step, as one call."""
        # Returns False, and has done nothing, when it has to be `pushpull` itself: a program has replaced it, or an
        # array or this world is unusual.
        how = self._reduction
        if type(self).pushpull is not _PUSHPULL or "pushpull" in vars(self) or how.is_scaled or how.threshold:
            return False
        member = self._member
        adapter = member.adapter
        prepared = None if adapter is None else step.prepared(adapter, self._name, self._wire_names)
        if prepared is None and not member.is_alone:
            return False
        with member.submitting():
            if not step.batch.times:
                self._usage.add_batch(step.batch)
            step.batch.times += 1
            if adapter is not None and prepared is not None:
                adapter.pushpull_step(prepared, how.as_half, how.op, how.weight)
        return True

    # -- How it works -----------------------------------------------------------------------------------------------

    def _label(self, key: str) -> str:
        """How messages name a key, given as text."""
        return self._call("").label(int(key) if key.isascii() and key.isdigit() else key)

    def _call(self, operation: str) -> Call:
        return Call(operation, self._member.topology, self._names)

    def _check(
        self, operation: str, key: Any, value: Any, out: Any = None, allow_rows: bool = False
    ) -> tuple[Call, list[Group]]:
        """Check everything that this worker can see, before anything is submitted."""
        call = Call(operation, self._member.topology, self._names)
        groups = group_arguments(call, key, value, out)
        for group in groups:
            check_group(call, group, allow_rows)
        return call, groups

    def _push_in_place(self, key: Any, value: Any, priority: int) -> bool:
        """Submit what a Trainer submits for each parameter of each step, at a fraction of the general case's cost."""
        # Returns False, and has done nothing, when this is not that case or anything is unusual about it.
        if type(value) is list and len(value) == 1:
            value = value[0]
        adapter = self._member.current_adapter
        if (
            adapter is None
            or type(key) not in (int, str)
            or type(priority) is not int
            or not -(2**31) <= priority < 2**31
            or not mxnet_compat.is_ndarray(value)
            or not self._reduction.is_plain
        ):
            return False
        names = self._wire_names.get(key) or self._name(key)
        bytes_summed = adapter.pushpull_in_place(*names, value.handle.value or 0, priority, self._reduction.as_half)
        if bytes_summed is None:
            return False
        mxnet_compat.collectives.counts.reductions += 1
        self._count("pushpull", key, bytes_summed)
        return True

    def _name(self, key: Key) -> tuple[str, str]:
        if len(self._wire_names) >= MAX_KEYS:
            self._wire_names.clear()
        names = self._wire_names[key] = (wire_name(self._namespace, key), self._call("pushpull").label(key))
        return names

    def _no_servers(self, method: str) -> None:
        text = "%s() has no effect: workers of the store 'horovod' update their own weights."
        log.once(f"no-servers-{method}", logging.WARNING, text, method)


# The method of stores in which no program has replaced it.
_PUSHPULL = Horovod.pushpull

# Importing MXNet registered its exit handler; ours has to come after it.
process.register_exit_handler()
mxnet_compat.install_hooks(Horovod, process.current().expected_size, process.everybody.adapter_for_gradients)
