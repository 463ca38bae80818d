"""The native engine, as type checkers see it. At run time it is loaded by ``kvstore_hvd.native``, at its first use.

Addresses are integers; MXNet's arrays are given as their handles, integers as well. Whatever waits releases the GIL.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.native import (
    DeviceOperation,
    EngineStatistics,
    Missed,
    Snapshot,
    Threshold,
    TimelineEvent,
    Waiting,
)

def calls_of(thread: int, most: int) -> list[tuple[str, int, str, str]]:
    """The innermost calls of a Python thread: file, line, function and module of each."""

def callers_of(package: str) -> list[tuple[int, bool]]:
    """The threads whose innermost call is one of a package, and whether the look before saw the same call."""

def abi() -> str:
    """What must be equal for two workers to share memory."""

def simd_target() -> str:
    """The instruction set that the reduction kernels use: scalar, avx2 or avx512."""

def set_simd_target(target: str) -> bool:
    """Choose the instruction set; False, and nothing changes, when this CPU or build lacks it."""

def scale(dtype: str, source: int, target: int, count: int, prescale: float, postscale: float) -> None:
    """Multiply `count` elements with both factors, as the reductions of several workers do: with the same kernels.

    `source` and `target` may be equal, and must not overlap otherwise.
    """

def thresholds(text: str = "") -> dict[str, Threshold]:
    """All thresholds by name (``Thresholds`` in native/shm/world.hpp says what they mean).

    `text` says what differs from the defaults: ``'one_shot=4096,direct_chunk=2097152'``. Raises ValueError where a name
    does not exist, or a value is not allowed.
    """

def has_pidfds() -> bool:
    """Whether this system tells at once that another worker died, and how."""

def end_as_failed() -> None:
    """Have the process end with code 1 where it would end with 0, for an exit handler.

    Python ends with the program's own code whatever a handler finds, and does not tell handlers the code.
    """

class Segment:
    """The shared memory of one world of workers on one host."""

    @staticmethod
    def create(
        size: int,
        arena_bytes: int = 0,
        thresholds: str = "",
        set_number: int = 0,
        size_of_all: int = 0,
        ranks: Sequence[int] = (),
        has_core_for_each: bool | None = None,
        host: int = 0,
        hosts: Sequence[Sequence[int]] = (),
        processes: Sequence[tuple[str, int]] = (),
        job: str = "",
        generation: int = 0,
    ) -> Segment:
        """Fresh memory for `size` workers, each with an arena of up to `arena_bytes` (none if 0).

        Parameters
        ----------
        size, arena_bytes : int
        thresholds : str
            What differs from the defaults, see `thresholds`; decides for all workers.
        set_number, size_of_all, ranks
            Of a world of some of the workers, as in `Place`: what messages name.
        has_core_for_each : bool, optional
            Whether the workers may use as many cores as they are, so that one that waits may spin. By default as this
            thread may.

        Raises
        ------
        OSError
            The system has no memory left for it.
        ValueError
            As `thresholds`.
        host, hosts, processes
            Of a world on several hosts: this one's index, each one's ranks, and by rank host name and process id for
            messages; `size` counts the ranks of this host.
        job, generation
            Name of the job and number of the world, for snapshots.
        """

    @staticmethod
    def attach(fd: int) -> Segment:
        """The memory behind `fd`, which is duplicated and stays the caller's."""

    def snapshot(self, most: int = 0) -> Snapshot:
        """What the workers do and have done, with up to `most` of the last operations of each worker of this host."""

    def claim_failure(self) -> bool:
        """Whether this call is the first one of the host's processes."""

    @property
    def size(self) -> int:
        """How many workers share it."""

    @property
    def has_core_for_each(self) -> bool:
        """What `create` was told."""

    @property
    def fd(self) -> int:
        """The file descriptor; it belongs to this object."""

