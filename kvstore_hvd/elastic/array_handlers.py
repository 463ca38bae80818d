"""Handlers of values that consist of many arrays, and of a few small things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore_hvd import log, mxnet_compat, native
from kvstore_hvd.elastic.copies import deep_copy
from kvstore_hvd.elastic.faults import raise_on_all
from kvstore_hvd.elastic.handlers import StagedHandler
from kvstore_hvd.elastic.images import Image, Spec, Specs
from kvstore_hvd.mxnet.functions import broadcast_object
from kvstore_hvd.world import process

#: What is worth knowing of a value besides its arrays; can be pickled.
Details = dict[str, Any]
#: Arrays with their names, for errors.
Arrays = list[tuple[object, Any]]

# Of the operation that sends the values of arrays; other operations' names begin otherwise.
_NAME = "elastic/values"


class _Copy:
    """What a value was like."""

    def __init__(self) -> None:
        self.details: Details = {}
        self.image = Image()
        #: Copies of arrays that belong to this worker: a sync does not replace them by rank 0's.
        self.own: dict[str, Any] = {}


class ArraysHandler(StagedHandler):
    """Keeps two copies in turn, in memory that is allocated once; sends one as a single piece."""

    def __init__(self, value: Any) -> None:
        self._saved, self._spare, self._specs = _Copy(), _Copy(), Specs()
        super().__init__(value)

    def describe(self) -> tuple[Details, Arrays]:
        """What the value is like, and its arrays. The details share nothing with the value."""
        raise NotImplementedError

    def fault(self, details: Details, specs: Sequence[Spec]) -> str:
        """Why the value cannot become like this, as a sentence; '' if it can."""
        raise NotImplementedError

    def conform(self, details: Details, specs: Sequence[Spec]) -> Sequence[tuple[Any, int]]:
        """Make the value like this in everything but the values of arrays."""
        raise NotImplementedError

    def stage(self) -> None:
        """See `StagedHandler.stage`. Waits for the arrays."""
        details, arrays = self.describe()
        self._spare.image.fit(self._specs.of(arrays))
        self._spare.image.read(array for _, array in arrays)
        self._spare.details, self._spare.own = details, self.own()

    def own(self) -> dict[str, Any]:
        """Copies of what belongs to this worker alone, as NumPy arrays; waits for them."""
        return {}

    def restore_own(self, saved: dict[str, Any]) -> None:
        """Take back what `own` returned."""

    def receive(self) -> None:
        """See `StagedHandler.receive`."""
        world = process.current().member
        is_root = world.topology.rank == 0
        spare = self._spare
        if is_root:
            self.stage()
        else:
            spare.own = self.own()
        if world.is_alone:
            return
        details, specs = broadcast_object((spare.details, spare.image.specs))
        with world.submitting():
            raise_on_all(world, "" if is_root else self.fault(details, specs))
            spare.details = details
            spare.image.fit(specs)
            memory = spare.image.memory
            if memory.size:
                place = [memory.ctypes.data]
                world.engine().run(
                    native.Request("broadcast", _NAME, "values of arrays", place, place, memory.shape, "uint8")
                )

    def content(self) -> Any:
        """See `StateHandler.content`."""
        return self._saved.details, self._saved.image.specs, self._saved.image.memory

    def misfit(self, content: Any) -> str:
        """See `StateHandler.misfit`."""
        return self.fault(*content[:2])

    def take(self, content: Any) -> None:
        """See `StateHandler.take`."""
        spare = self._spare
        spare.details, specs, values = content
        spare.image.fit(specs)
        spare.image.memory[:] = values
        spare.own = self.own()

    def adopt(self) -> None:
        """See `StagedHandler.adopt`."""
        self._saved, self._spare = self._spare, self._saved

    def settle(self) -> None:
        """See `StagedHandler.settle`."""
        if process.current().topology.rank != 0:  # its value is what the others received
            self.restore()

    def restore(self) -> None:
        """See `StateHandler.restore`."""
        drain()
        saved = self._saved
        saved.image.write(self.conform(deep_copy(saved.details), saved.image.specs))
        self.restore_own(saved.own)


def drain() -> None:
    """Wait until nothing is computed any more. Errors belong to what is taken back, and are forgotten."""
    try:
        mxnet_compat.waitall()
    except Exception as error:  # noqa: BLE001 - whatever it failed with
        log.logger.debug("forgotten, since the state is restored: %s", error)
