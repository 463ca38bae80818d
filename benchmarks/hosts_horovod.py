"""Time allreduces over hosts beside Horovod's, launches in turns; hosts are namespaces (needs root), of two ranks each.

    python benchmarks/hosts_horovod.py --python HOROVOD/bin/python [--mpirun /usr/bin/mpirun] [SIZE ...]

Horovod (for MXNet, with MPI) has an environment of its own; mpirun is that of its MPI, Open MPI. A size is in bytes;
`resnet` is the gradients of ResNet-50, all submitted in priority; `trainer` the same by a DistributedTrainer. A
repetition counts as its slowest rank. 'yield': Horovod's ranks give up their cores while they wait for MPI
(`mpi_yield_when_idle`). 'TCP': under kvhvdrun, in place of MPI. 'best' is the least of Horovod's medians, or minima.
'floor': what the bytes alone cost, one thing after the other, see `be_the_floor`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from math import prod
from pathlib import Path
from select import select
from statistics import median
from time import perf_counter, sleep

from common import ROOT, Samples, describe, joined, ratio_text, size_text, slowest, table, time_text, write
from ranks import TIMEOUT_S, load_samples, save_samples

GRADIENTS = ("resnet", "trainer")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1"}
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}
OFTEN = {**YIELD, "HOROVOD_CYCLE_TIME": "0.1"}
COLUMNS = {
    "ours": {},
    "ours, TCP": {},
    "Horovod, yield": YIELD,
    "yield, cycle 0.1 ms": OFTEN,
    "as installed": {},
    "floor": {},
}
FLOOR_PORT = 5999
EXECUTE = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"  # another interpreter than the network's


def be_a_rank(module: str, sizes: list[str], repetitions: int, folder: Path) -> None:
    """Time each size, and leave the samples in the folder."""
    hvd = importlib.import_module(module)
    import mxnet as mx
    from gradients import shapes_of_resnet50

    hvd.init()
    token, samples = mx.nd.ones(1), Samples()
    for size in sizes:
        shapes = shapes_of_resnet50(False) if size in GRADIENTS else [(int(size) // 4,)]
        arrays = [mx.nd.ones(shape) for shape in shapes]
        if size == "trainer":
            params = {f"{n:03}": mx.gluon.Parameter(f"{n:03}", shape=shape) for n, shape in enumerate(shapes)}
            for param in params.values():
                param.initialize()
            trainer = hvd.DistributedTrainer(params, "sgd")
            trainer.allreduce_grads()
            arrays = [param.list_grad()[0] for param in params.values()]
        inner = max(1, min(20, (1 << 20) // (4 * sum(array.size for array in arrays))))
        samples[size] = []
        for repetition in range(-2, repetitions):
            for array in arrays:
                array[:] = 1
            hvd.allreduce_(token, name="token")
            mx.nd.waitall()
            start = perf_counter()
            for _ in range(inner):
                if size == "trainer":
                    trainer.allreduce_grads()
                else:
                    for place, array in enumerate(arrays):
                        hvd.allreduce_(array, name=f"{size}.{place}", priority=-place, average=False)
                mx.nd.waitall()
            if repetition >= 0:
                samples[size].append((perf_counter() - start) / inner)
            elif inner == 1:
                assert all((array.asnumpy() == hvd.size()).all() for array in arrays), size
    save_samples(folder, hvd.rank(), samples)


def connected() -> socket.socket | None:
    """A connection to the first host; None while nobody listens there."""
    with suppress(ConnectionRefusedError):
        return socket.create_connection(("node0", FLOOR_PORT))
    return None


def be_the_floor(sizes: list[str], repetitions: int, folder: Path) -> None:
    """One process of each host: exchange the bytes of a rank both ways by TCP; sum two arrays, copy that twice."""
    import numpy as np
    from gradients import shapes_of_resnet50

    rank, samples = int(os.environ["KVHVD_RANK"]), Samples()
    if rank == 0:
        connection = socket.create_server(("", FLOOR_PORT)).accept()[0]
    else:
        while not (found := connected()):
            sleep(0.1)
        connection = found
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size in sizes:
        count = sum(map(prod, shapes_of_resnet50(False))) if size in GRADIENTS else int(size) // 4
        mine, theirs, total, *outputs = (np.ones(count, np.float32) for _ in range(5))
        sent, received = mine.data.cast("B"), theirs.data.cast("B")
        samples[size] = []
        for _ in range(repetitions):
            connection.setblocking(True)
            connection.sendall(b"x")
            connection.recv(1)
            connection.setblocking(False)
            start, to_send, to_receive = perf_counter(), sent, received
            while to_send or to_receive:
                ready = select([connection] * bool(to_receive), [connection] * bool(to_send), [])
                with suppress(BlockingIOError):
                    while ready[0] and to_receive:
                        to_receive = to_receive[connection.recv_into(to_receive[: 1 << 20]) :]
                with suppress(BlockingIOError):
                    to_send = to_send[connection.send(to_send[: 1 << 18]) :] if ready[1] else to_send
            for begin in range(0, count, 1 << 15):
                part = slice(begin, begin + (1 << 15))
                np.add(mine[part], theirs[part], out=total[part])
                for output in outputs:
                    output[part] = total[part]
            samples[size].append(perf_counter() - start)
    save_samples(folder, rank, samples)


def main() -> None:
    """Measure, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path("python"), help="of the environment that has Horovod")
    parser.add_argument("--mpirun", type=Path, default="/usr/bin/mpirun", help="(default: %(default)s)")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=ROOT / "build/hosts-horovod.json")
    parser.add_argument("sizes", nargs="*", default=["4", "65536", "1048576", "16777216", *GRADIENTS])
    if (options := parser.parse_args()).rank and options.rank[0] == "floor":
        return be_the_floor(options.sizes, options.repetitions, Path(options.rank[1]))
    if options.rank:
        return be_a_rank(options.rank[0], options.sizes, options.repetitions, Path(options.rank[1]))
    sys.path.insert(0, str(ROOT / "tests"))
    from hosts.network import Network
    from support.launchers import Launcher, environment, mpirun, with_tests

    own, rows, shell, port = mpirun(), [], ROOT / "tests/support/remote_shell.py", 2222
    assert own is not None, "an mpirun beside this interpreter is needed"
    answer = subprocess.run([options.mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.sub("mpirun |[()]", "", answer.splitlines()[0])
    theirs = Launcher("mpirun", (str(options.mpirun),), version, own.environment)
    run = describe()
    launches: dict[str, list[Samples]] = {column: [] for column in COLUMNS}

    def start(mpi: Launcher, *program: object) -> None:
        job = network.mpirun(mpi, [2, 2], *program, **ONE_THREAD, **COLUMNS[column])
        assert job.wait(TIMEOUT_S) == 0, (network.folder / "err").read_text()

    def start_by_tcp(hosts: str, *program: object) -> None:
        words = [*network.beside, sys.executable, "-m", "kvstore_hvd.launch", "--rsh-command", shell]
        words += ["-H", hosts, sys.executable, *program]
        variables = {**with_tests(environment()), **ONE_THREAD, "KVHVD_TEST_SHELL_PORT": str(port)}
        subprocess.run(list(map(str, words)), env=variables, check=True, timeout=TIMEOUT_S)

    with tempfile.TemporaryDirectory() as folder, Network(Path(folder), 2) as network:
        network.serve(port)
        program = [Path(__file__).resolve(), "--repetitions", options.repetitions, *options.sizes, "--rank"]
        for column in (column for n in range(options.launches) for column in list(COLUMNS)[:: -1 if n % 2 else 1]):
            if column == "ours":
                start(own, *program, "kvstore_hvd.mxnet", folder)
            elif column == "ours, TCP":
                start_by_tcp("node0:2,node1:2", *program, "kvstore_hvd.mxnet", folder)
            elif column == "floor":
                start_by_tcp("node0:1,node1:1", *program, "floor", folder)
            else:
                start(theirs, "-c", EXECUTE, options.python.absolute(), *program, "horovod.mxnet", folder)
            ranks = range(2 if column == "floor" else 4)
            launches[column].append(slowest([load_samples(Path(folder), rank) for rank in ranks]))
    for size in options.sizes:
        values = [joined(of)[size] for of in launches.values()]
        compared, theirs_of = (*values[:2], values[5]), values[2:5]
        best = min(map(median, theirs_of)), min(map(min, theirs_of))
        ratios = [found / least for of in compared for found, least in zip((median(of), min(of)), best)]
        times = [f"{time_text(median(of))} ({time_text(min(of))})" for of in values]
        rows.append([size if size in GRADIENTS else size_text(int(size)), *times, *map(ratio_text, ratios)])
    head = ["us: median (min)", *COLUMNS, "ours/best", "of minima", "TCP/best", "of minima", "floor/best", "of minima"]
    about = f"2 hosts of 2 ranks, {options.launches} launches; ours: {own.version}; Horovod: {version}"
    return write(options.json, run, launches, f"{about}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
