"""What `kvhvdrun explain` and `status` say, by parts that no job has written."""

import json
import re

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch import explain as commands
from kvstore_hvd.launch.explain import explain, status, tell
from kvstore_hvd.native import Counts

pytestmark = pytest.mark.alike

TIMEOUT = ("TimeoutError", "rank 0 waited 9 s")
LOST = ("PeerLostError", "rank 3 died")
# Of a worker that all others waited for, and of one of these.
LATE, PROMPT = Counts(100, 100, 0, 100, 100, 10**10), Counts(100, 100, 10**10, 100, 0, 0)


def part(workers, set_number=0, failure=TIMEOUT, stopped=(), doing="", counts=None, **fields):
    """Of one host. Workers by rank: operations, with how many seconds ago they were submitted and completed (None).

    A worker without a list is of another host.
    """
    kinds = list(dict.fromkeys(name for operations in workers.values() for name, *_ in operations or ()))

    def row(name, number, begin_s, end_s):
        return [kinds.index(name), number, 0, begin_s * 1e6, None, None if end_s is None else end_s * 1e6]

    def worker(rank, operations):
        state, counted = "" if operations is None else "joined", (counts or {}).get(rank, Counts(*[0] * 6))
        told = {"rank": rank, "host": "h", "pid": rank + 1, "state": state, "doing": doing}
        rows = [row(*one) for one in operations or ()]
        return {**told, "is_stopped": rank in stopped, "counts": counted._asdict(), "operations": rows}

    of_world = {"job": "j", "generation": 0, "host": 0, "hosts": 1, "set_number": set_number, "failure": failure}
    lists = {"kinds": [[name, f"'{name}'", "allreduce", "float32", "sum", 4] for name in kinds], "algorithms": [""]}
    told = {"time": 1e9, "age_s": 20.0, **of_world, **lists, **fields}
    return {**told, "workers": [worker(rank, operations) for rank, operations in workers.items()]}


def waits(name, since_s=5, number=0):
    return name, number, since_s, None


def over(name, ago_s=6, number=0):
    return name, number, ago_s + 1, ago_s


JOIN = {0: [waits("x")], 1: [waits("~left", 9), waits("x")], 2: [over("w")]}
# Rank 2 waits in its set for rank 3, and both are waited for in the world of all.
SETS = [{0: [waits("glob")], 1: [waits("glob")], 2: [over("w")], 3: [over("w")]}, {2: [waits("own", 4)], 3: []}]
INSIDE = {0: [waits("x")], 1: [waits("x")]}
PARTLY = {0: [over("x", 3)], 1: [over("x", 3)], 2: [waits("x")], 3: [waits("x")]}
ORDERS = {0: [waits("x")], 1: [waits("y", 4)]}
SLOW = {0: [waits("x"), waits("y", 4)], 1: [waits("x")], 2: [waits("y", 4)], 3: []}

