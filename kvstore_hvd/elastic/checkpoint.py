"""Checkpoints: the state of a training in a file, from which another job goes on."""

from __future__ import annotations

import hashlib
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, message

__all__ = ["read", "resume", "save", "write"]

# The first line of a file: this, the SHA-256 of what follows, and its parts' lengths in bytes. The first part is a
# pickle, the others are the buffers of its arrays.
_FORMAT = b"kvstore_hvd-state-1"
_LONGEST_LINE = 1 << 20

_tried = time.monotonic()  # when this process last wrote the job's checkpoint, or failed to


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Write a file as a whole or not at all: it takes the place of the last one once it is on the disk."""
    path, buffers = os.path.abspath(path), []  # type: ignore[var-annotated]
    try:
        parts = [pickle.dumps(content, protocol=5, buffer_callback=buffers.append)]
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        fact, fix = f"the state cannot be written: {error}.", "keep what cannot be pickled outside of the state."
        raise InvalidRequestError(message(fact, operation="save", fix=fix)) from error
    parts += [each.raw() for each in buffers]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    head = [_FORMAT, digest.hexdigest().encode(), *(b"%d" % len(part) for part in parts)]
    with open(f"{path}.part", "wb") as file:
        file.write(b" ".join(head) + b"\n")
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str]) -> Any:
    """What was written, after a check that it is whole."""
    with open(path, "rb") as file:
        words = file.readline(_LONGEST_LINE).split()
        if words[:1] != [_FORMAT]:
            raise _refused(path, "is no checkpoint of this version of kvstore_hvd")
        data = memoryview(bytearray(file.read()))
    if hashlib.sha256(data).hexdigest().encode() != words[1]:
        raise _refused(path, "is damaged: its checksum is wrong")
    parts = []
    for length in map(int, words[2:]):
        parts.append(data[:length])
        data = data[length:]
    return pickle.loads(parts[0], buffers=parts[1:])


def save(state: Any, get_rank: Callable[[], int]) -> None:
    """Save a state, to the job's checkpoint too if that is due. Training goes on if the file cannot be written."""
    global _tried
    state.save()
    cfg = config()
    if not cfg.checkpoint or time.monotonic() - _tried < cfg.checkpoint_every_s or get_rank() != 0:
        return
    try:
        write(cfg.checkpoint, state._content())
    except OSError as error:
        log.logger.error("the checkpoint was not written, the last one stays: %s", error)
    _tried = time.monotonic()


def resume(state: Any) -> str:
    """Load the job's checkpoint, if there is one; returns what there is to say about it."""
    path = config().checkpoint
    if not path:
        return ""
    if not callable(getattr(state, "load", None)):
        fact = f"KVHVD_CHECKPOINT is set, but a {type(state).__name__} cannot be written to a file."
        raise InvalidTypeError(message(fact, operation="elastic.run", fix="use a GluonState or an ObjectState."))
    try:
        state.load(path)
    except FileNotFoundError:
        return f"there is no checkpoint {path} yet: training begins anew"
    return f"training goes on from the checkpoint {path}"


def _refused(path: str | os.PathLike[str], what: str) -> InvalidRequestError:
    fix = "load another file, or begin anew without it."
    return InvalidRequestError(message(f"{os.fspath(path)} {what}.", operation="load", fix=fix))
