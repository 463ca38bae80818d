"""The native extension with types and this package's exceptions. The only module that imports ``_native``."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvstore_hvd import errors
from kvstore_hvd.native.records import (
    Announced,
    DeviceOperation,
    EngineStatistics,
    Missed,
    Statistics,
    Threshold,
    TimelineEvent,
    Times,
    Waiting,
)

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "ITEM_BYTES",
    "MAX_NAMES",
    "OPS",
    "Arena",
    "Engine",
    "LocalReductions",
    "MXNetAdapter",
    "Segment",
    "Work",
    "abi",
    "end_as_failed",
    "end_by_signal_if_failed",
    "exception_for",
    "has_pidfds",
    "lost_code",
    "scale",
    "set_simd_target",
    "simd_target",
    "thresholds",
]

# The codes are part of the shared-memory protocol: native/base/types.hpp.
DTYPES = {
    "float16": 0,
    "bfloat16": 1,
    "float32": 2,
    "float64": 3,
    "int8": 4,
    "uint8": 5,
    "int32": 6,
    "int64": 7,
}
#: Bytes of an element.
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4}
#: How many tensors a world knows at a time: native/shm/world.hpp.
MAX_NAMES = 8192
COLLECTIVES = {"allreduce": 0, "broadcast": 1, "exchange": 2, "reducescatter": 3}

# native/base/status.hpp
_EXCEPTIONS: dict[int, type[errors.KVHvdError]] = {
    1: errors.MismatchError,
    2: errors.InputFailedError,
    3: errors.InvalidRequestError,
    4: errors.PeerLostError,
    5: errors.TimeoutError,
    6: errors.TransportError,
    7: errors.ShutdownError,
}

_module: ModuleType | None = None


class NotBuiltError(errors.KVHvdError, ImportError):
    """The native extension is not there."""


def _native() -> Any:
    """The extension module, loaded at the first use so that importing this package never fails for want of it."""
    global _module
    if _module is None:
        try:
            _module = importlib.import_module("kvstore_hvd._native")
        except ModuleNotFoundError as error:
            if error.name != "kvstore_hvd._native":
                raise
            raise NotBuiltError(_why_not_built()) from None
        _module.set_error_factory(exception_for)
    return _module


def _why_not_built() -> str:
    """The message where the extension is missing."""
    here = Path(__file__).parents[1]
    fact = f"the native extension of kvstore_hvd is missing: {here} belongs to a source tree that was not built."
    # Python looks into the script's folder first: a script that lies in the source tree never finds the installed copy.
    installed = next((path.parent for entry in sys.path for path in Path(entry).glob("kvstore_hvd/_native.*.so")), None)
    if installed is None:
        return errors.message(fact, fix="run `pip install .` (or `pip install -e .`) in the source tree.")
    return errors.message(
        f"{fact} It hides the copy that is installed in {installed}.",
        fix="keep (or start) your script in another folder, or run `pip install -e .` in the source tree.",
    )


def exception_for(code: int, text: str) -> errors.KVHvdError:
    """The exception for a native error code (see ``status.hpp``)."""
    return _EXCEPTIONS.get(code, errors.KVHvdError)(text)


def lost_code(error: BaseException) -> int:
    """The native code of what loses a world: that of the exception's class, else of a `TransportError`."""
    codes = [code for code, kind in _EXCEPTIONS.items() if issubclass(kind, errors.HorovodInternalError)]
    return next((code for code in codes if isinstance(error, _EXCEPTIONS[code])), 6)


def abi() -> str:
    """What must be equal for two workers to share memory."""
    return str(_native().abi())


def simd_target() -> str:
    """The instruction set that the reduction kernels use: scalar, avx2 or avx512."""
    return str(_native().simd_target())


def set_simd_target(target: str) -> bool:
    """Choose the instruction set; False, and nothing changes, when this CPU or build lacks it."""
    return bool(_native().set_simd_target(target))


def scale(dtype: str, source: int, target: int, count: int, prescale: float, postscale: float) -> None:
    """Multiply `count` elements with both factors, as the reductions of several workers do: with the same kernels.

    Parameters
    ----------
    dtype : str
    source, target : int
        Addresses; may be equal, and must not overlap otherwise.
    count : int
    prescale, postscale : float
    """
    _native().scale(DTYPES[dtype], source, target, count, prescale, postscale)


def thresholds(changes: str = "") -> dict[str, Threshold]:
    """All thresholds by name (``native/shm/thresholds.hpp`` says what they mean).

    Parameters
    ----------
    changes : str
        What differs from the defaults: ``'one_shot=4096,direct_chunk=2097152'``.

    Raises
    ------
    ValueError
        A name does not exist, or a value is not allowed.
    """
    return {name: Threshold(*numbers) for name, *numbers in _native().thresholds(changes)}


