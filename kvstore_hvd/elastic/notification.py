"""Hands on that workers are to come or go, from the launcher to the states in training."""

from __future__ import annotations

import threading
import traceback
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.errors import message
from kvstore_hvd.world import process


class NotificationManager:
    """Tells its listeners of updates. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Any] = []

    def init(self) -> None:
        """Listen to the launcher from now on, if this worker belongs to an elastic job."""
        process.current().init()
        line = process.current().line
        if line is not None:
            line.on_update = self._on_update

    def register_listener(self, listener: Any) -> None:
        """Have ``listener.on_hosts_updated(timestamp, update_res)`` called for every update from now on."""
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Any) -> None:
        """Call this listener no more."""
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Tell the listeners of an update.

        Parameters
        ----------
        timestamp : int
            Grows from one update to the next.
        update_res : int
            A `HostUpdateResult`: all that has changed since the present world was formed.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def _on_update(self, timestamp: int, update_res: int) -> None:
        """As `handle_hosts_updated`, on the thread that listens to the launcher, which an error would end."""
        try:
            self.handle_hosts_updated(timestamp, update_res)
        except Exception as error:  # noqa: BLE001 - a class of the program may raise anything
            fact = f"on_hosts_updated() of the state has raised {type(error).__name__}: {error}"
            fix = "correct it; until then this worker learns only from others that workers come or go."
            details = traceback.format_exc().splitlines()
            log.logger.error(message(fact, operation="elastic.run", details=details, fix=fix))

    def repeat(self) -> None:
        """Tell again of an update that came after the present world was formed.

        States forget what they were told of when they are reset, and there might be no other update for a long time.
        """
        line = process.current().line
        update = None if line is None else line.update
        if update is not None:
            self.handle_hosts_updated(*update)


#: Tells the states of this process that workers are about to come or go. `run` uses it; programs need not.
notification_manager = NotificationManager()
