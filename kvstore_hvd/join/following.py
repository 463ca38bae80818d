"""A worker without input follows the others: it answers operations that they submit, until all workers have arrived.

Every worker that has no more input submits a sum under one name, `LEFT`, which is met once all have submitted it. Until
then the engine lists the operations of other workers that this one has not submitted, and this worker answers each:

- in `hvd.join` it takes part with zeros;
- at the end of a `Join` that throws it submits each as failed, which fails on all workers (`Withdrawal`).

The steps of Trainers in a `Join` are followed in context.py.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import KVHvdError, MismatchError, message
from kvstore_hvd.native import Missed
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member
from kvstore_hvd.world.topology import clock_ahead

#: The sum with which a worker waits for the others. One name for `hvd.join` and all Joins: workers in different ones
#: get a MismatchError instead of waiting for ever.
LEFT = f"{native.PATIENT}left"

# Seconds between looks for operations of the others, at first and at most.
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3
# The bits of infinity, minus infinity and one in bfloat16, which NumPy lacks.
_BFLOAT16 = {"min": 0x7F80, "max": 0xFF80, "product": 0x3F80}

# Operations in flight by world and name; None: not to be answered any more.
_Answers = dict[tuple[Member, str], Optional[native.Work]]
_Answer = Callable[[Member, Missed], Optional[native.Work]]


class Pauses:
    """Pauses between looks: short while the others are busy, longer and longer while they are not."""

    def __init__(self) -> None:
        self._next_s = _SHORTEST_S

    def after(self, found: bool) -> None:
        """Pause after a look, unless it found something."""
        if found:
            self._next_s = _SHORTEST_S
            return
        time.sleep(self._next_s)
        self._next_s = min(self._next_s * 1.05, _LONGEST_S)


# -- Small operations whose caller may leave before they are over, by Ctrl-C or another error -----------------------


@dataclass
class _Kept:
    memory: Any
    work: native.Work | None = None  # None until the engine has it


_lock = threading.Lock()
_kept: list[_Kept] = []  # the engine writes to the memory until an operation is over


def _submit(world: Member, request: native.Request, memory: Any) -> native.Work:
    """Submit an operation, and keep its memory until it is over."""
    one = _Kept(memory)
    with _lock:
        _kept[:] = [each for each in _kept if each.work is None or not each.work.done]
        _kept.append(one)
    try:
        one.work = world.engine().submit(request)
    except Exception:
        with _lock:
            _kept.remove(one)
        raise
    return one.work


def submit_sum(world: Member, name: str, label: str, table: np.ndarray[Any, Any], group: int = 0) -> native.Work:
    """Submit a sum of int64 numbers in place. To be called inside `Member.submitting`."""
    place = [table.ctypes.data]
    request = native.Request("allreduce", name, label, place, place, table.shape, "int64", group=group)
    return _submit(world, request, table)


def wait_for(work: native.Work, world: Member) -> None:
    """Wait for an operation under the name `LEFT`."""
    try:
        world.engine().wait(work)
    except MismatchError:
        fact = "some workers are at the end of one Join, and others at the end of another Join or in hvd.join()."
        fix = "enter and leave the same ones, in the same order, on all workers."
        raise MismatchError(message(fact, **world.topology.prefix, operation="join", fix=fix)) from None


def missed_in(world: Member) -> Sequence[Missed]:
    """The operations that others have submitted and this worker has not."""
    return world.engine().missed(native.MAX_NAMES, described=True) or []


def _answer_until(
    work: native.Work, world: Member, worlds: Iterable[Member], answers: _Answers, answer: _Answer
) -> None:
    """Answer the others' operations in `worlds` until all workers of `world` have submitted `work`; wait for that."""
    pauses = Pauses()
    while True:
        for place in [place for place, one in answers.items() if one is not None and one.done]:
            del answers[place]
        missed = [(each, one) for each in worlds for one in missed_in(each)]
        if world.engine().is_met(work):  # the missed operations come after it
            break
        new = [(each, one) for each, one in missed if (each, one.name) not in answers]
        for each, one in new:
            answers[each, one.name] = answer(each, one)
        pauses.after(found=bool(new))
    wait_for(work, world)


# -- Horovod's join ----------------------------------------------------------------------------------------------------


def join(world: Member) -> int:
    """Wait until all workers have called it, with zeros for their allreduces; returns the rank that came last."""
    topology = world.topology
    if world.is_alone:
        return topology.rank
    try:
        # Pending operations of this worker may wait for workers that have yet to call this.
        mxnet_compat.waitall()
        arrivals = np.zeros(topology.size, np.int64)
        arrived = arrivals[topology.rank] = time.monotonic_ns()
        with world.submitting():
            work = submit_sum(world, LEFT, "join", arrivals)
        _answer_until(work, world, [world], {}, _contribute)
        if topology.host_count > 1:  # clocks of hosts differ: all times become times of rank 0's host
            ahead_ns, _ = clock_ahead(world.engine(), topology, "join/clock")
            row = np.array([arrived - ahead_ns], np.int64)
            arrivals = world.all_rows("join", "join/arrivals", "join", row)[:, 0]
        return int(np.flatnonzero(arrivals == arrivals.max())[-1])
    except KVHvdError:
        raise  # the others have it, too, or the world is as before
    except BaseException as error:  # Ctrl-C: nobody else takes this worker's part
        world.abort(f"rank {topology.rank_in_all} left join() with {type(error).__name__}")
        raise