def has_pidfds() -> bool:
    """Whether this system tells at once that another worker died, and how."""
    return bool(_native().has_pidfds())


def end_as_failed() -> None:
    """Have the process end with code 1 where it would end with 0, for an exit handler.

    Python ends with the program's own code whatever a handler finds, and does not tell handlers the code.
    """
    _native().end_as_failed()


def end_by_signal_if_failed() -> None:
    """Have the process end by SIGKILL where it would end with another code than 0, for an exit handler."""
    _native().end_by_signal_if_failed()


class Segment:
    """The shared memory of one world of workers on one host."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl

    @classmethod
    def create(
        cls,
        size: int,
        arena_bytes: int = 0,
        thresholds: str = "",
        set_number: int = 0,
        size_of_all: int = 0,
        ranks: Sequence[int] = (),
        has_core_for_each: bool | None = None,
    ) -> Segment:
        """Fresh memory for `size` workers, each with an arena of up to `arena_bytes` (none if 0).

        Parameters
        ----------
        size, arena_bytes : int
        thresholds : str
            What differs from the defaults, see `thresholds`; decides for all workers.
        set_number, size_of_all, ranks
            Of a world of some of the workers, as in `topology.Inside`: what messages name.
        has_core_for_each : bool, optional
            Whether the workers may use as many cores as they are, so that one that waits may spin. By default as this
            thread may.

        Raises
        ------
        OSError
            The system has no memory left for it.
        ValueError
            As `thresholds`.
        """
        arguments = size, arena_bytes, thresholds, set_number, size_of_all, list(ranks), has_core_for_each
        return cls(_native().Segment.create(*arguments))

    @classmethod
    def attach(cls, fd: int) -> Segment:
        """The memory behind `fd`, which is duplicated and stays the caller's."""
        return cls(_native().Segment.attach(fd))

    @property
    def has_core_for_each(self) -> bool:
        """What `create` was told."""
        return bool(self.impl.has_core_for_each)

    @property
    def fd(self) -> int:
        """The file descriptor; it belongs to this object."""
        return int(self.impl.fd)


class Arena:
    """Memory of one worker for arrays that the others sum in place; arrays in it keep it alive."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.impl = _native().Arena(segment.impl, rank)

    @property
    def capacity(self) -> int:
        """Bytes of address space; memory is taken as it is used."""
        return int(self.impl.capacity)

    @property
    def used(self) -> int:
        """Bytes that arrays occupy."""
        return int(self.impl.used)

    def contains(self, address: int) -> bool:
        """Whether the address lies in it."""
        return bool(self.impl.contains(address))

    def retire(self) -> None:
        """Take no new arrays; the memory goes with the last one that lies in it, at once if there is none."""
        self.impl.retire()

    def after_fork_in_child(self) -> None:
        """Give a forked child memory of its own, with the parent's content; once.

        Raises
        ------
        RuntimeError
            The system has none; any access would end the child.
        """
        self.impl.after_fork_in_child()


class Work:
    """A request under way."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl

    @property
    def done(self) -> bool:
        """Whether the outputs are written or the request has failed."""
        return bool(self.impl.done)

    @property
    def error(self) -> errors.KVHvdError | None:
        """Why the request failed; None while it runs and when it succeeded."""
        error = self.impl.error
        return None if error is None else exception_for(*error)


def request(
    collective: str,
    name: str,
    label: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    shape: Sequence[int],
    dtype: str,
    op: str = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    priority: int = 0,
    as_half: bool = False,
    parts: Sequence[tuple[int, int, int, int]] = (),
    contributed: int = 0,
    weight: float = 1.0,
    failure: str = "",
    group: int = 0,
    on_device: bool = False,
) -> Any:
    """A request for `Engine.submit` and `Engine.run`, which may be used any number of times.

    The addresses must stay valid until it is done. For the parameters see `comm.base.Request`.
    """
    return _native().Request(
        COLLECTIVES[collective],
        name,
        label,
        list(inputs),
        list(outputs),
        math.prod(shape),
        list(shape),
        DTYPES[dtype],
        OPS[op],
        prescale,
        postscale,
        root,
        priority,
        as_half,
        list(parts),
        contributed,
        weight,
        failure,
        group,
        on_device,
    )