class Arena:
    """Memory of one worker for arrays that the others sum in place; arrays in it keep it alive."""

    def __init__(self, segment: Segment, rank: int) -> None: ...
    @property
    def capacity(self) -> int:
        """Bytes of address space; memory is taken as it is used."""

    @property
    def used(self) -> int:
        """Bytes that arrays occupy."""

    def allocate(self, size: int) -> int:
        """The address of fresh memory; 0 when there is no room."""

    def free(self, memory: int) -> None:
        """Give memory back that `allocate` gave out."""

    def contains(self, memory: int) -> bool:
        """Whether the address lies in it."""

    def retire(self) -> None:
        """Take no new arrays; the memory goes with the last one that lies in it, at once if there is none."""

    def after_fork_in_child(self) -> None:
        """Give a forked child memory of its own, with the parent's content; once.

        Raises RuntimeError where the system has none; any access would end the child.
        """

class Request:
    """A collective operation on raw addresses, as one worker submits it; any number of times.

    The addresses must stay valid until it is done.
    """

    def __init__(
        self,
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
        parts: Sequence[tuple[int, int, int, int]] = (),
        contributed: int = 0,
        weight: float = 1.0,
        as_half: bool = False,
        group: int = 0,
        on_device: bool = False,
        failure: str = "",
    ) -> None: ...

class Work:
    """A request in flight."""

    @property
    def done(self) -> bool:
        """Whether the outputs are written or the request has failed."""

    @property
    def error(self) -> KVHvdError | None:
        """Why the request failed; None while it runs and when it succeeded."""

class Activity:
    """What a process is doing, as its engines tell the other workers."""

    def __init__(self) -> None: ...

class Engine:
    """One worker's engine in a segment: matches requests with the other workers' and carries them out.

    In a forked child every request fails with `ShutdownError`.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        timeout_s: float,
        watch_peers: bool = True,
        host: str = "",
        waits_for_busy: bool = False,
        activity: Activity | None = None,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def bytes_in_place(self) -> int:
        """Bytes of this worker's arrays that were reduced where they lie, without staging memory."""

    @property
    def segment(self) -> Segment | None:
        """The memory of its world; None once it is left."""

    def protect(self, arena: Arena) -> None:
        """Keep other workers from changing what lies in this worker's arena once the world is lost."""

    def submit(self, request: Request) -> Work:
        """Submit `request`. Never waits."""

    def run(self, request: Request) -> None:
        """Submit and wait in one. Raises what went wrong, as an exception of ``errors``."""

    def prepare(self, request: Request, result: Any, owner: Any) -> Callable[[], Any]:
        """A function that runs `request`, any number of times, and returns `result`; it keeps both objects alive."""

    def wait(self, work: Work) -> None:
        """Until `work` is done, bounded by the engine's timeout. Raises what went wrong."""

    def wait_for_all(self, limit_s: float) -> bool:
        """Wait until nothing of this worker is pending; False when something still is after `limit_s` seconds.

        A signal's exception, like Ctrl-C's, fails the world first.
        """

    def is_met(self, work: Work) -> bool:
        """Whether all workers have submitted `work`; so if `missed` shows what another one submitted after it."""

    def abort(self, text: str) -> None:
        """Fail all pending and later requests of all workers with this text."""

    def counts(self) -> tuple[int, int]:
        """How many requests of this worker are over, and how many are pending."""

    def tell_line(self, line: str, callers: list[tuple[int, bool]], is_blocked: bool) -> None:
        """Where the program is, for the errors of all workers, its threads in calls of MXNet, whether it is blocked."""

    def health(self) -> KVHvdError | None:
        """The latched failure of the world, or None."""

    def take_batch(self, limit_s: float) -> tuple[int, str, list[DeviceOperation]] | None:
        """For the device thread: what is to be carried out next, with a number and the name of the collective.

        None after `limit_s` seconds, and once the world is lost or left.
        """

    def end_batch(self, number: int, error: BaseException | None = None) -> bool:
        """The device does not touch the arrays of a batch any more; an error loses the world.

        The error's text becomes the fact of one with a fix of its own. Another class than that of a lost world counts
        as a `TransportError`. Returns False for a batch that had ended before.
        """

    def report(self) -> EngineStatistics:
        """What was measured; ends a round (see `Times`)."""

    def start_timeline(self, capacity: int) -> None:
        """Record this worker's operations: up to `capacity` between two calls of `take_timeline`."""

    def stop_timeline(self) -> None:
        """Record nothing more; what is recorded can still be taken."""

    def take_timeline(self) -> tuple[list[TimelineEvent], int]:
        """What was completed since the last call, in that order; and how many operations found no room."""

    def waiting(self, age_s: float) -> list[Waiting] | None:
        """What this worker has waited for, for at least `age_s` seconds; None when nobody can tell just now."""

    def missed(self, most: int, described: bool = False) -> list[Missed] | None:
        """What others have submitted and this worker has not, up to `most`; None when nobody can tell just now.

        `described`: with what they announced. Then no other thread may submit anything at this time.
        """

    def process(self, rank: int) -> tuple[int, str]:
        """A worker's process id (0: it has not joined yet), and how errors name it."""

    def shutdown(self, reason: str = "") -> bool:
        """Leave the world: after the pending requests, or at once and with a reason that the others read.

        Afterwards nothing of the world is held any more, whoever keeps this object. Returns False when the devices of
        others may still use this worker's memory.
        """

