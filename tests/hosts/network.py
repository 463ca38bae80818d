"""Hosts on one machine, for tests: each has a network, a hostname, processes, shared memory and mounts of its own. They
are namespaces, joined by a bridge in one more, where mpirun runs. Needs root, and `ip` of iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.elastic import ElasticJob
from support.jobs import GLANCE_S, processes
from support.launchers import Launcher, environment, with_tests
from support.patience import patient

SHELL = Path(__file__).parents[1] / "support" / "remote_shell.py"
LEASE_S = 3  # of elastic jobs
_NET = "10.231.0"
_PORT = 2222
# What mpirun calls instead of ssh: enters the host's namespaces. Open MPI names its files by processes, whose numbers
# are those of other hosts, too: each host has a folder for them.
_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
export TMPDIR={folder}/$host.files
mkdir -p $TMPDIR
exec nsenter -t $(cat {folder}/$host.pid) -n -u -m -i -p --wd="$PWD" -- /bin/sh -c "$*"
"""


def unavailable() -> str:
    """Why there can be no hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' or '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.decode().strip()}"


class Network:
    """Hosts `node0`, `node1`, ...; a context manager, which leaves nothing behind."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"node{number}" for number in range(count)]
        self._prefix = f"kvhvd{os.getpid()}"
        self._bridge = f"{self._prefix}-bridge"
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._port = 0  # where hosts run commands
        self._servers: dict[str, set[int]] = {}

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._holders):
            self.crash(name)
        for space in (*(self._space(name) for name in self.names), self._bridge):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    @property
    def running(self) -> list[str]:
        return list(self._holders)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make(self) -> None:
        lines = ["127.0.0.1 localhost", f"{_NET}.1 {os.uname().nodename}"]
        lines += [f"{self._address(name)} {name}" for name in self.names]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        agent = self.folder / "agent"
        agent.write_text(_AGENT.format(folder=self.folder))
        agent.chmod(0o755)
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "addr", "add", f"{_NET}.1/24", "dev", "br0")
        for device in ("br0", "lo"):
            _ip("-n", self._bridge, "link", "set", device, "up")
        for name in self.names:
            self.boot(name)

    def boot(self, name: str) -> None:
        """Start a host, also one that has crashed."""
        space, bridge, address = self._space(name), self._bridge, f"{self._address(name)}/24"
        for former in (["-n", bridge, "link", "del", name], ["netns", "del", space]):
            subprocess.run(["ip", *former], capture_output=True, check=False)
        _ip("netns", "add", space)
        # The same each time: the others remember it.
        hardware = f"02:00:00:00:00:{self.names.index(name):02x}"
        peer = ["peer", "name", "eth0", "address", hardware, "netns", space]
        _ip("link", "add", name, "netns", bridge, "type", "veth", *peer)
        _ip("-n", bridge, "link", "set", name, "master", "br0", "up")
        _ip("-n", space, "addr", "add", address, "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", space, "link", "set", device, "up")
        begin = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount --bind {self.folder}/hosts /etc/hosts"
        words = ["unshare", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        begin += f"; touch {self.folder}/{name}.up; exec sleep infinity"
        command = ["ip", "netns", "exec", space, *words, "bash", "-c", begin]
        holder = self._holders[name] = subprocess.Popen(command, start_new_session=True)
        limit = time.monotonic() + 10
        while not (self.folder / f"{name}.up").exists():
            assert holder.poll() is None and time.monotonic() < limit, f"host {name} does not come up"
            time.sleep(0.01)
        (self.folder / f"{name}.up").unlink()
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        (self.folder / f"{name}.pid").write_text(children[0])
        if self._port:
            self._serve(name)

    def rename(self, name: str, interface: str) -> None:
        for words in (["eth0", "down"], ["eth0", "name", interface], [interface, "up"]):
            _ip("-n", self._space(name), "link", "set", *words)

    def mpirun(self, mpi: Launcher, ranks: Sequence[int], *program: Any, **more: str) -> subprocess.Popen[bytes]:
        """Start a program of Python with so many ranks on each host; it prints to the files `out` and `err`."""
        hosts = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks))
        agent, size = f"{self.folder}/agent", str(sum(ranks))
        if "Open MPI" in mpi.version:
            old = "Open MPI 4" in mpi.version
            if old:
                options = ["--mca", "plm_rsh_agent", agent, "--mca", "oob_tcp_if_include", f"{_NET}.0/24"]
            else:
                options = ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", f"{_NET}.0/24"]
            options += ["--host", hosts, "-np", size, "--bind-to", "none", "--mca", "pml", "ob1"]
            options += ["--mca", "btl", f"self,{'vader' if old else 'sm'},tcp", "--mca", "btl_tcp_if_include", "eth0"]
        else:
            options = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", hosts, "-np", size]
        words = [*mpi.prefix, *options, sys.executable, *map(str, program)]
        variables = {**with_tests(environment(mpi)), "PYTHONUNBUFFERED": "1", **more}
        variables |= {"FI_TCP_IFACE": "eth0", "TMPDIR": str(self.folder)}
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "cwd": self.folder}
            return subprocess.Popen([*self.beside, *words], env=variables, start_new_session=True, **given)

    @property
    def beside(self) -> list[str]:
        """What a command begins with that runs in the network of the hosts, on none of them."""
        mount = f'mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        return ["ip", "netns", "exec", self._bridge, "unshare", "--mount", "bash", "-c", mount, "beside"]

    def serve(self, port: int) -> None:
        """Have all hosts run commands for `support/remote_shell.py`."""
        self._port = port
        for name in self.names:
            self._serve(name)

    def _serve(self, name: str) -> None:
        command = [self.folder / "agent", name, str(SHELL), "--serve", str(self._port)]
        server = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline(), f"host {name} runs no commands"
        self._servers[name] = set(self.processes(name))

    def processes(self, name: str) -> list[int]:
        """The running processes of a host, by their numbers on this machine, without its first one and its server."""
        first = (self.folder / f"{name}.pid").read_text()
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{first}/ns/pid")
            found = [path for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != first]
            found = [path for path in found if _link(path / "ns/pid") == space]
            numbers = [int(path.name) for path in found if (path / "cmdline").read_bytes()]
            return [number for number in numbers if number not in self._servers.get(name, ())]
        return []

    def number(self, name: str, pid: int) -> int:
        """The number on this machine of a process that has the given one on its host; 0 if it has ended."""
        for number in self.processes(name):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{number}/status").read_text()
                if status.partition("NSpid:")[2].split("\n")[0].split()[-1] == str(pid):
                    return number
        return 0

    def shared_files(self, name: str) -> list[str]:
        return os.listdir(Path("/proc", (self.folder / f"{name}.pid").read_text(), "root", "dev", "shm"))

    def crash(self, name: str, *, is_silent: bool = True) -> None:
        """End a host with everything on it; unless it is silent, its kernel closes the connections."""
        if is_silent:
            self.cut(name)
        self._servers.pop(name, None)
        holder = self._holders.pop(name)
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()

    def cut(self, name: str) -> None:
        subprocess.run(["ip", "-n", self._bridge, "link", "set", name, "down"], capture_output=True, check=False)

    def heal(self, name: str) -> None:
        _ip("-n", self._bridge, "link", "set", name, "up")

    def part(self, name: str, other: str) -> None:
        """Have two hosts not reach each other, which all others still do."""
        _ip("-n", self._space(name), "route", "add", "unreachable", self._address(other))

    def rejoin(self, name: str, other: str) -> None:
        _ip("-n", self._space(name), "route", "del", "unreachable", self._address(other))

    def _address(self, name: str) -> str:
        return f"{_NET}.{10 + self.names.index(name)}"


