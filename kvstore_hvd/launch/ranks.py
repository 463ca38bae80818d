"""Who has which rank in a world of these workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvstore_hvd.horovod.variables import Ranks
from kvstore_hvd.launch.hosts import Slots, machine_of
from kvstore_hvd.launch.phases import Worker


def rank_order(workers: Sequence[Worker]) -> list[Worker]:
    """Workers, given oldest first, in the order of their ranks: host by host, the host of the oldest worker first."""
    hosts: dict[str, list[Worker]] = {}
    for worker, host in zip(workers, _machines(workers)):
        hosts.setdefault(host, []).append(worker)
    return [worker for same in hosts.values() for worker in same]


def ranks_of(rank: int, ranked: Sequence[Worker], slots: Slots) -> Ranks:
    """The ranks of the worker with this rank."""
    hosts, places = _machines(ranked), _local_ranks(ranked, slots)
    column = [other for other, place in enumerate(places) if place == places[rank]]
    return Ranks(rank, len(hosts), places[rank], hosts.count(hosts[rank]), column.index(rank), len(column))


def world_of(ranked: Sequence[Worker], slots: Slots) -> dict[str, Any]:
    """The fields of a message about a world of workers that have called init()."""
    entries = [worker.entry for worker in ranked if worker.entry]
    fields = {"hosts": "host", "pids": "pid", "addresses": "addresses"}
    world = {name: [entry[field] for entry in entries] for name, field in fields.items()}
    return {"size": len(ranked), **world, "local_ranks": _local_ranks(ranked, slots)}


def _machines(workers: Sequence[Worker]) -> list[str]:
    """The host of each worker: identities once all are known, until then names. Equal identities share memory."""
    known = [worker.entry["host"][1] for worker in workers if worker.entry]
    return known if len(known) == len(workers) else [machine_of(worker.slot.host) for worker in workers]


def _local_ranks(ranked: Sequence[Worker], slots: Slots) -> list[int]:
    """The local ranks of workers: on each host in the order of slots."""
    # A worker in the slot of a lost one gets its local rank, and so its GPU.
    counts: Counter[str] = Counter()
    found: dict[int, int] = {}
    for worker, host in sorted(zip(ranked, _machines(ranked)), key=lambda each: slots.order(each[0].slot)):
        found[worker.id] = counts[host]
        counts[host] += 1
    return [found[worker.id] for worker in ranked]
