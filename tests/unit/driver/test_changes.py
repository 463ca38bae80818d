"""The decisions about an elastic job whose workers come and go, do not meet, or do not answer."""

from __future__ import annotations

import signal

from support.elastic_jobs import Play

# -- Changes ------------------------------------------------------------------------------------------------------


def test_members_are_told_of_a_newcomer_when_it_is_ready() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.hosts({"a": 3})
    play.enter(2)
    assert play.notes("updated") == []
    play.ready(2)
    for worker in (0, 1):
        assert play.told(worker, "updated") == [{"t": "updated", "number": 1, "result": 2}]
    play.ready(0, "updated")
    assert play.generation == 0
    assert play.told(1, "void") == []
    play.ready(1, "updated")
    assert (play.generation, play.members) == (1, [0, 1, 2])


def test_members_are_told_of_all_changes_together() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 1, "c": 1})
    assert play.told(0, "updated") == [{"t": "updated", "number": 1, "result": 1}]
    play.ready(2)
    assert play.told(0, "updated")[1:] == [{"t": "updated", "number": 2, "result": 3}]
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.members == [0, 2]
    assert [message["t"] for message in play.told(1)] == ["world", "updated", "updated", "leave"]
    play.meet()
    play.hosts({"a": 1, "c": 2})
    play.ready(3)
    assert play.told(0, "updated")[2:] == [{"t": "updated", "number": 3, "result": 2}]


def test_a_newcomer_that_gets_ready_during_a_meeting_is_told_of_after_it() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.kill(1)
    play.ready(0)
    play.ready(2)
    assert (play.generation, play.members) == (1, [0])
    assert play.told(0, "updated") == []
    play.meet()
    assert play.told(0, "updated") == [{"t": "updated", "number": 1, "result": 2}]


def test_who_has_to_leave_and_does_not_is_ended() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1, exit_timeout_s=30, kill_grace_s=5)
    play.begin()
    play.hosts({"a": 1})
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.members == [0]
    play.meet()
    play.wait(29.9)
    assert play.signals(1) == []
    play.wait(0.2)
    assert play.signals(1) == [(signal.SIGTERM, True)]
    play.wait(5)
    assert play.signals(1) == [(signal.SIGTERM, True), (signal.SIGKILL, True)]
    play.kill(1)
    assert play.notes("slot_blacklisted") == []
    assert play.ending is None
    play.end(0)
    assert play.ending is not None
    assert play.ending.code == 0


def test_a_slot_that_comes_back_is_used_when_the_worker_that_left_has_ended() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 1})
    play.ready(0, "updated")
    play.ready(1, "updated")
    play.meet()
    play.hosts({"a": 1, "b": 1})
    assert len(play.starts()) == 2
    play.end(1)
    assert play.starts()[2:] == [(2, "b:0")]
    assert play.ending is None  # a worker that was sent away is no success
    play.ready(2)
    assert play.told(0, "updated")[-1]["result"] == 2


def test_a_slot_that_goes_and_comes_back_before_the_commit_keeps_its_worker() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 1})
    play.hosts({"a": 1, "b": 1})
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert (play.generation, play.members) == (1, [0, 1])
    assert play.told(1, "leave") == []


def test_who_leaves_takes_no_place_of_those_to_come() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1, max_np=2)
    play.begin()
    play.hosts({"a": 1, "c": 1})
    play.ready(2)
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.meet() == [0, 2]
    assert play.told(1, "leave")
    play.hosts({"a": 1, "b": 1, "c": 1})  # worker 1 is still there
    assert len(play.starts()) == 3
    play.kill(0)
    assert play.starts()[3:] == [(3, "a:0")]


def test_a_newcomer_whose_slot_goes_is_sent_away() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 1, "b": 1, "c": 2})
    play.ready(2)
    play.hosts({"a": 1, "b": 1})
    assert play.told(2, "leave")
    play.wait(0.1)
    assert play.signals(3) == [(signal.SIGTERM, True)]  # nobody there who could hear it
    play.enter(3)
    assert play.told(3, "leave")


def test_the_last_one_with_the_state_stays_until_a_newcomer_has_it() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.hosts({"b": 1})
    play.ready(2)
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.meet() == [0, 2]
    assert play.told(1, "leave")
    assert play.told(0, "updated")[-1]["result"] == 1
    play.ready(0, "updated")
    play.ready(2, "updated")
    assert play.meet() == [2]
    assert play.told(0, "leave")


def test_when_all_slots_go_the_workers_wait_for_others() -> None:
    play = Play({"a": 1}, min_np=1, elastic_timeout_s=10)
    play.begin()
    play.hosts({})
    play.ready(0, "updated")
    assert play.generation == 0
    play.wait(9)
    play.hosts({"a": 1})
    assert (play.generation, play.members) == (1, [0])


# -- Meetings -----------------------------------------------------------------------------------------------------


