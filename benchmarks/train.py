"""Time the training of small networks, with 1 and 2 workers: no store, ours, and MXNet's 'dist_sync'.

    python benchmarks/train.py
    python benchmarks/train.py --networks MLP ResNet-18 --optimizers sgd adam --modes "no store" ours sharded
    python benchmarks/train.py --hosts --workers 4 --networks CNN       # also over two namespaces (needs root)

All groups of workers are started at once and sleep; in every round each in turn trains for about a second, so that they
share good and bad moments of the machine. Each worker is pinned to its share of the cores (the same share for one
worker as for several) and computes with as many threads. Workers of 'no store' do not talk: their images/s are what
the machine gives when communication is free. 'dist_sync' has a scheduler and one server beside the workers, which are
not pinned; they run on the cores of the workers, as on a machine with no cores to spare.

'exposed' is the part of the time from the last gradient of a step until all of them are summed, as our store's report
has it; 'reducing' the part of that in which something was being reduced: in the rest the workers waited for each other.

Parameters are updated by MXNet's own operators but in the groups of ours (KVHVD_FUSED_UPDATE).

Batches are random and stay where they are: no data is loaded. The batch size is that of each worker.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, describe, median_ratio, ratio_text, summary, table, write
from ranks import kvhvdrun, start_or_be_a_rank, this_python, versions

NO_UPDATE = "no update"  # forward and backward pass only: nothing can be faster
MODES = ("no store", "ours", "sharded", "dist_sync", NO_UPDATE)
OVER_HOSTS = "ours over 2 hosts"
ELASTIC = "elastic"  # ours, in a job that may lose workers: for benchmarks/elastic.py
NETWORKS = ("CNN", "MLP", "LSTM", "ResNet-18")
OPTIMIZERS = {
    "sgd": {"learning_rate": 1e-3},
    "momentum": {"learning_rate": 1e-3, "momentum": 0.9},
    "adam": {"learning_rate": 1e-5},
    "lamb": {"learning_rate": 1e-5},
}
WAITS = ("exposed_ms", "reducing_ms")
START_TIMEOUT_S = 120.0
SEGMENT_TIMEOUT_S = 120.0

# Imported first, the package makes plain `import mxnet` work; with these roles it then serves until all workers left.
_SERVE = "import kvstore_hvd, mxnet"


def socket_in(folder: str) -> str:
    """Return the address where workers find the one that starts them."""
    return str(Path(folder) / "socket")


class Channel:
    """One JSON text a line, over a Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("r")

    def send(self, message: Any) -> None:
        """Send one message."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message.

        Raises
        ------
        EOFError
            The other side is gone.
        """
        line = self._file.readline()
        if not line:
            raise EOFError("the other side is gone")
        return json.loads(line)


# -- As a worker --------------------------------------------------------------------------------------------------


def be_a_worker(options: argparse.Namespace) -> None:
    """Connect, and train whenever told to."""
    variables = ("KVHVD_RANK", "KVHVD_WORKER", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    index = next((int(os.environ[name]) for name in variables if name in os.environ), options.index)
    # Before anything starts threads: they inherit it.
    os.sched_setaffinity(0, options.cores[index * options.share : (index + 1) * options.share])
    import kvstore_hvd

    if options.mode == ELASTIC:
        from kvstore_hvd import elastic

        kvstore_hvd.init()
        elastic.run(lambda state: train_when_told(options, index))(elastic.GluonState())
    else:
        train_when_told(options, index)


def train_when_told(options: argparse.Namespace, index: int) -> None:
    """Train as many steps as the other side says, again and again."""
    import mxnet as mx

    trainer, step = prepare(options.network, options.optimizer, options.batch_size, options.mode)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_in(options.folder))
    channel = Channel(connection)
    channel.send({"group": options.group, "index": index, "versions": versions()})
    while steps := channel.receive():
        mx.nd.waitall()
        waits = waits_of(trainer)
        start = time.perf_counter()
        before: Any = None
        for _ in range(steps):
            loss = step()
            # A training loop looks at its losses; that of the step before keeps it one step ahead, not hundreds.
            if before is not None:
                before.asnumpy()
            before = loss
        mx.nd.waitall()
        seconds = time.perf_counter() - start
        channel.send([seconds, *(now - then for now, then in zip(waits_of(trainer), waits))])
    del trainer