SAYS = {
    "who has no input left is not blamed": (
        [part(JOIN)],
        [
            "not over: allreduce 'x', number 1 of its name, submitted by ranks 0-1, not by rank 2, 5 s before.",
            "rank 1 (h, pid 2) has no input left and waits for the others, for 9 s.",
            "see why rank 2 did not come",
        ],
    ),
    "who has no input left blames nobody": (
        [part({0: [over("x")], 1: [waits("~left", 9)]})],
        [
            "No operation was under way.",
            "rank 0 (h, pid 1) waited for nothing: allreduce 'x' was over 6 s before",
            "What to do: see the error",
        ],
    ),
    "a wait in a process set": (
        [part(SETS[0]), part(SETS[1], 2, LOST)],
        [
            "not over: allreduce 'glob', number 1 of its name, submitted by ranks 0-1, not by ranks 2-3, 5 s",
            "rank 2 (h, pid 3) waited in allreduce 'own' of process set 2 for rank 3, for 4 s.",
            "generation 0: 4 workers on h",
            "rank 3 (h, pid 4) waited for nothing",
            "see why rank 3 did not come",
        ],
    ),
    "a failure that began in a process set": (
        [part({0: [waits("glob", 9)], 2: [], 3: []}, 0, LOST), part(SETS[1], 2)],
        [
            "generation 0, process set 2: 2 workers on h",
            "TimeoutError: rank 0 waited 9 s.",
            "not over: allreduce 'own', number 1 of its name, submitted by rank 2, not by rank 3, 4 s",
            "rank 0 (h, pid 1) waited in allreduce 'glob' of all workers for ranks 2-3, for 9 s.",
        ],
    ),
    "an operation that is over on some": (
        [part(PARTLY)],
        [
            "not over: allreduce 'x', number 1 of its name, submitted by ranks 0-3, not over on ranks 2-3, 5 s",
            "rank 0 (h, pid 1) waited for nothing: allreduce 'x' was over 3 s before.",
            "rank 2 (h, pid 3) waited in allreduce 'x', for 5 s.",
        ],
    ),
    "an operation that is over on some is told after one that some have not submitted": (
        [part({rank: [*has, *([waits("y", 1)] if rank else [])] for rank, has in PARTLY.items()})],
        [
            "not over: allreduce 'y', number 1 of its name, submitted by ranks 1-3, not by rank 0, 1 s before; 1",
            "rank 1 (h, pid 2) waited in allreduce 'y' for rank 0, for 1 s.",
        ],
    ),
    "what is over on a host was submitted on the other, whose part is older": (
        [
            part({0: [over("x", 1)], 1: [waits("x")]}, hosts=2),
            part({0: None, 2: []}, host=1, hosts=2),
        ],
        ["submitted by ranks 0-1, not over on rank 1, 5 s before", "rank 2 (h, pid 3) has submitted nothing."],
    ),
    "one was stopped inside": (
        [part(INSIDE, stopped=[1])],
        [
            "submitted by ranks 0-1, 5 s before",
            "rank 1 (h, pid 2) was stopped.",
            "find who stopped the process of rank 1;",
        ],
    ),
    "one was stopped where it is not over": ([part(PARTLY, stopped=[3])], ["find who stopped the process of rank 3;"]),
    "of those who did not come one was stopped": (
        [part({0: [waits("x")], 1: [over("w")], 2: []}, stopped=[2])],
        ["find who stopped the process of rank 2;"],
    ),
    "the last of a chain was stopped": (
        [part({**SETS[0], 3: [waits("glob")]}, stopped=[3]), part(SETS[1], 2, LOST, stopped=[3])],
        ["submitted by ranks 0-1, 3, not by rank 2", "find who stopped the process of rank 3;"],
    ),
    "who did not come waits for a host that has told nothing": (
        [part({0: [waits("x")], 1: [], 2: None}, hosts=2), part({1: [waits("own")], 2: None}, set_number=1, hosts=2)],
        ["rank 2 (h, pid 3) is on a host that has told nothing.", "see the workers of silent hosts (rank 2)"],
    ),
    "a stopped worker that nobody waits for": (
        [part({0: [waits("x")], 1: [], 2: [waits("x")]}, stopped=[2])],
        ["rank 2 (h, pid 3) was stopped.", "see why rank 1 did not come"],
    ),
    "all wait for each other": ([part(ORDERS)], ["have all workers submit the same operations"]),
    "one waits, and one for whom all wait does not": ([part(SLOW)], ["see why rank 3 did not come"]),
    "all are inside": (
        [part({0: [waits("x")], 1: [waits("x")]})],
        ["all workers have submitted it, and one stays"],
    ),
    "names with control characters": (
        [
            part(
                {0: [waits("x\n\r\x1b[2J")], 1: []},
                failure=("TimeoutError", "it waits in 'x\n\r\x1b[2J'.\n  rank 1: no"),
            )
        ],
        [r"TimeoutError: it waits in 'x\n\r\x1b[2J'.", r"not over: allreduce 'x\n\r\x1b[2J', number 1"],
    ),
    "words with control characters": (
        [part({0: [waits("x")], 1: []}, doing="at a\n\x1b.py", job="j\n\r")],
        [r"job j\n\r, generation 0: 2 workers", r"waited in allreduce 'x' for rank 1, for 5 s; it was at a\n\x1b.py."],
    ),
    "one was slow all the time": (
        [part({0: [], 1: []}, counts={0: PROMPT, 1: LATE})],
        ["rank 1 (h, pid 2) was slow"],
    ),
    "who has no input left is not slow": (
        [part({0: [], 1: [waits("~left")]}, counts={0: PROMPT, 1: LATE})],
        ["rank 1 (h, pid 2) has no input left and waits for the others, for 5 s."],
    ),
    "an older world is not told of": (
        [part({0: [waits("x")], 1: []}), part({0: [waits("y")], 1: []}, generation=1)],
        ["generation 1: 2 workers", "not over: allreduce 'y'"],
    ),
}


