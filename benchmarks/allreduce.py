"""Time one allreduce of float32, from 4 B to 256 MiB, ours beside MPI's, memcpy and an in-place scale.

    python benchmarks/allreduce.py -np 2
    python benchmarks/allreduce.py -np 2 --python OTHER-ENVIRONMENT/bin/python     # that has the other MPI

Starts its ranks itself, with the mpirun beside the Python that runs it (or kvhvdrun, then without MPI's column). All
methods work in the same processes, one after the other in every repetition and in another order in each, and on the
same memory, except those 'in arena': their array lies where gradients of Gluon's parameters do. Before each the buffer
is rewritten, as a backward pass would. A repetition counts as its slowest rank.

Up to 256 KiB a sample is a row of rewriting and reducing, less a row of rewriting alone; above, the ranks meet at a
barrier before every operation. Every method is also timed in a world of one rank ('call'): that part of a small
operation is Python, MXNet's engine, or MPI's checks, not communication.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
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
from ranks import Gate, Rank, arguments_of_launches, start_launches, start_or_be_a_rank

SCRIPT = Path(__file__).resolve()
SIZES = tuple(4 << shift for shift in range(0, 27, 2))
ROW_UP_TO = 256 << 10
# Untimed operations before a row: the method before it has left other data in the caches, and threads awake.
WARM_UP = 5
METHODS = ("memcpy", "scale", "MPI", "raw", "pushpull", "raw, in arena", "pushpull, in arena")


# -- As a rank ----------------------------------------------------------------------------------------------------


def repetitions(size: int) -> tuple[int, int]:
    """Return how many samples to take, and how many operations make one."""
    if size <= 16 << 10:
        return 15, 100
    if size <= ROW_UP_TO:
        return 15, 20
    if size <= 16 << 20:
        return 11, 4 if size <= 4 << 20 else 1
    return (7, 1) if size <= 64 << 20 else (5, 1)


def row(rewrite: Callable[[], object], run: Callable[[], object], count: int) -> float:
    """Return the seconds of one `run` in a row of rewriting and running."""
    for _ in range(WARM_UP):
        rewrite()
        run()
    start = perf_counter()
    for _ in range(count):
        rewrite()
        run()
    middle = perf_counter()
    for _ in range(count):
        rewrite()
    return max(0.0, (middle - start) - (perf_counter() - middle)) / count


def one_by_one(rewrite: Callable[[], object], run: Callable[[], object], count: int, gate: Gate) -> float:
    """Return the seconds of one `run`, each begun by all ranks at once."""
    total = 0.0
    for _ in range(count):
        rewrite()
        gate.wait()
        start = perf_counter()
        run()
        total += perf_counter() - start
    return total / count


def measure(size: int, methods: Any, gate: Gate, rank: int, ranks: int) -> Samples:
    """Return the samples of every method at one size, in seconds."""
    import numpy as np
    from methods import IN_ARENA, memory_of, zeros

    array = zeros((size // 4,))
    memory = memory_of(array)
    other = np.ones_like(memory)
    name = f"allreduce/{size}"
    summing = methods.on(array, name)
    in_arena = methods.arena_zeros((size // 4,))
    of_arena = memory_of(in_arena)
    for method, run in methods.on(in_arena, name + IN_ARENA).items():
        if method != "MPI":
            summing[method + IN_ARENA] = run

    def memory_for(method: str) -> Any:
        return of_arena if method.endswith(IN_ARENA) else memory

    for method, run in summing.items():
        memory_for(method)[:] = rank + 1
        run()
        if not (memory_for(method) == ranks * (ranks + 1) / 2).all():
            raise RuntimeError(f"rank {rank}: {method} of {size} bytes gives a wrong sum: {memory_for(method)[:4]}")
    actions = {**methods.floors(memory, other), **summing}
    if size <= ROW_UP_TO:
        actions.update(methods.alone(array, name))
    samples: Samples = {method: [] for method in actions}
    count, inner = repetitions(size)
    order = list(actions)
    shuffle = random.Random(size).shuffle  # the same order on all ranks
    for repetition in range(-1, count):
        shuffle(order)
        for method in order:
            gate.wait()
            run, fill = actions[method], memory_for(method).fill

            def rewrite(fill: Callable[[float], object] = fill) -> None:
                fill(0.0)

            seconds = row(rewrite, run, inner) if size <= ROW_UP_TO else one_by_one(rewrite, run, inner, gate)
            if repetition >= 0:
                samples[method].append(seconds)
    return samples


def be_a_rank(options: argparse.Namespace) -> None:
    """Measure all sizes and leave the samples in the folder."""
    rank = Rank(options)
    from methods import Methods

    methods = Methods(rank.mpi)
    results = {}
    for size in options.sizes:
        results[str(size)] = measure(size, methods, rank.gate, rank.rank, rank.size)
        rank.gate.wait()
    methods.close()
    rank.save(samples=results)


# -- As the one that starts them ----------------------------------------------------------------------------------


def by_size(launch: Sequence[Any]) -> dict[str, Samples]:
    """Return, for every size, the samples of the slowest ranks of a launch."""
    return {size: slowest([rank["samples"][size] for rank in launch]) for size in launch[0]["samples"]}


def evaluate(samples: dict[str, Samples]) -> list[dict[str, Any]]:
    """Return one entry for each size: statistics of each method, and ratios within the repetitions."""
    entries = []
    for size, methods in samples.items():
        times = {method: summary(values) for method, values in methods.items()}
        ratios = {}
        for ours in ("raw", "pushpull"):
            for peer in ("MPI", "memcpy", "scale"):
                if peer in methods:
                    ratios[f"{ours}/{peer}"] = median_ratio(methods[ours], methods[peer])
        entries.append({"bytes": int(size), "seconds": times, "ratios": ratios})
    return entries


def show(entries: Sequence[dict[str, Any]], mpi: str) -> str:
    """Return two tables of one MPI: medians and ratios; then minima and maxima."""
    shown = [method for method in METHODS if method in entries[0]["seconds"]]
    ratios = [name for name in ("raw/MPI", "pushpull/MPI", "raw/memcpy", "raw/scale") if name in entries[0]["ratios"]]
    calls = [method for method in ("MPI", "raw", "pushpull") if method in shown]
    names = [mpi if method == "MPI" else method for method in shown]
    rows, ranges = [], []
    for entry in entries:
        size, times = size_text(entry["bytes"]), entry["seconds"]
        medians = [time_text(times[method]["median"]) for method in shown]
        alone = [times.get(f"{method} (alone)") for method in calls]
        rows.append(
            [
                size,
                *medians,
                *(ratio_text(entry["ratios"][name]) for name in ratios),
                *(time_text(call["median"]) if call else "-" for call in alone),
            ]
        )
        ranges.append([size, *(f"{time_text(times[m]['min'])} - {time_text(times[m]['max'])}" for m in shown)])
    head = ["us, median", *names, *ratios, *(f"call: {mpi if method == 'MPI' else method}" for method in calls)]
    return f"{table(head, rows)}\n\n{table(['us, min - max', *names], ranges)}"


def start(options: argparse.Namespace) -> None:
    """Start the ranks, and show and write what they found."""
    run = describe()
    saved = start_launches(SCRIPT, options, ["--sizes", *map(str, options.sizes)])
    run["versions"] = {name: launches[-1][0]["versions"] for name, launches in saved.items()}
    results: dict[str, Any] = {}
    text = []
    for name, launches in saved.items():
        samples = [by_size(launch) for launch in launches]
        everything = {size: joined([launch[size] for launch in samples]) for size in samples[0]}
        results[name] = {"all": evaluate(everything), "launches": [evaluate(launch) for launch in samples]}
        text.append(f"{options.ranks} ranks, {name}, {options.launches} launches\n{show(results[name]['all'], name)}\n")
    write(options.json, run, {"ranks": options.ranks, "by_mpi": results}, "\n".join(text))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments_of_launches(SCRIPT, "Time allreduce beside MPI, memcpy and scaling.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="multiples of 4")
    return parser.parse_args()


if __name__ == "__main__":
    start_or_be_a_rank(parse_arguments(), start, be_a_rank)
