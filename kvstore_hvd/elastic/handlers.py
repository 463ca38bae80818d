"""How the parts of a state are saved, restored and synchronised: the base classes, samplers and seeds.

Parameters are in parameters.py, Trainers in trainers.py.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kvstore_hvd.elastic.state import raise_on_all
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.mxnet.functions import broadcast_object
from kvstore_hvd.mxnet_compat import require_mxnet
from kvstore_hvd.world import process


class StateHandler:
    """Saves, restores and synchronises one `value` of a `GluonState`; saves it when it is made. Base class."""

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
        """The saved value, for a file; can be pickled. Files need this method, `misfit` and `take`."""
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
        self.stage()
        self.adopt()

    def sync(self) -> None:
        self.receive()
        self.adopt()
        self.settle()


class SamplerHandler(StagedHandler):
    # Workers take their steps together, so rank 0 knows the samples that all have processed. Its sampler goes with its
    # parameters: other workers may have committed one step more or less.

    _saved: tuple[dict[str, Any], dict[str, Any]]  # settings, state

    def stage(self) -> None:
        self._spare = self._settings(), self.value.state_dict()

    def receive(self) -> None:
        self.stage()
        world = process.current().member
        if not world.is_alone:
            content = broadcast_object(self._spare)
            with world.submitting():
                raise_on_all(world, self.misfit(content))
            self._spare = content

    def content(self) -> Any:
        return self._saved

    def misfit(self, content: Any) -> str:
        here, there = self._settings(), content[0]
        faults = [f"{name}={here[name]} here, but {there[name]} there" for name in here if here[name] != there[name]]
        return f"the sampler has {', '.join(faults)}." if faults else ""

    def take(self, content: Any) -> None:
        self._spare = content

    def adopt(self) -> None:
        self._saved = self._spare

    def restore(self) -> None:
        self.value.load_state_dict(self._saved[1])

    def reset(self) -> None:
        if hasattr(self.value, "reset"):
            self.value.reset()

    def _settings(self) -> dict[str, Any]:
        present = vars(self.value)
        names = [name for name in ("shuffle", "seed", "global_batch_size") if name in present]
        return {"samples": self.value.length, **{name: present[name] for name in names}}


class RandomHandler(StagedHandler):
    """Handler of a seed: random numbers after a save depend on the seed, the number of saves and the rank only."""

    _saved = _spare = _saves = 0

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.seed()

    def advance(self) -> None:
        """Begin the numbers of the next save."""
        self._saves += 1
        self.seed()

    def seed(self) -> None:
        entropy = np.random.SeedSequence([self.value % 2**32, self._saves, process.current().topology.rank])
        for_mxnet, for_numpy, for_python = entropy.generate_state(3).tolist()
        require_mxnet().random.seed(for_mxnet % 2**31)
        np.random.seed(for_numpy)
        random.seed(for_python)

    def stage(self) -> None:
        self._spare = self._saves

    def receive(self) -> None:
        self._spare = broadcast_object(self._saves)

    def adopt(self) -> None:
        self._saved = self._spare

    def restore(self) -> None:
        self._saves = self._saved
        self.seed()

    def content(self) -> Any:
        return self._saved

    def misfit(self, content: Any) -> str:
        return ""

    def take(self, content: Any) -> None:
        self._spare = content
