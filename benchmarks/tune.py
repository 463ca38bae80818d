"""Find the sizes at which the engine should change its way on this machine, and print how to set them.

    python benchmarks/tune.py -np 2
    python benchmarks/tune.py -np 2 --only one_shot direct_chunk

For each threshold of the engine (native/shm/world.hpp says what they mean) the ranks join one
world for each value that is tried, in the same processes, and time allreduces (or broadcasts) of the sizes that the
threshold is about; the values take turns, in a new order in each repetition. A value is judged by the geometric mean
over the sizes of its medians, relative to the present one's. It replaces the present one when it is faster by more
than --margin in every launch; the next threshold is tried with it.

Not tried are `submitter` and `linger`: they are about threads that have other things to do.

The last line printed is what to put into the environment of a training. Only time counts here: with a larger
direct_chunk a gradient of higher priority has to wait longer.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from common import Samples, describe, size_text, slowest, table, write
from ranks import (
    TIMEOUT_S,
    Gate,
    environment_of_ranks,
    load_samples,
    prepare_gate,
    save_samples,
    start_or_be_a_rank,
    this_python,
)

from kvstore_hvd import native

SCRIPT = Path(__file__).resolve()
KI, MI = 1 << 10, 1 << 20
_ROW_S = 2e-3  # what a sample should take at least


@dataclass(frozen=True)
class Sweep:
    """What is tried for one threshold, and with which operations."""

    values: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: str  # 'staged', 'direct', 'broadcast'


SWEEPS = {
    "inlined": Sweep((0, 512, 1 * KI, 2 * KI, 4 * KI), (4, 512, 1 * KI, 2 * KI, 4 * KI), "staged"),
    "inlined_direct": Sweep(
        (0, 32 * KI, 64 * KI, 128 * KI, 256 * KI), (4 * KI, 16 * KI, 32 * KI, 64 * KI, 128 * KI), "direct"
    ),
    "one_shot": Sweep((0, 2 * KI, 4 * KI, 8 * KI, 16 * KI), (4 * KI, 8 * KI, 16 * KI), "staged"),
    "min_chunk": Sweep((16 * KI, 32 * KI, 64 * KI, 128 * KI), (32 * KI, 128 * KI, 512 * KI), "staged"),
    "max_slice": Sweep((32 * KI, 64 * KI, 128 * KI), (1 * MI, 4 * MI), "staged"),
    "max_slice_large": Sweep((32 * KI, 64 * KI, 128 * KI), (32 * MI,), "staged"),
    "large": Sweep((4 * MI, 16 * MI, 64 * MI), (8 * MI, 32 * MI), "staged"),
    "broadcast_chunk": Sweep((32 * KI, 64 * KI, 128 * KI, 256 * KI), (256 * KI, 4 * MI), "broadcast"),
    "direct_chunk": Sweep((256 * KI, 512 * KI, 1 * MI, 2 * MI, 4 * MI), (1 * MI, 4 * MI, 32 * MI), "direct"),
    "min_part": Sweep((4 * KI, 8 * KI, 16 * KI, 32 * KI), (16 * KI, 32 * KI, 128 * KI), "direct"),
    "max_part": Sweep((64 * KI, 128 * KI, 256 * KI, 512 * KI), (1 * MI, 4 * MI, 32 * MI), "direct"),
}


def setting_of(thresholds: Mapping[str, int]) -> str:
    """Return a value of KVHVD_THRESHOLDS."""
    return ",".join(f"{name}={value}" for name, value in thresholds.items())


# -- As a rank ----------------------------------------------------------------------------------------------------


def action_of(segment: native.Segment, engine: native.Engine, rank: int, kind: str, size: int) -> Callable[[], object]:
    """Return what rewrites an array and carries out one operation on it."""
    if kind == "direct":
        # Never given back: the world ends with this process.
        address = native.Arena(segment, rank).allocate(size)
        memory = np.ctypeslib.as_array((ctypes.c_float * (size // 4)).from_address(address))
    else:
        memory = np.empty(size // 4, np.float32)
        address = memory.ctypes.data
    collective = "broadcast" if kind == "broadcast" else "allreduce"
    request = native.Request(collective, str(size), str(size), [address], [address], [size // 4], "float32")
    run, fill = engine.run, memory.fill

    def action() -> None:
        fill(1.0)
        run(request)

    return action


def be_a_rank(options: argparse.Namespace) -> None:
    """Measure one sweep, and leave the samples in the folder."""
    sweep = SWEEPS[options.only[0]]
    gate = Gate(options.folder, options.rank, options.ranks)
    segments = [native.Segment.attach(fd) for fd in options.fds]
    engines = [native.Engine(segment, options.rank, 60.0) for segment in segments]
    samples: Samples = {}
    shuffle = random.Random(0).shuffle  # the same order on all ranks
    for size in sweep.sizes:
        # One after the other: an arena hands out the same places in every world.
        actions = [
            action_of(segment, engine, options.rank, sweep.kind, size) for segment, engine in zip(segments, engines)
        ]
        order = list(range(len(actions)))
        samples.update({f"{number}/{size}": [] for number in order})
        # About as long for every size; equal on all ranks.
        count = max(1, min(200, int(_ROW_S / (2e-6 + size / 4e9))))
        for repetition in range(-1, options.repetitions):
            shuffle(order)
            for number in order:
                gate.wait()
                start = perf_counter()
                for _ in range(count):
                    actions[number]()
                seconds = (perf_counter() - start) / count
                if repetition >= 0:
                    samples[f"{number}/{size}"].append(seconds)
    gate.wait()
    for engine in engines:
        engine.shutdown()
    save_samples(options.folder, options.rank, samples)


# -- As the one that starts them ----------------------------------------------------------------------------------


def launch(options: argparse.Namespace, name: str, values: Sequence[int], chosen: Mapping[str, int]) -> Samples:
    """Start the ranks once with a world for each value, and return the samples of the slowest ranks."""
    arena = 2 * sum(SWEEPS[name].sizes) if SWEEPS[name].kind == "direct" else 0
    segments = [native.Segment.create(options.ranks, arena, setting_of({**chosen, name: value})) for value in values]
    fds = [segment.fd for segment in segments]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as text:
        folder = Path(text)
        prepare_gate(folder, options.ranks)
        command = [str(this_python()), str(SCRIPT), "-np", str(options.ranks), "--only", name, "--folder", text]
        command += ["--repetitions", str(options.repetitions), "--fds", *map(str, fds)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment_of_ranks(options.ranks),
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
            for rank in range(options.ranks)
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in ranks]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{name}: the ranks did not end within {TIMEOUT_S:g} s") from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"{name}: the ranks ended with codes {codes}")
        return slowest([load_samples(folder, rank) for rank in range(options.ranks)])


def relative(samples: Samples, sizes: Sequence[int], number: int, present: int) -> float:
    """Return the time of a value relative to that of the present one: the geometric mean over the sizes."""
    logs = []
    for size in sizes:
        pairs = zip(samples[f"{number}/{size}"], samples[f"{present}/{size}"])
        logs.append(math.log(statistics.median(mine / other for mine, other in pairs)))
    return math.exp(sum(logs) / len(logs))


def tune(options: argparse.Namespace, name: str, chosen: Mapping[str, int]) -> tuple[int, dict[str, Any]]:
    """Sweep one threshold; return the value to use from now on, and the results."""
    sweep = SWEEPS[name]
    now = native.thresholds(setting_of(chosen))[name].value
    values = sorted({*sweep.values, now})
    present = values.index(now)
    launches = []
    for number in range(options.launches):
        print(f"{name}: launch {number + 1} of {options.launches} ...", file=sys.stderr, flush=True)
        launches.append(launch(options, name, values, chosen))
    ratios = [[relative(samples, sweep.sizes, v, present) for samples in launches] for v in range(len(values))]
    best = min(range(len(values)), key=lambda v: statistics.median(ratios[v]))
    # A little gain, or one in some launches only, is no reason to leave what was measured with more care.
    if max(ratios[best]) > 1 - options.margin:
        best = present
    medians = [
        {size: statistics.median(t for samples in launches for t in samples[f"{v}/{size}"]) for size in sweep.sizes}
        for v in range(len(values))
    ]
    return values[best], {"values": values, "before": now, "chosen": values[best], "ratios": ratios, "seconds": medians}


def show(name: str, found: Mapping[str, Any]) -> str:
    """Return the table of one threshold."""
    rows = []
    for value, ratios, seconds in zip(found["values"], found["ratios"], found["seconds"]):
        marks = [mark for mark in ("before", "chosen") if found[mark] == value]
        rows.append(
            [
                f"{size_text(value)} {', '.join(marks)}".strip(),
                *(f"{time * 1e6:.1f}" for time in seconds.values()),
                f"{statistics.median(ratios):.2f}",
                " ".join(f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    sizes = [f"us, {size_text(size)}" for size in SWEEPS[name].sizes]
    return table([name, *sizes, "relative", "of each launch"], rows)


def start(options: argparse.Namespace) -> None:
    """Start the ranks, and show and write what they found."""
    run = describe()
    chosen: dict[str, int] = {}
    results, text = {}, [f"{options.ranks} ranks, {options.launches} launches\n"]
    for name in options.only:
        value, found = tune(options, name, chosen)
        results[name] = found
        text.append(show(name, found) + "\n")
        if value != native.thresholds()[name].value:
            chosen[name] = value
    line = f"export KVHVD_THRESHOLDS={setting_of(chosen)}" if chosen else "The defaults fit this machine."
    write(options.json, run, {"ranks": options.ranks, "thresholds": results, "line": line}, "\n".join([*text, line]))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Find the engine's thresholds for this machine.")
    parser.add_argument("-np", "--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=3, help="how often the ranks are started for a threshold [3]")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--margin", type=float, default=0.03, help="what a change must gain in every launch [0.03]")
    parser.add_argument("--only", nargs="+", choices=list(SWEEPS), default=list(SWEEPS), metavar="THRESHOLD")
    parser.add_argument("--json", type=Path, default=SCRIPT.parent / "results" / "tune.json")
    # What ranks are told.
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fds", type=int, nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    start_or_be_a_rank(parse_arguments(), start, be_a_rank)
