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


def time_faults(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """Put the samples of each fault into `found`, and return the table of all that it has."""
    for name in options.rows:
        times_of, median, worst = ROWS[name]
        samples = times_of(options.workers, options.samples)
        limits = None if median == NO_LIMIT else {"median": median, "max": worst}
        found[name] = {"seconds": summary(samples), "samples": samples, "limits": limits}
        print(f"{name}: {found[name]['seconds']}", file=sys.stderr, flush=True)  # the next one may fail
    rows = []
    for name, of in ((name, found[name]) for name in ROWS if name in found):
        times, limits = of["seconds"], of["limits"]
        figures = [f"{times[what]:.3f}" for what in ("min", "median", "max")]
        is_fast = not limits or all(times[what] <= limit for what, limit in limits.items())
        text = " / ".join(f"{limit:g}" for limit in limits.values()) if limits else "-"
        rows.append([name, str(len(of["samples"])), *figures, text, "yes" if is_fast else "NO"])
    return table([f"{options.workers} workers, seconds", "faults", "min", "median", "worst", "limits", "kept"], rows)


def time_steps(options: argparse.Namespace, results: dict[str, Any]) -> str:
    """Put the images/s of both kinds of jobs into `results`, and return the table."""
    rows = []
    chosen = argparse.Namespace(workers=[options.ranks], batch_size=32, seconds=0.5, rounds=options.rounds)
    for network in options.networks:
        static, elastic = train.Group("ours", options.ranks), train.Group(train.ELASTIC, options.ranks)
        train.measure(network, "sgd", chosen, [static, elastic])
        # Seconds of a step: the inverse of images/s.
        times = {group.mode: [1 / speed for speed in group.speeds] for group in (static, elastic)}
        ratio = median_ratio(times[train.ELASTIC], times["ours"])
        least = min(times[train.ELASTIC]) / min(times["ours"])
        results[network] = {"static": static.speeds, "elastic": elastic.speeds, "median": ratio, "min": least}
        speeds = [f"{summary(group.speeds)['median']:.0f}" for group in (static, elastic)]
        rows.append([network, *speeds, f"{ratio:.3f}", f"{least:.3f}"])
    head = [f"{options.ranks} workers", "static images/s", "elastic", "step time ratio, median", "of the minima"]
    return table(head, rows)


def time_commit(options: argparse.Namespace, results: dict[str, Any]) -> str:
    """Put into `results` what elastic_commit.py found, and return the table."""
    command = [str(this_python()), str(SCRIPT.with_name("elastic_commit.py")), "--repetitions", str(options.rounds)]
    done = subprocess.run(
        command, env=environment_of_ranks(1), stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    results.update(found)
    rows = []
    for name, samples in found["samples"].items():
        times = [f"{1e3 * summary(samples)[what]:.1f}" for what in ("min", "median", "max")]
        rows.append([name, *times, f"{median_ratio(samples, found['samples']['memcpy']):.2f}"])
    head = [f"{found['bytes'] / 1e6:.0f} MB, ms", "min", "median", "max", "/memcpy"]
    return table(head, rows)


def main() -> None:
    """Time what was asked for, and write it down beside what the file has of other parts and faults."""
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
    results = json.loads(options.json.read_text())["results"] if options.json.exists() else {}
    for part, timing in zip(PARTS, (time_faults, time_steps, time_commit)):
        if part in options.parts:
            of_part = results.setdefault(part, {"found": {}})
            of_part["table"] = timing(options, of_part["found"])
    write(options.json, run, results, "\n".join(f"{part}\n{each['table']}\n" for part, each in results.items()))


if __name__ == "__main__":
    main()
