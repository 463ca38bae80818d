"""The state from which training continues in a new world: the last commit, which all workers get from rank 0."""

from __future__ import annotations

import copy
import enum
import os
import queue
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.elastic import checkpoint
from kvstore_hvd.errors import HostsUpdatedInterrupt, InvalidRequestError, MismatchError, message
from kvstore_hvd.mxnet.basics import rank
from kvstore_hvd.mxnet.functions import broadcast_object
from kvstore_hvd.store.arrays import buffer_like
from kvstore_hvd.store.arrays import copy as copy_array
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member
from kvstore_hvd.world.topology import exchange


class HostUpdateResult(enum.IntFlag):
    """What has changed about the hosts; Horovod's numbers."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What `run` needs of a state of training. Subclasses define how it is saved, restored and synchronised.

    Parameters
    ----------
    bcast_object, get_rank : callable
        Gives every worker rank 0's object; returns this worker's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._updates: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # number and result
        self._last_update = 0  # the number of the update on which the workers have acted
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to be called, in order, after the workers have met in a new world, and before `sync`.

        Use them for settings that depend on the number of workers, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `run` after the workers have met in a new world: forgets updates, calls `reset`, then callbacks."""
        self._updates = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Note an update, with a number that grows and a `HostUpdateResult`, for `check_host_updates`. Thread-safe."""
        self._updates.put((int(timestamp), int(update_res)))

    def commit(self) -> None:
        """`save`, then `check_host_updates`; raises as they do. Every worker calls it.

        Writes the job's checkpoint (``kvhvdrun --checkpoint``) when that is due.
        """
        self.save()
        checkpoint.commit(self, self._rank)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Leave the training function if any worker knows of an update. Every worker calls it, between two steps.

        Raises
        ------
        HostsUpdatedInterrupt
            On all workers alike, after the state was saved.
        HorovodInternalError, InvalidRequestError
            The world is lost; a worker is in ``hvd.join()``.
        """
        newest, result = self._last_update, HostUpdateResult.no_update
        while not self._updates.empty():
            number, update = self._updates.get()
            if number > self._last_update:
                newest, result = max(newest, number), result | update
        world = process.current().member
        with world.submitting():
            row = np.array([self._last_update, newest, result], np.int64)
            rows = world.all_rows("check_host_updates", "elastic/updates", "check_host_updates", row)
        # A worker that came later knows of fewer updates.
        self._last_update, newest = int(rows[:, 0].max()), int(rows[:, 1].max())
        if newest <= self._last_update:
            return
        self._last_update = newest
        result = HostUpdateResult(int(np.bitwise_or.reduce(rows[:, 2])))
        # `sync` sends the saved state: without this save it would undo the steps since the last commit.
        self._save()
        # The workers that leave may be the last ones.
        checkpoint.commit(self, self._rank, now=result is HostUpdateResult.removed)
        raise HostsUpdatedInterrupt(skip_sync=result is HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in this process, in place of the last copy."""
        raise NotImplementedError

    def _save(self) -> None:
        """A save that the program has not asked for."""
        self.save()

    def restore(self) -> None:
        """Go back to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all workers rank 0's state, and save it. Every worker calls it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world; nothing here."""


class ObjectState(State):
    """A state of Python objects, which are its attributes.

    Attributes are copied when they are saved and when they are restored: changes to a list or an array since the last
    commit are undone.

    Parameters
    ----------
    bcast_object, get_rank : callable, optional
        As `State`; by default the functions of ``kvstore_hvd.mxnet``.
    **kwargs
        Names and first values of the attributes, which are saved; ``copy.deepcopy`` and `pickle` can copy each value.

    Raises
    ------
    InvalidRequestError
        An attribute's name is already used by the class, or a value cannot be copied.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank, **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = named_copies(kwargs, "state")
        for name, value in kwargs.items():
            self._add(name, value)

    if TYPE_CHECKING:  # only the program knows the attributes

        def __getattr__(self, name: str) -> Any: ...

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Keep copies of the attributes that the state was made with.

        Rank 0 writes the copies to the file `path`, too: it is replaced as a whole once the new one is on the disk.

        Raises
        ------
        InvalidRequestError
            A value cannot be copied, and the last copies stay; or it cannot be pickled, its handler has no ``content``,
            or another process is writing the file.
        HorovodInternalError, MXNetError
            The world is lost, or the computation of an array failed; the last copies stay.
        OSError
            The file cannot be written; the last one stays.
        """
        self._save()
        if path is not None and self._rank() == 0:
            checkpoint.write(path, self._content())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore and save a file of ``save(path)``. Not collective: a `sync` gives all workers rank 0's state.

        The file is unpickled, which can run any program: load only files that can be trusted.

        Raises
        ------
        InvalidRequestError
            The file is damaged, or of a state with other attributes, networks or Trainers; nothing was changed.
        OSError
            It cannot be read.
        """
        content = checkpoint.read(path)
        fault = self._fault(content) if isinstance(content, dict) else "it has something else."
        if fault:
            fix = "build the state as it was when the file was written."
            raise InvalidRequestError(message(f"{os.fspath(path)} does not fit: {fault}", operation="load", fix=fix))
        self._take(content)
        self.restore()

    def _save(self) -> None:
        self._saved_state = self._present()

    def _content(self) -> dict[str, Any]:
        """The saved state; can be pickled."""
        return {"names": self._names(), "objects": self._saved_state}

    def _fault(self, content: dict[str, Any]) -> str:
        """Why the state cannot take a `_content`, as a sentence; '' if it can."""
        here, there = self._names(), content["names"]
        return "" if here == there else f"it has {_listed(there)}, but the state has {_listed(here)}."

    def _take(self, content: dict[str, Any]) -> None:
        self._saved_state = content["objects"]

    def restore(self) -> None:
        """Give the attributes the saved values."""
        for name, value in deep_copy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give the attributes on all workers the values that rank 0 has saved. Every worker calls it.

        Assignments of rank 0 since its last save are undone: call `commit` first, as after loading a checkpoint.

        Raises
        ------
        MismatchError
            On all workers: one has other attributes than rank 0. Nothing was changed.
        Exception
            As ``broadcast_object``.
        """
        received = self._bcast_object(self._saved_state)
        self._check_same(self._names(), sorted(received))
        self._saved_state = received
        self.restore()

    def _check_same(self, here: list[str], there: list[str]) -> None:
        """Raise on all workers if a state has other names than rank 0's."""
        if process.everybody.is_initialized and not process.current().member.is_alone:
            fault = f"it has {_listed(here)}, but rank 0 has {_listed(there)}."
            with process.current().member.submitting():
                raise_on_all(process.current().member, fault if here != there else "")

    def _names(self) -> list[str]:
        return sorted(self._saved_state)

    def _add(self, name: str, value: Any) -> None:
        """Add an attribute, which must not hide anything."""
        if hasattr(self, name):
            fact, fix = f"{type(self).__name__} has something of this name.", "choose another name."
            raise InvalidRequestError(message(fact, operation="state", name=name, fix=fix))
        setattr(self, name, value)

    def _present(self) -> dict[str, Any]:
        """Copies of the present attributes. Raises if the world is lost: a failed step may have changed them."""
        copies = named_copies({name: getattr(self, name) for name in self._saved_state}, "state")
        if process.everybody.is_initialized:
            process.current().member.check()
        return copies


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def raise_on_all(world: Member, fault: str) -> None:
    """Raise MismatchError on all workers if the state of any worker has a fault."""
    faults = exchange(world.engine(), world.topology, "elastic/faults", fault)
    details = [f"rank {number}: {each}" for number, each in enumerate(faults) if each]
    if details:
        fact = "a worker's state does not match rank 0's."
        fix = "build the same state on every worker: networks, Trainers, samplers, attributes; nothing was changed."
        raise MismatchError(message(fact, **world.topology.prefix, operation="sync", details=details, fix=fix))


# -- Copies of Python objects ---------------------------------------------------------------------------------------


def is_sampler(value: Any) -> bool:
    """Whether it is an `ElasticSampler` or a `DistributedBatchSampler`. Does not import MXNet."""
    module = sys.modules.get("kvstore_hvd.gluon.samplers")
    return module is not None and isinstance(value, module.EpochSampler) and hasattr(value, "state_dict")


def deep_copy(value: Any) -> Any:
    """A copy as of ``copy.deepcopy``, in which arrays of MXNet stay on their devices."""
    # MXNet copies its arrays by pickling them: slowly, to cpu(0), and no empty ones. So the arrays in containers and
    # attributes are copied first, and given to deepcopy as known.
    copies: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (str, bytes, int, float, complex, type(None))) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif mxnet_compat.is_ndarray(one):
            copies[id(one)] = buffer_like(one, context=mxnet_compat.context_of(one))
            copy_array(one, copies[id(one)])
        elif is_sampler(one):
            fact = f"a copy of a {type(one).__name__} among the values would take no part in the training."
            fix = "pass it to GluonState(sampler=...) under a name of its own, or keep it outside of the state."
            raise InvalidRequestError(message(fact, operation="state", fix=fix))
        elif not isinstance(one, type) and not hasattr(one, "__deepcopy__"):
            waiting.append(getattr(one, "__dict__", None))
    for copied in copies.values():
        copied.wait_to_read()
    return copy.deepcopy(value, copies)


def named_copies(values: Mapping[str, Any], of: str) -> dict[str, Any]:
    """Copies of values; an object that two of them share is copied once."""
    try:
        return deep_copy(dict(values))  # type: ignore[no-any-return]
    except Exception:
        for name, value in values.items():
            try:
                deep_copy(value)
            except InvalidRequestError:
                raise
            except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
                fact = f"a value of {type(value).__name__} cannot be copied: {error}."
                text = message(fact, operation=of, name=name, fix="keep it outside of the state.")
                raise InvalidRequestError(text) from error
        raise