class HostsJob(ElasticJob):
    """An elastic job on hosts of a network, which runs their commands."""

    def __init__(self, folder: Path, marker: str, network: Network, *, options: Sequence[str] = (), **more: Any):
        self.network = network
        network.serve(_PORT)
        options = ["--rsh-command", str(SHELL), "--blacklist-cooldown-range", "1", "2", *options]
        more = {"KVHVD_LEASE": str(LEASE_S), "KVHVD_TEST_SHELL_PORT": str(_PORT), **more}
        super().__init__(folder, marker, beside=network.beside, options=options, **more)

    def machine(self, worker: int) -> str:
        return str(self.events("worker_started", worker=worker)[-1]["slot"]).partition(":")[0]

    def pid(self, worker: int) -> int:
        """The process of a worker, by its number on this machine; 0 if it has ended."""
        return self.network.number(self.machine(worker), super().pid(worker))

    def of_host(self, name: str) -> list[int]:
        return [worker for worker in self.members() if self.machine(worker) == name]

    def everything(self) -> list[int]:
        on_hosts = [pid for name in self.network.running for pid in self.network.processes(name)]
        return [*processes(self.marker), *on_hosts]

    def end(self, code: int | None = 0, number: int = 0) -> HostsJob:
        """As of any job; fails if anything is left on a host."""
        super().end(code, number)
        limit = time.monotonic() + patient(15)
        for name in self.network.running:
            while left := [*self.network.processes(name), *self.network.shared_files(name)]:
                assert time.monotonic() < limit, f"left on {name}: {left}\n{self.describe()}"
                time.sleep(GLANCE_S)
        return self


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
