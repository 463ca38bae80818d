"""Horovod's join: a worker that has nothing more to do contributes zeros to every allreduce of the others."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import KVHvdError, MismatchError, message
from kvstore_hvd.join import tokens
from kvstore_hvd.join.pauses import Pauses
from kvstore_hvd.native.records import Announced
from kvstore_hvd.world.agree import clock_ahead
from kvstore_hvd.world.member import Member

#: What workers submit who wait for the others, here and at the end of every `Join`: of one name, or those in different
#: ones would wait for each other for ever.
LEFT = f"{native.PATIENT}left"

# The bits of infinity, minus infinity and one in bfloat16, which NumPy does not know.
_BFLOAT16 = {"min": 0x7F80, "max": 0xFF80, "product": 0x3F80}


def join(world: Member) -> int:
    """Wait until all workers have called it, and take part in their allreduces until then."""
    topology = world.topology
    if world.is_alone:
        return topology.rank
    try:
        # What this worker has submitted itself may wait for others that call this only after it.
        mxnet_compat.waitall()
        return _follow(world)
    except KVHvdError:
        raise  # the others have it, too, or the world is as before
    except BaseException as error:  # Ctrl-C: nobody else takes this worker's part
        world.abort(f"rank {topology.rank_in_all} left join() with {type(error).__name__}")
        raise


def _follow(world: Member) -> int:
    topology = world.topology
    arrivals = np.zeros(topology.size, np.int64)
    arrived = arrivals[topology.rank] = time.monotonic_ns()
    place = [arrivals.ctypes.data]
    request = native.Request("allreduce", LEFT, "join", place, place, arrivals.shape, "int64")
    with world.submitting():
        work = tokens.submit(world, request, arrivals)
    engine = world.engine()
    answers: dict[str, native.Work] = {}  # by name: under way
    pauses = Pauses()
    while True:
        answers = {name: answer for name, answer in answers.items() if not answer.done}
        missed = engine.missed(native.MAX_NAMES, described=True) or []
        if engine.is_met(work):  # then what is missed comes after it
            break
        new = [one for one in missed if one.name not in answers]
        for one in new:
            request, memory = _answer(one.name, one.announced)
            answers[one.name] = tokens.submit(world, request, memory)
        pauses.after(found=bool(new))
    try:
        engine.wait(work)
    except MismatchError as error:
        raise explained(error, world) from None
    if topology.host_count > 1:  # whose clocks differ: all times are made those of rank 0's host
        ahead_ns, _ = clock_ahead(engine, topology, "join/clock")
        row = np.array([arrived - ahead_ns], np.int64)
        arrivals = world.all_rows("join", "join/arrivals", "join", row)[:, 0]
    return int(np.flatnonzero(arrivals == arrivals.max())[-1])


def explained(error: Exception, world: Member) -> Exception:
    """What `LEFT` failed with, in words of the program."""
    if not isinstance(error, MismatchError):
        return error
    fact = "some workers are at the end of one Join, and others at the end of another Join or in hvd.join()."
    fix = "enter and leave the same ones, in the same order, on all workers."
    return MismatchError(message(fact, **world.topology.speaker, operation="join", fix=fix))


def _answer(name: str, what: Announced | None) -> tuple[native.Request, Any]:
    """What takes part in an operation of the others, and its memory."""
    label = f"'{name}' of the others, in join(),"
    if what is None or what.collective != "allreduce":
        called = "This operation" if what is None else what.collective.capitalize()
        failure = f"{called} is not supported with Join at this time."
        kind = "allreduce" if what is None else what.collective
        return native.Request(kind, name, label, (), (), (0,), "float32", failure=failure), None
    memory = _neutral(what.op, what.dtype, what.count)
    place = [memory.ctypes.data]
    request = native.Request(
        "allreduce",
        name,
        label,
        place,
        place,
        what.shape,
        what.dtype,
        what.op,
        what.prescale,
        what.postscale,
        as_half=what.as_half,
        group=what.group,
    )
    return request, memory


def _neutral(op: str, dtype: str, count: int) -> Any:
    """What leaves the others' values as they are; zeros in sums, as in Horovod, also where an average is formed."""
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
