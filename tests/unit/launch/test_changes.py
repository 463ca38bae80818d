"""The decisions about an elastic job whose workers come and go, do not meet, or do not answer."""

import signal

import pytest

from support.elastic_jobs import Play, begun

pytestmark = pytest.mark.alike

KILLED = [signal.SIGKILL]


def test_members_are_told_of_all_changes_together():
    play = begun({"a": 1, "b": 1})
    play.hosts({"a": 1, "c": 1})
    assert play.told(0, "updated") == [{"t": "updated", "number": 1, "result": 1}]
    play.ready(2)
    assert play.told(0, "updated")[1:] == [{"t": "updated", "number": 2, "result": 3}]
    assert play.commit() == [0, 2]
    assert [message["t"] for message in play.told(1)] == ["world", "updated", "updated", "leave"]
    play.hosts({"a": 1, "c": 2})
    play.ready(3)
    assert play.told(0, "updated")[2:] == [{"t": "updated", "number": 3, "result": 2}]


def test_who_has_to_leave_and_does_not_is_ended():
    play = begun({"a": 1, "b": 1}, exit_timeout_s=30, kill_grace_s=5)
    play.hosts({"a": 1})
    assert play.commit() == [0]
    for seconds, signals in (29.9, []), (0.2, [signal.SIGTERM]), (5, [signal.SIGTERM, signal.SIGKILL]):
        play.wait(seconds)
        assert play.signals(1) == signals
    play.kill(1)
    assert play.notes("slot_blacklisted") == []
    play.end(0)
    assert play.outcome == (0, "")


@pytest.mark.parametrize(("what", "worlds"), [("no meeting", 20), ("the state", 40), ("time", 40)])
def test_worlds_that_are_lost_before_they_have_begun(what, worlds):
    """As where large packets are lost and small ones are not: workers meet, and get no further."""
    play = Play({"a": 2})
    play.ready(0, 1)
    for number in range(worlds):
        assert play.ending is None
        if what == "no meeting":
            play.say(0, "ready", generation=play.generation, cause="meeting", text="b is silent", unreached=[])
            play.ready(1, cause="meeting")
            continue
        play.meet()
        play.say(0, "synced", generation=play.generation)
        if number == 19 and what == "the state":
            play.say(1, "synced", generation=play.generation)
        elif number == 19:
            play.wait(60)
        play.say(0, "ready", generation=play.generation, cause="lost", text="b is silent", unreached=[])
        play.ready(1)
    assert play.outcome == (1, "20 worlds in a row were lost before they had begun, the last one with: b is silent")


def test_who_is_not_ready_after_a_timeout_of_the_others_is_killed():
    play = begun({"a": 3})
    play.ready(0, cause="timeout")
    assert play.told(2, "lost")
    play.wait(0.4)
    play.ready(1, cause="timeout")
    play.wait(0.2)
    assert (play.signals(1), play.signals(2)) == ([], KILLED)
    assert play.notes("worker_killed") == [{"worker": 2, "why": "it did not answer while the others waited for it"}]
    assert play.members == [0, 1]  # not even its end is waited for
    assert play.running == [0, 1, 2]
    play.wait(6)  # one that the kernel does not end is taken for gone
    assert play.running == [0, 1, 3]
    play.kill(2)  # now, at last
    assert len(play.notes("worker_exited")) == len(play.notes("generation_void")) == 1


def test_who_never_gets_ready_at_the_start_is_killed():
    play = Play({"a": 3}, min_np=2, timeout_s=50)
    play.ready(0)
    play.wait(49)
    assert play.signals(1) == []
    play.wait(2)
    assert play.signals(1) == play.signals(2) == KILLED
    play.kill(1, 2)
    assert play.generation == -1  # those that take their places are waited for, as long
    play.ready(3)
    play.wait(51)
    assert play.signals(4) == KILLED
    assert play.members == [0, 3]


def updates(play):
    return len(play.notes("updated"))


@pytest.mark.parametrize(("took", "limit"), [(7, 7), (0.1, 2), (100, 30)])
def test_a_newcomer_is_waited_for_as_long_as_the_first_one_took_itself(took, limit):
    play = begun({"a": 1}, start_timeout_s=30)
    play.hosts({"a": 3})
    play.wait(took)
    play.ready(2)
    play.wait(limit - 0.1)
    assert updates(play) == 0
    play.wait(0.2)
    assert updates(play) == 1
    assert play.commit() == [0, 2]
    play.ready(1)
    assert updates(play) == 2
    assert play.commit() == [0, 2, 1]


def test_slots_that_go_are_told_at_once():
    """Those that come instead join later, and both is one change."""
    play = begun({"a": 1, "b": 2}, reset_limit=1)
    play.hosts({"a": 1, "c": 2})
    assert updates(play) == 1
    assert play.commit() == [0]
    play.wait(3)
    play.ready(3, 4)
    assert play.commit() == [0, 3, 4]
    assert play.ending is None
    play.hosts({"a": 1, "c": 1})
    play.ready(0, 3, 4, cause="updated")
    reason = "Horovod was shutdown because number of resets during elastic job exceeded limit: 1"
    assert play.outcome == (1, reason)
    assert [told["text"] for told in play.told(0, "fail")] == [reason]
