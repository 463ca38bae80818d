"""Time elastic training over hosts: from a fault to the next step, beside a static job, and starts. Needs root.

    python benchmarks/elastic_hosts.py
    python benchmarks/elastic_hosts.py --parts faults --rows crash cut --runs 5

Hosts are namespaces. *faults*: three hosts with two workers each train a small convolutional network
(`tests/support/elastic_trainee.py`), with KVHVD_LEASE=3. A job suffers one kind of fault again and again, each time
when all six workers are there. The time is that from the fault until all workers of the next world have made a step;
from a change of the hosts, between two steps of a worker that stays. 'noticed' is the part until the launcher gave the
world up. Every job is checked afterwards: parameters, samples, and that nothing is left on any host.

*steps*: the training of `train.py` on two hosts with two workers each, static and elastic, in turns.

*start*: ``kvhvdrun -np N`` on N hosts, whose program calls init() and sums once: from the command to the last sum, and
from the moment when all have imported the package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import train
from common import ROOT, describe, median_ratio, shape, summary, table, write
from elastic_faults import NO_LIMIT, last_step_before, next_step, settle
from ranks import kvhvdrun, this_python

from hosts.network import LEASE_S, SHELL, HostsJob, Network
from support.elastic import assert_all_right
from support.jobs import stopped, variables_of

PARTS = ("faults", "steps", "start")
HOSTS = ["node0", "node1", "node2"]
WORKERS = 6
PAUSED_S = 10
LOST_PERCENT = 10
PUBLISHED = {2: 0.4, 4: 1.2, 8: 7.1, 16: 15.8}  # by Horovod's issue 3556: its rendezvous

Times = dict[str, float]
Faults = Iterator[dict[str, Times]]  # by row, of one fault


def recovery(job: HostsJob, since: float, world: int) -> Times:
    """The seconds until the next world has made a step, and until the launcher gave up the present one."""
    seconds = next_step(job, since, world)
    void = [each["monotonic"] - since for each in job.events("generation_void") if each["generation"] >= world]
    return {"seconds": seconds, **({"noticed": max(0.0, void[0])} if void else {})}


def struck(job: HostsJob, worker: int) -> float:
    """Kill a worker; returns when."""
    pid, since = job.pid(worker), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return since


def killed(job: HostsJob) -> Faults:
    """A worker of each host in turn, the first one of its host or the second one."""
    world = -1
    for number in range(1 << 20):
        world = settle(job, WORKERS, world)
        worker = job.of_host(HOSTS[number % 3])[number // 3 % 2]
        yield {"SIGKILL a worker": recovery(job, struck(job, worker), world)}


def daemon_killed(job: HostsJob) -> Faults:
    """The daemon of each host in turn."""
    world = -1
    for number in range(1 << 20):
        world = settle(job, WORKERS, world)
        pid = job.pid(job.of_host(HOSTS[number % 3])[0])
        daemon = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        since = time.monotonic()
        os.kill(daemon, signal.SIGKILL)
        yield {"SIGKILL a daemon": recovery(job, since, world)}


def crashed(job: HostsJob, *, is_silent: bool) -> Faults:
    """Each host in turn."""
    world, name = -1, "a host crashes, silently" if is_silent else "a host crashes, its kernel says so"
    for number in range(1 << 20):
        world = settle(job, WORKERS, world)
        since = time.monotonic()
        job.network.crash(HOSTS[number % 3], is_silent=is_silent)
        times = recovery(job, since, world)
        job.network.boot(HOSTS[number % 3])
        yield {name: times}


def cut(job: HostsJob) -> Faults:
    """Each host in turn; healed once it has no worker."""
    world = -1
    for number in range(1 << 20):
        world, host = settle(job, WORKERS, world), HOSTS[number % 3]
        since = time.monotonic()
        job.network.cut(host)
        job.until(lambda: not job.network.processes(host), f"the end of what is on {host}")  # noqa: B023
        gone = time.monotonic() - since
        times = recovery(job, since, world)
        job.network.heal(host)
        yield {"the network of a host is cut": times, "until it has no process": {"seconds": gone}}


def slow(network: Network, host: str, *, is_on: bool) -> None:
    """Little gets through, and what waits for longer than 0.3 s is lost."""
    shape(network, "400kbit" if is_on else "", host, burst="1600", latency="300ms")


def lossy(network: Network, host: str, *, is_on: bool) -> None:
    """Packets are lost by chance, in both directions. Needs `nft`."""
    begin = ["ip", "netns", "exec", network._space(host), "nft"]
    subprocess.run([*begin, "delete table inet loss"], capture_output=True, check=False)
    for hook, way in (("input", "iifname"), ("output", "oifname")) if is_on else ():
        chain = f"add chain inet loss {hook} {{ type filter hook {hook} priority 0; }}"
        rule = f"add rule inet loss {hook} {way} eth0 numgen random mod 100 < {LOST_PERCENT} drop"
        subprocess.run([*begin, f"add table inet loss; {chain}; {rule}"], check=True)


def disturbed(job: HostsJob) -> Faults:
    """The links of a host are slow, or lose packets, for longer than the lease; the world goes on."""
    world = settle(job, WORKERS, -1)
    names = {"a host's link has 400 kbit/s": slow, f"a host's link loses {LOST_PERCENT} % of its packets": lossy}
    for number in range(1 << 20):
        found = {}
        for name, disturb in names.items():
            disturb(job.network, HOSTS[number % 3], is_on=True)
            since = time.monotonic()
            found[name] = {"seconds": step_after(job, since, world)}
            time.sleep(max(0.0, since + LEASE_S + 1 - time.monotonic()))
            step_after(job, time.monotonic(), world)
            disturb(job.network, HOSTS[number % 3], is_on=False)
            step_after(job, time.monotonic(), world)
        yield found


def step_after(job: HostsJob, since: float, world: int) -> float:
    """The seconds until all members of this world have made a step; there may be no other."""

    def made() -> float:
        assert job.events("generation_ready")[-1]["generation"] == world, job.describe()
        ends = [[line["t"] for line in job.done(worker, world)[-20:] if line["t"] > since] for worker in job.members()]
        return max(each[0] for each in ends) if all(ends) else 0.0

    return float(job.until(made, "a step")) - since


def changed(job: HostsJob) -> Faults:
    """The discovery script leaves a host out, and names it again."""
    world = settle(job, WORKERS, -1)
    while True:
        found = {}
        for name, hosts in (("removed", HOSTS[:2]), ("added", HOSTS)):
            job.set_slots([(host, 2) for host in hosts])
            world = settle(job, 2 * len(hosts), world)
            stayed = job.members()[0]
            pause = job.done(stayed, world)[0]["t"] - last_step_before(job, stayed, world)
            found[f"a host is {name} by the script: pause"] = {"seconds": pause}
        yield found


def killed_twice(job: HostsJob) -> Faults:
    """A worker, and one of another host while the others give the world up, or meet again."""
    world = -1
    for number in range(1 << 20):
        world, event = settle(job, WORKERS, world), ("generation_void", "generation_ready")[number % 2]
        first, second = (job.of_host(HOSTS[(number + place) % 3])[place] for place in (0, 1))
        pid, before = job.pid(second), len(job.events(event))
        struck(job, first)
        job.until(lambda: len(job.events(event)) > before, event)  # noqa: B023
        since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        yield {"SIGKILL a second one during recovery": recovery(job, since, world)}


def paused(job: HostsJob) -> Faults:
    """All processes of all hosts; from the moment when they run again."""
    world = settle(job, WORKERS, -1)
    while True:
        with stopped(*job.everything()):
            time.sleep(PAUSED_S)
        yield {f"all processes are stopped for {PAUSED_S} s": {"seconds": step_after(job, time.monotonic(), world)}}
        time.sleep(1)


class Row(NamedTuple):
    """A job of faults, and the limits of its median and its worst, by the beginning of the name."""

    faults: Callable[..., Faults]
    limits: Sequence[tuple[float, float]]
    more: Mapping[str, Any] = MappingProxyType({})


LEASE_LIMIT_S = LEASE_S + 1  # when a host is given up
ROWS = {
    "kill": Row(killed, [(1, 5)]),
    "daemon": Row(daemon_killed, [(1, 5)]),
    "crash": Row(crashed, [(1, 5)], {"is_silent": False}),
    "silent": Row(crashed, [(LEASE_LIMIT_S, 5)], {"is_silent": True}),
    "cut": Row(cut, [(LEASE_LIMIT_S, LEASE_LIMIT_S), (LEASE_S + 5, LEASE_S + 5)]),
    "link": Row(disturbed, [(NO_LIMIT, NO_LIMIT)] * 2),
    "change": Row(changed, [(1, 1)] * 2),
    "second": Row(killed_twice, [(NO_LIMIT, NO_LIMIT)]),
    "pause": Row(paused, [(NO_LIMIT, NO_LIMIT)]),
}


def times_of(row: Row, runs: int) -> dict[str, Any]:
    """What so many faults of a kind took, by their names, in one job that then ends as it has to."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "network").mkdir()
        with Network(folder / "network", len(HOSTS)) as network:
            is_script, slots = row.faults is changed, [(host, 2) for host in HOSTS]
            job = HostsJob(
                folder,
                f"BENCHMARK_MARK={uuid.uuid4().hex}",
                network,
                workers=WORKERS,
                slots=slots if is_script else None,
                options=[] if is_script else ["--hosts", ",".join(f"{host}:{count}" for host, count in slots)],
                arguments=["--pause", "0.02"],
            )
            try:
                for times in islice(row.faults(job, **row.more), runs):
                    for what, of_row in times.items():
                        print(f"{what}: {of_row}", file=sys.stderr, flush=True)
                        for part, seconds in of_row.items():
                            found[what][part].append(seconds)
                settle(job, WORKERS, -1)
                job.finish()
                job.end()
                assert_all_right(job)
            finally:
                job.close()
    place = list(ROWS.values()).index(row)
    return {
        what: {"place": place, "limits": [limit for limit in limits if limit != NO_LIMIT], **of}
        for (what, of), limits in zip(found.items(), row.limits)
    }


