"""The decisions about an elastic job: how it starts, what a lost worker costs, and who has which rank."""

from __future__ import annotations

import signal

from support.elastic_jobs import Play

# -- Start --------------------------------------------------------------------------------------------------------


def test_the_first_generation_begins_when_all_are_ready() -> None:
    play = Play({"a": 2, "b": 1}, min_np=2)
    assert play.starts() == [(0, "a:0"), (1, "a:1"), (2, "b:0")]
    play.ready(2)
    play.ready(0)
    assert play.generation == -1
    play.ready(1)
    assert (play.generation, play.members) == (0, [0, 1, 2])
    for rank in range(3):
        (world,) = play.told(rank)
        assert world == {
            "t": "world",
            "generation": 0,
            "rank": rank,
            "size": 3,
            "hosts": [("name", "machine")] * 3,
            "places": [0, 1, 2],
            "job": "play",
        }
    assert play.notes("generation_joined") == []
    play.meet()
    assert play.notes("generation_joined") == [{"generation": 0}]


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


def test_a_program_that_always_fails_ends_the_job() -> None:
    play = Play({"a": 2}, min_np=1)
    for worker in range(4):
        play.end(worker, 3, "SyntaxError: x")
    assert play.ending is not None
    assert play.ending.code == 3
    assert play.ending.reason == "worker 0 (a:0) exited with code 3. Its last lines on stderr:"
    assert play.ending.details == ("SyntaxError: x",)


def test_a_worker_that_never_gets_ready_at_the_start_is_killed() -> None:
    play = Play({"a": 3}, min_np=2, timeout_s=50)
    play.ready(0)
    play.wait(49)
    assert play.signals(1) == []
    play.wait(2)
    assert play.signals(1) == play.signals(2) == [(signal.SIGKILL, False)]
    play.kill(1, 2)
    assert play.generation == -1  # those that take their places are waited for, as long
    play.ready(3)
    play.wait(51)
    assert play.signals(4) == [(signal.SIGKILL, False)]
    assert play.members == [0, 3]


# -- Losses -------------------------------------------------------------------------------------------------------


def test_a_dead_worker_costs_itself_only() -> None:
    play = Play({"a": 3}, min_np=2)
    play.begin()
    play.kill(1)
    assert play.notes("generation_void") == [
        {"generation": 0, "cause": "lost", "text": "worker 1 (a:1) was killed by SIGKILL"}
    ]
    for worker in (0, 2):
        assert play.told(worker, "void") == [
            {"t": "void", "generation": 0, "text": "worker 1 (a:1) was killed by SIGKILL"}
        ]
    assert play.starts()[3:] == [(3, "a:1")]
    play.ready(0)
    assert play.generation == 0
    play.ready(2)  # nobody waits for the new one, which still starts
    assert (play.generation, play.members) == (1, [0, 2])


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


def test_when_nobody_is_left_the_state_is_lost() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.end(0, 1, "PeerLostError: rank 1")
    play.enter(2)
    play.end(1, 9, "ValueError: the cause")
    assert play.ending is not None
    assert play.ending.code == 9
    assert play.ending.reason == (
        "no worker of generation 0 is left. First, worker 1 (a:1) exited with code 9. Its last lines on stderr:"
    )
    assert play.ending.details == ("ValueError: the cause",)
    assert play.told(2, "fail")
    assert play.starts()[2:] == [(2, "a:0")]


def test_newcomers_that_never_had_the_state_do_not_go_on_alone() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    for worker in (0, 1):
        play.say(worker, "synced", generation=0)
    play.kill(1)
    play.ready(0)
    play.meet()
    play.ready(2)
    play.ready(0, "updated")
    play.meet()
    assert play.members == [0, 2]
    play.kill(0)  # while it hands the state to worker 2
    assert play.ending is not None
    assert play.ending.reason.startswith(
        "no worker of generation 2 is left that has the state of the training. First, "
    )
    assert play.told(2, "fail")


# -- Order --------------------------------------------------------------------------------------------------------


def test_a_newcomer_is_told_a_place_until_it_is_ready() -> None:
    play = Play({"a": 1}, min_np=1)
    play.begin()
    play.hosts({"a": 2})
    play.enter(1)
    assert play.told(1) == [{"t": "place", "rank": 1, "size": 2, "hosts": [("name", "machine")] * 2, "places": [0, 1]}]


# -- Slots --------------------------------------------------------------------------------------------------------


def places(play: Play) -> dict[str, int]:
    """The local rank of the worker on each slot, as all members of the generation have been told it."""
    members = play.job.generation.members
    told = [play.told(member.id, "world")[-1] for member in members]
    assert [one["rank"] for one in told] == list(range(len(members)))
    assert all(one["places"] == told[0]["places"] for one in told)
    return {str(member.slot): place for member, place in zip(members, told[0]["places"])}


def test_local_ranks_follow_the_slots_whoever_was_ready_first() -> None:
    play = Play({"a": 3}, min_np=1)
    for worker in (2, 0, 1):
        play.ready(worker)
    assert play.meet() == [0, 1, 2]
    assert places(play) == {"a:0": 0, "a:1": 1, "a:2": 2}
    play.kill(0)
    for worker in (1, 2):
        play.ready(worker)
    play.meet()
    assert places(play) == {"a:1": 0, "a:2": 1}
    play.enter(3)  # on the slot that is free
    (place,) = play.told(3)
    assert (place["rank"], place["places"]) == (2, [1, 2, 0])
    for worker in (3, 2, 1):
        play.ready(worker)
    assert play.meet() == [1, 2, 3]  # the state is the old ones'
    assert places(play) == {"a:0": 0, "a:1": 1, "a:2": 2}


def test_local_ranks_of_two_machines() -> None:
    play = Play({"a": 2, "b": 2}, min_np=1)
    for worker, identity in ((3, "y"), (2, "y"), (1, "x"), (0, "x")):
        play.enter(worker, identity)
    play.meet()
    assert places(play) == {"a:0": 0, "a:1": 1, "b:0": 0, "b:1": 1}
    play.kill(2)
    play.enter(4, "y")
    for worker in (4, 3, 1, 0):
        play.ready(worker)
    play.meet()
    assert places(play) == {"a:0": 0, "a:1": 1, "b:0": 0, "b:1": 1}


def test_seats_of_newcomers() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.hosts({"a": 4})
    assert [play.job.seat(worker) for worker in (2, 3)] == [(2, 4, 2, 4), (3, 4, 3, 4)]
    play.kill(0)
    assert play.job.seat(4) == (3, 4, 0, 4)
    for worker in (4, 3, 2, 1):
        play.ready(worker)
    assert play.meet() == [1, 2, 3, 4]
    play.hosts({"a": 1, "b": 1})
    assert play.job.seat(5) == (1, 2, 1, 2)
