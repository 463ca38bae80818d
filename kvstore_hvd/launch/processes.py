"""Processes: their start, signals, and their end. No process outlives its job.

Each worker leads a session and process group of its own, which is ended as a whole. The kernel kills the worker when
its daemon dies (PR_SET_PDEATHSIG). Processes that the worker has started become children of the daemon when their
parent ends (PR_SET_CHILD_SUBREAPER). The parent of the daemon is a guard: it inherits and ends these processes when the
daemon is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvstore_hvd.base.cores import RunningClock

#: Seconds between SIGTERM and SIGKILL for processes that workers leave: enough for Python's resource tracker, which
#: removes files in /dev/shm once the other processes of its program have ended.
LEFT_GRACE_S = 1.0
# A process that the kernel does not end in this time after SIGKILL (it waits for a dead file system) is left alone.
_KILLED_S = 2.0
_FIRST_LOOK_S, _LAST_LOOK_S, _GROUP_LOOK_S = 0.005, 0.1, 0.05
# A guard looks this often besides being woken. After so many looks a daemon whose launcher has gone counts as stuck:
# without a fault it ends within six seconds.
_GUARD_LOOK_S, _MOST_LOOKS = 2.0, 4

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True)

# End the job.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# For the workers. On SIGQUIT (Ctrl-\) those that have joined print their Python stacks.
PASSED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
# For the launcher: the end of a process, Ctrl-Z and its end.
_OWN = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT)
#: Has a guard kill its daemon.
KILL_DAEMON = signal.SIGRTMIN


class SignalInbox:
    """Collects the signals that arrive from now on, for the loop of the main thread."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()  # never closed
        for fd in (self._reader, writer):
            os.set_blocking(fd, False)
        # Before the handlers, which do nothing: a signal in between would be lost.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED, *_OWN):
            # An ignored signal stays ignored, for the workers too: nohup, and background jobs of simple shells. Not
            # SIGCHLD: if it is ignored, the kernel keeps no exit codes.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])

    def fileno(self) -> int:
        return self._reader

    def take(self) -> bytes:
        """The numbers of the signals since the last call, in order; does not wait."""
        try:
            return os.read(self._reader, 4096)
        except BlockingIOError:
            return b""


def adopt_orphans() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[set[int]]:
    """Block signals during a fork: a signal to our group could hit the unprepared child. Yields the former mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reset_handlers() -> None:
    # Handlers of the launcher would write to the pipe of its inbox.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def spawn(
    command: Sequence[str], environment: dict[str, str], streams: Sequence[int | None], cores: Iterable[int] = ()
) -> int:
    """Start a process in its own session; returns its process id, which is also its group and session."""
    # `streams`: its descriptors 0 to 2, None for ours. `cores`: to pin it to. The caller reaps it with waitpid. For the
    # main thread only: the kernel kills the process when the thread ends that has started it.
    us, pinned = os.getpid(), set(cores)

    def prepare() -> None:
        _reset_handlers()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != us:  # the parent died before the call
            os._exit(1)
        if pinned:
            os.sched_setaffinity(0, pinned)

    with _signals_blocked() as blocked:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - there are no other threads
        )
    process.returncode = 0  # the object must not call waitpid
    return process.pid


def run_guarded(
    name: str, keep: Collection[int], control: int, run: Callable[[], int], grace_s: float, *, fork: bool = True
) -> int:
    """Run a function in a daemon that outlives us, with these descriptors; returns the pid of the daemon's guard."""
    # The guard kills a daemon that does not see the end of its connection `control`. It ends the processes that the
    # daemon has left by SIGTERM, and after `grace_s` by SIGKILL. It exits with the code of the daemon, or with 128 +
    # signal. Without `fork`, this process becomes the guard.
    with _signals_blocked() as blocked:
        if fork and (pid := os.fork()):
            return pid
        code = 1
        try:
            gc.freeze()  # objects of the launcher must not close descriptors, whose numbers are used again here
            signal.set_wakeup_fd(-1)
            _reset_handlers()
            adopt_orphans()
            daemon = os.fork()
            role = "guard" if daemon else "daemon"
            _detach(f"job-{role} {name}".encode(), {control} if daemon else {0, 1, 2, control, *keep})
            if daemon:
                code = _guard(daemon, control, min(LEFT_GRACE_S, grace_s))
            else:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                code = run()
        except BaseException:  # noqa: BLE001 - nothing of the launcher may run in these processes
            import traceback  # the launcher starts without it

            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)


def _detach(name: bytes, keep: Collection[int]) -> None:
    """Give a forked process a session and a name, and close all descriptors but these."""
    # With our name, `pkill kvhvdrun` would hit both. With our sockets, peers would not see the end of the launcher.
    with contextlib.suppress(OSError):  # a remote shell has made it the leader of a session
        os.setsid()
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)  # its first 15 bytes
    start, end = map(int, _stat(os.getpid())[45:47])  # fields 48 and 49 of proc(5): arg_start, arg_end
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in keep:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(fd)
    if 0 < start < end:  # the command line that `ps` shows
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, min(len(name), end - start - 1))