def test_a_death_during_a_meeting_voids_it() -> None:
    play = Play({"a": 3}, min_np=1)
    for worker in range(3):
        play.ready(worker)
    play.say(0, "joined", generation=0)
    play.kill(2)
    assert [note["generation"] for note in play.notes("generation_void")] == [0]
    assert play.told(0, "void")
    play.ready(0)
    play.ready(1)
    assert (play.generation, play.members) == (1, [0, 1])
    play.say(0, "joined", generation=0)  # too late
    play.say(1, "joined", generation=1)
    assert play.notes("generation_joined") == []
    play.say(0, "joined", generation=1)
    assert play.notes("generation_joined") == [{"generation": 1}]


def test_after_a_meeting_is_voided_its_own_deadline_does_not_count() -> None:
    play = Play({"a": 3}, min_np=1, start_timeout_s=30, timeout_s=600)
    for worker in range(3):
        play.ready(worker)
    play.wait(39)
    play.kill(2)
    play.wait(100)
    assert play.signals(0) == play.signals(1) == []
    play.wait(501)
    assert play.signals(0) == play.signals(1) == [(signal.SIGKILL, False)]


def test_who_gives_a_meeting_up_voids_it() -> None:
    play = Play({"a": 2}, min_np=1)
    play.ready(0)
    play.ready(1)
    play.ready(1, "meeting")
    assert play.notes("generation_void")[0]["cause"] == "meeting"
    assert play.told(0, "void")
    assert not play.told(1, "void")
    play.ready(0, "meeting")
    assert (play.generation, play.members) == (1, [0, 1])


def test_a_word_from_before_the_world_changes_nothing() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.kill(1)
    play.ready(0)
    assert play.generation == 1
    play.ready(0, generation=0)
    assert play.notes("generation_void")[-1]["generation"] == 0
    assert play.generation == 1


def test_a_meeting_that_hangs_altogether_is_ended() -> None:
    play = Play({"a": 2}, min_np=1, start_timeout_s=30)
    play.ready(0)
    play.ready(1)
    play.say(0, "joined", generation=0)
    play.wait(41)
    assert play.signals(0) == []
    assert play.signals(1) == [(signal.SIGKILL, False)]
    play.ready(0)
    assert play.members == [0]


def test_who_does_not_come_out_of_a_meeting_is_killed() -> None:
    play = Play({"a": 2}, min_np=1)
    play.ready(0)
    play.ready(1)
    play.ready(0, "meeting")
    play.wait(6)
    assert play.signals(1) == [(signal.SIGKILL, False)]
    assert play.members == [0]


def test_workers_that_never_meet() -> None:
    play = Play({"a": 2}, min_np=1)
    play.ready(0)
    play.ready(1)
    for _ in range(20):
        assert play.ending is None
        play.say(0, "ready", generation=play.generation, cause="meeting", text="no memory")
        play.ready(1, "meeting")
    assert play.ending is not None
    assert play.ending.code == 1
    assert play.ending.reason == "the rendezvous failed 20 times in a row, the last time with: no memory"


def test_a_meeting_that_succeeds_makes_those_before_it_good() -> None:
    play = Play({"a": 2}, min_np=1)
    play.ready(0)
    play.ready(1)
    for _ in range(3):
        for _ in range(19):
            play.ready(0, "meeting")
            play.ready(1, "meeting")
        play.meet()
        for worker in (0, 1):
            play.ready(worker, "updated")
    assert play.ending is None
    assert play.generation == 3 * 20


# -- Hangs --------------------------------------------------------------------------------------------------------


def test_who_is_not_ready_after_a_timeout_of_the_others_is_killed() -> None:
    play = Play({"a": 3}, min_np=1)
    play.begin()
    play.ready(0, "timeout")
    assert play.told(2, "void")
    play.wait(0.4)
    play.ready(1, "timeout")
    play.wait(0.2)
    assert play.signals(1) == []
    assert play.signals(2) == [(signal.SIGKILL, False)]
    assert play.notes("worker_killed") == [{"worker": 2, "why": "it did not answer while the others waited for it"}]
    assert play.members == [0, 1]  # not even its end is waited for
    play.kill(2)
    assert len(play.notes("generation_void")) == 1
    assert play.starts()[3:] == [(3, "a:2")]


def test_who_is_not_ready_for_long_is_killed_whatever_the_cause() -> None:
    for cause in ("lost", "updated", "reset"):
        play = Play({"a": 2}, min_np=1, timeout_s=100)
        play.begin()
        play.ready(0, cause)
        assert bool(play.told(1, "void")) is (cause == "lost")
        play.wait(99)
        assert play.signals(1) == []
        play.wait(2)
        assert play.signals(1) == [(signal.SIGKILL, False)]
        assert play.members == [0]


def test_survivors_that_never_come_are_killed() -> None:
    play = Play({"a": 2}, min_np=1, timeout_s=100)
    play.begin()
    play.kill(0)
    play.wait(101)
    assert play.signals(1) == [(signal.SIGKILL, False)]


def test_a_killed_worker_that_the_kernel_does_not_end_is_taken_for_gone() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.ready(0, "timeout")
    play.wait(5)
    assert play.signals(1)
    assert play.running == [0, 1]
    play.wait(1)
    assert play.running == [0, 2]
    play.kill(1)  # now, at last
    assert len(play.notes("worker_exited")) == 1


