"""The decisions about an elastic job: crashes, its end, and what workers may not say."""

from __future__ import annotations

import pytest

from support.elastic_jobs import Play

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


def fail_in_turn(play: Play, code: int = 1, *, hung: bool = False) -> None:
    """All of a world but rank 0 fail, or are killed because they hang; it meets with those that take their places."""
    first, *others = play.members
    generation = play.generation
    if hung:
        play.ready(first, "timeout")
        play.wait(0.6)
        assert all(play.signals(worker) for worker in others)
    for worker in others:
        play.end(worker, code, "ValueError: always")
    if not hung:
        play.ready(first)
    while play.ending is None and play.generation == generation:
        for worker in play.running:
            if worker != first:
                play.ready(worker)
        play.wait(1)
    play.meet()


def test_a_program_that_fails_whoever_runs_it_ends_the_job() -> None:
    play = Play({"a": 2}, min_np=2)
    play.begin()
    for _ in range(5):
        fail_in_turn(play)
        assert play.ending is None
    fail_in_turn(play, 3)
    assert play.ending is not None
    assert play.ending.code == 3
    assert play.ending.reason.startswith("workers keep failing, and so do their replacements soon after they start")
    assert "Most recently, worker 6 (a:1) exited with code 3." in play.ending.reason
    assert play.ending.details == ("ValueError: always",)


@pytest.mark.parametrize("what", ["killed", "hung", "commit", "long life"])
def test_failures_that_do_not_tell_of_the_program(what: str) -> None:
    play = Play({"a": 2, "b": 1}, min_np=2, max_np=2, timeout_s=10_000)
    play.begin()
    for _ in range(12):
        if what == "commit":
            for worker in play.members:
                play.ready(worker, "updated")
            play.meet()
        elif what == "long life":
            play.wait(61)
        # One that hangs may come to an end of its own just as it is killed.
        fail_in_turn(play, -9 if what == "killed" else 1, hung=what == "hung")
    assert play.ending is None


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


def test_a_loss_after_a_success_that_nobody_makes_good_is_the_code() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.say(0, "finished")
    play.end(0)
    play.end(1, 7, "oops")
    assert play.ending is not None
    assert play.ending.code == 7
    assert play.ending.reason == "worker 1 (a:1) exited with code 7. Its last lines on stderr:"


def test_how_a_worker_ends_that_had_to_leave_is_not_the_code_of_the_job() -> None:
    play = Play({"a": 2}, min_np=1)
    play.begin()
    play.say(0, "synced", generation=0)
    play.say(0, "finished")
    play.end(0)
    play.ready(1, "lost")
    assert play.told(1, "leave")
    play.end(1, -15)
    assert play.ending is not None
    assert (play.ending.code, play.ending.reason) == (0, "")


def test_in_a_second_run_the_dead_are_replaced_and_all_are_waited_for() -> None:
    play = Play({"a": 3}, min_np=1)
    play.begin()
    for kind in ("synced", "finished", "synced"):
        for worker in (0, 1, 2):
            play.say(worker, kind, **({"generation": 0} if kind == "synced" else {}))
    play.kill(2)
    assert play.starts()[3:] == [(3, "a:2")]
    play.ready(0)
    assert play.generation == 0
    play.ready(1)
    assert play.members == [0, 1]


def test_too_many_resets() -> None:
    play = Play({"a": 4}, min_np=1, reset_limit=1)
    play.begin()
    play.kill(1)
    for worker in (0, 2, 3):
        play.ready(worker)
    play.meet()
    assert play.generation == 1
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
        play.say(0, "ready", generation=-1, cause="start", text="")
    play.enter(0)
    with pytest.raises(ValueError, match="a generation that it was not given"):
        play.say(0, "joined", generation=0)
    with pytest.raises(ValueError, match="a generation that it was not given"):
        play.say(0, "ready", generation=3, cause="lost", text="")
    assert len(play.seen) == seen + 1
    play.kill(0)
    play.say(0, "finished")
    assert play.notes("worker_finished") == []