def _guard(daemon: int, control: int, grace_s: float) -> int:
    """Wait for the daemon, and end the processes that it has left. All signals but SIGKILL are blocked."""
    looks, poll = 0, select.poll()
    poll.register(control, 0)  # reports the end of the connection only
    while not (ended := os.waitpid(daemon, os.WNOHANG))[0]:
        arrived = signal.sigtimedwait({signal.SIGCHLD, KILL_DAEMON}, _GUARD_LOOK_S)
        looks += arrived is None and bool(poll.poll(0))
        if looks >= _MOST_LOOKS or (arrived is not None and arrived.si_signo == KILL_DAEMON):
            os.kill(daemon, signal.SIGKILL)
    os.close(control)  # the launcher learns of the end of the daemon
    for pause_s in end_children(grace_s):
        time.sleep(pause_s)
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def descends_from(pid: int, worker: int) -> bool:
    """Whether a process is this worker, is in its session, or is a descendant of it."""
    try:
        if pid == worker or os.getsid(pid) == worker:  # the worker itself may have ended
            return True
        while pid not in (0, 1, worker):
            pid = int(_stat(pid)[1])
    except OSError:
        return False  # it has ended
    return pid == worker


def share_of_cores(cores: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """The cores of one worker: equal runs of neighbours; with more workers than cores, one core each, in turn."""
    if count >= len(cores):
        return (cores[place % len(cores)],)
    return tuple(cores[place * len(cores) // count : (place + 1) * len(cores) // count])


def _stat(pid: int) -> list[bytes]:
    """Fields of ``/proc/PID/stat`` from the state on. Raises OSError when there is no such process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # the name is in parentheses and may contain anything


def _running() -> Iterator[tuple[int, list[bytes]]]:
    """All processes except zombies, with their `_stat`."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = _stat(int(entry))
                if stat[0] not in (b"Z", b"X"):
                    yield int(entry), stat


def ask(pid: int, number: int) -> bool:
    """Send a signal to a process if it has a handler for it; whether it has. Raises OSError if there is no process."""
    with open(f"/proc/{pid}/status", "rb") as file:
        (caught,) = (int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:"))
    if caught >> number - 1 & 1:
        os.kill(pid, number)
        return True
    return False


def children() -> set[tuple[int, bytes]]:
    """The running children of this process, each with its start time."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # it has none
    us = str(os.getpid()).encode()
    return {(pid, stat[19]) for pid, stat in _running() if stat[1] == us}


def end_children(grace_s: float, spare: Collection[tuple[int, bytes]] = ()) -> Iterator[float]:
    """End all children, and their orphans, except those in `spare`; yields seconds to wait."""
    # Children are not reaped here, so no other process can have their numbers.
    clock = RunningClock()
    start, pause_s, told = clock.now(), _FIRST_LOOK_S, set[tuple[int, bytes]]()
    while (found := children().difference(spare)) and (spent_s := clock.now() - start) < grace_s + _KILLED_S:
        for child in found if spent_s >= grace_s else found - told:
            with contextlib.suppress(OSError):  # it belongs to another user
                os.kill(child[0], signal.SIGTERM if spent_s < grace_s else signal.SIGKILL)
        told |= found
        # They may fork while they are being killed.
        yield min(pause_s, grace_s - spent_s) if spent_s < grace_s else _FIRST_LOOK_S
        pause_s = min(2 * pause_s, _LAST_LOOK_S)


class Reaper:
    """Reaps children, adopted orphans too; leaders of process groups with their groups."""

    # A leader that has ended stays unreaped until its group is empty: until then the kernel does not use its number
    # again, so that a signal to the group cannot hit other processes. The group gets SIGTERM at once, and SIGKILL after
    # the grace.

    def __init__(self, grace_s: float = LEFT_GRACE_S) -> None:
        self._grace_s = grace_s
        self._clock = RunningClock()
        self._leaders: set[int] = set()  # that run
        self._kill_at: dict[int, float] = {}  # by unreaped leader: when its group is killed

    def add(self, leader: int) -> None:
        self._leaders.add(leader)

    def signal(self, leader: int, number: int) -> None:
        """Send a signal to the group of a leader, as a terminal would; SIGKILL to the leader only."""
        if leader not in self._leaders:
            return
        if number == signal.SIGQUIT:  # it would end shells, and workers that have not joined yet
            for pid, stat in _running():
                if int(stat[2]) == leader:
                    with contextlib.suppress(OSError):
                        ask(pid, number)
            return
        with contextlib.suppress(OSError):
            (os.kill if number == signal.SIGKILL else os.killpg)(leader, number)

    def reap(self) -> list[tuple[int, int]]:
        """The children that have ended since the last call: process id, and exit code or -signal."""
        # While a group is not empty, only leaders are looked at.
        ended = []
        while True:
            now = self._clock.now()
            for leader in list(self._leaders):
                code = _look(os.P_PID, leader)
                if code is not None:
                    self._leaders.remove(leader)
                    self._kill_at[leader] = now + self._grace_s
                    with contextlib.suppress(OSError):
                        os.killpg(leader, signal.SIGTERM)
                    ended.append(code)
            for leader, kill_at in list(self._kill_at.items()):
                if any(int(stat[2]) == leader for _, stat in _running()):
                    if now < kill_at:
                        continue
                    with contextlib.suppress(OSError):
                        os.killpg(leader, signal.SIGKILL)
                os.waitpid(leader, 0)
                del self._kill_at[leader]
            other = _look(os.P_ALL, 0) if not self._kill_at else None
            if other is None:
                return ended
            if other[0] not in self._leaders:
                os.waitpid(other[0], 0)
                ended.append(other)

    def wait_s(self) -> float:
        """Seconds until the next call of `reap` even if no child ends."""
        return _GROUP_LOOK_S if self._kill_at else float("inf")


def _look(kind: int, pid: int) -> tuple[int, int] | None:
    """A child that has ended, and its exit code or -signal; it is not reaped."""
    info = None
    with contextlib.suppress(ChildProcessError):
        info = os.waitid(kind, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_pid, info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