class Engine:
    """One worker's engine in a segment: matches requests with the other workers' and carries them out.

    Every method that waits releases the GIL. In a forked child every request fails with `ShutdownError`.
    """

    def __init__(self, segment: Segment, rank: int, timeout_s: float, watch_peers: bool = True, host: str = "") -> None:
        self.impl = _native().Engine(segment.impl, rank, timeout_s, watch_peers, host)

    def submit(self, request: Any) -> Work:
        """Submit what `request` made. Never waits."""
        return Work(self.impl.submit(request))

    def run(self, request: Any) -> None:
        """Submit and wait in one. Raises what went wrong, as an exception of ``errors``."""
        self.impl.run(request)

    def prepare(self, request: Any, result: Any, owner: Any) -> Callable[[], Any]:
        """A function that runs `request`, any number of times, and returns `result`; it keeps both objects alive."""
        prepared: Callable[[], Any] = self.impl.prepare(request, result, owner)
        return prepared

    def wait(self, work: Work) -> None:
        """Until `work` is done, bounded by the engine's timeout. Raises what went wrong."""
        self.impl.wait(work.impl)

    def wait_for_all(self, limit_s: float) -> bool:
        """Wait until nothing of this worker is pending; False when something still is after `limit_s` seconds.

        A signal's exception, like Ctrl-C's, fails the world first.
        """
        return bool(self.impl.wait_for_all(limit_s))

    def is_met(self, work: Work) -> bool:
        """Whether all workers have submitted `work`; so if `missed` shows what another one submitted after it."""
        return bool(self.impl.is_met(work.impl))

    def abort(self, text: str) -> None:
        """Fail all pending and later requests of all workers with this text."""
        self.impl.abort(text)

    def health(self) -> errors.KVHvdError | None:
        """The latched failure of the world, or None."""
        failure = self.impl.health()
        return None if failure is None else exception_for(*failure)

    def take_batch(self, limit_s: float) -> tuple[int, str, list[DeviceOperation]] | None:
        """For the device thread: what is to be carried out next, with a number and the name of the collective.

        None after `limit_s` seconds, and once the world is lost or left.
        """
        taken = self.impl.take_batch(limit_s)
        if taken is None:
            return None
        number, collective, *common, operations = taken
        return number, collective, [DeviceOperation(*own, *common) for own in operations]

    def end_batch(self, number: int, error: BaseException | None = None) -> None:
        """The device does not touch the arrays of a batch any more; an error loses the world."""
        if error is None:
            self.impl.end_batch(number)
        else:
            text = str(error) if isinstance(error, errors.KVHvdError) else f"{type(error).__name__}: {error}"
            # It becomes the fact of an error with a stop and a fix of its own.
            fact = "; ".join(part.rstrip(".") for part in text.split("\n  Fix: "))
            # The engine takes UTF-8, and the name of a file may be anything else.
            sendable = fact.encode(errors="backslashreplace").decode()
            self.impl.end_batch(number, lost_code(error), sendable)

    @property
    def bytes_in_place(self) -> int:
        """Bytes of this worker's arrays that were reduced where they lie, without staging memory."""
        return int(self.impl.bytes_in_place)

    def report(self) -> EngineStatistics:
        """What was measured; ends a round (see `Times`)."""
        names, *rounds = self.impl.report()
        by_name = {
            name: Statistics(operations, bytes_reduced, algorithm, Times(*total), Times(*last), submitted)
            for name, operations, bytes_reduced, algorithm, total, last, submitted in names
        }
        return EngineStatistics(by_name, *rounds)

    def start_timeline(self, capacity: int) -> None:
        """Record this worker's operations: up to `capacity` between two calls of `take_timeline`."""
        self.impl.start_timeline(capacity)

    def stop_timeline(self) -> None:
        """Record nothing more; what is recorded can still be taken."""
        self.impl.stop_timeline()

    def take_timeline(self) -> tuple[list[TimelineEvent], int]:
        """What was completed since the last call, in that order; and how many operations found no room."""
        events, lost = self.impl.take_timeline()
        return [TimelineEvent._make(event) for event in events], lost

    def waiting(self, age_s: float) -> list[Waiting] | None:
        """What this worker has waited for, for at least `age_s` seconds; None when nobody can tell just now."""
        found = self.impl.waiting(age_s)
        if found is None:
            return None
        return [Waiting(name, text, age, since, tuple(late), by_all) for name, text, age, since, late, by_all in found]

    def missed(self, most: int, described: bool = False) -> list[Missed] | None:
        """What others have submitted and this worker has not, up to `most`; None when nobody can tell just now.

        `described`: with what they announced. Then no other thread may submit anything at this time.
        """
        found = self.impl.missed(most, described)
        if found is None:
            return None
        return [Missed(name, operation, what and _announced(*what)) for name, operation, what in found]

    def process(self, rank: int) -> tuple[int, str]:
        """A worker's process id (0: it has not joined yet), and how errors name it."""
        pid, text = self.impl.process(rank)
        return int(pid), str(text)

    def shutdown(self, reason: str = "") -> bool:
        """Leave the world: after the pending requests, or at once and with a reason that the others read.

        Afterwards nothing of the world is held any more, whoever keeps this object.

        Returns False when the devices of others may still use this worker's memory.
        """
        return bool(self.impl.shutdown(reason))


