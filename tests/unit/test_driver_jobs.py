"""The decisions about an elastic job, one rule after the other."""

from __future__ import annotations

import signal

import pytest

from support.elastic_jobs import Play

KILLED = -signal.SIGKILL

# -- Start --------------------------------------------------------------------------------------------------------


def test_the_first_epoch_begins_when_all_are_ready() -> None:
    play = Play({"a": 2, "b": 1}, min_np=2)
    assert play.starts() == [(0, "a:0"), (1, "a:1"), (2, "b:0")]
    play.ready(2)
    play.ready(0)
    assert play.epoch == -1
    play.ready(1)
    assert (play.epoch, play.members) == (0, [0, 1, 2])
    for rank in range(3):
        (world,) = play.told(rank)
        assert world == {
            "t": "world",
            "epoch": 0,
            "rank": rank,
            "size": 3,
            "hosts": [("name", "machine")] * 3,
            "job": "play",
        }
    assert play.notes("epoch_joined") == []
    play.meet()
    assert play.notes("epoch_joined") == [{"epoch": 0}]


def test_not_more_workers_than_asked_for() -> None:
    assert len(Play({"a": 9}, min_np=2, max_np=3).starts()) == 3


def test_the_start_waits_for_slots() -> None:
    play = Play({"a": 1}, min_np=2, elastic_timeout_s=60)
    assert play.starts() == []
    play.wait(59)
    play.hosts({"a": 1, "b": 1})
    assert len(play.starts()) == 2


def test_the_number_at_the_start_may_be_more_than_the_least() -> None:
    play = Play({"a": 2}, min_np=1, first_np=3)
    assert play.starts() == []
    play.hosts({"a": 4})
    assert len(play.starts()) == 4


def test_the_start_gives_up_with_the_reason() -> None:
    play = Play({"a": 1}, min_np=2, elastic_timeout_s=60)
    play.wait(59)
    assert play.ending is None
    play.wait(2)
    assert play.ending is not None
    assert play.ending.code == 1
    assert play.ending.reason == "there are 1 slots, 2 are needed, and no more came within 60 s."


def test_a_worker_that_dies_before_the_first_epoch_is_replaced_and_waited_for() -> None:
    play = Play({"a": 2}, min_np=1)
    play.ready(0)
    play.kill(1)
    assert play.starts()[2:] == [(2, "a:1")]
    assert play.epoch == -1
    play.ready(2)
    assert play.members == [0, 2]


def test_a_program_that_always_fails_ends_the_job() -> None:
    play = Play({"a": 2}, min_np=1)
    for worker in range(4):
        play.end(worker, 3, "SyntaxError: x")
    assert play.ending is not None
    assert play.ending.code == 3
    assert play.ending.reason == "worker 0 (a:0) exited with code 3. Its last lines on stderr:"
    assert play.ending.details == ("SyntaxError: x",)


def test_programs_that_never_call_init_end_well() -> None:
    play = Play({"a": 2}, min_np=2)
    play.end(0)
    assert play.ending is None
    play.end(1)
    assert play.ending is not None
    assert (play.ending.code, play.ending.reason) == (0, "")


def test_a_worker_that_never_gets_ready_at_the_start_is_killed() -> None:
    play = Play({"a": 3}, min_np=2, timeout_s=50)
    play.ready(0)
    play.wait(49)
    assert play.signals(1) == []
    play.wait(2)
    assert play.signals(1) == play.signals(2) == [(signal.SIGKILL, False)]
    play.kill(1, 2)
    assert play.epoch == -1  # those that take their places are waited for, as long
    play.ready(3)
    play.wait(51)
    assert play.signals(4) == [(signal.SIGKILL, False)]
    assert play.members == [0, 3]


# -- Losses -------------------------------------------------------------------------------------------------------


