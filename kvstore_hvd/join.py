"""Uneven inputs: who has used up its own follows the others until all have, with the semantics of PyTorch's ``Join``.

A `Joinable` does something collective in each iteration, and knows how to do its share without input (its `JoinHook`).
Within `Join`, the first joinable tells in each iteration that this worker is still there, with one small allreduce that
nobody waits for. A worker that leaves the context's body takes part in those with zeros: as long as their sum is not
zero, it runs the hooks.

PyTorch, "Distributed Training with Uneven Inputs Using the Join Context Manager", is the reference.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Optional

import numpy as np

from kvstore_hvd import engine, native
from kvstore_hvd.comm.base import Request
from kvstore_hvd.errors import HorovodInternalError, InputFailedError, MismatchError
from kvstore_hvd.member import Member

__all__ = ["Join", "JoinHook", "Joinable"]

# Iterations that a worker follows the others before it is told that this is a lot.
_WARN_AFTER = 1000
# The n-th enabled context of a world is the same one on all its workers.
_contexts: weakref.WeakKeyDictionary[Member, Iterator[int]] = weakref.WeakKeyDictionary()
# Operations that nobody waits for, with the memory that the engine writes to: kept until they are over, whatever
# becomes of their context.
_under_way: list[tuple[native.Work, Any]] = []


class _Exhausted(RuntimeError):
    """What `throw_on_early_termination` raises, on every worker."""


class JoinHook:
    """What a joinable does in place of its iterations on a worker that has no more input."""

    def main_hook(self) -> None:
        """Take part in the collectives of one iteration of the others; called once for each of them."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, after all workers have joined.

        Parameters
        ----------
        is_last_joiner : bool
            Whether this worker is among those that joined last.
        """


class _JoinConfig(NamedTuple):
    """How a joinable takes part in the context that it is in."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool
    context: Any = None

    @staticmethod
    def construct_disabled_join_config() -> _JoinConfig:
        """That of a joinable in no context."""
        return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joinable(ABC):
    """Something that communicates in each iteration and can go on without input.

    A subclass calls this constructor, and `Join.notify_join_context` in each iteration, before it communicates.
    """

    def __init__(self) -> None:
        super().__init__()
        self._join_config = _JoinConfig.construct_disabled_join_config()

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for a context; `kwargs` are those of `Join`."""

    @property
    @abstractmethod
    def join_device(self) -> Any:
        """The MXNet context of its arrays."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The process set of its collectives; None means all workers."""


class Join:
    """Surrounds training in which workers may run out of input at different times.

    Parameters
    ----------
    joinables : sequence of Joinable
        In the order in which each iteration calls them; the same on all workers.
    enable : bool
        False: all workers are known to have the same number of iterations, and nothing is done.
    throw_on_early_termination : bool
        Raise on all workers as soon as one has no more input, instead of following the others.
    **kwargs
        For every `Joinable.join_hook`.

    Raises
    ------
    ValueError
        There is no joinable, or they have different process sets.

    Examples
    --------
    >>> with Join([model]):
    ...     for batch in uneven_batches:
    ...         model.step(batch)
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if len(joinables) == 0:
            raise ValueError("The join context manager requires at least one joinable")
        self._joinables = list(joinables)
        self._enable = enable
        self._throws = throw_on_early_termination
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        groups = [joinable.join_process_group for joinable in self._joinables]
        if any(group is not groups[0] for group in groups):
            raise ValueError("Using join context manager with multiple process groups")
        # That of a process set, if the joinables have one.
        self._world = engine.current() if groups[0] is None else groups[0].world("Join")
        self._name = ""
        self._before: list[_JoinConfig] = []

    def __enter__(self) -> Join:
        if self._enable:
            self._name = f"join/{next(_contexts.setdefault(self._world, itertools.count()))}"
        self._before = [joinable._join_config for joinable in self._joinables]
        for place, joinable in enumerate(self._joinables):
            joinable._join_config = _JoinConfig(self._enable, self._throws, place == 0, self)
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            if error is None and self._enable:
                self._follow()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._tell_of(error)
            # A later use outside of the context must not wait for workers that are not in it.
            for joinable, config in zip(self._joinables, self._before):
                joinable._join_config = config

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Optional[native.Work]:
        """Tell the workers that have joined that this one begins an iteration. For joinables, not for their users.

        Returns
        -------
        native.Work or None
            The handle of an allreduce under way; None outside of an enabled context, and from all but its first
            joinable.

        Raises
        ------
        RuntimeError
            A worker has no more input, and the context is to throw then.
        """
        assert hasattr(joinable, "_join_config"), (
            f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor"
        )
        config = joinable._join_config
        if not config.is_first_joinable or not config.enable:
            return None
        context: Join = config.context
        work = context._tell_presence(1)
        if config.throw_on_early_termination and context._sum("early", 0) > 0:
            raise _Exhausted("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        return work

    # -- The protocol -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Run the hooks until no worker has input any more."""
        iterations = 0
        while self._sum("presence", 0) > 0:
            if self._throws:
                self._sum("early", 1)
                raise _Exhausted(f"Rank {self._world.topology.rank} exhausted all inputs.")
            for hook in self._hooks:
                hook.main_hook()
            iterations += 1
            if iterations == _WARN_AFTER + 1:
                rank = self._world.topology.rank
                warnings.warn(
                    f"Detected uneven input skew of greater than {_WARN_AFTER}. This means that rank {rank} has at "
                    f"least {_WARN_AFTER} fewer inputs than other currently-active ranks. This level of skew could "
                    "lead to performance degradation during training.",
                    stacklevel=3,
                )
        for hook in self._hooks:
            hook.post_hook(iterations == 0)

    def _tell_of(self, error: BaseException) -> None:
        """Free the workers that would wait for this one, unless they have the same error."""
        current = self._world
        of_all = (_Exhausted, MismatchError, InputFailedError, HorovodInternalError)
        if not self._enable or current.is_alone or isinstance(error, of_all):
            return
        rank = current.topology.rank
        with contextlib.suppress(Exception):  # the error of the body is the one to raise
            current.abort(f"rank {rank} left a Join context with {type(error).__name__}: {error}")

    def _tell_presence(self, present: int) -> Optional[native.Work]:
        current = self._world
        if current.is_alone:
            return None
        token = np.array([present], np.int64)
        # The errors of those that are over are raised by the operations that training waits for.
        _under_way[:] = [each for each in _under_way if not each[0].done]
        with current.submitting():
            work = current.communicator().submit(self._request("presence", token))
        _under_way.append((work, token))
        return work

    def _sum(self, what: str, number: int) -> int:
        """Sum a number over all workers, and wait for it."""
        current = self._world
        if current.is_alone:
            return number
        token = np.array([number], np.int64)
        with current.submitting():
            current.communicator().run(self._request(what, token))
        return int(token[0])

    def _request(self, what: str, token: Any) -> Request:
        place = [token.ctypes.data]
        name = f"{self._name}/{what}"
        return Request("allreduce", name, f"'{name}'", place, place, (1,), "int64")
