"""What a worker does with errors that nobody has read, and with a world that is declared lost."""

import contextlib
import errno
import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InputFailedError, KVHvdError, LaunchError, MismatchError, PeerLostError
from kvstore_hvd.world import process, segment
from kvstore_hvd.world.member import Member, SetMember
from kvstore_hvd.world.topology import Host, Place, World
from support.fake_native import fake_world

pytest.importorskip("mxnet")


@pytest.fixture
def fake():
    with fake_world() as connection:
        process.current().member.mxnet_adapter()
        yield connection


@pytest.mark.parametrize("held", [0, 2])
def test_errors_that_nobody_has_read_are_told_once(fake, held):
    """Two, of which one was put off and one comes from MXNet; one that comes twice; after a call that fails."""
    mine = process.current().member
    mine.defer(MismatchError("'first': ranks disagree on shape.\n  details"))
    fake.adapter.unread.append(InputFailedError("'second': its input failed.\n  details"))
    for _ in range(held):  # one Join in another
        mine.hold_unread(1)
    with pytest.raises(ValueError, match="wrong"), mine.submitting():
        raise ValueError("wrong")
    for _ in range(held):
        mine.check()
        mine.hold_unread(-1)
    with pytest.raises(MismatchError, match=r"(?s)'first'.*'second'"):
        mine.check()
    mine.check()
    text = "'first': ranks disagree on shape.\n  details"
    mine.defer(RuntimeError(f"Traceback\n{text}"))  # as MXNet raises it
    fake.adapter.unread.append(MismatchError(text))
    with pytest.raises(MismatchError) as caught:
        mine.check()
    assert str(caught.value) == text
    mine.check()


@pytest.mark.parametrize("held", [0, 1])
def test_an_error_from_before_the_world_was_lost_comes_first(fake, held):
    """It may be why the others have left; but not where it follows from the loss itself."""
    mine = process.current().member
    mine.hold_unread(held)
    fake.adapter.unread.append(InputFailedError("'first': its input failed."))
    fake.failure = PeerLostError("rank 1 died.")
    with pytest.raises(InputFailedError, match="'first'"):
        mine.check()
    with pytest.raises(PeerLostError):
        mine.check()
    follows = InputFailedError("allreduce 'w': an operation that should have produced an input failed.\n  ")
    fake.adapter.unread.append(InputFailedError(f"{follows}PeerLostError: [rank 0/2] rank 1 died."))
    with pytest.raises(PeerLostError):
        mine.check()


@pytest.mark.parametrize(("hosts", "takes"), [(1, 8 + 12), (2, 4 + 12 + 4)])
def test_a_world_takes_open_files(monkeypatch, hosts, takes):
    """As many as this host has workers, and some more."""
    machines = [Host(str(rank % hosts), str(rank % hosts)) for rank in range(8)]
    topology = Place.of(0, machines, source="launcher", set_number=3)
    monkeypatch.setattr(segment.cores, "limit_of", lambda which: 100)
    monkeypatch.setattr(segment.cores, "open_below", lambda limit: limit - takes)
    segment._check_room(topology)
    monkeypatch.setattr(segment.cores, "open_below", lambda limit: limit - takes + 1)
    text = f"process set 3 of 8 workers takes {takes} open files, and this process has {takes - 1} left"
    with pytest.raises(LaunchError, match=rf"{text}.\n  100 are allowed \(ulimit -n\), {101 - takes} are in use"):
        segment._check_room(topology)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EMFILE, "memfd_create: Too many open files"), r"needs: memfd_create: .*\.\n  Fix: .*ulimit -n"),
        (OSError(errno.EIO, "mmap: I/O error"), r"needs: mmap: I/O error\.\n  Fix: .*dmesg"),
        (RuntimeError("can't start new thread"), r"needs: a thread\.\n  Fix: .*ulimit -u"),
    ],
)
def test_what_the_system_refuses_has_a_fix(error, told):
    place = Place.of(0, [Host.here()], source="alone")
    with pytest.raises(LaunchError, match=told), segment.refusals_explained(place):
        raise error


def test_a_fresh_world_knows_nothing_of_the_errors_of_the_last_one():
    first, second = (Place.of(0, [Host.here()], generation=each, source="launcher") for each in range(2))
    mine = Member()
    mine.join(World(first, "fake", b""))
    mine.defer(KVHvdError("of the world before"))
    mine.leave()
    mine.join(World(second, "fake", b""))
    mine.check()


@pytest.mark.parametrize(
    ("name", "settings", "asked"), [("s0/1", {}, 3), ("s0/1", {"KVHVD_TIMEOUT": "9"}, 1), ("~left", {}, 1)]
)
def test_who_leaves_waits_beyond_the_timeout_for_workers_that_compute_only(
    fake, monkeypatch, setting, name, settings, asked
):
    """Not where the timeout was set, nor for operations that may wait for others for any time."""
    monkeypatch.delenv("KVHVD_TIMEOUT", raising=False)
    setting(**settings)
    fake.pending, fake.waiting = [True] * 2, lambda age_s: [SimpleNamespace(name=name)]
    assert process.current()._leave("") == []
    assert fake.left == ["" if asked == 3 else "it left while its operations were pending"]
    assert len(fake.pending) == max(2 - asked, 0)


