"""The names under which workers match their operations, and what users call them.

A store's operations are ``s0/3`` (see ``keys.wire_name``), others begin with what they
are: ``np/loss``, ``barrier/s0``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

__all__ = ["Namespaces"]

Label = Callable[[str], str]


class Namespaces:
    """Hands out namespaces, and remembers whose they are as long as their owners live."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._labels: dict[str, weakref.WeakMethod[Label]] = {}

    def add(self, label: Label) -> str:
        """A fresh namespace: equal on all workers when they ask for theirs in the same order."""
        namespace = f"s{next(self._numbers)}"
        self._labels[namespace] = weakref.WeakMethod(label, lambda _: self._labels.pop(namespace, None))
        return namespace

    def describe(self, name: str) -> str:
        """How messages name the operation: ``'dense0_weight' (key 3)``, ``'loss'``, ``barrier 's0'``."""
        namespace, _, key = name.partition("/")
        if namespace == "np":
            return f"'{key}'"
        reference = self._labels.get(namespace)
        label = None if reference is None else reference()
        return f"{namespace} '{key}'" if label is None else label(key)