def test_a_dead_worker_costs_itself_only() -> None:
    play = Play({"a": 3}, min_np=2)
    play.begin()
    play.kill(1)
    assert play.notes("epoch_void") == [{"epoch": 0, "cause": "lost", "text": "worker 1 (a:1) was killed by SIGKILL"}]
    for worker in (0, 2):
        assert play.told(worker, "void") == [{"t": "void", "epoch": 0, "text": "worker 1 (a:1) was killed by SIGKILL"}]
    assert play.starts()[3:] == [(3, "a:1")]
    play.ready(0)
    assert play.epoch == 0
    play.ready(2)  # nobody waits for the new one, which still starts
    assert (play.epoch, play.members) == (1, [0, 2])


def test_a_newcomer_that_is_ready_in_time_is_taken_along() -> None:
    play = Play({"a": 3}, min_np=2)
    play.begin()
    play.kill(0)
    play.ready(3)
    play.ready(2)
    play.ready(1)
    assert play.members == [1, 2, 3]


def test_below_the_least_the_newcomers_are_waited_for() -> None:
    play = Play({"a": 2}, min_np=2)
    play.begin()
    play.kill(0)
    play.ready(1)
    assert play.epoch == 0
    play.ready(2)
    assert (play.epoch, play.members) == (1, [1, 2])


def test_below_the_least_without_slots_it_waits_and_ends_with_the_reason() -> None:
    play = Play({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=30)
    play.begin()
    play.hosts({"a": 1})
    play.kill(1)
    play.ready(0)
    play.wait(29)
    assert play.ending is None
    play.wait(2)
    assert play.ending is not None
    assert play.ending.code == 1
    assert play.ending.reason == "1 workers are ready, 2 are needed, and no more came within 30 s."
    assert play.ending.details == ("worker 1 (b:0) was killed by SIGKILL",)
    assert play.told(0, "fail") == [{"t": "fail", "text": play.ending.reason}]


def test_the_wait_below_the_least_ends_when_a_slot_comes() -> None:
    play = Play({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=30)
    play.begin()
    play.hosts({"a": 1})
    play.kill(1)
    play.ready(0)
    play.wait(29)
    play.hosts({"a": 1, "c": 1})
    play.ready(2)
    assert play.members == [0, 2]
    play.meet()
    play.wait(1000)
    assert play.ending is None


def test_when_nobody_is_left_the_state_is_lost() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.end(0, 1, "PeerLostError: rank 1")
    play.enter(2)
    play.end(1, 9, "ValueError: the cause")
    assert play.ending is not None
    assert play.ending.code == 9
    assert play.ending.reason == (
        "no worker of epoch 0 is left that has the state of the training. "
        "First, worker 1 (a:1) exited with code 9. Its last lines on stderr:"
    )
    assert play.ending.details == ("ValueError: the cause",)
    assert play.told(2, "fail")
    assert play.starts()[2:] == [(2, "a:0")]


def test_newcomers_that_never_had_the_state_do_not_go_on_alone() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    for worker in (0, 1):
        play.say(worker, "synced", epoch=0)
    play.kill(1)
    play.ready(0)
    play.meet()
    play.ready(2)
    play.ready(0, "updated")
    play.meet()
    assert play.members == [0, 2]
    play.kill(0)  # while it hands the state to worker 2
    assert play.ending is not None
    assert play.ending.reason.startswith("no worker of epoch 2 is left that has the state of the training. First, ")
    assert play.told(2, "fail")


def test_the_last_one_that_has_the_state_stays_until_another_has_it() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1, max_np=2)
    play.begin()
    play.say(0, "synced", epoch=0)
    play.hosts({"b": 1, "c": 1})
    play.ready(2)
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.members == [0, 1]  # its slot is gone, but worker 1 may not have the state


def test_the_state_stays_although_no_newcomer_waits_for_it() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1)
    play.begin()
    play.say(0, "synced", epoch=0)
    play.hosts({"b": 1})
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.meet() == [0, 1]
    play.say(1, "synced", epoch=1)
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.meet() == [1]


