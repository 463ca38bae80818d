"""How a part of a state is saved, restored and synchronised; copies of Python objects."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, MismatchError, message
from kvstore_hvd.store.arrays import buffer_like
from kvstore_hvd.store.arrays import copy as copy_array
from kvstore_hvd.world.member import Member
from kvstore_hvd.world.topology import exchange


class StateHandler:
    """Saves, restores and synchronises one value of a `GluonState`. Base class.

    Parameters
    ----------
    value : object
        The value; it is saved now.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the value, in place of the last copy."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved value in place: it stays the same object."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's value, and save it. Every worker calls it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the value to a new world; nothing here."""

    def content(self) -> Any:
        """The saved value, for a file; can be pickled. A handler without this method, `misfit` and `take` supports no
        files."""
        fact = f"a {type(self).__name__} does not say how its value is written to a file."
        fix = "define content(), misfit() and take() in it."
        raise InvalidRequestError(message(fact, operation="save", name=type(self.value).__name__, fix=fix))

    def misfit(self, content: Any) -> str:
        """Why the value cannot take a `content`, as a sentence; '' if it can."""
        raise NotImplementedError

    def take(self, content: Any) -> None:
        """Make a `content` the saved value; of a `StagedHandler`, the first phase of that."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another value, and save it; without effect if that fails."""
        before, self.value = self.value, value
        try:
            self.save()
        except BaseException:
            self.value = before
            raise


class StagedHandler(StateHandler):
    """A handler that saves and synchronises in two phases.

    The first phase makes a copy; it may fail, and leaves the saved copy alone. The second phase makes the new copy the
    saved one, and cannot fail. A state runs the first phases of all its handlers before any second phase, so all that
    it restores is of one moment.
    """

    def stage(self) -> None:
        """The first phase of `save`."""
        raise NotImplementedError

    def receive(self) -> None:
        """The first phase of `sync`, with rank 0's value; the value itself stays. Every worker calls it."""
        raise NotImplementedError

    def adopt(self) -> None:
        """The second phase of both."""
        raise NotImplementedError

    def settle(self) -> None:
        """The end of `sync`: restore the received value."""
        self.restore()

    def save(self) -> None:
        """Keep a copy of the value; the last copy stays if that fails."""
        self.stage()
        self.adopt()

    def sync(self) -> None:
        """Take rank 0's value, and save it. Every worker calls it."""
        self.receive()
        self.adopt()
        self.settle()


def raise_on_all(world: Member, fault: str) -> None:
    """Raise MismatchError on all workers if the state of any worker has a fault."""
    faults = exchange(world.engine(), world.topology, "elastic/faults", fault)
    if any(faults):
        raise MismatchError(
            message(
                "a worker's state does not match rank 0's.",
                **world.topology.prefix,
                operation="sync",
                details=[f"rank {rank}: {each}" for rank, each in enumerate(faults) if each],
                fix="build the same state on every worker: networks, Trainers, samplers, other attributes; "
                "nothing was changed.",
            )
        )


# -- Copies of Python objects ---------------------------------------------------------------------------------------


def is_sampler(value: Any) -> bool:
    """Whether it is an `ElasticSampler`. Does not import MXNet."""
    module = sys.modules.get("kvstore_hvd.elastic.sampler")
    return module is not None and isinstance(value, module.ElasticSampler)


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
            fact = "an ElasticSampler among the values would give every worker rank 0's share of the samples."
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