def _announced(collective: int, dtype: int, op: int, *others: Any) -> Announced:
    prescale, postscale, as_half, group, count, shape = others
    names = _name(COLLECTIVES, collective), _name(DTYPES, dtype), _name(OPS, op)
    return Announced(*names, prescale, postscale, as_half, group, count, tuple(shape))


def _name(codes: dict[str, int], code: int) -> str:
    return next(name for name, known in codes.items() if known == code)


class LocalReductions:
    """Reductions of this process's own MXNet arrays, with the kernels that several workers reduce with.

    Parameters
    ----------
    library_path : str
        MXNet's library.
    naive : bool
        Whether MXNet runs with NaiveEngine.
    """

    def __init__(self, library_path: str, naive: bool) -> None:
        self.impl = _native().LocalReductions(library_path, naive)

    def reduce(self, inputs: list[int], output: int, prescale: float = 1.0, postscale: float = 1.0) -> None:
        """Sum arrays of equal dtype and size, given as their handles, times both factors; asynchronous.

        `output` may be one of the inputs. All are dense, and in memory that the CPU reaches.

        Raises
        ------
        InputFailedError
            MXNet refused it; with NaiveEngine, whatever failed.
        """
        self.impl.reduce(inputs, output, prescale, postscale)


class MXNetAdapter:
    """Submits MXNet arrays through MXNet's own engine, so that nothing blocks and dependencies are kept.

    Arrays are given as their native handles. With NaiveEngine (`naive`) operations are over, and their errors raised,
    when a call returns.
    """

    def __init__(self, engine: Engine, library_path: str, naive: bool, arena: Arena | None = None) -> None:
        self.impl = _native().MXNetAdapter(engine.impl, library_path, naive, arena.impl if arena else None)
        # Called for every array of every step: bound once.
        self.is_dense: Callable[[int], bool] = self.impl.is_dense
        self.is_plain: Callable[[int], bool] = self.impl.is_plain
        self.chunk_id: Callable[[int], int] = self.impl.chunk_id
        #: (name, label, array, priority, as_half) -> bytes: the sum of one array in place; None, and nothing done, when
        #: the case needs a closer look.
        self.pushpull_in_place: Callable[[str, str, int, int, bool], int | None] = self.impl.pushpull_in_place
        #: (name, label, array, priority) of each array -> what `pushpull_step` takes, any number of times, and which
        #: keeps the arrays' memory; None when an array needs a closer look.
        self.prepare: Callable[[Sequence[tuple[str, str, int, int]]], Any] = self.impl.prepare

    def pushpull(
        self,
        name: str,
        label: str,
        inputs: list[int],
        outputs: list[int],
        op: int,
        prescale: float,
        postscale: float,
        priority: int,
        as_half: bool = False,
        weight: float = 1.0,
        group: int = 0,
    ) -> None:
        """Reduce `inputs` with those of the other workers into each of `outputs`; asynchronous.

        Operations of one name take part in the order of the calls. For `as_half`, `weight` and `group` see
        `comm.base.Request`.
        """
        self.impl.pushpull(name, label, inputs, outputs, op, prescale, postscale, priority, as_half, weight, group)

    def pushpull_step(self, prepared: Any, as_half: bool = False, op: int = 0, weight: float = 1.0) -> None:
        """Reduce each array that was prepared in place, as `pushpull` does one after the other; asynchronous.

        Small arrays may share an operation of MXNet: they are ready together, and the error of one is raised by all.
        """
        self.impl.pushpull_step(prepared, as_half, op, weight)

    def broadcast(self, name: str, label: str, array: int, root: int, priority: int) -> None:
        """Overwrite `array` with the root's; asynchronous, in turn as in `pushpull`."""
        self.impl.broadcast(name, label, array, root, priority)

    def new_array(self, shape: tuple[int, ...], dtype: str) -> int:
        """The NDArrayHandle of a new array in the arena, for the caller to own; 0 when it takes none.

        Its content is unspecified.
        """
        return int(self.impl.new_array(shape, DTYPES[dtype])) if dtype in DTYPES else 0

    def take_unread_error(self) -> errors.KVHvdError | None:
        """The error of an earlier operation that nobody has seen yet, or None; it is given out once."""
        error = self.impl.take_unread_error()
        return None if error is None else exception_for(*error)

    def after_fork_in_child(self) -> None:
        """Give up threads in a forked child."""
        self.impl.after_fork_in_child()
