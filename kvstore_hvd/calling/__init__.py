"""Calling a function in workers from within a program: `run`, as Horovod's ``horovod.run``.

The program starts the launcher as a process of its own, which starts the workers. What is called, and what comes back,
travels in files without names, whose descriptors are handed on (`parcel`, `reports`): nobody else can open them, and
they are gone with the last process that has one.
"""

from __future__ import annotations

from kvstore_hvd.calling.function import run

__all__ = ["run"]
