"""``--output-filename``: what each worker writes, kept in files of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.launcher.writer import Writer

__all__ = ["OutputFiles"]


class OutputFiles:
    """The files ``FOLDER/rank.N/stdout`` and ``FOLDER/rank.N/stderr`` of every rank; use as a context manager."""

    # N has leading zeros, so that the folders sort by rank. Files of an earlier job are overwritten.

    def __init__(self, folder: str, count: int) -> None:
        self._files: dict[tuple[int, str], int] = {}
        self._writer = Writer()
        width = len(str(count - 1))
        path = folder
        try:
            for rank in range(count):
                path = os.path.join(folder, f"rank.{rank:0{width}d}")
                os.makedirs(path, exist_ok=True)
                for name in ("stdout", "stderr"):
                    path = os.path.join(folder, f"rank.{rank:0{width}d}", name)
                    self._files[rank, name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._close()
            raise LaunchError(
                message(f"--output-filename: '{path}' cannot be made: {error.strerror}.", fix="name another folder.")
            ) from None

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def write_by(self, writer: Writer) -> None:
        """Before the first write: have this one do it."""
        self._writer = writer

    def keeper(self, rank: int, name: str) -> Callable[[bytes], None]:
        """A function that appends what it is given to the file of a rank's ``'stdout'`` or ``'stderr'``."""
        fd = self._files[rank, name]
        return lambda data: self._writer.put(fd, data)

    def take_lost(self) -> list[str]:
        """Which files can be written no longer, and why; each is told once."""
        of = {fd: f"{name} of rank {rank}" for (rank, name), fd in self._files.items()}
        return [f"{of[fd]} cannot be written to its file: {error.strerror}" for fd, error in self._writer.take_lost()]

    def _close(self) -> None:
        if self._writer.is_idle:  # else its number might come to belong to another file, and the process ends anyway
            for fd in self._files.values():
                os.close(fd)
        self._files.clear()
