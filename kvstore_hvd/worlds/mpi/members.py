"""The processes behind the ranks of an MPI communicator: who has come, who is stopped, who is dead."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore_hvd.errors import rank_list
from kvstore_hvd.worlds.mpi.world import Introduction, start_time
from kvstore_hvd.worlds.topology import Host

__all__ = ["Members"]

# Tags of empty messages.
_COME, _FINISHED, _FAILED = 1, 2, 3


class Members:
    """The ranks of a communicator that is ours alone, as one of them sees them. Any thread may call its methods."""

    def __init__(self, mpi: Any, communicator: Any, introductions: Sequence[Introduction]) -> None:
        self.communicator = communicator
        self.introductions = tuple(introductions)
        self._mpi = mpi
        self._nothing = [None, 0, mpi.BYTE]
        self.own = communicator.rank
        self._lock = threading.Lock()
        self._dead: set[int] = set()
        self._heard: dict[int, set[int]] = {_COME: set(), _FINISHED: set(), _FAILED: set()}
        self._sent: list[Any] = []
        self._watches: dict[int, int] = {}  # pidfd of each rank on this host
        self._poll = select.poll()
        here = Host.here().identity
        for rank, each in enumerate(self.introductions):
            if rank != self.own and each.host.identity == here:
                self._watch(rank, each)

    def __del__(self) -> None:
        for fd in self._watches.values():
            with contextlib.suppress(OSError):
                os.close(fd)

    # -- Messages -----------------------------------------------------------------------------------------------------

    def tell_come(self) -> None:
        """Tell the others that this worker wants the next world."""
        self._tell(_COME)

    def tell_finished(self) -> None:
        """Tell the others that this worker wants no further world."""
        self._tell(_FINISHED)

    def tell_failed(self) -> None:
        """Tell the others that this worker's program has failed, and that it will end."""
        self._tell(_FAILED)

    def have_all_failed(self) -> bool:
        """Whether none of the others goes on."""
        with self._lock:
            self._look()
            return len(self._dead | self._heard[_FAILED]) == len(self.introductions) - 1

    def absent(self) -> list[int]:
        """The living who have neither come nor finished."""
        with self._lock:
            self._look()
            known = self._dead | self._heard[_COME] | self._heard[_FINISHED]
            return [rank for rank in range(len(self.introductions)) if rank != self.own and rank not in known]

    def living(self) -> list[int]:
        """The others who are not known to be dead."""
        with self._lock:
            self._look()
            return [rank for rank in range(len(self.introductions)) if rank != self.own and rank not in self._dead]

    def somebody_came(self) -> bool:
        """Whether anyone wants the next world."""
        with self._lock:
            self._look()
            return bool(self._heard[_COME])

    def lost(self) -> str:
        """Why these ranks cannot be a world any more; empty as long as they can."""
        with self._lock:
            self._look()
            if self._dead:
                return f"{rank_list(self._dead)} died."
            if self._heard[_COME]:
                return f"{rank_list(self._heard[_COME])} gave it up."
            return ""

    def unreported(self) -> list[int]:
        """The dead whom MPI counts among the living: its launcher has not told."""
        failed = self.communicator.Get_failed()
        told = self._mpi.Group.Translate_ranks(failed, None, self.communicator.group)
        with self._lock:
            self._look()
            return sorted(self._dead - set(told))

    # -- Processes ----------------------------------------------------------------------------------------------------

    def is_stopped(self, rank: int) -> bool:
        """Whether the process is on this host, and stopped by a signal."""
        if rank not in self._watches:
            return False
        try:
            with open(f"/proc/{self.introductions[rank].process}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state == b"T"

    def kill(self, rank: int) -> str:
        """Kill the process (SIGKILL), and return why that is not possible; empty if it was."""
        each = self.introductions[rank]
        if rank not in self._watches:
            here = each.host.identity == Host.here().identity
            return "this system has no pidfds (Linux 5.3)" if here else f"it is on another host, {each.host.name}"
        if each.user != os.geteuid():
            return f"it belongs to another user ({each.user})"
        try:
            signal.pidfd_send_signal(self._watches[rank], signal.SIGKILL)
        except ProcessLookupError:
            pass  # it is dead already
        except OSError as error:
            return str(error)
        with self._lock:
            self._dead.add(rank)
        return ""

    def describe(self, rank: int) -> str:
        """Name a rank for people."""
        each = self.introductions[rank]
        return f"rank {rank} ({each.host.name}, pid {each.process})"

    # -- Below it -----------------------------------------------------------------------------------------------------

    def _watch(self, rank: int, introduction: Introduction) -> None:
        try:
            watch = os.pidfd_open(introduction.process)
            # The number may be that of another process, if this one died after it had introduced itself.
            began = start_time(introduction.process)
            if began and introduction.started not in (0, began):
                os.close(watch)
                raise ProcessLookupError
        except ProcessLookupError:
            self._dead.add(rank)
        except (OSError, AttributeError):
            pass  # no pidfds here; MPI tells of deaths as well, a little later
        else:
            self._watches[rank] = watch
            self._poll.register(watch, select.POLLIN)

    def _tell(self, tag: int) -> None:
        with self._lock:
            for rank in range(len(self.introductions)):
                if rank != self.own and rank not in self._dead:
                    with self._deaths_of(rank):
                        self._sent.append(self.communicator.Isend(self._nothing, rank, tag))

    def _look(self) -> None:
        for rank in range(len(self.introductions)):
            if rank == self.own or rank in self._dead:
                continue
            for tag, heard in self._heard.items():
                if rank in heard:
                    continue
                with self._deaths_of(rank):
                    if self.communicator.Iprobe(rank, tag):
                        self.communicator.Recv(self._nothing, rank, tag)
                        heard.add(rank)
        gone = {fd for fd, _ in self._poll.poll(0)}
        self._dead.update(rank for rank, watch in self._watches.items() if watch in gone)

    @contextlib.contextmanager
    def _deaths_of(self, rank: int) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            if error.Get_error_class() not in (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING):
                raise
            self._dead.add(rank)
