"""Worlds after deaths under plain mpirun: those who live form a smaller one in place (Open MPI 5, ULFM).

ULFM (User-Level Failure Mitigation) lets MPI be used after processes have died: `Shrink` makes a communicator of those
who live, and `Agree` has all of them know whether what followed has succeeded. Both wait for every living process of
the communicator, without a limit and at the full load of a core. So workers first tell each other by short messages
that they have come, and shrink when nobody is missed any more; and a thread of its own does that, for others wait for
it no longer than they want to.

ULFM knows the dead only. A process that is stopped or hangs is alive, and the others cannot go on without it: it has to
be killed first, see `UlfmMembership.next_world`.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.base.clocks import RunningClock
from kvstore_hvd.config import MPILaunch, config
from kvstore_hvd.errors import LaunchError, message, rank_list
from kvstore_hvd.worlds.leaving import early_end
from kvstore_hvd.worlds.membership import Membership
from kvstore_hvd.worlds.mpi.calls import call_within
from kvstore_hvd.worlds.mpi.exit import finalize_without_waiting
from kvstore_hvd.worlds.mpi.members import Members
from kvstore_hvd.worlds.mpi.world import initialised_mpi, introduce, world_of
from kvstore_hvd.worlds.topology import World

__all__ = ["UlfmMembership", "why_unavailable"]

# MPI gives no event to wait for, and its own waits spin.
_LOOK_S = 0.002
_LOOK_FINISHED_S = 0.05
_ATTENDANT_ENDS_S = 1.0
# A fault of the program itself ends all workers at about the same time.
_ALL_FAIL_S = 1.0
# mpirun tells of a death within milliseconds.
_REPORTED_S = 5.0
# A worker that is seen stopped for so long is not about to go on.
_STOPPED_S = 0.5


def why_unavailable(launch: MPILaunch | None) -> str:
    """Why the workers of this job cannot go on without one that died; empty if they can."""
    mpi = initialised_mpi()
    if mpi is None:
        return "it is not elastic, nor started by an mpirun that survives deaths (Open MPI 5, `mpirun --with-ft ulfm`)."
    vendor, version = mpi.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    if vendor != "Open MPI" or version[0] < 5:
        return f"{name} ends the whole job when a process dies; Open MPI 5 can go on (`mpirun --with-ft ulfm`)."
    if launch is None or not launch.recovers:
        return f"{name} was started without `--with-ft ulfm`, and ends the whole job when a process dies."
    if not hasattr(mpi.Comm, "Shrink"):
        return "this mpi4py does not know what to do after deaths; mpi4py 4.1 does."
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return "the program has initialised MPI without MPI_THREAD_MULTIPLE."
    return ""


class UlfmMembership(Membership):
    """Where a worker's worlds come from, one after the other, while processes die. Any thread may call its methods."""

    # Collective over the ranks of `world`.

    def __init__(self, world: World) -> None:
        super().__init__()
        mpi = initialised_mpi()
        assert mpi is not None
        self._mpi = mpi
        self._pid = os.getpid()
        self._generation = world.topology.generation
        self._lock = threading.Lock()
        self._failed = ""  # why there will be no further world
        self._is_finished = False
        self._attendant: threading.Thread | None = None
        # Exit handlers run in the reverse order.
        finalize_without_waiting(mpi)
        atexit.register(self._end)
        communicator = world.communicator
        limit_s = config().start_timeout_s
        try:
            ranks = call_within(limit_s, lambda: introduce(communicator, self._generation))
        except (TimeoutError, mpi.Exception) as error:
            text = f"the workers did not find each other by MPI: {str(error) or f'it took more than {limit_s:g} s'}."
            raise LaunchError(message(text, **world.topology.speaker, fix="look at what they have printed.")) from error
        self._members = Members(mpi, communicator, ranks)

    def next_world(self, cause: str, text: str) -> World:
        """Form the next world of those who live, after the present one was lost or left; each of them calls it."""
        # Waits for all who live. One that does not come within KVHVD_TIMEOUT, as long as it may miss any other
        # operation, is killed if a world was lost: whether it is stopped or hangs, the others could not go on before it
        # ends. After a timeout, a worker that is stopped (SIGSTOP) and stays so is killed after half a second. That is
        # possible for processes of this user on this host, and is logged. Time in which this worker itself was stopped
        # does not count.
        log.logger.debug("forming the next world (%s): %s", cause, text)
        with self._lock:
            self._stop_attending()
            if self._failed:
                raise self._failure(self._failed)
            self._members.tell_come()
            self._gather(cause)
            return self._form_within(config().start_timeout_s)

    def finished(self) -> None:
        """Tell that training is over here: the others need not wait for this worker, should they lose one."""
        # It goes on to answer for as long as its process lives, because `Shrink` needs every living process.
        with self._lock:
            if self._failed or self._attendant is not None:
                return
            self._is_finished = True
            self._members.tell_finished()
            self._attendant = threading.Thread(target=self._attend, name="kvstore_hvd-finished", daemon=True)
            self._attendant.start()

    # -- Waiting for those who live -----------------------------------------------------------------------------------

    def _gather(self, cause: str) -> None:
        """Return once everyone has come, has finished, or is dead."""
        members, clock, limit_s = self._members, RunningClock(), config().timeout_s
        stopped = _Stopped(members)
        while True:
            absent = members.absent()
            if not absent:
                return
            if cause == "timeout":
                for rank in stopped.ranks(absent):
                    self._kill(rank, "it is stopped, and the others have waited for it long enough")
            if clock.elapsed() > limit_s:
                if cause not in ("lost", "timeout", "meeting"):
                    fact = f"{rank_list(absent)} did not come to the next world within {limit_s:g} s."
                    details = [members.describe(rank) for rank in absent]
                    raise self._failure(fact, details=details, fix="call reset() on every worker.")
                for rank in absent:
                    self._kill(rank, f"it did not come to the next world within {limit_s:g} s")
            time.sleep(_LOOK_S)

    def _form_within(self, limit_s: float) -> World:
        """Form the world, and kill members that are stopped meanwhile."""
        members = self._members
        stopped, clock = _Stopped(members), RunningClock()

        def look() -> None:
            for rank in stopped.ranks(members.living()):
                self._kill(rank, "it is stopped while the workers form the next world")
            unreported = members.unreported() if clock.elapsed() > _REPORTED_S else []
            if unreported:
                fact = f"{rank_list(unreported)} ended, but mpirun has not reported it, so MPI still waits for it."
                details = [
                    "mpirun reports a process that was ended by a signal or with exit code 0, and only those that it "
                    "started itself."
                ]
                fix = "start the job again from its last checkpoint; `kvhvdrun --min-np` recovers from every end."
                raise self._failure(fact, details=details, fix=fix)

        try:
            world = call_within(limit_s, self._form, look)
        except TimeoutError:
            text = f"MPI has not formed the next world within {limit_s:g} s after all had come."
            living = rank_list([members.own, *members.living()])
            raise self._failure(text, details=[f"alive: {living}"]) from None
        except self._mpi.Exception as error:
            raise self._failure(f"MPI could not form the next world: {error}.") from error
        assert world is not None
        return world

    def _kill(self, rank: int, why: str) -> None:
        who = self._members.describe(rank)
        fault = self._members.kill(rank)
        if fault:
            fix = "end it by hand; MPI cannot go on without a process that lives."
            raise self._failure(f"{who} does not come to the next world, and cannot be killed: {fault}.", fix=fix)
        log.logger.warning("killed %s: %s", who, why)

    # -- Forming ------------------------------------------------------------------------------------------------------

    def _form(self, is_leaving: bool = False) -> World | None:
        """Shrink until nobody dies meanwhile; None for a worker that takes no part. May block."""
        mpi, base = self._mpi, self._members.communicator
        while True:
            try:
                shrunk = base.Shrink()
            except mpi.Exception as error:
                if not self._is_death(error):
                    raise
                continue
            shrunk.Set_errhandler(mpi.ERRORS_RETURN)
            # Nobody revokes before all have it: Open MPI 5.0.11 crashes where a revocation comes into `Shrink`.
            if not self._agree(shrunk, True):
                continue
            formed, failure = None, None
            try:
                formed = self._introduce(shrunk, is_leaving)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this worker
                failure = error
                shrunk.Revoke()
            is_formed = self._agree(shrunk, failure is None)
            if failure is not None and not self._is_death(failure):
                raise failure
            if is_formed:
                break
        if is_leaving:
            return None
        assert formed is not None
        members, generation = formed
        self._members, self._generation = members, generation
        world = world_of(members.communicator, members.introductions, generation)
        return dataclasses.replace(world, lost=members.lost)

    def _introduce(self, shrunk: Any, is_leaving: bool) -> tuple[Members, int] | None:
        ranks = introduce(shrunk, self._generation, is_leaving)
        communicator = shrunk
        if any(each.is_leaving for each in ranks):
            communicator = shrunk.Split(self._mpi.UNDEFINED if is_leaving else 0, shrunk.rank)
            ranks = [each for each in ranks if not each.is_leaving]
        if is_leaving:
            return None
        communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
        return Members(self._mpi, communicator, ranks), 1 + max(each.generation for each in ranks)

    def _agree(self, shrunk: Any, is_formed: bool) -> bool:
        """Whether all have formed it. The same on all workers, whoever dies meanwhile."""
        try:
            return bool(shrunk.Agree(int(is_formed)))
        except self._mpi.Exception as error:
            if not self._is_death(error):
                raise
            return False

    def _is_death(self, error: Exception) -> bool:
        """Whether an error tells that another worker has died while the next world was formed."""
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            return False
        log.logger.debug("forming the next world: %s", error)
        return error.Get_error_class() in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)

    # -- A worker that has finished -----------------------------------------------------------------------------------

    def _attend(self) -> None:
        members = self._members
        while self._is_finished and not self._mpi.Is_finalized():
            if members.somebody_came():
                self._failed = "this worker had finished its training, and the others have gone on without it."
                try:
                    self._form(is_leaving=True)
                except self._mpi.Exception as error:
                    log.logger.warning("the other workers may not form another world without this one: %s", error)
                return
            time.sleep(_LOOK_FINISHED_S)

    def _stop_attending(self) -> None:
        """The process ends, or training has begun again on this worker (unless the others have gone on already)."""
        self._is_finished = False
        attendant, self._attendant = self._attendant, None
        if attendant is not None:
            attendant.join(_ATTENDANT_ENDS_S)

    def _end(self) -> None:
        """The process ends. Let the others go on without it, should its program have failed."""
        members, is_expected = self._members, self._is_finished or bool(self._failed)
        self._stop_attending()
        if is_expected or self._pid != os.getpid() or self._mpi.Is_finalized() or not early_end():
            return
        members.tell_failed()
        clock = RunningClock()
        while not members.have_all_failed():  # then there is nobody to tell, and the exit code is worth more
            if members.somebody_came() or clock.elapsed() > _ALL_FAIL_S:
                log.logger.warning("this worker ends by SIGKILL: mpirun tells the others of ends by a signal only")
                native.end_by_signal_if_failed()
                return
            time.sleep(_LOOK_S)

    def _failure(self, fact: str, *, details: Sequence[str] = (), fix: str = "") -> LaunchError:
        """The error for `fact`, after which there are no further worlds."""
        self._failed = fact
        size = len(self._members.introductions)
        fix = fix or "start the job again from its last checkpoint."
        return LaunchError(message(fact, rank=self._members.own, size=size, details=details, fix=fix))


class _Stopped:
    """Which workers stay stopped."""

    def __init__(self, members: Members) -> None:
        self._members, self._clock = members, RunningClock()
        self._since: dict[int, float] = {}

    def ranks(self, among: list[int]) -> list[int]:
        """Those that have been stopped since half a second of calls."""
        now = self._clock.elapsed()
        self._since = {r: self._since.get(r, now) for r in among if self._members.is_stopped(r)}
        return [rank for rank, since in self._since.items() if now - since > _STOPPED_S]
