"""Time allreduces of two hosts with one worker each beside gloo's (torch.distributed), over TCP on loopback.

    python benchmarks/hosts_gloo.py --torch PYTHON [--launches 5] [SIZE ...]

PYTHON has torch, a wheel for CPUs is enough. The launches of both take turns; in each the first worker times all sizes,
in bytes. Ours are in shared memory, as gradients of Gluon are. `CPU` is processor time of one host per GB of the array.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = [4, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
PORT = "29533"


# -- As a worker, of ours or of gloo ------------------------------------------------------------------------------


def time_it(count: int, call: Callable[[], object]) -> tuple[float, float, float]:
    """Return the median and the minimum of a call's seconds, and its processor time."""
    samples, before = [], time.process_time()
    repetitions = max(10, min(2000, (512 << 20) // (4 * count)))
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples), min(samples), (time.process_time() - before) / repetitions


def be_ours(sizes: list[int]) -> None:
    """Time the engine's allreduce."""
    import ctypes

    import numpy as np

    import kvstore_hvd
    from kvstore_hvd import native
    from kvstore_hvd.world import process

    kvstore_hvd.init()
    member, rank = process.current().member, process.current().topology.rank
    engine, arena = member.engine(), member.arena
    assert arena is not None
    told = {}
    for size in sizes:
        address = arena.allocate(size)
        array = np.ctypeslib.as_array((ctypes.c_float * (size // 4)).from_address(address))
        name, at = str(size), [address]
        call = engine.prepare(native.Request("allreduce", name, name, at, at, [size // 4], "float32"), None, None)
        array[:] = 1 + rank
        call()
        assert (array == 3).all()
        array[:] = 0
        told[size] = time_it(size // 4, call)
    if rank == 0:
        sys.stdout.write(json.dumps(told) + "\n")


def be_gloo(sizes: list[int]) -> None:
    """Time torch.distributed's allreduce."""
    import torch  # type: ignore[import-not-found]
    import torch.distributed as dist  # type: ignore[import-not-found]

    dist.init_process_group("gloo")
    told = {}
    for size in sizes:
        array = torch.full((size // 4,), 1.0 + dist.get_rank())
        dist.all_reduce(array)
        assert bool((array == 3).all())
        array.zero_()
        told[size] = time_it(size // 4, partial(dist.all_reduce, array))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(told) + "\n")
    dist.destroy_process_group()


# -- As the parent ------------------------------------------------------------------------------------------------


def launch(who: str, python: str, sizes: list[str]) -> dict[str, Any]:
    """Run one job; returns by size what its first worker has measured."""
    program, variables = [python, __file__, "--as", who, *sizes], {**os.environ, "OMP_NUM_THREADS": "1"}
    if who == "ours":
        launcher = str(Path(sys.executable).with_name("kvhvdrun"))
        commands, ranks = [[launcher, "-np", "2", "--no-prefix", *program]], [""]
        variables |= {"KVHVD_TEST_HOSTS": "2"}
    else:
        commands, ranks = [program, program], ["0", "1"]
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    jobs = [
        subprocess.Popen(command, env={**variables, "RANK": rank}, stdout=subprocess.PIPE, text=True)
        for command, rank in zip(commands, ranks)
    ]
    outputs = [job.communicate(timeout=300)[0] for job in jobs]
    assert not any(job.returncode for job in jobs), who
    told: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return told


def main() -> None:
    """Measure, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter with torch")
    parser.add_argument("--launches", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--as", dest="who", default="", help=argparse.SUPPRESS)
    results = ROOT / "build" / "hosts-gloo.json"
    parser.add_argument("--json", type=Path, default=results, help="results (default: %(default)s)")
    parser.add_argument("sizes", nargs="*", default=[*map(str, SIZES)])
    options = parser.parse_args()
    if options.who:
        (be_ours if options.who == "ours" else be_gloo)([int(size) for size in options.sizes])
        return
    from common import describe, ratio_text, size_text, table, time_text, write

    if not options.torch:
        parser.error("--torch is needed")
    run, rows = describe(), []
    samples: dict[str, list[dict[str, Any]]] = {"ours": [], "gloo": []}
    for turn in range(options.launches):
        for who in ("ours", "gloo") if turn % 2 else ("gloo", "ours"):
            python = options.torch if who == "gloo" else sys.executable
            samples[who].append(launch(who, python, options.sizes))
    for size in options.sizes:
        medians = {who: [one[size][0] for one in of] for who, of in samples.items()}
        least = {who: min(one[size][1] for one in of) for who, of in samples.items()}
        cpu = {who: statistics.median(one[size][2] for one in of) for who, of in samples.items()}
        times = [f"{time_text(statistics.median(medians[who]))} ({time_text(least[who])})" for who in samples]
        ratio = statistics.median(a / b for a, b in zip(medians["ours"], medians["gloo"]))
        used = [f"{1e9 / int(size) * cpu[who]:.2f}" for who in samples] if int(size) >= 1 << 20 else ["", ""]
        rows.append([size_text(int(size)), *times, ratio_text(ratio), ratio_text(least["ours"] / least["gloo"]), *used])
    head = ["size", "ours, us: median (min)", "gloo", "ours/gloo", "of minima", "CPU, s/GB", "of gloo"]
    about = f"2 hosts x 1, {options.launches} launches of each in turns"
    write(options.json, run, samples, f"{about}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
