"""Leaving worlds inside a world: each of them is left, and no error that nobody has read is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore_hvd.errors import KVHvdError, MismatchError, PeerLostError
from kvstore_hvd.process import process
from kvstore_hvd.process.inner_worlds import InnerMember, InnerWorlds
from support.fake_native import FakeCommunicator, fake_world


@pytest.fixture
def fake() -> Iterator[FakeCommunicator]:
    """Return the communicator of a world of two."""
    with fake_world() as communicator:
        yield communicator


class _Left(InnerMember):
    """A world that is left with an error to tell, or cannot be left in good order."""

    def __init__(self, unread: KVHvdError | None = None, lost: KVHvdError | None = None) -> None:
        super().__init__([0, 1], 1)
        self._unread = unread
        self._lost: BaseException | None = lost
        self.reasons: list[str] = []

    def leave(self, reason: str = "") -> Exception | None:
        """Remember that it was."""
        self.reasons.append(reason)
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        return self._unread


@pytest.mark.parametrize("interrupted", [0, 1])
def test_who_is_interrupted_as_it_leaves_one_leaves_all(fake: FakeCommunicator, interrupted: int) -> None:
    """Nobody waits for this worker, neither in the worlds inside nor in that of all workers."""
    members = [_Left(), _Left()]
    members[interrupted]._lost = KeyboardInterrupt()
    mine = process.current()
    mine._inner = worlds(*members)
    with pytest.raises(KeyboardInterrupt):
        mine.leave()
    reason = "it was interrupted while it left: KeyboardInterrupt"
    assert [member.reasons[-1] for member in members] == [reason] * 2
    assert fake.left == [reason]
    assert not mine.is_initialized


def worlds(*members: Any) -> InnerWorlds:
    """Return worlds that this worker is in already."""
    inner = InnerWorlds()
    inner._members = list(members)
    return inner


FIRST, SECOND = MismatchError("the first"), MismatchError("the second")
LOST = PeerLostError("rank 1 died")


@pytest.mark.parametrize(
    ("members", "raised", "logged"),
    [
        ([_Left(FIRST), _Left()], FIRST, []),
        ([_Left(), _Left(SECOND)], SECOND, []),
        ([_Left(FIRST), _Left(SECOND)], FIRST, ["the second"]),
        ([_Left(lost=LOST), _Left(SECOND), _Left()], LOST, ["the second"]),
        ([_Left(FIRST), _Left(FIRST)], FIRST, []),  # a fork lets all of them know of one error
        ([_Left(), _Left()], None, []),
    ],
)
def test_the_first_error_is_raised_and_the_others_are_logged(
    members: list[_Left], raised: Exception | None, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "kvstore_hvd"):
        assert worlds(*members).leave("") is raised
    assert [member.reasons for member in members] == [[""]] * len(members)
    assert [record.getMessage().rpartition("\n")[2] for record in caplog.records] == logged
