"""Time allreduces over hosts beside flat MPI_Allreduce of the same ranks, in turns; hosts are namespaces (needs root).

    python benchmarks/hosts.py [--ranks 2,2] [--rate 1gbit] [--repetitions 12] [SIZE ...]

A size is in bytes, or `resnet`: the gradients of ResNet-50, all submitted in priority by us, one after the other by
MPI. Ours are in shared memory, as gradients of Gluon are. A repetition counts as its slowest rank. With fewer cores
than ranks an MPI that spins while it waits (MPICH, Open MPI) takes cores from the others. 'wire' is a floor: the bytes
of a sum over hosts, sent by MPI_Alltoall of one rank of each host, twice, while the other ranks sleep.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from common import ROOT, describe, median_ratio, ratio_text, size_text, table, time_text, write
from ranks import start_over_hosts

SIZES = [4, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


# -- As a rank ----------------------------------------------------------------------------------------------------


def be_a_rank(name: str, repetitions: int) -> None:
    """Time one size; rank 0 prints the slowest rank's seconds of each repetition."""
    import numpy as np
    from gradients import shapes_of_resnet50

    import kvstore_hvd
    from kvstore_hvd import native
    from kvstore_hvd.world import process

    kvstore_hvd.init()
    from mpi4py import MPI

    world, engine, arena = MPI.COMM_WORLD, process.current().member.engine(), process.current().member.arena
    assert arena is not None
    if name == "resnet":
        counts = [int(np.prod(shape)) for shape in shapes_of_resnet50(with_biases=False)]
    else:
        counts = [max(1, int(name) // 4)]
    arrays, requests = [], []
    for place, count in enumerate(counts):
        address = arena.allocate(4 * count)
        arrays.append(np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)))
        at = [address]
        requests.append(
            native.Request("allreduce", f"{place}", f"{place}", at, at, [count], "float32", priority=-place)
        )
    prepared = engine.prepare(requests[0], None, None)

    def ours() -> None:
        if len(requests) == 1:
            prepared()
            return
        for work in [engine.submit(request) for request in requests]:
            engine.wait(work)

    def flat() -> None:
        for array in arrays:
            world.Allreduce(MPI.IN_PLACE, array)

    topology = process.current().topology
    hosts = world.Split(topology.local_rank, world.rank)
    whole = np.zeros((hosts.size, -(-sum(counts) // hosts.size)), np.float32)
    received = np.empty_like(whole)

    def wire() -> None:
        for _ in range(2 if topology.local_rank == 0 else 0):
            hosts.Alltoall(whole, received)

    inner = max(1, min(20, (1 << 20) // (4 * sum(counts))))
    methods: list[tuple[str, Callable[[], None]]] = [("ours", ours), ("flat", flat), ("wire", wire)]
    samples: dict[str, list[float]] = {method: [] for method, _ in methods}
    for repetition in range(repetitions + 1):
        for method, call in methods[:: 1 if repetition % 2 else -1]:
            for array in arrays:
                array[:] = world.rank if repetition == 0 else 0
            world.Barrier()
            start = perf_counter()
            for _ in range(inner):
                call()
            own = (perf_counter() - start) / inner
            kvstore_hvd.barrier()  # asleep: a rank that spins in MPI would take a core from those that are not done
            seconds = world.allreduce(own, MPI.MAX)
            if repetition == 0 and inner == 1 and method != "wire":
                assert all((array == sum(range(world.size))).all() for array in arrays), method
            elif repetition > 0:
                samples[method].append(seconds)
    if world.rank == 0:
        sys.stdout.write(json.dumps(samples) + "\n")
    world.Barrier()


# -- As the parent ------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,2", help="on each host (default: %(default)s)")
    parser.add_argument("--rate", default="", help="of each host's network, as 1gbit (default: as it is)")
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    results = ROOT / "build" / "hosts.json"
    parser.add_argument("--json", type=Path, default=results, help="results (default: %(default)s)")
    parser.add_argument("sizes", nargs="*", default=[*map(str, SIZES), "resnet"])
    options = parser.parse_args()
    if options.rank:
        be_a_rank(options.rank, options.repetitions)
        return
    run, rows = describe(), []
    large = {size for size in options.sizes if size == "resnet" or int(size) > 1 << 20}
    repetitions = {size: options.repetitions // (2 if size in large else 1) for size in options.sizes}
    jobs = [("--rank", size, "--repetitions", repetitions[size]) for size in options.sizes]
    version, told = start_over_hosts(__file__, list(map(int, options.ranks.split(","))), options.rate, jobs)
    samples = dict(zip(options.sizes, told))
    for size, of in samples.items():
        ours, flat = of["ours"], of["flat"]
        times = [f"{time_text(statistics.median(each))} ({time_text(min(each))})" for each in of.values()]
        ratios = [ratio_text(median_ratio(ours, flat)), ratio_text(min(ours) / min(flat))]
        rows.append([size if size == "resnet" else size_text(int(size)), *times, *ratios])
    head = ["size", "ours, us: median (min)", "flat MPI_Allreduce", "wire", "ours/flat", "of minima"]
    about = f"ranks on each host: {options.ranks}; network: {options.rate or 'unshaped'}; {version}"
    write(options.json, run, samples, f"{about}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
