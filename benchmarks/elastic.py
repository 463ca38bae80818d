"""Time elastic training: from a fault to the next step, what it costs when nothing fails, and commits.

    python benchmarks/elastic.py
    python benchmarks/elastic.py --parts faults --samples 5 --rows 'SIGKILL a worker'

*faults*: a small convolutional network is trained by four workers (`tests/support/elastic_trainee.py`). From the signal
until all workers of the next world have made a step; of a slot more or less: between two steps of a worker that stays,
so that a newcomer's start-up does not count; of daemon and launcher: until no process is left. Every job is checked
afterwards: parameters, samples, and that nothing is left behind.

*steps*: the training of `train.py` under ``kvhvdrun -np N`` and under ``kvhvdrun --min-np N --max-np N``, both alive at
the same time and training in turns.

*commit*: saving and restoring a state of the size of ResNet-50 with momentum, beside memcpy of as many bytes
(`elastic_commit.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import train
from common import describe, median_ratio, summary, table, write
from elastic_faults import NO_LIMIT, ROWS
from ranks import environment_of_ranks, this_python

SCRIPT = Path(__file__).resolve()
PARTS = ("faults", "steps", "commit")


def time_faults(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the samples of each fault, and the table."""
    results, rows = {}, []
    for name in options.rows:
        times_of, median, worst = ROWS[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        samples = times_of(options.workers, options.samples)
        times = summary(samples)
        is_fast = times["median"] <= median and times["max"] <= worst
        limits = None if median == NO_LIMIT else {"median": median, "max": worst}
        results[name] = {"seconds": times, "samples": samples, "limits": limits}
        figures = [f"{times[what]:.3f}" for what in ("min", "median", "max")]
        rows.append(
            [
                name,
                str(len(samples)),
                *figures,
                f"{median:g} / {worst:g}" if limits else "-",
                "yes" if is_fast else "NO",
            ]
        )
        print(", ".join(rows[-1]), file=sys.stderr, flush=True)  # the next one may fail
    head = [f"{options.workers} workers, seconds", "faults", "min", "median", "worst", "limits", "kept"]
    return results, table(head, rows)


def time_steps(options: argparse.Namespace) -> tuple[Any, str]:
    """Return images/s of both kinds of jobs, and the table."""
    results, rows = {}, []
    chosen = argparse.Namespace(workers=[options.ranks], batch_size=32, seconds=0.5, rounds=options.rounds)
    for network in options.networks:
        static, elastic = train.Group("ours", options.ranks), train.Group(train.ELASTIC, options.ranks)
        train.measure(network, chosen, [static, elastic])
        # Seconds of a step: the inverse of images/s.
        times = {group.mode: [1 / speed for speed in group.speeds] for group in (static, elastic)}
        ratio = median_ratio(times[train.ELASTIC], times["ours"])
        least = min(times[train.ELASTIC]) / min(times["ours"])
        results[network] = {"static": static.speeds, "elastic": elastic.speeds, "median": ratio, "min": least}
        speeds = [f"{summary(group.speeds)['median']:.0f}" for group in (static, elastic)]
        rows.append([network, *speeds, f"{ratio:.3f}", f"{least:.3f}"])
    head = [f"{options.ranks} workers", "static images/s", "elastic", "step time ratio, median", "of the minima"]
    return results, table(head, rows)


def time_commit(options: argparse.Namespace) -> tuple[Any, str]:
    """Return what elastic_commit.py found, and the table."""
    command = [str(this_python()), str(SCRIPT.with_name("elastic_commit.py")), "--repetitions", str(options.rounds)]
    done = subprocess.run(
        command, env=environment_of_ranks(1), stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    rows = []
    for name, samples in found["samples"].items():
        times = [f"{1e3 * summary(samples)[what]:.1f}" for what in ("min", "median", "max")]
        rows.append([name, *times, f"{median_ratio(samples, found['samples']['memcpy']):.2f}"])
    head = [f"{found['bytes'] / 1e6:.0f} MB, ms", "min", "median", "max", "/memcpy"]
    return found, table(head, rows)


def main() -> None:
    """Time what was asked for, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workers", type=int, default=4, help="of the jobs with faults [4]")
    parser.add_argument("--samples", type=int, default=20, help="of each fault [20]")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which faults", metavar="ROW")
    parser.add_argument("-np", "--ranks", type=int, default=2, help="workers of the jobs whose steps are timed [2]")
    parser.add_argument("--networks", nargs="+", choices=train.NETWORKS, default=["CNN", "MLP"])
    parser.add_argument("--rounds", type=int, default=30, help="of steps, and of commits [30]")
    parser.add_argument("--json", type=Path, default=SCRIPT.parent / "results" / "elastic.json")
    options = parser.parse_args()
    run = describe()
    results, texts = {}, []
    for part, timing in zip(PARTS, (time_faults, time_steps, time_commit)):
        if part in options.parts:
            results[part], text = timing(options)
            texts.append(f"{part}\n{text}\n")
    write(options.json, run, results, "\n".join(texts))


if __name__ == "__main__":
    main()
