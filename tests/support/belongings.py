"""What a job has on this machine, to see that nothing is left of it; other jobs may run at the same time."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from support.jobs import processes
from support.patience import patient

__all__ = ["Belongings"]

SHARED = Path("/dev/shm")
# MPI names its files so; whether they stay is MPI's affair.
OF_MPI = re.compile(r"sm_segment\.|mpich_shm_|vader_segment\.|open_mpi\.")
# A file of another job may be held by no process for a moment, on its way from one to the next.
LIMIT_S = patient(15)
# Between two looks at /proc, which has no events.
GLANCE_S = 0.02
# Between two looks at the sockets of a job.
NOTE_S = 0.25


class Belongings:
    """Processes, sockets and files in /dev/shm of a job that starts now.

    Parameters
    ----------
    marker : str
        ``NAME=value``, a variable that all processes of the job carry.
    """

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self._files_before = shared_files()
        self._sockets: set[str] = set()

    def note(self) -> None:
        """Remember the sockets that the job has now: a file descriptor in foreign hands would show at the end."""
        self._sockets |= sockets_of(processes(self.marker))

    def note_until_end_of(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        """Remember the sockets that the job has until its launcher ends.

        Raises
        ------
        subprocess.TimeoutExpired
            The launcher has not ended within the limit.
        """
        end = time.monotonic() + limit_s
        while True:
            self.note()
            try:
                process.wait(NOTE_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise
            else:
                return

    def assert_gone(self, limit_s: float = 0.0, about: str = "") -> None:
        """Fail if anything of the job is left; a limit is for processes of a job whose launcher was killed."""
        end = time.monotonic() + limit_s
        while (left := processes(self.marker)) and time.monotonic() < end:
            time.sleep(GLANCE_S)
        assert not left, f"processes are left: {[command_of(pid) for pid in left]}\n{about}"
        assert not self._sockets & open_sockets(), "sockets are left"
        end = time.monotonic() + LIMIT_S
        while files := left_files(self._files_before):
            assert time.monotonic() < end, f"left in {SHARED}: {files}"
            time.sleep(GLANCE_S)


def command_of(pid: int) -> str:
    """Return the command line of a process, for messages."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return f"{pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    return str(pid)


def shared_files() -> set[str]:
    """Return the files in /dev/shm that this user has made, but for those of MPI."""
    found = set()
    for entry in os.scandir(SHARED):
        with contextlib.suppress(FileNotFoundError):
            if not OF_MPI.match(entry.name) and entry.stat().st_uid == os.getuid():
                found.add(entry.name)
    return found


def left_files(before: Collection[str]) -> set[str]:
    """Return the files in /dev/shm that are new and that no process holds.

    Those that a process holds belong to a job that still runs: nobody holds what a job has left that has no process.
    """
    new = shared_files().difference(before)
    if new:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            new.difference_update(files_held_by(pid))
    return new & shared_files()


def files_held_by(pid: str) -> Iterator[str]:
    """Yield the names of the files in /dev/shm that a process has open or mapped."""
    held = []
    with contextlib.suppress(OSError):
        held += [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.append(os.readlink(entry.path))
    return (path[len(f"{SHARED}/") :] for path in held if path.startswith(f"{SHARED}/"))


def sockets_of(pids: Collection[int]) -> set[str]:
    """Return the inodes of the sockets that processes have open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                        found.add(match[1])
    return found


def open_sockets() -> set[str]:
    """Return the inodes of all Unix sockets, and of all TCP sockets that listen."""
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = "0A"
    return {line[6] for line in unix} | {line[9] for line in tcp if line[3] == listening}
