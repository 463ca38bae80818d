"""Record when each gradient of one training step was ready, scheduled and summed, for the picture of `report.py`.

    python benchmarks/timeline.py -np 2 --network CNN

Trains a network of `train.py` for some steps, and takes the times of the last one from the store's report. All ranks
read the same clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import describe, table, write
from ranks import Rank, arguments_of_launches, start_launches, start_or_be_a_rank
from train import NETWORKS, prepare

SCRIPT = Path(__file__).resolve()
_STEPS = 20  # before the one that counts


def be_a_rank(options: argparse.Namespace) -> None:
    """Train, and leave the times of the last step in the folder."""
    rank = Rank(options)
    import mxnet as mx

    trainer, step = prepare(options.network, "sgd", options.batch_size, "ours")
    for _ in range(_STEPS):
        step()
    mx.nd.waitall()
    rank.gate.wait()
    begin = time.monotonic()
    step()
    mx.nd.waitall()
    end = time.monotonic()
    report = trainer._kvstore.report()
    rank.gate.wait()
    rank.save(begin=begin, end=end, keys=report["keys"])


def timeline_of(rank: Mapping[str, Any], begin: float) -> dict[str, Any]:
    """Return a rank's step in milliseconds from the beginning of the first one's."""
    bars = []
    for name, entry in rank["keys"].items():
        last = {what: times["last"] for what, times in entry["ms"].items()}
        submitted = (entry["submitted"] - begin) * 1e3
        scheduled = submitted + last["queued"]
        bars.append(
            {
                "name": name,
                "algorithm": entry["algorithm"],
                "bytes": entry["bytes"] // max(1, sum(entry["operations"].values())),
                "submitted": submitted,
                "scheduled": scheduled,
                "complete": scheduled + last["reducing"],
                "exposed": last["exposed"],
            }
        )
    bars.sort(key=lambda bar: bar["submitted"])
    return {"begin": (rank["begin"] - begin) * 1e3, "end": (rank["end"] - begin) * 1e3, "bars": bars}


def show(step: Mapping[str, Any]) -> str:
    """Return the table of one rank's step."""
    times = ("submitted", "scheduled", "complete", "exposed")
    rows = [
        [bar["name"], bar["algorithm"], str(bar["bytes"]), *(f"{bar[what]:.3f}" for what in times)]
        for bar in step["bars"]
    ]
    exposed = max((bar["exposed"] for bar in step["bars"]), default=0.0)
    share = exposed / (step["end"] - step["begin"])
    told = f"step {step['end'] - step['begin']:.2f} ms, exposed communication {exposed:.2f} ms ({share:.1%})"
    return f"{table(['ms', 'algorithm', 'bytes', *times], rows)}\n{told}"


def start(options: argparse.Namespace) -> None:
    """Start the ranks, and show and write what they found."""
    run = describe()
    arguments = ["--network", options.network, "--batch-size", str(options.batch_size)]
    name, launches = next(iter(start_launches(SCRIPT, options, arguments).items()))
    ranks = launches[-1]
    run["versions"] = {name: ranks[0]["versions"]}
    begin = min(rank["begin"] for rank in ranks)
    steps = [timeline_of(rank, begin) for rank in ranks]
    text = "\n\n".join(f"{options.network}, rank {number}\n{show(step)}" for number, step in enumerate(steps))
    write(options.json, run, {"ranks": options.ranks, "network": options.network, "steps": steps}, text)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = arguments_of_launches(SCRIPT, "Record one training step for report.py.")
    parser.set_defaults(launches=1)
    parser.add_argument("--network", choices=NETWORKS, default="CNN")
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    start_or_be_a_rank(parse_arguments(), start, be_a_rank)
