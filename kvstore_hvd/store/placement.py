"""Where operations on MXNet's arrays take place, and which arrays of a call need a copy to stand in for them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvstore_hvd import gpu, log, mxnet_compat
from kvstore_hvd.store.arrays import unique
from kvstore_hvd.store.keys import Group
from kvstore_hvd.world.member import Member


def home_of(world: Member, array: Any) -> Any:
    """The GPU on which an operation on this array takes place; None for the CPU, also if GPUs are out of reach."""
    context = mxnet_compat.context_of(array)
    if context.device_type.startswith("cpu"):
        return None
    if not world.reaches_gpus:
        text = "arrays on GPUs are copied to the CPU and back, which is slow%s"
        log.once("gpu-out-of-reach", logging.WARNING, text, "" if gpu.is_installed() else ": CuPy is not installed")
        return None
    return context


class Placement:
    """Decides, for the arrays of one call, which may be handed to the engine themselves."""

    # An array goes through a copy when it is on another device or has another dtype than the sum, when it is sparse,
    # and when another array or key of the call shares it, so that all is read before anything is written.

    def __init__(self, world: Member, groups: Sequence[Group]) -> None:
        self._adapter = None if world.is_alone else world.mxnet_adapter()
        self._direct: dict[tuple[int, str, Any], bool] = {}
        self._aliased: set[int] = set()  # ids of arrays
        seen = [(number, array) for number, group in enumerate(groups) for array in _arrays_of(group)]
        if self._adapter is None:
            # Alone, copies cost little: who shares memory with whom is not worth finding out.
            self._aliased = {id(array) for _, array in seen} if len(groups) > 1 else set()
        elif len(seen) > 1:
            users: dict[int, set[tuple[int, int]]] = {}  # by storage: (number of the group, id of the array)
            for number, array in seen:
                storage = self._adapter.chunk_id(mxnet_compat.handle_of(array))
                users.setdefault(storage, set()).add((number, id(array)))
            self._aliased = {array for who in users.values() if len(who) > 1 for _, array in who}

    def is_aliased(self, array: Any) -> bool:
        """Whether another array of the call, or another key, may use the same memory."""
        return id(array) in self._aliased

    def is_direct(self, array: Any, dtype: str, home: Any = None) -> bool:
        """Whether the engine may work on the array itself, in a sum of `dtype` at `home`; the same answer each time."""
        place = (id(array), dtype, home)
        if place not in self._direct:
            self._direct[place] = self._is_direct(array, dtype, home)
        return self._direct[place]

    def _is_direct(self, array: Any, dtype: str, home: Any) -> bool:
        assert self._adapter is not None
        context = mxnet_compat.context_of(array)
        is_there = context.device_type.startswith("cpu") if home is None else context == home
        if mxnet_compat.dtype_name(array) != dtype or not is_there or self.is_aliased(array):
            return False
        if not self._adapter.is_dense(mxnet_compat.handle_of(array)):
            log.once(
                "staged", logging.DEBUG, "some arrays cannot be handed to the engine as they are; copies stand in."
            )
            return False
        return True


def _arrays_of(group: Group) -> list[Any]:
    return unique((*group.values, *group.outs))
