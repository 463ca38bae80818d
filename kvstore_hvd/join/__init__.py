"""Uneven inputs: an exhausted worker takes part in the others' collectives, as with PyTorch's ``Join``."""

from __future__ import annotations

from kvstore_hvd.join.context import Join
from kvstore_hvd.join.joinables import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
