"""Start workers so that none of them, nor anything they start, outlives the launcher.

Four nets, because each has holes. Each worker leads a session and process group of its own, which is killed as a
whole. The kernel kills a worker when the launcher dies (PR_SET_PDEATHSIG), which does not reach what the worker
started. The launcher adopts orphans (PR_SET_CHILD_SUBREAPER), so that processes which left their group are found. And
a guard process, which survives even SIGKILL of the launcher, kills whatever belongs to the job when the launcher's end
of a pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "Guard",
    "adopt_orphans",
    "descends_from",
    "job_processes",
    "kill_job",
    "reap",
    "share_of_cores",
    "spawn",
    "usable_cores",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends. Without effect on kernels that cannot."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """Hold signals back, for a fork: the child would take those to our group for its own, or die of them half made.

    Yields the signals that were blocked before.
    """
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
    cores: Iterable[int] = (),
    *,
    outlives: bool = False,
    keep: Iterable[int] = (),
) -> int:
    """Start a worker in its own session; returns its process id, which is also its group and session.

    `stdin`, `stdout` and `stderr` are descriptors, or None to share the launcher's; it has those of `keep` too. `cores`
    pins the worker. The caller reaps the process with waitpid. Must be called from the launcher's main thread: the
    worker dies with the thread that started it, unless it `outlives` the launcher.

    Raises
    ------
    OSError
        The command cannot be executed.
    """
    launcher = os.getpid()
    pinned = set(cores)
    caught = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]

    def prepare() -> None:
        # The launcher's handlers would write to the socket that the child still shares with it.
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if not outlives:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:  # it died before the call
                os._exit(1)
        if pinned:
            os.sched_setaffinity(0, pinned)

    with _signals_blocked() as blocked:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=tuple(keep),
            preexec_fn=prepare,  # noqa: PLW1509 - there are no other threads
        )
    process.returncode = 0  # reaped by our own waitpid; the object must not wait too
    return process.pid


def reap() -> Iterator[tuple[int, int]]:
    """Collect every child that has ended, adopted orphans too.

    Yields
    ------
    int, int
        Its process id, and its exit code, or minus the signal that killed it.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def job_processes(variable: bytes, sessions: Iterable[int], root: int = 0, spare: Iterable[int] = ()) -> list[int]:
    """Find the running processes of a job.

    Parameters
    ----------
    variable : bytes
        ``b'NAME=value'``: processes that have it in their environment belong to the job.
    sessions : iterable of int
        Sessions (and process groups) of the workers.
    root : int
        Descendants of this process belong to the job too; 0 for none. It does not itself, nor does the caller.
    spare : iterable of int
        Processes that do not belong to the job whatever else they are.

    Returns
    -------
    list of int
        Process ids, zombies left out.
    """
    sessions = set(sessions)
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name stands in parentheses and may contain anything.
                state, parent, group, session = file.read().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            parents[pid] = int(parent)
            if int(group) in sessions or int(session) in sessions:
                found.add(pid)
                continue
            with open(f"/proc/{entry}/environ", "rb") as file:
                if variable in file.read().split(b"\0"):
                    found.add(pid)
        except OSError:
            continue  # it ended, or belongs to another user
    if root:
        for pid in parents:
            ancestor = parents.get(pid, 0)
            while ancestor not in (0, 1, root):
                ancestor = parents.get(ancestor, 0)
            if ancestor == root:
                found.add(pid)
    return sorted(found - {root, os.getpid(), *spare})


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


def kill_job(find: Callable[[], list[int]], rounds: int = 50) -> None:
    """SIGKILL what `find` returns until it finds nothing: processes may fork while they are being killed."""
    for attempt in range(rounds):
        pids = find()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if attempt:
            time.sleep(0.01)  # being killed takes the kernel a moment, and others' children give no event


class Guard:
    """A process that kills the job when the launcher disappears without having called `close`."""

    def __init__(self, variable: bytes) -> None:
        read, self._write = os.pipe()
        with _signals_blocked():
            self.pid = os.fork()
            if self.pid == 0:  # signals stay blocked: only SIGKILL ends it early
                try:
                    os.close(self._write)
                    self._watch(read, variable)
                finally:
                    os._exit(0)
        os.close(read)

    def add(self, session: int) -> None:
        """Tell the guard the session of a worker."""
        # If somebody killed the guard, the other nets remain.
        with contextlib.suppress(OSError):
            os.write(self._write, f"{session}\n".encode())

    def remove(self, session: int) -> None:
        """This worker is gone: its number may come to belong to others."""
        with contextlib.suppress(OSError):
            os.write(self._write, f"-{session}\n".encode())

    def close(self) -> None:
        """The launcher has cleaned up: the guard ends without doing anything."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"done\n")
        os.close(self._write)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    @staticmethod
    def _watch(read: int, variable: bytes) -> None:
        os.setsid()  # out of reach of the terminal's Ctrl-C
        # Holding the launcher's streams would keep `kvhvdrun ... | reader` open after the launcher's death.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        text = b""
        while True:
            data = os.read(read, 4096)
            if not data:
                break
            text += data
        words = text.split()
        if b"done" not in words:
            numbers = [int(word) for word in words]
            sessions = {number for number in numbers if number > 0} - {-number for number in numbers if number < 0}
            kill_job(lambda: job_processes(variable, sessions))


def usable_cores() -> list[int]:
    """The cores that this process may run on, not more than the control group's share of CPU time."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = cores[: max(1, -(-int(quota) // int(period)))]
    except (OSError, ValueError):
        pass  # no limit, or another version of control groups
    return cores


def share_of_cores(cores: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """The cores of one worker: equal runs of neighbours; with more workers than cores, one core each, in turn."""
    if count >= len(cores):
        return (cores[place % len(cores)],)
    return tuple(cores[place * len(cores) // count : (place + 1) * len(cores) // count])
