"""The decisions about an elastic job: its start, what lost workers cost, who has which rank, who comes, and its end."""

import signal

import pytest

from support.elastic_jobs import Play, begun

pytestmark = pytest.mark.alike

KILLED = [signal.SIGKILL]


def test_workers_of_a_job_that_replaces_nobody_meet_over_hosts():
    """Those that one waits for, in the order that it says; who does not come is named, and met later."""
    play = Play({"a": 1, "b": 2}, min_np=3, max_np=3, replaces=False, start_timeout_s=30)
    play.start_all()
    play.enter(0, "a", [0, 1, 2])
    play.enter(2, "b", [2, 0])
    (world,) = play.told(2)
    place = {key: world[key] for key in ("rank", "size", "pids", "addresses", "local_ranks", "generation")}
    addresses = [["10.0.0.2:1"], ["10.0.0.0:1"]]
    assert place == {
        "rank": 0, "size": 2, "pids": [102, 100], "addresses": addresses, "local_ranks": [0, 0], "generation": 0
    }  # fmt: skip
    assert play.told(0) == []
    play.wait(31)
    (fail,) = play.told(0)
    assert fail["text"] == "rank 1 on b did not call init() within 30 s."
    play.enter(1, "b", [0, 1])
    play.enter(0, "a", [0, 1])
    assert [play.told(number)[-1]["rank"] for number in (0, 1)] == [0, 1]


def test_a_job_that_replaces_nobody_starts_one_by_one_and_ends_after_a_failure():
    """Its survivors have time to report, and the first that is no consequence of another is the reason."""
    play = Play({"a": 3}, min_np=3, max_np=3, replaces=False, survivor_time_s=2.0)
    assert play.starts() == [(0, "a:0")]
    assert play.job.ranks_of(0) == (0, 3, 0, 3, 0, 1)
    play.start_all()
    assert play.starts() == [(0, "a:0"), (1, "a:1"), (2, "a:2")]
    play.end(0, 1, "PeerLostError: rank 1")
    play.wait(1)
    play.end(1, -9)
    assert play.ending is None
    play.wait(2)
    assert play.outcome == (137, "rank 1 of 3 (pid 101) was killed by SIGKILL.")
    assert (play.ending.grace_s, play.starts()[3:]) == (0.0, [])


def test_a_job_that_replaces_nobody_goes_on_starting_until_it_is_over():
    play = Play({"a": 3}, min_np=3, max_np=3, replaces=False)
    for number in range(3):
        play.job.started(number, 100 + number, play.now)
        play.end(number)
        play.wait(5)
    assert play.outcome == (0, "")


def test_ranks_where_hosts_have_unequal_slots():
    """Rank and size; those on the host; those among the hosts that have a worker of this local rank."""
    job = Play({"a": 2, "b": 1}, min_np=3, max_np=3, replaces=False).job
    assert [job.ranks_of(rank) for rank in range(3)] == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 1, 1, 2)]


def test_a_worker_that_ends_while_the_others_meet_is_not_waited_for():
    play = Play({"a": 3}, min_np=2)
    play.ready(*play.running)
    play.end(0)
    assert [play.told(number)[-1]["t"] for number in (1, 2)] == ["lost", "lost"]


