"""What becomes of operations that only workers with input have submitted, when a Join ends because one has none.

A forward pass with `SyncBatchNorm`, a metric, parameters that are broadcast as soon as they have a shape: an iteration
may have submitted all that before it learns that it is not to be. What stayed behind would meet the next epoch's. So
who has no input declines what others submit, which fails on all of them; nobody leaves before that is through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import MismatchError
from kvstore_hvd.join import tokens
from kvstore_hvd.join.pauses import Pauses
from kvstore_hvd.join.zeros import explained
from kvstore_hvd.native.records import Missed
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member


def _refusal(world: Member, number: int) -> str:
    """What errors of declined operations are known by, also where MXNet has made text of them."""
    return f"this worker has no more input in Join {number}{world.topology.group}, which is to throw then."


def is_withdrawn(error: BaseException | None, world: Member, number: int) -> bool:
    """Whether it comes, directly or not, of an operation that a worker without input has declined."""
    return isinstance(error, Exception) and any(_refusal(world, number) in str(each) for each in _causes(error))


class Withdrawal:
    """One worker's part in the end of a Join that throws."""

    def __init__(self, world: Member, number: int, early: str) -> None:
        self._world = world
        self._number = number
        self._early = early  # the operation by which workers of this Join tell whether they have ended
        # Process sets within it, too: all of their workers are in the Join.
        self._worlds = process.current().worlds_within(world)
        self._declined: dict[tuple[Member, str], native.Work] = {}  # under way
        self._followed: set[tuple[Member, str]] = set()

    def drain(self) -> bool:
        """Wait for all that this worker has pushed to MXNet; returns whether others have declined some of it."""
        # What this worker does not know yet to be submitted, it must not decline.
        declined = False
        if mxnet_compat.is_imported():
            try:
                mxnet_compat.waitall()
            except Exception as error:  # noqa: BLE001 - whatever an operation failed with
                declined = self._is_withdrawn(error)
                if not declined:
                    self._world.defer(error)
        for world in self._worlds:
            declined |= world.forget_unread(self._is_withdrawn)
        return declined

    def decline_until(self, work: native.Work) -> None:
        """Decline what the others submit until all have submitted `work`, and wait for that. After `drain`."""
        engine = self._world.engine()
        pauses = Pauses()
        while True:
            missed = [(world, self._missed_in(world)) for world in self._worlds]
            if engine.is_met(work):  # then what is missed comes after it
                break
            done = [self._decline(world, one) for world, found in missed for one in found]
            pauses.after(found=any(done))
        try:
            engine.wait(work)
        except MismatchError as error:
            raise explained(error, self._world) from None

    def agree(self) -> None:
        """Number what comes next alike: workers have begun different numbers of calls."""
        for world in self._worlds:
            with world.submitting():
                world.agree_on_numbers()

    def _is_withdrawn(self, error: Exception) -> bool:
        return is_withdrawn(error, self._world, self._number)

    def _missed_in(self, world: Member) -> Sequence[Missed]:
        missed = world.engine().missed(native.MAX_NAMES, described=True) or []
        # A Join of a process set may have this one's number there, and its operations the same names.
        own = self._early if world is self._world else ""
        return [one for one in missed if one.name != own and (world, one.name) not in self._followed]

    def _decline(self, world: Member, one: Missed) -> bool:
        """Returns whether there was anything to do."""
        place = world, one.name
        under_way = self._declined.get(place)
        if under_way is not None and not under_way.done:
            return False
        # The others have that parameter from now on, and will not broadcast it again.
        if one.announced is not None and mxnet_compat.initialize_awaiting(one.name, one.announced.shape):
            self._followed.add(place)
            return True
        kind = "allreduce" if one.announced is None else one.announced.collective
        label = f"'{one.name}' of the others"
        request = native.Request(
            kind, one.name, label, (), (), (0,), "float32", failure=_refusal(self._world, self._number)
        )
        self._declined[place] = tokens.submit(world, request, None)
        return True


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those it was raised from or after."""
    known: set[int] = set()
    while error is not None and id(error) not in known:
        known.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