class LocalOperations:
    """Operations on this process's own MXNet arrays, through MXNet's engine; asynchronous, but with NaiveEngine.

    Parameters
    ----------
    library_path : str
        MXNet's library.
    naive : bool
        Whether MXNet runs with NaiveEngine.
    """

    def __init__(self, library_path: str, naive: bool) -> None: ...
    def reduce(self, inputs: list[int], output: int, prescale: float = 1.0, postscale: float = 1.0) -> None:
        """Sum arrays of equal dtype and size, given as their handles, times both factors, as several workers do.

        `output` may be one of the inputs. All are dense, and in memory that the CPU reaches. Raises `InputFailedError`
        where MXNet refused it; with NaiveEngine, whatever failed.
        """

    def update(
        self,
        name: str,
        rule: int,
        arrays: list[int],
        how: list[tuple[float, ...]],
        is_mixed: bool,
        scale: int,
    ) -> bool:
        """Do what an operator of MXNet's optimizers does, in one pass; returns whether it is one for these arrays.

        Parameters
        ----------
        name : str
            The operator.
        rule : int
            Its formula, `Rule` of native/reduce/update.hpp.
        arrays : list of int
            Handles: of each parameter its weight, gradient, states and, if `is_mixed`, float32 copy.
        how : list of tuple of float
            Of each parameter lr, wd, eta, number of the step for a correction of moments (or 0), rescale_grad,
            clip_gradient, momentum, beta1, beta2, epsilon, lower_bound, upper_bound.
        is_mixed : bool
            Whether weights and gradients are float16, with float32 copies of the weights.
        scale : int
            Handle of the array that has rescale_grad; 0: it is in `how`.
        """

class Step:
    """The gradients of a Trainer's step, see `MXNetAdapter.prepare`."""