def test_too_few_workers_are_waited_for_and_the_end_has_the_reason():
    play = Play({"a": 1}, first_np=2, elastic_timeout_s=60)
    play.wait(59)
    assert play.news == ["there are 1 slots, 2 are needed: waiting for more, for 50 s."]
    assert play.ending is None
    play.wait(2)
    assert play.outcome == (1, "there are 1 slots, 2 are needed, and no more came within 60 s.")
    play = begun({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=30)
    play.hosts({"a": 1})
    play.kill(1)
    assert play.job.status == "generation 0, 1 of 1 workers"
    play.ready(0)
    play.wait(29)
    assert play.ending is None
    play.wait(2)
    assert play.outcome == (1, reason := "1 workers are ready, 2 are needed, and no more came within 30 s.")
    assert (play.ending.details, play.ending.grace_s) == (("worker 1 (b:0) was killed by SIGKILL",), 2.0)
    assert [told["text"] for told in play.told(0, "fail")] == [reason]


def test_the_deadline_of_replacements_wakes_the_job():
    play = Play({"a": 1, "b": 1}, min_np=2, timeout_s=20, elastic_timeout_s=600)
    play.ready(0)
    play.hosts({"a": 1})
    play.end(1)
    play.wait(11)  # a report of the wait
    play.wait(10)
    assert play.job.wake_at <= play.now + 20


def test_a_program_that_always_fails_ends_the_job():
    play = Play({"a": 2})
    for worker in range(4):
        play.end(worker, 3, "SyntaxError: x")
    assert (*play.outcome, play.ending.lines) == (3, "worker 0 (a:0) exited with code 3.", ("SyntaxError: x",))


def test_when_nobody_is_left_the_state_is_lost():
    play = begun({"a": 2})
    play.end(0, 1, "PeerLostError: rank 1")
    play.enter(2)
    play.end(1, 9, "ValueError: the cause")
    cause = "First, worker 1 (a:1) exited with code 9."
    assert play.outcome == (9, f"no worker of generation 0 is left. {cause}")
    assert play.ending.lines == ("ValueError: the cause",)
    assert play.told(2, "fail")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_member_that_has_not_answered_may_have_got_the_state(goes_on):
    """The state of the first world is where each begins; later, it is lost when nobody has it and all have answered."""
    play = begun({"a": 2})
    play.say(0, "synced", generation=0)
    play.kill(0)
    play.ready(1)
    assert play.meet() == [1]
    play.say(1, "synced", generation=1)
    play.ready(2, 1, cause="updated")
    assert play.meet() == [1, 2]
    play.kill(1)
    assert play.ending is None
    play.say(2, "synced", generation=2) if goes_on else play.ready(2)
    assert (play.ending is None) == goes_on


def test_a_newcomer_is_told_a_place_before_it_is_in_a_world():
    play = Play({"a": 3, "b": 1})
    play.enter(3, "other")
    play.begin()
    play.kill(0)
    assert play.job.ranks_of(4) == (2, 4, 0, 3, 0, 2)  # what it begins with
    play.enter(4)  # on the slot that is free
    (place,) = play.told(4)
    assert (place["t"], place["rank"], place["size"], place["local_ranks"]) == ("rank", 2, 4, [1, 2, 0, 0])


def test_a_lost_host_costs_its_slots_nothing_and_is_left_alone_when_it_is_lost_again():
    play = Play({"a": 1, "b": 3}, cooldown=(10.0, 300.0))
    play.lines[1] = ("last",)

    def lose():
        play.lose_host("b", "a storm")
        return play.notes("host_lost")[-1]

    for worker in range(4):
        play.job.started(worker, 70 + worker, play.now)
    play.begin()
    assert lose() == {"host": "b", "text": "a storm", "seconds": 0.0}
    assert [note["lines"] for note in play.notes("worker_exited")] == [["last"], [], []]
    assert len(play.starts()) == 7  # at once
    assert lose()["seconds"] == 20.0
    assert play.news == ["host b is lost: a storm.", "host b is lost: a storm. It gets no worker for 20 s."]
    play.wait(19)
    assert len(play.starts()) == 7
    play.wait(11)
    assert len(play.starts()) == 10
    assert play.notes("slot_blacklisted") == []
    play.job.started(7, 77, play.now)
    play.job.host_leaves("b", "a notice", 143, play.now)
    assert lose() == {"host": "b", "text": "a notice", "seconds": 40.0}
    assert lose()["seconds"] == 80.0  # without a worker
    play.wait(81)  # then it may come back
    assert len(play.starts()) == 13


def test_when_all_hosts_leave_nobody_is_blamed():
    play = begun({"a": 1, "b": 1})
    play.hosts({})  # not for good
    play.ready(0, 1, cause="updated")
    play.hosts({"a": 1, "b": 1})
    assert play.meet() == [0, 1]
    for host in "ab":
        play.job.host_leaves(host, "a notice", 143, play.now)
    play.ready(0, 1, cause="updated")
    assert [play.told(worker)[-1]["t"] for worker in (0, 1)] == ["leave", "leave"]
    play.end(0)
    play.end(1)
    assert play.outcome == (1, "no worker of generation 1 is left.")


def test_the_only_host_is_tried_again_until_the_time_for_workers_is_over():
    play = Play({"a": 1}, elastic_timeout_s=100.0)
    for number in range(2):
        play.lose_host("a", "it cannot be reached")
        assert (play.ending, len(play.starts())) == (None, number + 1)
        play.wait(45.0)
    play.wait(20.0)
    code, text = play.outcome
    assert (code, text.partition(",")[0]) == (1, "0 workers are ready")
    assert play.ending.details == ("worker 2 (a:0) has not called init()",)


def test_a_host_that_others_do_not_reach_is_left_out_until_its_cooldown_is_over():
    play = begun({"a": 1, "b": 1, "c": 1}, cooldown=(10, 20))

    def fail(*apart):
        ranks = {worker: rank for rank, worker in enumerate(play.members)}
        for worker in play.members:
            others = [other for pair in apart for other in pair if worker in pair and other != worker]
            play.ready(worker, cause="meeting", unreached=[ranks[other] for other in others])

    for _ in range(2):
        play.meet()  # what was before is forgotten
        play.ready(0, 1, 2)
        fail((1, 2))
        fail((0, 1), (1, 2))
    assert play.members == [0, 1, 2]
    fail((1, 2), (0, 1))  # for the third time: 1 and 2; they are alike, and 2 comes later
    (note,) = play.notes("host_left_out")
    assert (note["host"], note["unreached"]) == ("c", ["b"])
    assert "host c is left out for 10 s: it and b do not reach each other.\n  Fix: see whether a fire" in play.news[-2]
    assert play.meet() == [0, 1]
    assert [told["t"] for told in play.told(2)][-1] == "leave"
    play.end(2)
    assert play.ending is None
    play.wait(note["seconds"] - 1)
    assert len(play.starts()) == 3
    play.wait(2)
    assert play.starts()[3:] == [(3, "c:0")]
    play.ready(3)
    play.ready(*play.members, cause="updated")
    assert play.members == [0, 1, 3]
    fail((1, 3))  # still: at once
    assert play.members == [0, 1]
    assert play.notes("host_left_out")[1]["seconds"] > note["seconds"]


def test_who_has_finished_does_not_leave_with_its_host():
    play = begun({"a": 1, "b": 2})
    play.say(2, "finished")
    play.ready(0, 1)
    for _ in range(3):
        play.ready(0, cause="meeting", unreached=[1])
        play.ready(1, cause="meeting", unreached=[0])
    assert play.notes("host_left_out")[0]["host"] == "b"
    assert [len(play.told(worker, "leave")) for worker in (0, 1, 2)] == [0, 1, 0]


CHAIN, STAR = [(1, 3), (0,), (3,), (0, 2)], [(1, 2, 3), (0,), (0,), (0,)]


@pytest.mark.parametrize(
    ("unreached", "synced", "out"),
    [(CHAIN, (), "d"), (CHAIN, (1, 2, 3), "a"), (CHAIN, (0,), "d"), (CHAIN, (0, 1, 2), "d"), (STAR, (0,), "d")],
)
def test_which_host_is_left_out(unreached, synced, out):
    """One that does not reach the most others, of these one without the state; never the last one that has it."""
    play = begun({"a": 1, "b": 1, "c": 1, "d": 1})
    for worker in synced:
        play.say(worker, "synced", generation=0)
    play.ready(0, 1, 2, 3)
    for _ in range(3):
        assert play.members[:1] == list(synced[:1] or [0])
        ranks = {worker: rank for rank, worker in enumerate(play.members)}
        for worker in list(play.members):
            play.ready(worker, cause="meeting", unreached=[ranks[other] for other in unreached[worker]])
    assert play.notes("host_left_out")[0]["host"] == out


def test_a_slot_with_repeated_crashes_is_left_alone_for_a_while():
    play = begun({"a": 2})
    play.kill(1)
    play.ready(0)
    play.meet()
    play.kill(2)  # while it starts
    (note,) = play.notes("slot_blacklisted")
    assert (note["slot"], note["seconds"]) == ("a:1", 10.0)
    assert play.news[1::2] == ["generation 1: 1 workers (0).", "slot a:1 gets no worker for 10 s: they crash there."]
    play.wait(note["seconds"] - 0.1)
    assert len(play.starts()) == 3
    play.wait(0.2)
    assert play.starts()[3:] == [(3, "a:1")]
    play.ready(3)
    play.commit()
    play.wait(300)
    play.commit()
    play.wait(301)  # after a long life crashes are forgotten
    play.kill(3)
    assert len(play.notes("slot_blacklisted")) == 1
    assert play.starts()[4:] == [(4, "a:1")]


def fail_in_turn(play, code=1, *, hung=False):
    """All of a world but rank 0 fail, or are killed because they hang; it meets with those that take their places."""
    first, *others = play.members
    generation = play.generation
    if hung:
        play.ready(first, cause="timeout")
        play.wait(0.6)
        assert all(play.signals(worker) for worker in others)
    for worker in others:
        play.end(worker, code, "ValueError: always")
    if not hung:
        play.ready(first)
    while play.ending is None and play.generation == generation:
        play.ready(*(worker for worker in play.running if worker != first))
        play.wait(1)
    play.meet()


def test_a_program_that_fails_whoever_runs_it_ends_the_job():
    play = begun({"a": 2}, min_np=2)
    for code in (1, 1, 1, 1, 1, 3):
        assert play.ending is None
        fail_in_turn(play, code)
    code, reason = play.outcome
    assert (code, play.ending.lines) == (3, ("ValueError: always",))
    assert reason.startswith("workers keep failing, and so do their replacements soon after they start")
    assert "Most recently, worker 6 (a:1) exited with code 3." in reason


@pytest.mark.parametrize("what", ["killed", "hung", "commit", "long life"])
def test_failures_that_do_not_tell_of_the_program(what):
    play = begun({"a": 2, "b": 1}, min_np=2, max_np=2, timeout_s=10_000)
    for _ in range(12):
        if what == "commit":
            play.commit()
        elif what == "long life":
            play.wait(61)
        # One that hangs may come to an end of its own just as it is killed.
        fail_in_turn(play, -9 if what == "killed" else 1, hung=what == "hung")
    assert play.ending is None


def test_a_loss_after_a_success_is_the_code_unless_the_worker_had_to_leave():
    play = begun({"a": 2})
    play.say(0, "finished")
    play.end(0)
    play.end(1, 7, "PeerLostError: oops")
    assert (play.outcome, play.news) == ((7, text := "worker 1 (a:1) exited with code 7."), [text])
    play = begun({"a": 2})
    play.say(0, "synced", generation=0)
    play.say(0, "finished")
    play.end(0)
    play.ready(1)
    assert play.told(1, "leave")
    play.end(1, -signal.SIGTERM)
    assert play.outcome == (0, "")
    play = begun({"a": 3}, min_np=3)
    play.say(0, "finished")  # and has not ended: it is not waited for
    play.kill(1)
    play.ready(2)
    assert play.members == [2]


def test_a_worker_may_be_done_before_all_others_have_said_that_they_met():
    play = Play({"a": 2})
    play.ready(0, 1)
    play.say(0, "joined", generation=0)
    play.say(0, "synced", generation=0)
    play.say(0, "finished")
    play.end(0)
    assert play.notes("generation_void") == []
    play.say(1, "joined", generation=0)
    assert len(play.notes("generation_joined")) == 1
    play.end(1)
    assert play.outcome == (0, "")
    for again in "synced", "ready":  # one that trains for a second time is not done
        play = begun({"a": 2})
        play.say(0, "finished")
        play.say(0, "synced", generation=0) if again == "synced" else play.ready(0, cause="reset")
        play.kill(1)
        assert play.starts()[2:] == [(2, "a:1")]


def test_a_host_that_has_not_come_does_not_spoil_a_success():
    play = Play({"a": 2, "b": 1}, min_np=3)
    play.end(0)
    play.lose_host("b", "it cannot be reached")
    play.ready(1)
    assert play.members == [1]
    play.end(1)
    assert play.outcome == (0, "")
    play = Play({"a": 1})
    play.job.started(0, 100, play.now)
    play.begin()
    play.hosts({"a": 1, "b": 1})
    play.say(0, "finished")
    play.end(0)
    assert play.outcome == (0, "")


def test_members_are_told_of_all_changes_together():
    play = begun({"a": 1, "b": 1})
    play.hosts({"a": 1, "c": 1})
    assert play.job.ranks_of(2)[:2] == (1, 2)  # without the one that goes
    assert play.told(0, "updated") == [{"t": "updated", "number": 1, "result": 1}]
    play.ready(2)
    assert play.told(0, "updated")[1:] == [{"t": "updated", "number": 2, "result": 3}]
    assert play.commit() == [0, 2]
    assert [message["t"] for message in play.told(1)] == ["world", "updated", "updated", "leave"]
    play.hosts({"a": 1, "c": 2})
    play.ready(3)
    assert play.told(0, "updated")[2:] == [{"t": "updated", "number": 3, "result": 2}]


def test_who_has_to_leave_and_does_not_is_ended():
    play = begun({"a": 1, "b": 1}, exit_timeout_s=30, survivor_time_s=3, kill_grace_s=5)
    play.hosts({"a": 1, "c": 1})
    play.enter(2)
    play.hosts({"a": 1})
    assert play.commit() == [0]
    for seconds, signals in (2.9, (0, 0)), (0.2, (0, 1)), (26.8, (0, 2)), (0.2, (1, 2)), (5, (2, 2)):
        play.wait(seconds)
        assert tuple(len(play.signals(worker)) for worker in (1, 2)) == signals
    assert play.signals(1) == play.signals(2) == [signal.SIGTERM, signal.SIGKILL]
    play.kill(1)
    assert (play.notes("slot_blacklisted"), "SIGKILL" in play.news[-1]) == ([], False)
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
    assert (play.signals(1), play.job.status) == ([], "3 workers start")
    assert play.news[0] == "the others wait for worker 1 (a:1), 2 (a:2), and kill what has not come in 40 s."
    play.wait(2)
    assert play.signals(1) == play.signals(2) == KILLED
    play.kill(1, 2)
    play.ready(3)
    assert play.generation == -1  # those that take their places are waited for, as long
    play.wait(51)
    assert (play.signals(4), play.members) == (KILLED, [0, 3])
    assert sum("the others wait for " in text for text in play.news) == 2


def test_who_does_not_join_a_meeting_is_killed():
    """After the workers' own deadline; within seconds once somebody has given the meeting up."""
    play = Play({"a": 3}, min_np=3, start_timeout_s=20)
    play.ready(0, 1, 2)
    play.say(0, "joined", generation=0)
    play.wait(29.9)
    assert play.signals(1) == []
    play.wait(0.2)
    assert (play.signals(0), play.signals(1), play.signals(2)) == ([], KILLED, KILLED)
    play.kill(1, 2)
    play.ready(0, 3, 4)
    play.ready(0, 3, cause="meeting")
    play.wait(5.1)
    assert (play.signals(3), play.signals(4)) == ([], KILLED)


def updates(play):
    return len(play.notes("updated"))


@pytest.mark.parametrize(("took", "limit"), [(7, 7), (0.1, 2), (100, 30)])
def test_a_newcomer_is_waited_for_as_long_as_the_first_one_took_itself(took, limit):
    play = begun({"a": 1}, start_timeout_s=30)
    play.hosts({"a": 4})
    play.wait(took)
    play.ready(2)
    play.wait(limit / 2)
    play.ready(3)
    play.wait(limit / 2 - 0.1)
    assert updates(play) == 0
    play.wait(0.2)
    assert updates(play) == 1
    assert play.commit() == [0, 2, 3]
    play.ready(1)
    assert updates(play) == 2
    assert play.commit() == [0, 2, 3, 1]


def test_a_change_is_one_reset_however_many_workers_it_brings():
    play = begun({"a": 1, "b": 2}, reset_limit=3, max_np=3)
    play.hosts({"a": 1, "c": 2})
    assert play.commit() == [0]
    play.wait(3)
    play.ready(3, 4)
    assert play.commit() == [0, 3, 4]  # the first one
    play.kill(4)
    play.ready(0, 3)
    assert play.meet() == [0, 3]
    play.ready(5)
    assert play.commit() == [0, 3, 5]
    assert play.ending is None
    play.ready(0, 3, 5, cause="reset")
    reason = "Horovod was shutdown because number of resets during elastic job exceeded limit: 3"
    assert play.outcome == (1, reason)
    assert [told["text"] for told in play.told(0, "fail")] == [reason]
