"""Uneven inputs: an exhausted worker shadows the others' collectives until all are, as with PyTorch's ``Join``."""

from __future__ import annotations

from kvstore_hvd.join.context import Join
from kvstore_hvd.join.joinable import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