class MXNetAdapter:
    """Submits MXNet arrays through MXNet's own engine, so that nothing blocks and dependencies are kept.

    With NaiveEngine (`naive`) operations are over, and their errors raised, when a call returns.
    """

    def __init__(self, engine: Engine, library_path: str, naive: bool = False, arena: Arena | None = None) -> None: ...
    def is_dense(self, array: int) -> bool:
        """Whether the array can be given to `pushpull` and `broadcast` as it is."""

    def is_plain(self, array: int) -> bool:
        """The same, and it lies on the CPU."""

    def chunk_id(self, array: int) -> int:
        """What tells the storage of arrays apart: equal for views of one array."""

    def pushpull(
        self,
        name: str,
        label: str,
        inputs: list[int],
        outputs: list[int],
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        priority: int = 0,
        as_half: bool = False,
        weight: float = 1.0,
        group: int = 0,
    ) -> None:
        """Reduce `inputs` with those of the other workers into each of `outputs`; asynchronous.

        Operations of one name take part in the order of the calls. For `op`, `as_half`, `weight` and `group` see
        `Request`.
        """

    def pushpull_in_place(
        self,
        name: str,
        label: str,
        array: int,
        priority: int,
        as_half: bool = False,
        op: str = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> int | None:
        """Reduce one array in place; returns its bytes. None, and nothing done, when the case needs a closer look."""

    def prepare(self, gradients: Sequence[tuple[str, str, int, int]]) -> Step | None:
        """What `pushpull_step` takes, of the (name, label, array, priority) of each array; it keeps their memory.

        None when an array needs a closer look.
        """

    def pushpull_step(self, step: Step, as_half: bool = False, op: str = "sum", weight: float = 1.0) -> None:
        """Reduce each array that was prepared in place, as `pushpull` does one after the other; asynchronous.

        Small arrays may share an operation of MXNet: they are ready together, and the error of one is raised by all.
        """

    def await_turn(self, name: str) -> None:
        """Wait until the operations of this name that were called before take part: until MXNet has their arrays."""

    def broadcast(self, name: str, label: str, array: int, root: int = 0, priority: int = 0) -> None:
        """Overwrite `array` with the root's; asynchronous, in turn as in `pushpull`."""

    def exchange(
        self,
        name: str,
        label: str,
        source: int,
        target: int,
        count: int,
        contributed: int,
        parts: Sequence[tuple[int, int, int, int]],
        priority: int,
    ) -> None:
        """Give elements of `source` to the other workers, and write theirs to `target`; asynchronous, in turn.

        `source` may be a view of `target`, or `target` itself. Where it lies in it no part is written.

        Parameters
        ----------
        count : int
            The most elements that a worker gives; equal on all workers.
        contributed : int
            The number of elements, from the first of `source` on, that this worker gives.
        parts : sequence of tuple of int
            Rank, first byte of what that rank gives, number of bytes, and where they go in `target`.
        """

    def new_array(self, shape: Sequence[int], dtype: str) -> int:
        """The NDArrayHandle of a new array in the arena, for the caller to own; 0 when it takes none.

        Its content is unspecified.
        """

    def take_unread_error(self) -> KVHvdError | None:
        """The error of an earlier operation that nobody has seen yet, or None; it is given out once."""

    def after_fork_in_child(self) -> None:
        """Give up threads in a forked child."""

class Transport:
    """What carries messages between the links of hosts."""

def mpi_transport(functions: Mapping[str, int], communicator: int, ranks: Sequence[int], first_tag: int) -> Transport:
    """By MPI.

    Parameters
    ----------
    functions : dict of str to int
        Addresses of MPI's functions, and of its byte datatype and ignored status.
    communicator : int
        MPI's handle.
    ranks : sequence of int
        By host, the rank of its link in the communicator.
    first_tag : int
        Of the four that the link uses; no other link of these processes uses them.
    """

def tcp_transport(connections: Sequence[int]) -> Transport:
    """By TCP.

    Parameters
    ----------
    connections : sequence of int
        By host, the descriptor of a connected socket; -1 for this one. The transport closes them.
    """

class Link:
    """What moves bytes between this host and the others: served by a thread of this process until all have left.

    Parameters
    ----------
    segment : Segment
        The memory of this host's ranks.
    transport : Transport
        The way to the links of the other hosts.
    timeout_s, silence_s : float
        How long an operation may take, and how long another host may be silent.
    build : str
        Equal on all hosts, or the world fails.
    dtype : int
        A code of `DTYPES`: what sums of float32 are rounded to on their way to other hosts.
    """

    def __init__(
        self,
        segment: Segment,
        transport: Transport,
        timeout_s: float,
        silence_s: float,
        build: str,
        dtype: int,
    ) -> None: ...
    def missing(self) -> list[int]:
        """Returns the ranks of hosts whose links were not heard of.

        Raises
        ------
        HorovodInternalError
            There are some, and the world has failed.
        """
    def give_up(self) -> None:
        """Serves it no longer."""

def stop_links(limit_s: float) -> bool:
    """Waits until all links of this process are over, or the limit; returns whether they were."""

def end_within(limit_s: float, text: str) -> None:
    """Ends this process with code 1, and the text on stderr, unless it ends sooner; also while no Python runs."""