def test_rank_0_has_the_state_if_anybody_has_it() -> None:
    play = Play({"a": 3}, min_np=1)
    play.begin()
    for worker in (0, 1, 2):
        play.say(worker, "synced", epoch=0)
    play.kill(1, 2)
    play.ready(0)
    play.ready(3)
    play.ready(4)
    play.ready(0, "updated")
    play.meet()
    play.ready(3, "updated")
    assert play.members[0] == 0
    play.ready(4, "updated")
    play.ready(0, "updated")
    assert play.meet() == [0, 3, 4]
    play.say(4, "synced", epoch=play.epoch)
    play.kill(0)
    play.ready(3)
    play.ready(4)
    assert play.members == [4, 3]


def test_who_leaves_with_the_state_does_not_count() -> None:
    play = Play({"a": 1, "b": 1}, min_np=1)
    play.begin()
    for worker in (0, 1):
        play.say(worker, "synced", epoch=0)
    play.hosts({"b": 1, "c": 1})
    play.ready(2)
    play.ready(0, "updated")
    play.ready(1, "updated")
    assert play.meet() == [1, 2]
    assert play.told(0, "leave")
    play.kill(1)  # while it hands the state to worker 2
    assert play.ending is not None
    assert "that has the state of the training" in play.ending.reason


def test_a_host_is_lost_with_its_workers() -> None:
    play = Play({"a": 2, "b": 1}, min_np=1)
    play.begin()
    play.job.host_lost("a", "its daemon was killed by SIGKILL", play.now)
    play._take()
    assert [note["worker"] for note in play.notes("worker_exited")] == [0, 1]
    assert len(play.notes("epoch_void")) == 1
    play.ready(2)
    assert play.members == [2]
    assert play.starts()[3:] == [(3, "a:0"), (4, "a:1")]


# -- Order --------------------------------------------------------------------------------------------------------


def test_old_workers_keep_their_order_and_newcomers_come_after_them() -> None:
    play = Play({"a": 4}, min_np=1)
    play.begin()
    play.kill(0)
    play.ready(4)
    for worker in (3, 2, 1):
        play.ready(worker)
    assert play.meet() == [1, 2, 3, 4]
    play.kill(2)
    play.ready(5)
    for worker in (4, 3, 1):
        play.ready(worker)
    assert play.meet() == [1, 3, 4, 5]


def test_workers_of_a_machine_are_neighbours_and_the_oldest_machine_is_first() -> None:
    play = Play({"a": 2, "b": 2}, min_np=1)
    for worker, identity in ((2, "y"), (3, "y"), (0, "x"), (1, "x")):
        play.enter(worker, identity)
    assert play.meet() == [0, 1, 2, 3]
    play.kill(0)
    play.enter(4, "x")
    play.kill(1)
    play.enter(5, "x")
    for worker in (4, 5, 2, 3):
        play.ready(worker)
    assert play.meet() == [2, 3, 4, 5]
    play.kill(2)
    play.enter(6, "y")
    for worker in (6, 3, 4, 5):
        play.ready(worker)
    assert play.members == [3, 6, 4, 5]
    assert play.told(3, "world")[-1]["rank"] == 0
    assert [host[1] for host in play.told(3, "world")[-1]["hosts"]] == ["y", "y", "x", "x"]


def test_a_newcomer_is_told_a_place_until_it_is_ready() -> None:
    play = Play({"a": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 2})
    play.enter(1)
    assert play.told(1) == [{"t": "place", "rank": 1, "size": 2, "hosts": [("name", "machine")] * 2}]


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
    assert play.epoch == 0
    assert play.told(1, "void") == []
    play.ready(1, "updated")
    assert (play.epoch, play.members) == (1, [0, 1, 2])


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
    assert (play.epoch, play.members) == (1, [0])
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
    assert (play.epoch, play.members) == (1, [0, 1])
    assert play.told(1, "leave") == []


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
    assert play.epoch == 0
    play.wait(9)
    play.hosts({"a": 1})
    assert (play.epoch, play.members) == (1, [0])


