"""What is wrong on one worker is an error on all of them."""

from __future__ import annotations

from kvstore_hvd.errors import MismatchError, message
from kvstore_hvd.world.agree import exchange
from kvstore_hvd.world.member import Member

# Other operations' names begin otherwise.
_NAME = "elastic/faults"


def raise_on_all(world: Member, fault: str) -> None:
    """Raise on all workers what is wrong with the state of any."""
    faults = exchange(world.engine(), world.topology, _NAME, fault)
    if any(faults):
        raise MismatchError(
            message(
                "a worker's state does not match rank 0's.",
                **world.topology.speaker,
                operation="sync",
                details=[f"rank {rank}: {each}" for rank, each in enumerate(faults) if each],
                fix="build the same state on every worker: networks, Trainers, samplers, other attributes; "
                "nothing was changed.",
            )
        )
