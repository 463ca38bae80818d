"""Short texts that all workers tell each other, so that what one of them cannot do fails on all alike."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvstore_hvd import native
from kvstore_hvd.world.topology import Topology

_CLOCK_ROUNDS = 20


def exchange(engine: native.Engine | None, topology: Topology, name: str, text: str) -> list[str]:
    """Every worker's text, in the order of ranks; collective. Without an engine: that of a worker alone."""
    if engine is None:
        return [text]
    encoded = text.encode(errors="surrogatepass")
    lengths = np.zeros(topology.size, np.int64)
    lengths[topology.rank] = len(encoded)
    _sum(engine, f"{name}/lengths", lengths)
    rows = np.zeros((topology.size, max(1, int(lengths.max()))), np.uint8)
    rows[topology.rank, : len(encoded)] = np.frombuffer(encoded, np.uint8)
    _sum(engine, name, rows)
    return [row[:length].tobytes().decode(errors="surrogatepass") for row, length in zip(rows, lengths.tolist())]


def clock_ahead(engine: native.Engine | None, topology: Topology, name: str) -> tuple[int, int]:
    """By how many ns this host's monotonic clock is ahead of rank 0's, and the error of that; collective."""
    # F. Cristian, Probabilistic clock synchronization (1989). A sum is complete nowhere before all have submitted it:
    # it bounds the difference from both sides. All ranks of a host take the times of its lowest rank.
    first = topology.ranks_by_host[topology.host][0]
    if engine is None or topology.host_count == 1:
        return 0, 0
    low, high, completed = -(1 << 62), 1 << 62, 0
    submitted_before: list[int] = []
    for _ in range(_CLOCK_ROUNDS):
        table = np.zeros((topology.size, 2), np.int64)
        table[topology.rank] = time.monotonic_ns(), completed
        _sum(engine, name, table)
        completed = time.monotonic_ns()
        if submitted_before:
            low = max(low, submitted_before[first] - int(table[0, 1]))
            high = min(high, int(table[first, 1]) - submitted_before[0])
        submitted_before = table[:, 0].tolist()
    return ((low + high) // 2, (high - low + 1) // 2) if first else (0, 0)


def _sum(engine: native.Engine, name: str, table: np.ndarray[Any, Any]) -> None:
    place = [table.ctypes.data]
    engine.run(native.Request("allreduce", name, f"'{name}'", place, place, table.shape, table.dtype.name))
