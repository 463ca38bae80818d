"""The handler of samplers: how far an epoch is."""

from __future__ import annotations

from typing import Any

from kvstore_hvd.elastic.faults import raise_on_all
from kvstore_hvd.elastic.handlers import StagedHandler
from kvstore_hvd.mxnet.functions import broadcast_object
from kvstore_hvd.world import process


class SamplerHandler(StagedHandler):
    """Handler of an `ElasticSampler`."""

    # Workers take their steps together, so rank 0 knows what all have processed. It hands on what belongs to the
    # parameters that it hands on: others may have committed one step more or less.

    def __init__(self, value: Any) -> None:
        self._saved: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        super().__init__(value)

    def stage(self) -> None:
        """See `StagedHandler.stage`."""
        self._spare = self.value.state_dict()

    def receive(self) -> None:
        """See `StagedHandler.receive`."""
        world = process.current().member
        self.stage()
        if world.is_alone:
            return
        content = broadcast_object((self._settings(), self._spare))
        with world.submitting():
            raise_on_all(world, self.misfit(content))
        self.take(content)

    def content(self) -> Any:
        """See `StateHandler.content`."""
        return self._settings(), self._saved

    def misfit(self, content: Any) -> str:
        """See `StateHandler.misfit`."""
        here, there = self._settings(), content[0]
        faults = [f"{name}={here[name]} here, but {there[name]} there" for name in here if here[name] != there[name]]
        return f"the sampler has {', '.join(faults)}." if faults else ""

    def take(self, content: Any) -> None:
        """See `StateHandler.take`."""
        self._spare = content[1]

    def _settings(self) -> dict[str, Any]:
        return {"samples": len(self.value.dataset), "shuffle": self.value.shuffle, "seed": self.value.seed}

    def adopt(self) -> None:
        """See `StagedHandler.adopt`."""
        self._saved = self._spare

    def restore(self) -> None:
        """See `StateHandler.restore`."""
        self.value.load_state_dict(self._saved)

    def reset(self) -> None:
        """Deal out among the workers of the new world what is left of the epoch."""
        self.value.reset()
