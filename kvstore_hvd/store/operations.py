"""From what a store's call says about its keys to operations of the engine, with copies before and after them.

Nothing waits here: copies and operations are handed to MXNet's engine, which runs each when its arrays are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, KVHvdError
from kvstore_hvd.store import sparse
from kvstore_hvd.store.arrays import buffer_like, bytes_of, copy, local_sum, scaled, unique
from kvstore_hvd.store.compression import check_compressible, expand, signs_of
from kvstore_hvd.store.keys import Call, Group, Key, priority_of, wire_name
from kvstore_hvd.store.placement import Placement, home_of
from kvstore_hvd.store.reduction import SUM, Reduction
from kvstore_hvd.world.member import Member

Copies = list[Callable[[], None]]


class Operations:
    """Carries out the calls of one store, whose arguments have been checked."""

    def __init__(self, world: Member, namespace: str, count: Callable[[str, Key, int], None]) -> None:
        self._world = world
        self._namespace = namespace
        self._count = count
        #: Of 2bit compression: what this worker has not yet sent, by str(key).
        self.residuals: dict[str, Any] = {}

    def broadcast(self, call: Call, groups: Sequence[Group], priority: Any, root: int = 0) -> None:
        """Copy the root's value of each group into all outs of the group, on every worker."""
        for group in groups:
            if len(group.values) > 1:
                fact = f"there are {len(group.values)} values for one key."
                raise InvalidRequestError(call.message(group.key, fact, "pass one value, and a list of outs."))
        priority = priority_of(call, priority)
        mxnet_compat.note_collective(reduces=False)
        placement = Placement(self._world, groups)
        _submit_groups([partial(self._broadcast, call, group, placement, priority, root) for group in groups])

    def pushpull(self, call: Call, groups: Sequence[Group], priority: Any, how: Reduction = SUM) -> None:
        """Reduce the values of each group over the group and all workers, into all outs of the group."""
        # Waits for the groups of row_sparse arrays, after the others were submitted.
        priority = priority_of(call, priority)
        if how.threshold:
            for group in groups:
                check_compressible(call, group)
        mxnet_compat.note_collective()
        rows = [group for group in groups if group.is_row_sparse]
        if rows:
            groups = [group for group in groups if not group.is_row_sparse]
            submit_all(
                [partial(self._pushpull, call, groups, priority, how), partial(self._rows, call, rows, priority, how)]
            )
        else:
            self._pushpull(call, groups, priority, how)

    def _rows(self, call: Call, groups: Sequence[Group], priority: int, how: Reduction) -> None:
        names = [wire_name(self._namespace, group.key) for group in groups]
        sizes = sparse.pushpull(self._world, call, names, groups, priority, how)
        for group, size in zip(groups, sizes):
            self._count(call.operation, group.key, size)

    def _pushpull(self, call: Call, groups: Sequence[Group], priority: int, how: Reduction) -> None:
        # All inputs are copied before anything is submitted, and all outputs are copied after everything was.
        outs, threshold = [unique(group.outs) for group in groups], how.threshold
        if threshold:
            size = self._world.topology.size
            groups = [signs_of(group, self.residuals, threshold, how.prescale, size) for group in groups]
            how = how.of_signs
        placement = Placement(self._world, groups)
        prepared = [self._prepare(call, group, placement, how) for group in groups]
        if threshold:
            for one, group, receivers in zip(prepared, groups, outs):
                one.copies.append(partial(expand, group.values[0], threshold, receivers))

        def submit(one: _Prepared) -> Copies:
            if one.inputs:
                self._submit(call, one, priority, how)
            return one.copies

        _submit_groups([partial(submit, one) for one in prepared])

    def _broadcast(self, call: Call, group: Group, placement: Placement, priority: int, root: int) -> Copies:
        """Submit one group; returns the copies that have to follow."""
        value, outs = group.values[0], unique(group.outs)
        dtype = mxnet_compat.dtype_name(value)
        self._count(call.operation, group.key, bytes_of(value, dtype))
        if self._world.is_alone:
            # Two keys may share memory: read it before the other one writes.
            source = local_sum([value]) if placement.is_aliased(value) else value
            return [partial(copy, source, array) for array in outs if array is not source]
        is_root = self._world.topology.rank == root
        # The outs are about to be overwritten: one of them can serve as the wire's buffer, `value` only if it is one of
        # them. The root's would have to hold the value before the others have agreed, and keep it when they do not.
        candidates = [value] if any(array is value for array in outs) else [] if is_root else outs
        home = home_of(self._world, value)
        wire = next((array for array in candidates if placement.is_direct(array, dtype, home)), None)
        if wire is None:
            wire = buffer_like(value, context=home)
        if home is not None:
            self._world.start_device(home.device_id)
        if is_root and wire is not value:
            copy(value, wire)
        self._world.mxnet_adapter().broadcast(
            wire_name(self._namespace, group.key),
            call.label(group.key),
            mxnet_compat.handle_of(wire),
            root,
            priority,
        )
        return [partial(copy, wire, array) for array in outs if array is not wire and not (is_root and array is value)]

    def _prepare(self, call: Call, group: Group, placement: Placement, how: Reduction) -> _Prepared:
        """Decide which arrays take part themselves and which through a copy, and start the copies of inputs."""
        outs = unique(group.outs)
        dtype = mxnet_compat.dtype_name(group.values[0])
        self._count(call.operation, group.key, bytes_of(group.values[0], dtype))
        if self._world.is_alone:
            source = group.values[0]
            if len(group.values) > 1 or placement.is_aliased(source):
                source = local_sum(group.values)
            if how.is_scaled:
                source = scaled(source, how.prescale, how.postscale)
            return _Prepared(group.key, copies=[partial(copy, source, array) for array in outs if array is not source])
        home = home_of(self._world, group.values[0])
        values = group.values
        if home is not None:
            self._world.start_device(home.device_id)
            if len(values) > 1 and how.op in ("sum", "average"):
                # On a GPU an operation takes one array of each worker.
                values = [local_sum(values)]
        stand_ins: dict[int, Any] = {}
        for value in unique(values):
            if not placement.is_direct(value, dtype, home):
                stand_ins[id(value)] = buffer_like(value, context=home)
                copy(value, stand_ins[id(value)])
        inputs = [stand_ins.get(id(value), value) for value in values]
        outputs = [array for array in outs if placement.is_direct(array, dtype, home)]
        rest = [array for array in outs if not placement.is_direct(array, dtype, home)]
        if not outputs:
            # A stand-in of an input is ours to overwrite.
            outputs = [next(iter(stand_ins.values())) if stand_ins else buffer_like(outs[0], dtype, context=home)]
        return _Prepared(group.key, inputs, outputs, [partial(copy, outputs[0], array) for array in rest])

    def _submit(self, call: Call, prepared: _Prepared, priority: int, how: Reduction) -> None:
        self._world.mxnet_adapter().pushpull(
            wire_name(self._namespace, prepared.key),
            call.label(prepared.key),
            [mxnet_compat.handle_of(array) for array in prepared.inputs],
            [mxnet_compat.handle_of(array) for array in prepared.outputs],
            how.op,
            how.prescale,
            how.postscale,
            priority,
            how.as_half,
            how.weight,
            how.group,
        )


@dataclass
class _Prepared:
    """One operation on the wire (none when there are no inputs), and the copies that follow it."""

    key: Key
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    copies: Copies = field(default_factory=list)


def submit_all(submissions: Iterable[Callable[[], object]]) -> None:
    """Make every submission; the first one's error is raised at the end."""
    # What a worker submits must not depend on what becomes of what it submitted before, or the others would wait for
    # the rest.
    failures: list[KVHvdError] = []
    for submit in submissions:
        try:
            submit()
        except KVHvdError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _submit_groups(submissions: Sequence[Callable[[], Copies]]) -> None:
    """Submit every group of a call, then start the copies that follow."""
    copies: Copies = []
    try:
        submit_all(partial(_collect, submit, copies) for submit in submissions)
    finally:
        for each in copies:
            each()


def _collect(submit: Callable[[], Copies], copies: Copies) -> None:
    copies += submit()
