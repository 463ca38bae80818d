"""Time one allreduce with idle cores, beside a busy thread in every rank, and beside other processes, ours and MPI's.

    python benchmarks/waiting.py -np 2 4
    python benchmarks/waiting.py -np 2 --bytes 67108864

What is measured is how ranks wait for one another: 4 B have nothing to move. With idle cores the question is how soon a
rank notices that another has come; with more ranks than cores, or computations beside it, how soon it gets a core at
all, and how long it keeps one that it does not need.

The busy thread computes without Python's lock; 'loaded' is beside four busy processes. Methods take turns, in a new
order in each repetition, the states in turn. Every operation is timed by itself and counts as its slowest rank; shown
are medians over all operations.
At the end the ranks do nothing for a while, and the CPU time that they use is taken: of all threads, the engine's and
MXNet's.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from common import (
    Samples,
    describe,
    joined,
    median_ratio,
    ratio_text,
    size_text,
    slowest,
    summary,
    table,
    time_text,
    write,
)
from ranks import BUSY_PROCESSES, Rank, arguments_of_launches, busy_processes, start_launches, start_or_be_a_rank

SCRIPT = Path(__file__).resolve()
METHODS = ("MPI", "raw", "pushpull")
STATES = ("idle", "busy", "loaded")
SMALL = 1 << 20
# Operations of a row: before the clock is read, and with it (of at most SMALL bytes, and of more).
WARM_UP = 10
IN_A_ROW = {"idle": (200, 20), "busy": (40, 20), "loaded": (200, 20)}
NOTHING_S = 10.0


# -- As a rank ----------------------------------------------------------------------------------------------------


@contextmanager
def busy_thread() -> Iterator[None]:
    """Compute on another thread of this process, all the time."""
    stop = threading.Event()

    def compute() -> None:
        # About 30 ms each, in which Python's lock is free.
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 50_000)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def row(run: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of `count` operations."""
    for _ in range(min(WARM_UP, count)):
        run()
    times = []
    for _ in range(count):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return times


def cpu_of_doing_nothing() -> float:
    """Return the part of a core that this process uses while its program sleeps."""
    before, start = time.process_time(), perf_counter()
    time.sleep(NOTHING_S)
    return (time.process_time() - before) / (perf_counter() - start)


def be_a_rank(options: argparse.Namespace) -> None:
    """Measure, and leave the samples in the folder."""
    rank = Rank(options)
    from methods import Methods

    methods = Methods(rank.mpi)
    actions = methods.on(methods.arena_zeros((options.bytes // 4,)), "waiting")
    samples: Samples = {f"{method}, {state}": [] for state in STATES for method in METHODS if method in actions}
    order = [method for method in METHODS if method in actions]
    shuffle = random.Random(0).shuffle  # the same order on all ranks
    with busy_processes(BUSY_PROCESSES if rank.rank == 0 else 0) as loaded:
        load: dict[str, Callable[[], AbstractContextManager[None]]]
        load = {"idle": nullcontext, "busy": busy_thread, "loaded": loaded}
        for repetition in range(-1, options.repetitions):
            shuffle(order)
            for method in order:
                for state in STATES:
                    rank.gate.wait()
                    with load[state]():
                        times = row(actions[method], IN_A_ROW[state][options.bytes > SMALL])
                    if repetition >= 0:
                        samples[f"{method}, {state}"] += times
    rank.gate.wait()
    methods.close()
    nothing = cpu_of_doing_nothing()
    rank.gate.wait()
    rank.save(samples=samples, nothing=nothing)


# -- As the one that starts them ----------------------------------------------------------------------------------


def evaluate(samples: Samples) -> dict[str, Any]:
    """Return statistics of each method and state, and ratios to MPI."""
    ratios = {}
    for state in STATES:
        for ours in ("raw", "pushpull"):
            if f"MPI, {state}" in samples:
                ratios[f"{ours}/MPI, {state}"] = median_ratio(samples[f"{ours}, {state}"], samples[f"MPI, {state}"])
    return {"seconds": {name: summary(values) for name, values in samples.items()}, "ratios": ratios}


def show(results: dict[str, Any], launches: Sequence[dict[str, Any]], mpi: str) -> str:
    """Return the table of one MPI and number of ranks."""
    rows = []
    for name, times in results["seconds"].items():
        method, _, state = name.partition(", ")
        rows.append(
            [
                name.replace("MPI", mpi),
                *(time_text(times[what]) for what in ("min", "median", "max")),
                ratio_text(results["ratios"].get(f"{method}/MPI, {state}", float("nan"))),
                " ".join(time_text(launch["seconds"][name]["median"]) for launch in launches),
            ]
        )
    return table(["us", "min", "median", "max", f"/{mpi}", "medians of launches"], rows)


def start(options: argparse.Namespace) -> None:
    """Start the ranks, and show and write what they found."""
    run = describe()
    results: dict[str, Any] = {}
    text = []
    for ranks in options.ranks:
        told = argparse.Namespace(**{**vars(options), "ranks": ranks})
        saved = start_launches(SCRIPT, told, ["--repetitions", str(options.repetitions), "--bytes", str(options.bytes)])
        run["versions"] = {name: launches[-1][0]["versions"] for name, launches in saved.items()}
        of_ranks = results[str(ranks)] = {}
        for name, started in saved.items():
            samples = [slowest([rank["samples"] for rank in launch]) for launch in started]
            launches = [evaluate(launch) for launch in samples]
            everything = evaluate(joined(samples))
            nothing = summary([rank["nothing"] for launch in started for rank in launch])
            of_ranks[name] = {"all": everything, "launches": launches, "cpu_of_doing_nothing": nothing}
            size = size_text(options.bytes)
            head = f"{ranks} ranks on {run['cores']} cores, {size}, {name}, {options.launches} launches"
            idle = " / ".join(f"{nothing[what]:.3%}" for what in ("min", "median", "max"))
            asleep = f"CPU of a rank that does nothing: {idle} of a core"
            text.append(f"{head}\n{show(everything, launches, name)}\n{asleep}\n")
    write(options.json, run, {"bytes": options.bytes, "by_ranks": results}, "\n".join(text))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments_of_launches(SCRIPT, "Time one allreduce, idle, and beside other work, beside MPI.")
    for action in parser._actions:
        if action.dest == "ranks":
            action.nargs, action.default = "+", [2, 4]
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=4, help="of the array, a multiple of 4 [4]")
    return parser.parse_args()


if __name__ == "__main__":
    start_or_be_a_rank(parse_arguments(), start, be_a_rank)