# -- Meetings -----------------------------------------------------------------------------------------------------


def test_a_death_during_a_meeting_voids_it() -> None:
    play = Play({"a": 3}, min_np=1)
    for worker in range(3):
        play.ready(worker)
    play.say(0, "joined", epoch=0)
    play.kill(2)
    assert [note["epoch"] for note in play.notes("epoch_void")] == [0]
    assert play.told(0, "void")
    play.ready(0)
    play.ready(1)
    assert (play.epoch, play.members) == (1, [0, 1])
    play.say(0, "joined", epoch=0)  # too late
    play.say(1, "joined", epoch=1)
    assert play.notes("epoch_joined") == []
    play.say(0, "joined", epoch=1)
    assert play.notes("epoch_joined") == [{"epoch": 1}]


def test_who_gives_a_meeting_up_voids_it() -> None:
    play = Play({"a": 2}, min_np=1)
    play.ready(0)
    play.ready(1)
    play.ready(1, "meeting")
    assert play.notes("epoch_void")[0]["cause"] == "meeting"
    assert play.told(0, "void")
    assert not play.told(1, "void")
    play.ready(0, "meeting")
    assert (play.epoch, play.members) == (1, [0, 1])


def test_a_word_from_before_the_world_changes_nothing() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.kill(1)
    play.ready(0)
    assert play.epoch == 1
    play.ready(0, epoch=0)
    assert play.notes("epoch_void")[-1]["epoch"] == 0
    assert play.epoch == 1


def test_a_meeting_that_hangs_altogether_is_ended() -> None:
    play = Play({"a": 2}, min_np=1, start_timeout_s=30)
    play.ready(0)
    play.ready(1)
    play.say(0, "joined", epoch=0)
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
        play.say(0, "ready", epoch=play.epoch, cause="meeting", text="no memory")
        play.ready(1, "meeting")
    assert play.ending is not None
    assert play.ending.code == 1
    assert play.ending.reason == "the workers did not meet 20 times in a row. The last time: no memory"


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
    assert len(play.notes("epoch_void")) == 1
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


# -- Crashes ------------------------------------------------------------------------------------------------------


def crash_and_return(play: Play, worker: int, others: list[int]) -> None:
    play.kill(worker)
    for other in others:
        play.ready(other)
    play.meet()


def test_a_slot_with_repeated_crashes_is_left_alone_for_a_while() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    crash_and_return(play, 1, [0])
    assert play.starts()[2:] == [(2, "a:1")]
    play.kill(2)  # while it starts
    (note,) = play.notes("slot_blacklisted")
    assert note["slot"] == "a:1"
    assert 20 <= note["seconds"] <= 30
    assert len(play.starts()) == 3
    play.wait(note["seconds"] - 0.1)
    assert len(play.starts()) == 3
    play.wait(0.2)
    assert play.starts()[3:] == [(3, "a:1")]


def test_crashes_are_forgotten_after_a_long_life() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    crash_and_return(play, 1, [0])
    play.ready(2)
    play.ready(0, "updated")
    play.meet()
    play.wait(599)
    play.wait(2)
    crash_and_return(play, 2, [0])
    assert play.notes("slot_blacklisted") == []
    assert play.starts()[3:] == [(3, "a:1")]


def test_a_worker_that_cannot_be_started_counts_as_crashed() -> None:
    play = Play({"a": 2}, min_np=1)
    play.end(1, 126, "no such file")
    play.end(2, 126, "no such file")
    assert [note["slot"] for note in play.notes("slot_blacklisted")] == ["a:1"]
    play.ready(0)
    assert play.members == [0]


# -- Ends ---------------------------------------------------------------------------------------------------------


def test_all_end_well() -> None:
    play = Play({"a": 2}, min_np=2)
    play.begin()
    for worker in (0, 1):
        play.say(worker, "finished")
        play.end(worker)
    assert play.ending is not None
    assert (play.ending.code, play.ending.reason) == (0, "")
    assert len(play.starts()) == 2


