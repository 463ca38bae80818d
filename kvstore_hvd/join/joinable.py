"""What can take part in a `Join`: something that communicates in each iteration, and knows its share without input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple


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