def _contribute(world: Member, missed: Missed) -> native.Work:
    """Take part in an allreduce of the others; have another operation of theirs fail."""
    what, name, label = missed.announced, missed.name, f"'{missed.name}' of the others, in join(),"
    if what is None or what.collective != "allreduce":
        called = "This operation" if what is None else what.collective.capitalize()
        return _refuse(world, missed, label, f"{called} is not supported with Join at this time.")
    # The factor applies to the values of this worker, too, which must not count.
    if (what.op == "product" and what.prescale != 1.0) or (what.op in ("min", "max") and what.prescale <= 0.0):
        factor = f"{what.op.capitalize()} with prescale_factor {what.prescale:g}"
        return _refuse(world, missed, label, f"{factor} is not supported with Join at this time.")
    memory = _neutral(what.op, what.dtype, what.count)
    place, kind = [memory.ctypes.data], (what.shape, what.dtype, what.op, what.prescale, what.postscale)
    request = native.Request("allreduce", name, label, place, place, *kind, as_half=what.as_half, group=what.group)
    return _submit(world, request, memory)


def _refuse(world: Member, missed: Missed, label: str, failure: str) -> native.Work:
    """Submit an operation of the others as failed: it fails on all workers."""
    kind = "allreduce" if missed.announced is None else missed.announced.collective
    return _submit(world, native.Request(kind, missed.name, label, (), (), (0,), "float32", failure=failure), None)


def _neutral(op: str, dtype: str, count: int) -> Any:
    """Values that do not change the result; zeros in sums and, as in Horovod, in averages."""
    if dtype == "bfloat16":
        return np.full(count, _BFLOAT16.get(op, 0), np.uint16)
    kind = np.dtype(dtype)
    if op not in ("min", "max", "product"):
        return np.zeros(count, kind)
    if op == "product":
        return np.ones(count, kind)
    if kind.kind == "f":
        return np.full(count, np.inf if op == "min" else -np.inf, kind)
    limits = np.iinfo(kind)
    return np.full(count, limits.max if op == "min" else limits.min, kind)


# -- The end of a Join that throws -------------------------------------------------------------------------------------


def is_withdrawn(error: BaseException | None, world: Member, number: int) -> bool:
    """Whether an error results, directly or not, from an operation that a worker without input has declined."""
    causes: list[BaseException] = []
    cause: BaseException | None = error if isinstance(error, Exception) else None
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(_refusal(world, number) in str(each) for each in causes)


def _refusal(world: Member, number: int) -> str:
    """The text of a declined operation's error, which also an error of MXNet's contains."""
    return f"this worker has no more input in Join {number}{world.topology.group}, which is to throw then."


def early_name(number: int) -> str:
    """The name of the sum by which workers tell each other whether they have ended, in a Join of this number."""
    return f"join/{number}/early"


class Withdrawal:
    """One worker's part in the end of a Join that throws because a worker has no more input.

    Workers with input may have submitted operations of an iteration that is not to be: of a forward pass with
    `SyncBatchNorm`, a metric, parameters that are broadcast as soon as they have a shape. Leftover operations would
    match operations of the next epoch. So each worker submits the others' as failed, and no worker leaves before all
    have come to that.
    """

    def __init__(self, world: Member, number: int) -> None:
        self._world = world
        self._refusal = _refusal(world, number)
        self._is_withdrawn = functools.partial(is_withdrawn, world=world, number=number)
        # The workers of process sets within it are all in the Join.
        self._worlds = process.current().worlds_within(world)
        # Not to be answered; a Join of a process set may use the same name there.
        self._answers: _Answers = {(world, early_name(number)): None}

    def drain(self) -> bool:
        """Wait for all operations that this worker has pushed to MXNet; returns whether others have declined one."""
        # Until then the engine may not know of them, and this worker would decline its own.
        declined = False
        if mxnet_compat.is_imported():
            try:
                mxnet_compat.waitall()
            except Exception as error:  # noqa: BLE001 - an operation may raise anything
                declined = self._is_withdrawn(error)
                if not declined:
                    self._world.defer(error)
        for world in self._worlds:
            declined |= world.forget_unread(self._is_withdrawn)
        return declined

    def decline_until(self, work: native.Work) -> None:
        """Decline the others' operations until all have submitted `work`, and wait for that. After `drain`."""
        _answer_until(work, self._world, self._worlds, self._answers, self._decline)

    def agree(self) -> None:
        """Number the next calls alike: workers have begun different numbers of calls."""
        for world in self._worlds:
            with world.submitting():
                world.agree_on_numbers()

    def _decline(self, world: Member, missed: Missed) -> native.Work | None:
        # The others have initialised that parameter, and will not broadcast it again.
        what = missed.announced
        if what is not None and mxnet_compat.initialize_awaiting(missed.name, what.shape):
            return None
        return _refuse(world, missed, f"'{missed.name}' of the others", self._refusal)
