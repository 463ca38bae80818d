"""The operations of a store's call: which arrays the engine works on itself, and which through copies.

First every key is prepared: inputs that the engine cannot read as they are get copied. Then every key's operation is
submitted. Then results are copied to the outs that the engine could not write. Nothing waits here: copies and
operations are handed to MXNet's engine, which runs each when its arrays are ready.

An array goes through a staging copy when it is on another device or has another dtype than the sum, when it is sparse,
and when another array or key of the call shares its memory, so that all is read before anything is written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_hvd import gpu, log, mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, KVHvdError
from kvstore_hvd.store import sparse
from kvstore_hvd.store.arrays import buffer_like, copy, local_sum, scaled
from kvstore_hvd.store.compression import check_compressible, signs_of
from kvstore_hvd.store.keys import SUM, Call, Group, Key, Reduction, unique, wire_name
from kvstore_hvd.store.usage import Batch
from kvstore_hvd.world.member import Member


def gpu_of(world: Member, context: Any) -> Any:
    """The GPU of an operation on arrays of this context; None for the CPU, also if GPUs are out of reach."""
    if context.device_type.startswith("cpu"):
        return None
    if not world.reaches_gpus:
        text = "arrays on GPUs are copied to the CPU and back, which is slow%s"
        log.once("gpu-out-of-reach", logging.WARNING, text, "" if gpu.is_installed() else ": CuPy is not installed")
        return None
    return context


@dataclass
class _Prepared:
    """One operation of the engine, and the copies of its first output that follow it."""

    group: Group
    inputs: list[Any]
    outputs: list[Any]
    receivers: list[Any]
    root: int | None = None  # of a broadcast


class Operations:
    """Carries out the calls of one store, whose arguments have been checked."""

    def __init__(self, world: Member, namespace: str, count: Callable[[str, Key, int], None] | None = None) -> None:
        self._world = world
        self._namespace = namespace
        self._count = count  # called with the operation, the key, and the size in bytes
        #: Of 2bit compression: the part of gradients that this worker has not sent yet, by str(key).
        self.residuals: dict[str, Any] = {}

    def broadcast(self, call: Call, groups: Sequence[Group], priority: int, root: int = 0) -> None:
        """Copy the root's value of each group into all outs of the group, on every worker."""
        for group in groups:
            if len(group.values) > 1:
                fact = f"there are {len(group.values)} values for one key."
                raise InvalidRequestError(call.message(group.key, fact, "pass one value, and a list of outs."))
        mxnet_compat.collectives.counts.broadcasts += 1
        failures = self._run(call, groups, priority, SUM, root)
        if failures:
            raise failures[0]

    def pushpull(self, call: Call, groups: Sequence[Group], priority: int, how: Reduction = SUM) -> None:
        """Reduce the values of each group over the group and all workers, into all outs of the group."""
        # Waits for the groups of row_sparse arrays, after the others were submitted.
        if how.threshold:
            for group in groups:
                check_compressible(call, group)
        mxnet_compat.collectives.counts.reductions += 1
        rows = [group for group in groups if group.is_row_sparse]
        if rows:
            groups = [group for group in groups if not group.is_row_sparse]
        if how.threshold:
            size = self._world.topology.size
            groups = [signs_of(group, self.residuals, how.threshold, how.prescale, size) for group in groups]
            how = how.of_signs
        failures = self._run(call, groups, priority, how)
        if rows:
            names = [wire_name(self._namespace, group.key) for group in rows]
            try:
                sizes = sparse.pushpull(self._world, call, names, rows, priority, how)
                for group, size in zip(rows, sizes):
                    if self._count is not None:
                        self._count(call.operation, group.key, size)
            except KVHvdError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _run(
        self, call: Call, groups: Sequence[Group], priority: int, how: Reduction, root: int | None = None
    ) -> list[KVHvdError]:
        """Submit an operation of each group, and start the copies that follow; returns the errors of submissions."""
        adapter = None if self._world.is_alone else self._world.mxnet_adapter()
        aliased = _aliased(adapter, groups)
        prepared = [self._prepare(call, group, adapter, aliased, how, root) for group in groups]
        # The submissions of a worker must not depend on the fate of earlier ones: the other workers wait for all.
        failures: list[KVHvdError] = []
        submitted: list[_Prepared] = []
        try:
            for one in prepared:
                try:
                    if adapter is not None:
                        self._submit(call, one, adapter, priority, how)
                    submitted.append(one)
                except KVHvdError as error:
                    failures.append(error)
        finally:
            for one in submitted:
                for array in one.receivers:
                    copy(one.outputs[0], array)
                if one.group.then is not None:
                    one.group.then()
        return failures

    def _prepare(
        self,
        call: Call,
        group: Group,
        adapter: native.MXNetAdapter | None,
        aliased: set[int],
        how: Reduction,
        root: int | None,
    ) -> _Prepared:
        """Choose the arrays that take part themselves, and copy the other inputs."""
        values, facts = group.values, group.facts[id(group.values[0])]
        if self._count is not None:
            self._count(call.operation, group.key, _bytes_of(values[0], facts.dtype))
        if adapter is None:
            source = local_sum(values) if len(values) > 1 or id(values[0]) in aliased else values[0]
            if how.is_scaled:
                source = scaled(source, how.prescale, how.postscale)
            return _Prepared(group, [], [source], [array for array in unique(group.outs) if array is not source])
        device = gpu_of(self._world, facts.context)
        direct = self._direct(group, adapter, aliased, device)
        if root is not None:
            return _prepare_broadcast(group, direct, device, root, is_root=self._world.topology.rank == root)
        if device is not None and len(values) > 1 and how.op in ("sum", "average"):
            # On a GPU an operation takes one array of each worker.
            values = [local_sum(values)]
            direct.add(id(values[0]))
        one = _Prepared(group, [], [], [])
        staged: dict[int, Any] = {}
        for value in values:
            if id(value) not in direct and id(value) not in staged:
                staged[id(value)] = buffer_like(value, context=device)
                copy(value, staged[id(value)])
            one.inputs.append(staged.get(id(value), value))
        for array in unique(group.outs):
            (one.outputs if id(array) in direct else one.receivers).append(array)
        if not one.outputs:  # the staging copy of an input may be overwritten
            one.outputs += [*staged.values()][:1] or [buffer_like(group.outs[0], facts.dtype, context=device)]
        return one

    def _direct(self, group: Group, adapter: native.MXNetAdapter, aliased: set[int], device: Any) -> set[int]:
        """The ids of the arrays that the engine may work on themselves, in an operation on a GPU (None: the CPU)."""
        if device is not None:
            self._world.start_device(device.device_id)
        dtype, direct = group.facts[id(group.values[0])].dtype, set()
        for array, each in group.facts.items():
            is_there = each.context.device_type.startswith("cpu") if device is None else each.context == device
            if each.dtype == dtype and is_there and array not in aliased:
                if adapter.is_dense(each.handle):
                    direct.add(array)
                else:
                    log.once("staged", logging.DEBUG, "some arrays go through staging copies: they are not dense.")
        return direct

    def _submit(self, call: Call, one: _Prepared, adapter: native.MXNetAdapter, priority: int, how: Reduction) -> None:
        name, label = wire_name(self._namespace, one.group.key), call.label(one.group.key)
        inputs = list(map(mxnet_compat.handle_of, one.inputs))
        if one.root is not None:
            adapter.broadcast(name, label, inputs[0], one.root, priority)
            return
        outputs = list(map(mxnet_compat.handle_of, one.outputs))
        factors = how.prescale, how.postscale
        adapter.pushpull(name, label, inputs, outputs, how.op, *factors, priority, how.as_half, how.weight, how.group)


