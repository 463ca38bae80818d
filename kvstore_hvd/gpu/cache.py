"""Compiled kernels on disk, so that only the first start on a machine compiles.

A file is complete, or it is not there: it is written beside its place and moved there, and its name ends with a digest
of its content. Many workers may start at once, on a file system that several machines share. What cannot be read or
written is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore_hvd import log
from kvstore_hvd.config import cache_folder


def key_of(*parts: object) -> str:
    """A name for what these determine, of which the text counts."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@contextlib.contextmanager
def stored(key: str, make: Callable[[], bytes], folder: str = "") -> Iterator[Path]:
    """A file with what `make` returned, now or on an earlier start; it exists while this context lasts."""
    place = Path(folder or cache_folder())
    found = _find(place, key)
    if found is not None:
        yield found
        return
    content = make()
    try:
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{key}-{_digest(content)}.bin"
        _write(path, content)
    except OSError as error:
        text = "compiled kernels cannot be kept in %s (%s): every start compiles them anew"
        log.once("gpu-cache", logging.INFO, text, place, error.strerror)
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(content)
            file.flush()
            yield Path(file.name)
        return
    yield path


def _find(place: Path, key: str) -> Path | None:
    try:
        for path in sorted(place.glob(f"{key}-*.bin")):
            if path.stem == f"{key}-{_digest(path.read_bytes())}":
                return path
            path.unlink()
    except OSError:
        pass
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _write(path: Path, content: bytes) -> None:
    number, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