@pytest.mark.parametrize("where", ["operations", "mxnet", "afterwards", 0, 1])
def test_who_is_interrupted_as_it_leaves_has_left(fake, monkeypatch, where):
    """The others are told at once: nothing is left to the garbage collector, which would wait for them. Nobody waits in
    the worlds inside, either, in whichever of them it is."""
    interruption, members = KeyboardInterrupt(), [_Inner(), _Inner()] if where in (0, 1) else []

    def waitall():
        if where == "mxnet" or fake.left:
            raise interruption

    monkeypatch.setattr(mxnet_compat, "waitall", waitall)
    if where == "operations":
        fake.interrupted = interruption
    elif members:
        members[where]._lost = interruption
    mine = process.current()
    mine.sets = members
    with pytest.raises(KeyboardInterrupt) as caught:
        mine.leave()
    assert caught.value is interruption
    reason = "it was interrupted while it left: KeyboardInterrupt"
    assert fake.left == (["", reason] if where == "afterwards" else [reason])
    assert [member.reasons[-1] for member in members] == [reason] * len(members)
    assert not process.everybody.is_initialized
    assert mine._leave("") == []


@pytest.mark.parametrize(("voided", "is_aborted"), [(4, False), (5, True), (6, True)])
def test_a_world_fails_when_it_or_a_later_one_is_declared_lost(fake, voided, is_aborted):
    """A word about an earlier one, which came late, changes nothing."""
    mine = process.current()
    mine.member.world = World(Place.of(0, [Host.here()] * 2, generation=5, source="launcher"), "fake", b"")
    mine._on_lost(voided, "worker 1 died")
    assert fake.left == (["abort: worker 1 died"] if is_aborted else [])


def test_a_world_whose_workers_do_not_meet_is_followed_by_the_launchers_next_one(fake, monkeypatch):
    """Which may be lost already."""
    place, lost = Place.of(0, [Host.here()], source="launcher"), LaunchError("rank 1 is late.\n  Fix: see it.")
    first, second = (World(place, "fake", b"", unreached=[1], lost=lambda: "why", meeting=each) for each in range(2))
    mine = process.current()
    monkeypatch.setattr(mine._member, "join", Mock(side_effect=[lost, None]))
    mine.control = Mock(**{"next_world.return_value": second})
    mine._join(first)
    mine.control.next_world.assert_called_once_with("meeting", "rank 1 is late. Fix: see it.", [1])
    mine.control.joined.assert_called_once_with(second)
    assert fake.left == ["abort: why"]
    monkeypatch.setattr(process, "control_connection", lambda: mine.control)
    with pytest.raises(ValueError, match="the launcher chooses the workers"):
        process.Process().init([0])


@pytest.mark.parametrize(("path", "is_waiting"), [("DYNAMIC", False), ("t", True)])
def test_a_timeline_that_does_not_begin_with_the_job(fake, setting, path, is_waiting):
    setting(KVHVD_TIMELINE=path)
    mine = process.current()
    mine.member.is_waiting = is_waiting
    mine._record_from_start()
    assert not mine._recorder.is_recording


def test_the_world_of_a_process_set(monkeypatch):
    """Its workers with their hosts and processes; a worker that is not in it is alone."""
    worlds = []
    monkeypatch.setattr(Member, "join", lambda member, world: worlds.append(world))
    for rank in (3, 0):
        about = {"generation": 5, "pids": (1, 2, 3, 4)}
        outer = Place.of(rank, [Host(name, name) for name in "abab"], source="launcher", **about)
        SetMember([1, 2, 3], 7).join_within(World(outer, "job", b"", unreached=[2]), 9)
    inner, alone = (world.topology for world in worlds)
    assert (inner.rank, inner.hosts, inner.pids, inner.all_ranks) == (2, ("b", "a", "b"), (2, 3, 4), (1, 2, 3))
    assert (alone.hosts, alone.pids, alone.all_ranks, alone.is_member) == (("a",), (1,), (0,), False)
    for world in worlds:
        assert (world.topology.generation, world.job, world.index, world.unreached) == (5, "job.set7", 9, [])


class _Inner(SetMember):
    """A world inside that is left with an error to tell, or cannot be left in good order."""

    def __init__(self, unread=None, lost=None):
        super().__init__([0, 1], 1)
        self._unread, self._lost, self.reasons = unread, lost, []

    def leave(self, reason=""):
        self.reasons.append(reason)
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        return self._unread


FIRST, SECOND, LOST = MismatchError("the first"), MismatchError("the second"), PeerLostError("rank 1 died")


@pytest.mark.parametrize(
    ("members", "raised", "logged"),
    [
        ([_Inner(FIRST), _Inner(SECOND)], FIRST, ["the second"]),
        ([_Inner(lost=LOST), _Inner(SECOND), _Inner()], LOST, ["the second"]),
        ([_Inner(FIRST), _Inner(FIRST)], FIRST, []),  # a fork lets all of them know of one error
        ([_Inner(), _Inner()], None, []),
    ],
)
def test_the_first_error_is_raised_and_the_others_are_logged(fake, members, raised, logged, caplog):
    with caplog.at_level(logging.ERROR, "kvstore_hvd"):
        process.current().sets = members
        with pytest.raises(KVHvdError) if raised else contextlib.nullcontext() as caught:
            process.current().shutdown()
    assert raised is (caught and caught.value)
    assert [member.reasons for member in members] == [[""]] * len(members)
    assert [record.getMessage().rpartition("\n")[2] for record in caplog.records] == logged
