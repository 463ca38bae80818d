"""The handler of samplers: how far an epoch is."""

from __future__ import annotations

from typing import Any

from kvstore_hvd import engine
from kvstore_hvd.elastic.handlers import StagedHandler
from kvstore_hvd.mxnet.functions import broadcast_object

__all__ = ["SamplerHandler"]


class SamplerHandler(StagedHandler):
    """Handler of an `ElasticSampler`.

    Workers take their steps together, so rank 0 knows what all have processed. It hands on what belongs to the
    parameters that it hands on: others may have committed one step more or less.

    Parameters
    ----------
    value : ElasticSampler
    """

    def __init__(self, value: Any) -> None:
        self._saved: dict[str, Any] = {}
        self._spare: dict[str, Any] = {}
        super().__init__(value)

    def stage(self) -> None:
        """See `StagedHandler.stage`."""
        self._spare = self.value.state_dict()

    def receive(self) -> None:
        """See `StagedHandler.receive`; raises as `broadcast_object`."""
        self.stage()
        if not engine.current().is_alone:
            self._spare = broadcast_object(self._spare)

    def adopt(self) -> None:
        """See `StagedHandler.adopt`."""
        self._saved = self._spare

    def restore(self) -> None:
        """See `StateHandler.restore`."""
        self.value.load_state_dict(self._saved)

    def reset(self) -> None:
        """Deal out among the workers of the new world what is left of the epoch."""
        self.value.reset()