def _prepare_broadcast(group: Group, direct: set[int], device: Any, root: int, *, is_root: bool) -> _Prepared:
    """Choose the array that travels, and fill it on the root."""
    value, outs = group.values[0], unique(group.outs)
    # An out can serve as the buffer, `value` only if it is an out itself. A buffer on the root would have to hold the
    # value before the others have agreed, and would keep it when they do not.
    candidates = [value] if any(array is value for array in outs) else [] if is_root else outs
    wire = next((array for array in candidates if id(array) in direct), None)
    if wire is None:
        wire = buffer_like(value, context=device)
    if is_root and wire is not value:
        copy(value, wire)
    receivers = [array for array in outs if array is not wire and not (is_root and array is value)]
    return _Prepared(group, [wire], [wire], receivers, root)


def _aliased(adapter: native.MXNetAdapter | None, groups: Sequence[Group]) -> set[int]:
    """The ids of arrays whose memory another array or key of the call may use. Without an adapter: a worker alone."""
    if adapter is None:
        # Copies cost little here, and the search for shared memory does not pay.
        return {array for group in groups for array in group.facts} if len(groups) > 1 else set()
    users: dict[int, set[tuple[int, int]]] = {}  # by storage: (number of the group, id of the array)
    for number, group in enumerate(groups):
        for array, facts in group.facts.items():
            users.setdefault(adapter.chunk_id(facts.handle), set()).add((number, array))
    aliased: set[int] = set()
    for several in users.values():
        if len(several) > 1:
            aliased.update(array for _, array in several)
    return aliased


def _bytes_of(array: Any, dtype: str) -> int:
    return int(math.prod(array.shape)) * native.ITEM_BYTES[dtype]


class Step:
    """The gradients of a Trainer's step, summed in place: looked at once, then summed by one native call a step."""

    # A loop of `pushpull` over the parameters takes some microseconds for each, which a small network notices.

    def __init__(self, gradients: Sequence[tuple[Key, Any, int]]) -> None:
        self._gradients = gradients  # (key, array, priority)
        sizes = [(key, _bytes_of(array, mxnet_compat.dtype_name(array))) for key, array, _ in gradients]
        self.batch = Batch("pushpull", sizes)
        self._prepared: native.Step | None = None
        self._version: object = None  # of the names in `_prepared`

    def prepared(
        self, adapter: native.MXNetAdapter, names: Callable[[Key], tuple[str, str]], version: object
    ) -> native.Step | None:
        """What `native.MXNetAdapter.pushpull_step` takes; None when an array needs a closer look."""
        if self._version is not version:
            rows = [(*names(key), mxnet_compat.handle_of(array), priority) for key, array, priority in self._gradients]
            self._prepared, self._version = adapter.prepare(rows), version
        return self._prepared
