"""Uneven inputs: who has used up its own follows the others until all have, as with PyTorch's ``Join``."""

from __future__ import annotations

from kvstore_hvd.join.context import Join
from kvstore_hvd.join.joinable import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
