"""What a worker does with errors that nobody has read, and with a world that is declared lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InputFailedError, KVHvdError, LaunchError, MismatchError
from kvstore_hvd.process import member as member_module
from kvstore_hvd.process import process
from kvstore_hvd.process.member import Member
from kvstore_hvd.process.stall import StallInspector
from kvstore_hvd.worlds.topology import Host, Topology, World
from support.fake_native import FakeAdapter, FakeCommunicator, fake_world

pytest.importorskip("mxnet")


@pytest.fixture
def fake() -> Iterator[FakeCommunicator]:
    with fake_world() as communicator:
        process.current().member.mxnet_adapter()
        yield communicator


class MXNetError(RuntimeError):
    """What MXNet raises at a read: the text of our error, of no class of ours."""


def test_two_errors_that_nobody_has_read_are_both_told(fake: FakeCommunicator) -> None:
    """One was put off, the other one comes from MXNet; once."""
    process.current().member.defer(MismatchError("'first': ranks disagree on shape.\n  details"))
    fake.adapter.unread.append(InputFailedError("'second': its input failed.\n  details"))
    with pytest.raises(MismatchError) as caught:
        process.current().member.check()
    assert "'first'" in str(caught.value)
    assert "'second'" in str(caught.value)
    process.current().member.check()


def test_one_error_that_comes_twice_is_told_once_in_our_own_class(fake: FakeCommunicator) -> None:
    text = "'first': ranks disagree on shape.\n  details"
    process.current().member.defer(MXNetError(f"Traceback\n{text}"))
    fake.adapter.unread.append(MismatchError(text))
    with pytest.raises(MismatchError) as caught:
        process.current().member.check()
    assert str(caught.value) == text
    process.current().member.check()


def test_who_cannot_start_its_stall_reports_has_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told, and nothing is kept of the world."""
    communicator = FakeCommunicator(FakeAdapter())
    monkeypatch.setattr(member_module, "ShmCommunicator", lambda world: communicator)

    def refuse(inspector: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(StallInspector, "start", refuse)
    mine = Member()
    with pytest.raises(LaunchError, match="a thread"):
        mine.join(World(Topology.of(0, [Host.here()] * 2, source="launcher"), "fake", b""))
    assert communicator.left == ["it could not join the world: LaunchError"]
    assert (mine.is_connected, mine.has_given_up) == (False, False)


def test_a_fresh_world_knows_nothing_of_the_errors_of_the_last_one() -> None:
    mine = Member()
    mine.join(_world_of_one(0))
    mine.defer(KVHvdError("of the world before"))
    mine.leave()
    mine.join(_world_of_one(1))
    mine.check()


def test_who_leaves_waits_for_its_operations_for_the_timeout_only(fake: FakeCommunicator) -> None:
    """Longer than that there are only those that may wait for others for any time."""
    fake.is_pending = True
    assert process.current().leave() is None
    assert fake.left == ["it left while its operations were pending"]


@pytest.mark.parametrize("where", ["operations", "mxnet", "afterwards"])
def test_who_is_interrupted_as_it_leaves_has_left(
    fake: FakeCommunicator, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The others are told at once: nothing is left to the garbage collector, which would wait for them."""
    interruption = KeyboardInterrupt()

    def waitall() -> None:
        if where == "mxnet" or fake.left:
            raise interruption

    monkeypatch.setattr(mxnet_compat, "waitall", waitall)
    if where == "operations":
        fake.interrupted = interruption
    mine = process.current()
    with pytest.raises(KeyboardInterrupt) as caught:
        mine.leave()
    assert caught.value is interruption
    reason = "it was interrupted while it left: KeyboardInterrupt"
    assert fake.left == (["", reason] if where == "afterwards" else [reason])
    assert not mine.is_initialized
    assert mine.leave() is None


@pytest.mark.parametrize(("voided", "is_aborted"), [(4, False), (5, True), (6, True)])
def test_a_world_fails_when_it_or_a_later_one_is_declared_lost(
    fake: FakeCommunicator, voided: int, is_aborted: bool
) -> None:
    """A word about an earlier one, which came late, changes nothing."""
    mine = process.current()
    mine.member._world = World(Topology.of(0, [Host.here()] * 2, generation=5, source="launcher"), "fake", b"")
    mine._on_void(voided, "worker 1 died")
    assert fake.left == (["abort: worker 1 died"] if is_aborted else [])


def _world_of_one(generation: int) -> World:
    return World(Topology.of(0, [Host.here()], generation=generation, source="launcher"), "fake", b"")


@pytest.mark.parametrize("held", [0, 1])
def test_an_error_that_waits_survives_a_call_that_fails(fake: FakeCommunicator, held: int) -> None:
    mine = process.current().member
    mine.defer(KVHvdError("of an operation"))
    mine.hold_unread(held)
    with pytest.raises(ValueError, match="wrong"), mine.submitting():
        raise ValueError("wrong")
    mine.hold_unread(-held)
    with pytest.raises(KVHvdError, match="of an operation"):
        mine.check()
    mine.check()
