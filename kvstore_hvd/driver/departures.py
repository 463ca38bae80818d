"""Workers that have to go: told to leave, then ended, then killed; nobody is waited for without a limit."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from kvstore_hvd.driver.actions import Actions
from kvstore_hvd.driver.roster import Worker
from kvstore_hvd.driver.settings import Settings

__all__ = ["Departures"]

_NOT_NEEDED = "this worker is not needed any more"
# A worker that the kernel has not ended so long after SIGKILL is taken for gone: it will not run again.
_KILL_TAKES_S = 5.0


class Departures:
    """Sees workers off."""

    def __init__(self, settings: Settings, actions: Actions) -> None:
        self._settings = settings
        self._actions = actions

    def dismiss(self, worker: Worker, now: float) -> None:
        """This worker is not needed any more."""
        worker.leaving, worker.act_at = True, now
        if worker.place is not None:  # else there is nobody yet who could hear it
            trained = worker.joined_at is not None
            worker.act_at += self._settings.exit_timeout_s if trained else self._settings.survivor_time_s
            self.repeat(worker)

    def repeat(self, worker: Worker) -> None:
        """Tell a worker to leave, which has been dismissed."""
        self._actions.tell(worker.id, "leave", text=_NOT_NEEDED)

    def kill(self, worker: Worker, why: str, now: float) -> None:
        """End a worker at once; it counts as crashed, unless it was to leave."""
        worker.killed, worker.act_at = why, now + _KILL_TAKES_S
        self._actions.note("worker_killed", worker=worker.id, why=why)
        self._actions.kill(worker.id, signal.SIGKILL, ended=worker.leaving)

    def act_on_time(self, running: Iterable[Worker], now: float) -> list[Worker]:
        """Do the next step with those that have not gone in time; returns those that are to be taken for gone."""
        gone = []
        for worker in running:
            if worker.act_at is None or now < worker.act_at:
                continue
            if worker.killed:
                gone.append(worker)
            elif worker.told_to_end:
                self.kill(worker, "it did not leave", now)
            else:
                worker.told_to_end, worker.act_at = True, now + self._settings.kill_grace_s
                self._actions.kill(worker.id, signal.SIGTERM, ended=True)
        return gone
