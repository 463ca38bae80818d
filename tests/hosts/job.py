"""Elastic jobs whose hosts are namespaces."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hosts.network import SHELL, Network
from support.elastic import ElasticJob
from support.jobs import GLANCE_S, processes
from support.patience import patient

__all__ = ["LEASE_S", "HostsJob"]

LEASE_S = 3
_PORT = 2222


class HostsJob(ElasticJob):
    """An elastic job on hosts of a network, which runs their commands."""

    def __init__(self, folder: Path, marker: str, network: Network, *, options: Sequence[str] = (), **more: Any):
        self.network = network
        network.serve(_PORT)
        options = ["--rsh-command", str(SHELL), "--blacklist-cooldown-range", "1", "2", *options]
        more = {"KVHVD_LEASE": str(LEASE_S), "KVHVD_TEST_SHELL_PORT": str(_PORT), **more}
        super().__init__(folder, marker, beside=network.beside, options=options, **more)

    def machine(self, worker: int) -> str:
        """The host of a worker."""
        return str(self.events("worker_started", worker=worker)[-1]["slot"]).partition(":")[0]

    def pid(self, worker: int) -> int:
        """The process of a worker, by its number on this machine; 0 if it has ended."""
        return self.network.number(self.machine(worker), super().pid(worker))

    def of_host(self, name: str) -> list[int]:
        """The members of the newest world on a host."""
        return [worker for worker in self.members() if self.machine(worker) == name]

    def everything(self) -> list[int]:
        """All processes of the job."""
        on_hosts = (self.network.processes(name) for name in self.network.running)
        return [*processes(self.marker), *itertools.chain.from_iterable(on_hosts)]

    def end(self, code: int | None = 0, number: int = 0) -> HostsJob:
        """As of any job; fails if anything is left on a host."""
        super().end(code, number)
        limit = time.monotonic() + patient(15)
        for name in self.network.running:
            while left := [*self.network.processes(name), *self.network.shared_files(name)]:
                assert time.monotonic() < limit, f"left on {name}: {left}\n{self.describe()}"
                time.sleep(GLANCE_S)
        return self
