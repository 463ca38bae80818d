"""How often a store was used, and for how many bytes: what its `report` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd.keys import MAX_KEYS, Key

__all__ = ["OTHER_KEYS", "Usage"]

#: How a report calls all keys beyond the first `MAX_KEYS`.
OTHER_KEYS = "(other keys)"


@dataclass
class _Counts:
    operations: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def report(self) -> dict[str, Any]:
        return {"operations": dict(self.operations), "bytes": self.bytes}


class Usage:
    """Counts operations and their arrays' bytes, for each of the first `MAX_KEYS` keys, and for all the others."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        self._others = _Counts()

    def add(self, operation: str, key: Key, array_bytes: int) -> None:
        """Count one operation. The keys 3 and '3' are the same."""
        counts = self._counts.get(str(key))
        if counts is None:
            counts = _Counts() if len(self._counts) < MAX_KEYS else self._others
            if counts is not self._others:
                self._counts[str(key)] = counts
        counts.operations[operation] = counts.operations.get(operation, 0) + 1
        counts.bytes += array_bytes

    def report(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Totals, and counts by key.

        Parameters
        ----------
        names : mapping of str to str
            What to call a key, by ``str(key)``; itself where there is nothing.

        Returns
        -------
        dict
            ``'operations'``: how many of each kind; ``'bytes'``: of all of them; ``'keys'``: both for each key, those
            beyond the first `MAX_KEYS` together under `OTHER_KEYS`.
        """
        everything = [*self._counts.values(), self._others]
        operations: dict[str, int] = {}
        for counts in everything:
            for operation, number in counts.operations.items():
                operations[operation] = operations.get(operation, 0) + number
        keys = {names.get(key, key): counts.report() for key, counts in self._counts.items()}
        if self._others.operations:
            keys[OTHER_KEYS] = self._others.report()
        return {"operations": operations, "bytes": sum(counts.bytes for counts in everything), "keys": keys}