def waits_of(trainer: Any) -> list[float]:
    """Return for how many seconds this worker's steps have waited for our store, and for how many of them while
    something was being reduced; 0 without it."""
    store = trainer._kvstore
    rounds = store.report()["rounds"] if hasattr(store, "report") else {}
    return [rounds.get(what, 0.0) * 1e-3 for what in WAITS]


def make_store(mode: str) -> Any:
    """Return the store of a mode, or None."""
    import mxnet as mx

    ours = ("ours", OVER_HOSTS, ELASTIC)
    return None if mode in ("no store", NO_UPDATE) else mx.kv.create("horovod" if mode in ours else mode)


def prepare(network: str, optimizer: str, batch_size: int, mode: str) -> tuple[Any, Any]:
    """Return a trainer and a function that trains one step and returns the loss."""
    import mxnet as mx
    import numpy as np
    from mxnet import autograd, gluon
    from mxnet.gluon import nn

    array = mx.nd.array
    # Of MXNet 1, the LSTM cannot infer shapes of np arrays, and ResNet-18 does not take them.
    if network in ("CNN", "MLP") or not mx.__version__.startswith("1."):
        mx.npx.set_np()
        array = mx.np.array
    mx.random.seed(0)
    net = nn.HybridSequential()
    inputs: tuple[int, ...] = (batch_size, 1, 28, 28)
    targets: tuple[int, ...] = (batch_size,)
    if network == "LSTM":
        # A label for each of 28 steps in time.
        inputs, targets = (28, batch_size, 28), (28, batch_size)
        net.add(gluon.rnn.LSTM(128, input_size=28), nn.Dense(10, flatten=False, in_units=128))
    elif network == "ResNet-18":
        inputs = (batch_size, 3, 32, 32)
        net.add(gluon.model_zoo.vision.resnet18_v1(classes=10))
    elif network == "CNN":
        net.add(
            nn.Conv2D(20, 5, in_channels=1, activation="tanh"),
            nn.MaxPool2D(),
            nn.Conv2D(50, 5, in_channels=20, activation="tanh"),
            nn.MaxPool2D(),
            nn.Dense(500, in_units=800, activation="tanh"),
            nn.Dense(10, in_units=500),
        )
    else:
        net.add(
            nn.Dense(512, in_units=784, activation="relu"),
            nn.Dense(512, in_units=512, activation="relu"),
            nn.Dense(10, in_units=512),
        )
    net.initialize(mx.init.Uniform(0.07))
    net.hybridize(static_alloc=True, static_shape=True)
    name = "sgd" if optimizer == "momentum" else optimizer
    params, arguments = net.collect_params(), dict(OPTIMIZERS[optimizer])
    if mode == "sharded":
        import kvstore_hvd.mxnet as hvd

        hvd.init()
        trainer: Any = hvd.ShardedTrainer(params, name, arguments)
    else:
        trainer = gluon.Trainer(params, name, arguments, kvstore=make_store(mode))
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    generator = np.random.default_rng(0)
    images = array(generator.random(inputs, np.float32), dtype="float32")
    labels = array(generator.integers(0, 10, targets), dtype="float32")

    def step() -> Any:
        with autograd.record():
            loss = loss_of(net(images), labels).mean()
        loss.backward()
        if mode != NO_UPDATE:
            trainer.step(1)
        return loss

    return trainer, step


# -- As the one that starts them ----------------------------------------------------------------------------------