def test_a_long_wait_for_a_worker_is_told_once() -> None:
    play = Play({"a": 3}, min_np=1, timeout_s=100)
    play.begin()
    play.ready(0, "reset")
    play.ready(1, "reset")
    play.wait(9)
    assert play.notes("waiting") == []
    play.wait(2)
    assert play.notes("waiting") == [{"workers": [2], "seconds": 90}]
    play.wait(30)
    assert len(play.notes("waiting")) == 1
    play.ready(2, "reset")
    play.meet()
    play.wait(100)
    assert len(play.notes("waiting")) == 1


def test_a_wait_for_more_workers_is_told_once() -> None:
    play = Play({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=60)
    play.begin()
    play.hosts({"a": 1})
    play.kill(1)
    play.ready(0)
    play.wait(11)
    assert play.notes("too_few") == [{"text": "1 workers are ready", "needed": 2, "seconds": 50}]
    play.wait(20)
    assert len(play.notes("too_few")) == 1


# -- Newcomers of one change --------------------------------------------------------------------------------------


def updates(play: Play) -> int:
    return len(play.notes("updated"))


def commit(play: Play) -> list[int]:
    """All members come to a commit, and meet those that are ready."""
    for worker in play.members:
        play.ready(worker, "updated")
    return play.meet()


def test_newcomers_of_one_change_join_together() -> None:
    play = Play({"a": 1}, min_np=1, reset_limit=1)
    play.begin()
    play.hosts({"a": 2, "b": 2})
    for seconds, worker in ((5, 2), (4, 1)):
        play.wait(seconds)
        play.ready(worker)
        assert updates(play) == 0
    play.ready(3)
    assert updates(play) == 1
    assert commit(play) == [0, 1, 2, 3]
    assert play.ending is None


def test_a_newcomer_is_waited_for_as_long_as_the_first_one_took_itself() -> None:
    play = Play({"a": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 3})
    play.wait(7)
    play.ready(2)
    play.wait(6.9)
    assert updates(play) == 0
    play.wait(0.2)
    assert updates(play) == 1
    assert commit(play) == [0, 2]
    play.ready(1)
    assert updates(play) == 2
    assert commit(play) == [0, 2, 1]


def test_the_wait_has_bounds() -> None:
    for took, limit in ((0.1, 2), (100, 30)):
        play = Play({"a": 1}, min_np=1, start_timeout_s=30)
        play.begin()
        play.hosts({"a": 3})
        play.wait(took)
        play.ready(1)
        play.wait(limit - 0.1)
        assert updates(play) == 0
        play.wait(0.2)
        assert updates(play) == 1


def test_who_will_not_come_is_not_waited_for() -> None:
    """One that dies is; but its successor is, as long as it would have been."""
    play = Play({"a": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 3})
    play.wait(10)
    play.ready(1)
    play.wait(1)
    play.kill(2)
    assert play.starts()[3:] == [(3, "a:2")]
    play.wait(8.9)
    assert updates(play) == 0
    play.wait(0.2)
    assert updates(play) == 1
    play = Play({"a": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 3})
    play.wait(10)
    play.ready(1)
    play.hosts({"a": 2})  # the other slot is gone
    assert updates(play) == 1


def test_a_commit_for_another_reason_takes_those_that_are_ready() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.hosts({"a": 4})
    play.ready(2)
    play.kill(1)
    play.ready(0)
    assert play.meet() == [0, 2]


def test_slots_that_go_are_told_at_once() -> None:
    """Those that come instead join later, and both is one change."""
    play = Play({"a": 1, "b": 2}, min_np=1, reset_limit=1)
    play.begin()
    play.hosts({"a": 1, "c": 2})
    assert updates(play) == 1
    assert commit(play) == [0]
    play.wait(3)
    play.ready(3)
    play.ready(4)
    assert commit(play) == [0, 3, 4]
    assert play.ending is None
    play.hosts({"a": 1, "c": 1})
    for worker in (0, 3, 4):
        play.ready(worker, "updated")
    assert play.ending is not None
    assert "number of resets" in play.ending.reason


def test_the_reset_limit_counts_a_change_once_also_where_one_is_late() -> None:
    play = Play({"a": 1}, min_np=1, reset_limit=2)
    play.begin()
    play.hosts({"a": 3})
    play.ready(1)
    play.wait(60)
    assert commit(play) == [0, 1]
    play.ready(2)
    assert commit(play) == [0, 1, 2]
    play.hosts({"a": 4})
    play.ready(3)
    assert commit(play) == [0, 1, 2, 3]
    assert play.ending is None
    play.kill(3)  # a loss
    for worker in (0, 1, 2):
        play.ready(worker)
    assert play.ending is not None


def test_who_replaces_a_worker_that_died_counts() -> None:
    play = Play({"a": 2}, min_np=1, reset_limit=1)
    play.begin()
    play.kill(1)
    play.ready(0)
    play.meet()
    play.ready(2)
    play.ready(0, "updated")
    assert play.ending is not None
