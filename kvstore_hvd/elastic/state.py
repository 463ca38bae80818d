"""What training goes on from when the world changes: the last commit, and how all workers come to have the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvstore_hvd.elastic import checkpoint
from kvstore_hvd.elastic.copies import deep_copy, named_copies
from kvstore_hvd.elastic.faults import raise_on_all
from kvstore_hvd.elastic.updates import HostUpdateResult, HostUpdates
from kvstore_hvd.errors import HostsUpdatedInterrupt, InvalidRequestError, message
from kvstore_hvd.mxnet.basics import rank
from kvstore_hvd.mxnet.functions import broadcast_object
from kvstore_hvd.world import process


class State:
    """What `run` needs of a state of training. Base of others, which say how it is saved, restored and synchronised.

    Parameters
    ----------
    bcast_object : callable
        Gives every worker rank 0's object.
    get_rank : callable
        This worker's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._updates = HostUpdates()
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to be called, in order and without arguments, after the workers have met in a new world.

        They run before `sync`; use them for what depends on the number of workers, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `run` after the workers have met in a new world: forgets updates, calls `reset`, then callbacks."""
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Note that workers are about to come or go; `check_host_updates` acts on it. May be called from any thread.

        Parameters
        ----------
        timestamp : int
            Grows from one update to the next.
        update_res : int
            A `HostUpdateResult`.
        """
        self._updates.put(timestamp, update_res)

    def commit(self) -> None:
        """Save the state, then look for updates: `save`, then `check_host_updates`. Every worker calls it.

        Writes the job's checkpoint (``kvhvdrun --checkpoint``) when that is due.

        Raises
        ------
        HostsUpdatedInterrupt, HorovodInternalError, InvalidRequestError
            As `check_host_updates`, and what `save` raises.
        """
        self.save()
        checkpoint.commit(self, self._rank)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Leave the training function if any worker was told that workers come or go. Every worker calls it.

        Costs less than `commit`, and belongs in the same places: between two steps.

        Raises
        ------
        HostsUpdatedInterrupt
            On all workers alike, after the state was saved.
        HorovodInternalError
            The world is lost.
        InvalidRequestError
            A worker is in ``hvd.join()``.
        """
        result = self._updates.agree()
        if result is None:
            return
        # Without a commit before it, `sync` would take back what was done since the last one in a part of the state.
        self.save()
        # Workers that leave may be the last ones.
        checkpoint.commit(self, self._rank, now=result is HostUpdateResult.removed)
        raise HostsUpdatedInterrupt(skip_sync=result is HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in this process, in place of the last one."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all workers rank 0's state, and save it. Every worker calls it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world; nothing here."""


class ObjectState(State):
    """A state of Python objects, which are its attributes.

    Attributes are copied when they are saved and when they are restored, so changes made to a list or an array since
    the last commit are undone.

    Parameters
    ----------
    bcast_object, get_rank : callable, optional
        As `State`; by default those of ``kvstore_hvd.mxnet``.
    **kwargs
        Names and first values of the attributes. Anything that ``copy.deepcopy`` can copy and that can be pickled.
        Values are those saved first.

    Raises
    ------
    InvalidRequestError
        An attribute's name is already used by the class, or a value cannot be copied.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = named_copies(kwargs, "state")
        for name, value in kwargs.items():
            self._add(name, value)

    if TYPE_CHECKING:  # which attributes there are only the program knows

        def __getattr__(self, name: str) -> Any: ...

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Keep copies of the attributes that the state was made with.

        Parameters
        ----------
        path : path-like, optional
            Rank 0 writes what was saved to this file, too; other workers write nothing. The file is replaced as a whole
            once the new one is on the disk.

        Raises
        ------
        InvalidRequestError
            A value cannot be copied, and what was saved last is still there; or it cannot be pickled, or another
            process is writing the file.
        HorovodInternalError
            The world is lost; what was saved last is still there.
        OSError
            The file cannot be written; the one that was there still is.
        """
        self._save()
        if path is not None and self._rank() == 0:
            checkpoint.write(path, self._content())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take and save what was written by ``save(path)``. Not collective: a `sync` gives all workers rank 0's state.

        Parameters
        ----------
        path : path-like
            Of a file that can be trusted: it is unpickled, which can run any program.

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
        """What was saved last; can be pickled."""
        return {"names": self._names(), "objects": self._saved_state}

    def _fault(self, content: dict[str, Any]) -> str:
        """Why the state cannot become like this, as a sentence; '' if it can."""
        here, there = self._names(), content["names"]
        return "" if here == there else f"it has {_listed(there)}, but the state has {_listed(here)}."

    def _take(self, content: dict[str, Any]) -> None:
        self._saved_state = content["objects"]

    def restore(self) -> None:
        """Give the attributes the values saved last."""
        for name, value in deep_copy(self._saved_state).items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give the attributes on all workers the values that rank 0 saved last. Every worker calls it.

        What rank 0 has assigned since then is undone: call `commit` first, for example after loading a checkpoint.

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

    def _names(self) -> list[str]:
        return sorted(self._saved_state)

    def _check_same(self, here: list[str], there: list[str]) -> None:
        """Raise on all workers if one has not what rank 0 has."""
        if not process.current().is_initialized:
            return
        world = process.current().member
        if not world.is_alone:
            fault = f"it has {_listed(here)}, but rank 0 has {_listed(there)}."
            with world.submitting():
                raise_on_all(world, fault if here != there else "")

    def _add(self, name: str, value: Any) -> None:
        """Add an attribute, which must not hide anything."""
        if hasattr(self, name):
            fact, fix = f"{type(self).__name__} has something of this name.", "choose another name."
            raise InvalidRequestError(message(fact, operation="state", name=name, fix=fix))
        setattr(self, name, value)

    def _present(self) -> dict[str, Any]:
        """Copies of the attributes, as they are now. Raises when the world is lost: they may tell of a failed step."""
        copies = named_copies({name: getattr(self, name) for name in self._saved_state}, "state")
        if process.current().is_initialized:
            process.current().member.check()
        return copies


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