@pytest.mark.parametrize("case", SAYS)
def test_an_explanation(case):
    parts, expected = SAYS[case]
    text = explain(tell(json.loads(json.dumps(parts))))
    for words in expected:
        assert words in text, text
    ranks = {worker["rank"] for one in parts for worker in one["workers"]}
    is_slow = any("was slow" in words for words in expected)
    assert len(text.splitlines()) == 4 + len(ranks) + is_slow, text
    assert all(line.isprintable() for line in text.split("\n")), text
    assert "~left" not in text


@pytest.mark.parametrize(
    "change",
    [
        {"time": 1e17},
        {"time": float("nan")},
        {"kinds": 3},
        {"failure": [1]},
        {"workers": []},
        {"job": []},
        {"hosts": ""},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(tmp_path, change):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"format": 1, "parts": [{**part(JOIN), **change}]}))
    with pytest.raises(LaunchError, match=r"^'.*file.json' is no file of a failure of this version: .*\n  Fix: .*$"):
        commands.main(["explain", str(file)])


def test_what_cannot_be_written_is_escaped(tmp_path, capsysbinary):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"format": 1, "parts": [part(JOIN, job="\udcff")]}))
    assert commands.main(["explain", str(file)]) == 0
    assert capsysbinary.readouterr().out.startswith(rb"job \udcff, generation 0")


def table(monkeypatch, *looks):
    """What `status` shows of a world that is as these parts tell, one after the other."""
    told = iter(looks)
    monkeypatch.setattr(commands, "_parts", lambda segments, most=0: [json.loads(json.dumps(next(told)))])
    monkeypatch.setattr(commands, "_RATES_S", 0)
    return status([])


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_status_names_a_worker_that_is_slow_now(monkeypatch, is_slow):
    workers, later = {0: [], 1: []}, Counts(*(2 * each for each in LATE)) if is_slow else LATE
    before = part(workers, counts={0: PROMPT, 1: LATE})
    prompt = Counts(*(2 * each for each in PROMPT)) if is_slow else PROMPT
    text = table(monkeypatch, before, part(workers, counts={0: prompt, 1: later}, time=1e9 + 1))
    assert ("rank 1 (h, pid 2) was slow: it came last in 100 % of 100 operations" in text) == is_slow, text


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        (PARTLY, []),
        ({0: [waits("x")], 1: []}, ["waits in allreduce 'x' for rank 1, 5.0 s"]),
        (INSIDE, ["waits in allreduce 'x' for the others, 5.0 s"] * 2),
        (JOIN, ["waits in allreduce 'x' for rank 2, 5.0 s", "has no input left"]),
        ({0: [waits("x\n\x1b")], 1: []}, [r"waits in allreduce 'x\n\x1b' for rank 1, 5.0 s"]),
    ],
)
def test_a_status_tells_who_waits(monkeypatch, workers, expected):
    """Not for a moment in which some have completed an operation and others will."""
    text = table(monkeypatch, part(workers, failure=None), part(workers, failure=None, time=1e9 + 1))
    assert re.findall(r"(?m) ((?:waits in|has no input).*)$", text) == expected, text
    assert len(text.splitlines()) == 2 + len(workers)


def test_a_status_of_a_lost_world_tells_no_waits(monkeypatch):
    workers = {0: [waits("x")], 1: []}
    text = table(monkeypatch, part(workers), part(workers, time=1e9 + 1, doing="at a.py:3"))
    assert text.splitlines()[0].endswith("; the world is lost: rank 0 waited 9 s")
    assert "waits" not in text
    assert "a.py" not in text