@dataclass
class Group:
    """Workers that train together."""

    mode: str
    workers: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # images/s of all workers, one for each round
    # Parts of the time, means of the workers, one for each round.
    exposed: list[float] = field(default_factory=list)
    reducing: list[float] = field(default_factory=list)
    hosts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def name(self) -> str:
        """How results name it."""
        return f"{self.mode}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    @property
    def is_measured_by_our_store(self) -> bool:
        """Whether `exposed` says anything."""
        return self.mode in ("ours", "sharded", OVER_HOSTS) and self.workers > 1

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start the processes; they connect by themselves."""
        command = [*command, "--group", self.name, "--mode", self.mode]
        if self.mode in ("no store", "dist_sync", NO_UPDATE):
            environment = {**environment, "KVHVD_FUSED_UPDATE": "0"}
        if self.mode in ("ours", "sharded"):
            self._start([*kvhvdrun(this_python()), "-np", str(self.workers), *command], environment)
            return
        if self.mode == OVER_HOSTS:
            sys.path.insert(0, str(ROOT / "tests"))
            from hosts.network import Network
            from support.launchers import mpirun

            mpi = mpirun()
            assert mpi is not None, "no mpirun beside this Python"
            network = self.hosts.enter_context(
                Network(Path(self.hosts.enter_context(tempfile.TemporaryDirectory())), min(2, self.workers))
            )
            counts = [len(range(host, self.workers, 2)) for host in range(len(network.names))]
            more = {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}
            self.processes.append(network.mpirun(mpi, counts, *command[1:], **more))
            return
        if self.mode == ELASTIC:
            count = str(self.workers)
            self._start([*kvhvdrun(this_python()), "--min-np", count, "--max-np", count, *command], environment)
            return
        if self.mode == "dist_sync":
            environment = {
                **environment,
                "DMLC_PS_ROOT_URI": "127.0.0.1",
                "DMLC_PS_ROOT_PORT": str(free_port()),
                "DMLC_NODE_HOST": "127.0.0.1",
                "DMLC_NUM_SERVER": "1",
                "DMLC_NUM_WORKER": str(self.workers),
            }
            for role in ("scheduler", "server"):
                self._start([str(this_python()), "-c", _SERVE], {**environment, "DMLC_ROLE": role})
            environment["DMLC_ROLE"] = "worker"
        for index in range(self.workers):
            self._start([*command, "--index", str(index)], environment)

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))

    def train(self, steps: int) -> tuple[float, float, float]:
        """Have all workers train `steps` steps; return the seconds of the slowest, and the parts that `WAITS` says."""
        for channel in self.channels:
            channel.send(steps)
        seconds, *waits = zip(*(channel.receive() for channel in self.channels))
        exposed, reducing = (sum(part / whole for part, whole in zip(each, seconds)) / len(seconds) for each in waits)
        return max(seconds), exposed, reducing

    def stop(self) -> None:
        """End the processes: they are asked first, then killed."""
        for channel in self.channels:
            try:
                channel.send(0)
            except OSError:  # it is gone already
                continue
        deadline = time.monotonic() + (20 if self.channels else 0)
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()  # kvhvdrun takes its workers with it
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.hosts.close()


def free_port() -> int:
    """Return a TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(network: str, optimizer: str, options: argparse.Namespace, groups: Sequence[Group]) -> dict[str, str]:
    """Start all groups for one network, and fill in their speeds; returns the versions of a worker."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // max(options.workers))
    command = [str(this_python()), str(Path(__file__).resolve()), "--network", network]
    command += ["--optimizer", optimizer]
    command += ["--share", str(share), "--batch-size", str(options.batch_size)]
    # With more workers than cores, cores are shared in turn.
    command += ["--cores", *(str(cores[place % len(cores)]) for place in range(share * max(options.workers)))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(share)}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_in(folder))
        listener.listen(64)
        listener.settimeout(START_TIMEOUT_S)
        by_name = {group.name: group for group in groups}
        try:
            for group in groups:
                group.start([*command, "--folder", folder], environment)
            for _ in range(sum(group.workers for group in groups)):
                connection, _ = listener.accept()
                connection.settimeout(SEGMENT_TIMEOUT_S)
                channel = Channel(connection)
                hello = channel.receive()
                found = hello["versions"]
                by_name[hello["group"]].channels.append(channel)
            run_rounds(f"{network}, {optimizer}", options, groups)
        except (OSError, EOFError) as error:
            late = [group.name for group in groups if len(group.channels) < group.workers]
            raise SystemExit(f"{network}: {error}; not started: {', '.join(late) or 'none'}") from None
        finally:
            for group in groups:
                group.stop()
    return found


def run_rounds(network: str, options: argparse.Namespace, groups: Sequence[Group]) -> None:
    """Train in rounds, all groups in each."""
    for group in groups:
        group.train(10)
    # The best of a few: one that was disturbed would make all rounds short.
    steps = max(5, int(10 * options.seconds / min(groups[0].train(10)[0] for _ in range(5))))
    for number in range(options.rounds):
        print(f"{network}: round {number + 1} of {options.rounds}, {steps} steps each", file=sys.stderr, flush=True)
        # Forwards and backwards, so that nobody always follows the same one.
        for group in groups[:: 1 if number % 2 == 0 else -1]:
            seconds, exposed, reducing = group.train(steps)
            group.speeds.append(group.workers * options.batch_size * steps / seconds)
            group.exposed.append(exposed)
            group.reducing.append(reducing)


def show(groups: Sequence[Group]) -> str:
    """Return the table of one network."""
    speeds = {(group.mode, group.workers): group.speeds for group in groups}
    rows = []
    for group in groups:
        times = summary(group.speeds)
        free, single = speeds.get(("no store", group.workers)), speeds.get((group.mode, min(w for _, w in speeds)))
        rows.append(
            [
                group.name,
                *(f"{times[what]:.0f}" for what in ("min", "median", "max")),
                ratio_text(median_ratio(group.speeds, free)) if free else "-",
                ratio_text(median_ratio(group.speeds, single)) if single else "-",
                *(
                    f"{summary(each)['median']:.1%}" if group.is_measured_by_our_store else "-"
                    for each in (group.exposed, group.reducing)
                ),
            ]
        )
    return table(["images/s", "min", "median", "max", "/no store", "/1 worker", "exposed", "reducing"], rows)


def start(options: argparse.Namespace) -> None:
    """Start the workers, and show and write what they found."""
    run = describe()
    results: dict[str, Any] = {"batch_size": options.batch_size, "networks": {}}
    text = [f"batches of {options.batch_size} for each worker, {options.rounds} rounds\n"]
    for network, optimizer in itertools.product(options.networks, options.optimizers):
        modes = [*options.modes, *([OVER_HOSTS] if options.hosts else [])]
        groups = [Group(mode, workers) for workers in options.workers for mode in modes]
        run["versions"] = {"all": measure(network, optimizer, options, groups)}
        title = network if optimizer == "sgd" else f"{network}, {optimizer}"
        results["networks"][title] = {
            group.name: {
                "images_per_second": summary(group.speeds),
                "rounds": group.speeds,
                **(
                    {"exposed": summary(group.exposed), "reducing": summary(group.reducing)}
                    if group.is_measured_by_our_store
                    else {}
                ),
            }
            for group in groups
        }
        text.append(f"{title}\n{show(groups)}\n")
    write(options.json, run, results, "\n".join(text))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time training with no store, ours, and dist_sync.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long one worker without store trains in a round"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker [32]")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["no store", "ours", "dist_sync"])
    parser.add_argument("--hosts", action="store_true", help=f"also {OVER_HOSTS}: namespaces, by mpirun; needs root")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS[:3]))
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["sgd"])
    results = Path(__file__).resolve().parent / "results" / "train.json"
    parser.add_argument("--json", type=Path, default=results, help="where results go; the table goes beside it (.txt)")
    for name, kind in (
        ("folder", str),
        ("group", str),
        ("mode", str),
        ("network", str),
        ("optimizer", str),
        ("index", int),
        ("share", int),
    ):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    start_or_be_a_rank(parse_arguments(), start, be_a_worker)