def time_faults(options: argparse.Namespace, before: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The samples of each fault, also of those that were timed before, and the table."""
    found = {**before}
    for name in options.rows:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found |= times_of(ROWS[name], options.runs)
    rows = []
    for what, of in sorted(found.items(), key=lambda item: item[1]["place"]):
        seconds, noticed = summary(of["seconds"]), of.get("noticed")
        is_kept = not of["limits"] or (seconds["median"] <= of["limits"][0] and seconds["max"] <= of["limits"][1])
        limits = " / ".join(f"{limit:g}" for limit in of["limits"]) or "-"
        figures = [f"{seconds[part]:.3f}" for part in ("min", "median", "max")]
        part = f"{summary(noticed)['median']:.3f}" if noticed else "-"
        rows.append([what, str(seconds["samples"]), part, *figures, limits, "yes" if is_kept else "NO"])
    head = ["3 hosts with 2 workers, seconds", "faults", "noticed", "min", "median", "worst", "limits", "kept"]
    return found, table(head, rows)


# -- Beside a static job, and starts ------------------------------------------------------------------------------


class OverHosts(train.Group):
    """Four workers on two hosts of a network."""

    network: Network

    def start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start them by kvhvdrun; as any group."""
        options = ["--rsh-command", str(SHELL), "--hosts", "node0:2,node1:2"]
        options += ["--min-np", "4", "--max-np", "4"] if self.mode == train.ELASTIC else ["-np", "4"]
        command = [*command, "--group", self.name, "--mode", self.mode]
        words = [*self.network.beside, *kvhvdrun(this_python()), *options, *command]
        self._start(words, {**environment, "KVHVD_TEST_SHELL_PORT": "2222"})


def time_steps(options: argparse.Namespace, _: Any) -> tuple[dict[str, Any], str]:
    """Images/s of both kinds of jobs, and the table."""
    found, rows = {}, []
    chosen = argparse.Namespace(workers=[4], batch_size=32, seconds=2.0, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, Network(Path(folder), 2) as network:
        network.serve(2222)
        for name in options.networks:
            groups = [OverHosts(mode, 4) for mode in ("ours", train.ELASTIC)]
            for group in groups:
                group.network = network
            train.measure(name, "sgd", chosen, groups)
            static, elastic = (group.speeds for group in groups)
            ratio = median_ratio(static, elastic)  # of the times of a step
            found[name] = {"static": static, "elastic": elastic, "ratio": ratio}
            speeds = [f"{summary(each)['median']:.0f}" for each in (static, elastic)]
            rows.append([name, *speeds, f"{ratio:.3f}", f"{max(static) / max(elastic):.3f}"])
    head = ["2 hosts with 2 workers", "static images/s", "elastic", "step time ratio, median", "of the minima"]
    return found, table(head, rows)


PROGRAM = """
import json, sys, time
import numpy as np, kvstore_hvd
begin = time.monotonic()
kvstore_hvd.init()
met = time.monotonic()
kvstore_hvd.allreduce(np.ones(1, np.float32), "one")
sys.stdout.write(json.dumps([begin, met, time.monotonic()]) + "\\n")
"""


def time_start(options: argparse.Namespace, _: Any) -> tuple[dict[str, Any], str]:
    """Seconds of starts on more and more hosts, and the table."""
    found, rows = {}, []
    for count, published in PUBLISHED.items():
        samples: dict[str, list[float]] = {"all": [], "init": []}
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, Network(Path(folder), count) as network:
            network.serve(2222)
            hosts = ",".join(f"{name}:1" for name in network.names)
            words = [*kvhvdrun(this_python()), "-np", str(count), "--rsh-command", str(SHELL), "--hosts", hosts]
            for _ in range(options.rounds):
                start = time.monotonic()
                done = subprocess.run(
                    [*network.beside, *words, "--no-prefix", str(this_python()), "-c", PROGRAM],
                    env={**variables_of(), "KVHVD_TEST_SHELL_PORT": "2222", "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=120,
                    check=True,
                )
                begun, met, ended = zip(*map(json.loads, done.stdout.split("\n")[:-1]))
                assert len(met) == count
                samples["all"].append(max(ended) - start)
                samples["init"].append(max(met) - max(begun))
        found[str(count)] = samples
        figures = [f"{summary(each)[part]:.2f}" for each in samples.values() for part in ("median", "max")]
        rows.append([str(count), *figures, str(published)])
    head = ["hosts with 1 worker, seconds", "command to last sum", "worst", "init() of all", "worst", "horovod#3556"]
    return found, table(head, rows)


def main() -> None:
    """Time what was asked for, and write it down beside what the file has of other rows, parts and MXNets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which faults", metavar="ROW")
    parser.add_argument("--runs", type=int, default=20, help="faults of each kind [20]")
    parser.add_argument("--networks", nargs="+", choices=train.NETWORKS, default=["CNN", "MLP"])
    parser.add_argument("--rounds", type=int, default=5, help="of steps, and of starts [5]")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "elastic-hosts.json")
    options = parser.parse_args()
    run = describe()
    results = json.loads(options.json.read_text())["results"] if options.json.exists() else {}
    version = f"MXNet {importlib.metadata.version('mxnet')}"
    for part, timing in zip(PARTS, (time_faults, time_steps, time_start)):
        if part in options.parts:
            of_version = results.setdefault(version, {})
            found, text = timing(options, of_version.get(part, {}).get("found", {}))
            of_version[part] = {"found": found, "table": text}
    texts = [f"{part}, {of}\n{each['table']}\n" for of, parts in results.items() for part, each in parts.items()]
    write(options.json, run, results, "\n".join(texts))


if __name__ == "__main__":
    main()