def test_after_a_success_nobody_is_started_and_the_rest_goes_on() -> None:
    play = Play({"a": 3}, min_np=3)
    play.begin()
    play.end(0)
    assert play.starts()[3:] == []
    play.kill(1)
    assert play.starts()[3:] == []
    play.ready(2)
    assert play.meet() == [2]
    play.end(2)
    assert play.ending is not None
    assert play.ending.code == 0  # what was lost was made good


def test_a_loss_after_a_success_that_nobody_makes_good_is_the_code() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.say(0, "finished")
    play.end(0)
    play.end(1, 7, "oops")
    assert play.ending is not None
    assert play.ending.code == 7
    assert play.ending.reason == "worker 1 (a:1) exited with code 7. Its last lines on stderr:"


def test_newcomers_leave_when_the_others_are_done() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    crash_and_return(play, 1, [0])
    play.ready(2)
    play.say(0, "finished")
    assert play.told(2, "leave")
    play.end(0)
    assert play.ending is None
    play.end(2)
    assert play.ending is not None
    assert play.ending.code == 0


def test_who_has_finished_is_not_waited_for() -> None:
    play = Play({"a": 3}, min_np=1)
    play.begin()
    play.say(0, "finished")
    play.kill(1)
    play.ready(2)
    assert play.members == [2]


def test_who_never_had_the_state_leaves_when_it_is_all_done() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.say(0, "synced", epoch=0)
    play.say(0, "finished")
    play.end(0)
    play.ready(1, "lost")
    assert play.epoch == 0
    assert play.told(1, "leave")
    play.end(1)
    assert play.ending is not None
    assert play.ending.code == 0


def test_a_second_run_in_the_same_program_recovers_too() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.say(0, "finished")
    play.say(1, "finished")
    play.kill(1)
    assert play.ending is None
    play.ready(0, "lost")
    assert play.members == [0]


def test_in_a_second_run_the_dead_are_replaced_and_all_are_waited_for() -> None:
    play = Play({"a": 3}, min_np=1)
    play.begin()
    for kind in ("synced", "finished", "synced"):
        for worker in (0, 1, 2):
            play.say(worker, kind, **({"epoch": 0} if kind == "synced" else {}))
    play.kill(2)
    assert play.starts()[3:] == [(3, "a:2")]
    play.ready(0)
    assert play.epoch == 0
    play.ready(1)
    assert play.members == [0, 1]


def test_too_many_resets() -> None:
    play = Play({"a": 4}, min_np=1, reset_limit=1)
    play.begin()
    play.kill(1)
    for worker in (0, 2, 3):
        play.ready(worker)
    play.meet()
    assert play.epoch == 1
    play.kill(2)
    play.ready(0)
    play.ready(3)
    assert play.ending is not None
    assert play.ending.code == 1
    assert play.ending.reason == ("Horovod was shutdown because number of resets during elastic job exceeded limit: 1")
    assert play.told(0, "fail") == [{"t": "fail", "text": play.ending.reason}]
    seen = len(play.seen)
    play.kill(0)
    play.wait(10_000)
    assert len(play.seen) == seen + 1  # the note of its end, and no decision any more


# -- What workers may not say -------------------------------------------------------------------------------------


def test_words_out_of_place_change_nothing() -> None:
    play = Play({"a": 2}, min_np=1)
    seen = len(play.seen)
    with pytest.raises(ValueError, match="there is no worker 7"):
        play.say(7, "finished")
    with pytest.raises(ValueError, match="before it has called init"):
        play.say(0, "ready", epoch=-1, cause="start", text="")
    play.enter(0)
    with pytest.raises(ValueError, match="an epoch that it was not given"):
        play.say(0, "joined", epoch=0)
    with pytest.raises(ValueError, match="an epoch that it was not given"):
        play.say(0, "ready", epoch=3, cause="lost", text="")
    assert len(play.seen) == seen + 1
    play.kill(0)
    play.say(0, "finished")
    assert play.notes("worker_finished") == []
