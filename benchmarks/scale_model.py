"""Predict a step over 1 to 1,024 hosts by a model, which is compared with steps over 2 and 3 hosts (needs root).

    python benchmarks/scale_model.py [--rate 1gbit] [--repetitions 6]

A step is a backward pass of a given time, during which the gradients of ResNet-50 become ready one by one, last layer
first, and the wait for all sums. With H hosts, N bytes of gradients, W bytes on their way at a time, and what one small
operation takes over two hosts as the time of a hop:

    share = 2 (H - 1) / H
    step = max(backward, share N / rate) + share W / rate + 4 hops + H x batches x 0.3 us

The last term is the records that each link exchanges with all others. Hosts are namespaces with one rank each, whose
backward pass sleeps: two cores serve all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from common import ROOT, describe, table, write
from ranks import start_over_hosts

BACKWARDS_S = (0.0, 1.0, 2.0)
GBIT = 1e9 / 8 * 1448 / 1538  # bytes/s of TCP's payload in Ethernet's frames
WINDOW = 4 << 20  # see native/link/link.cpp
BATCHES = 150  # entries of the schedule of ResNet-50's gradients
RECORD_S = 0.3e-6
HOPS = 4  # announcement, order, sums of hosts, result


def be_a_rank(repetitions: int) -> None:
    """Time steps; rank 0 prints the slowest rank's seconds of each, and the time of a small operation."""
    import numpy as np
    from gradients import shapes_of_resnet50

    import kvstore_hvd
    from kvstore_hvd import native
    from kvstore_hvd.world import process

    kvstore_hvd.init()
    from mpi4py import MPI

    engine, arena = process.current().member.engine(), process.current().member.arena
    assert arena is not None
    counts, requests = [int(np.prod(shape)) for shape in shapes_of_resnet50(with_biases=False)], []
    for place, count in enumerate(counts):
        array = [arena.allocate(4 * count)]
        requests.append(
            native.Request("allreduce", f"{place}", f"{place}", array, array, [count], "float32", priority=-place)
        )

    def step(backward_s: float) -> None:
        works, start = [], time.perf_counter()
        for number, request in enumerate(reversed(requests)):
            time.sleep(max(0.0, start + backward_s * (number + 1) / len(requests) - time.perf_counter()))
            works.append(engine.submit(request))
        for work in works:
            engine.wait(work)

    def timed(call: object, *arguments: object) -> float:
        kvstore_hvd.barrier()
        start = time.perf_counter()
        call(*arguments)  # type: ignore[operator]
        seconds = time.perf_counter() - start
        kvstore_hvd.barrier()
        return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))

    step(0.0)
    told: dict[str, list[float]] = {str(s): [timed(step, s) for _ in range(repetitions)] for s in BACKWARDS_S}
    small = np.ones(1, np.float32)
    told["hop"] = [timed(kvstore_hvd.allreduce, small, "small") for _ in range(50)]
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(json.dumps({**told, "bytes": 4 * sum(counts)}) + "\n")


def step_s(hosts: int, backward_s: float, size: int, rate: float, hop_s: float) -> float:
    """The model: `size` in bytes, `rate` of each host's network in bytes/s."""
    if hosts == 1:
        return backward_s
    share = 2 * (hosts - 1) / hosts
    moved_s = max(backward_s, share * size / rate) + share * WINDOW / rate
    return moved_s + HOPS * hop_s + hosts * BATCHES * RECORD_S


def main() -> None:
    """Measure, compare, and print the prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of each host's network (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "scale_model.json")
    options = parser.parse_args()
    if options.rank:
        be_a_rank(options.repetitions)
        return
    run, rows, results = describe(), [], {}
    rate = float(options.rate.removesuffix("gbit")) * GBIT
    for hosts in (2, 3):
        job = ("--rank", "--repetitions", options.repetitions)
        version, (told,) = start_over_hosts(__file__, [1] * hosts, options.rate, [job])
        results[hosts] = told
        for backward_s in BACKWARDS_S:
            measured = statistics.median(told[str(backward_s)])
            model = step_s(hosts, backward_s, told["bytes"], rate, statistics.median(told["hop"]))
            texts = f"{backward_s:.1f}", f"{measured:.3f} ({min(told[str(backward_s)]):.3f})", f"{model:.3f}"
            rows.append([str(hosts), *texts, f"{model / measured - 1:+.0%}"])
    head = ["hosts", "backward, s", "step: median (min)", "model", "model against median"]
    text = f"one rank on each host, {options.rate}; {version}\n\n{table(head, rows)}\n\n"
    size, rows = results[2]["bytes"], []
    for hosts in (1 << power for power in range(11)):
        speeds = [0.25 / step_s(hosts, 0.25, size, gbit * GBIT, 50e-6) for gbit in (1, 10, 25, 100)]
        rows.append([str(hosts), *(f"{speed:.0%}" for speed in speeds)])
    head = ["hosts", *(f"{gbit} Gbit/s" for gbit in (1, 10, 25, 100))]
    about = "Predicted speed of each host, of what it has alone: backward 0.25 s, hops of 50 us"
    write(options.json, run, results, f"{text}{about}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
