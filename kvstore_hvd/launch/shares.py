"""What each worker of an elastic job gets of its host's cores."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore_hvd.base.cores import usable_cores
from kvstore_hvd.launch.processes import share_of_cores
from kvstore_hvd.launch.state import Slot, Slots

__all__ = ["Shares"]


class Shares:
    """Cores, and threads of OpenMP."""

    def __init__(self, bind: bool, environment: Mapping[str, str], max_np: int) -> None:
        self._bind = bind
        self._chosen = bool(environment.get("OMP_NUM_THREADS"))
        self._max_np = max_np
        self._threads: int | None = None
        self._cores = usable_cores()

    def of(self, slot: Slot, slots: Slots) -> tuple[dict[str, str], tuple[int, ...]]:
        """Variables for the worker of a slot, and the cores that it is pinned to; none: all."""
        if self._threads is None:
            # Settled once: sums of workers with different numbers of threads could differ in their last bits.
            self._threads = max(1, len(self._cores) // max(1, min(len(slots), self._max_np)))
        variables = {} if self._chosen else {"OMP_NUM_THREADS": str(self._threads)}
        if not self._bind:
            return variables, ()
        on_host = sum(other.host == slot.host for other in slots)
        return variables, share_of_cores(self._cores, slot.index, max(on_host, slot.index + 1))
