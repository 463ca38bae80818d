"""Start workers so that none of them, nor anything they start, outlives the launcher.

Four nets, because each has holes. Each worker leads a session and process group of its own, which is ended as a whole
(reaper.py). The kernel kills a worker when the launcher dies (PR_SET_PDEATHSIG), which does not reach what the worker
started. All of that carries a mark of the job, and the launcher adopts orphans (PR_SET_CHILD_SUBREAPER), so that
processes which left their group are found (belonging.py). And a guard process, which survives even SIGKILL of the
launcher, ends whatever belongs to the job when the launcher's end of a pipe closes (guard.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence

from kvstore_hvd.launcher.belonging import mark_of, mark_this_process

__all__ = [
    "adopt_orphans",
    "descends_from",
    "detach",
    "fork",
    "share_of_cores",
    "signals_blocked",
    "spawn",
]

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends. Without effect on kernels that cannot."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """Hold signals back, for a fork: the child would take those to our group for its own, or die of them half made."""
    # Yields the signals that were blocked before.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spawn(
    command: Sequence[str],
    environment: dict[str, str],
    stdin: int | None,
    stdout: int | None,
    stderr: int | None,
    job: bytes,
    cores: Iterable[int] = (),
    keep: Iterable[int] = (),
) -> int:
    """Start a worker in its own session; returns its process id, which is also its group and session."""
    # `stdin`, `stdout` and `stderr` are descriptors, or None to share the launcher's; it has those of `keep` too. `job`
    # is the variable that marks what belongs together, see `belonging`. `cores` pins the worker. The caller reaps the
    # process with waitpid. Must be called from the launcher's main thread: the worker dies with the thread that started
    # it.
    launcher = os.getpid()
    pinned = set(cores)
    mark = mark_of(job)
    caught = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]

    def prepare() -> None:
        # The launcher's handlers would write to the socket that the child still shares with it.
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the call
            os._exit(1)
        mark_this_process(mark)
        if pinned:
            os.sched_setaffinity(0, pinned)

    with signals_blocked() as blocked:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=tuple(keep),
            preexec_fn=prepare,  # noqa: PLW1509 - other threads of ours only write: it needs no lock of theirs
        )
    process.returncode = 0  # reaped by our own waitpid; the object must not wait too
    return process.pid


def fork(name: bytes, streams: Sequence[int], keep: Collection[int], job: bytes) -> int:
    """Fork a process that outlives us; returns as os.fork. In the child see `detach`; signals are not handled there."""
    mark = mark_of(job)
    with signals_blocked():
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            detach(name, streams, keep)
            mark_this_process(mark)
    return pid


def detach(name: bytes, streams: Sequence[int], keep: Collection[int]) -> None:
    """Give a forked process a session and a name, and of our descriptors only `streams`, as 0 to 2, and `keep`."""
    # With our name, `pkill kvhvdrun` would hit both. Holding our streams, `kvhvdrun ... | reader` would stay open after
    # our death; and holding our sockets, others would take us for alive.
    os.setsid()
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
    for fd in [int(entry) for entry in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(fd)
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)  # its first 15 bytes
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5): arg_start, arg_end
    if 0 < start < end:  # the command line lies where the kernel has put it
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, min(len(name), end - start - 1))


def descends_from(pid: int, worker: int) -> bool:
    """Whether a process is this worker, is in its session, or was started by it or by what it has started."""
    try:
        if os.getsid(pid) == worker:
            return True
        while pid not in (0, 1, worker):
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return False  # it has ended
    return pid == worker


def share_of_cores(cores: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """The cores of one worker: equal runs of neighbours; with more workers than cores, one core each, in turn."""
    if count >= len(cores):
        return (cores[place % len(cores)],)
    return tuple(cores[place * len(cores) // count : (place + 1) * len(cores) // count])
