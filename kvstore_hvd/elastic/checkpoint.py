"""Checkpoints: the state of a training in a file, from which another job continues.

The first line of a file has the format, the SHA-256 of the rest, and the number of parts. Then follow the lengths of
the parts, in 8 bytes each, and the parts: a pickle, and the buffers of its arrays.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import io
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.base.files import keep_mode, open_alone
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, KVHvdError, message

_FORMAT = b"kvstore_hvd-state-1"

_state: Any = None  # the state that the job's checkpoint is of
_is_written = True  # whether its last commit is in the file
_tried = time.monotonic()  # when this process last wrote the file, or failed to


def _parts(content: Any) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    try:
        body = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    except Exception as error:
        fact, fix = f"the state cannot be written: {error}.", "keep what cannot be pickled outside of the state."
        raise InvalidRequestError(message(fact, operation="save", fix=fix)) from error
    parts = [body, *(each.raw() for each in buffers)]
    return [array.array("Q", map(len, parts)).tobytes(), *parts]


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Write a file as a whole or not at all: it replaces the last one once it is on the disk."""
    path, parts = os.path.realpath(os.fsdecode(path)), _parts(content)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    if os.path.isdir(path):
        raise InvalidRequestError(message(f"{path} is a folder.", operation="save", fix="name a file."))
    unfinished = f"{path}.part"
    try:
        new = open_alone(unfinished)
    except (BlockingIOError, IsADirectoryError) as error:
        fact, fix = f"another process is writing {path}.", "end the other job, or give each a file of its own."
        if isinstance(error, IsADirectoryError):
            fact, fix = f"{unfinished}, where {path} is written first, is a folder.", "move it, or name another file."
        raise InvalidRequestError(message(fact, operation="save", fix=fix)) from None
    with io.BufferedWriter(new) as file:
        try:
            keep_mode(file.fileno(), path)
            file.write(b"%s %s %d\n" % (_FORMAT, digest.hexdigest().encode(), len(parts) - 1))
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str]) -> Any:
    """The content of a file, after a check that it is whole."""
    with open(path, "rb") as file:
        words = file.readline(200).split()
        if len(words) != 3 or words[0] != _FORMAT:
            raise _refused(path, "is no checkpoint of this version of kvstore_hvd")
        data = memoryview(bytearray(file.read()))
    if hashlib.sha256(data).hexdigest().encode() != words[1]:
        raise _refused(path, "is damaged: its checksum is wrong")
    try:
        begin = 8 * int(words[2])
        parts, lengths = [], array.array("Q", data[:begin].tobytes())
        for length in lengths:
            parts.append(data[begin : begin + length])
            begin += length
        return pickle.loads(parts[0], buffers=parts[1:])
    except Exception as error:
        raise _refused(path, f"cannot be read: {error}") from error


def _refused(path: str | os.PathLike[str], what: str) -> InvalidRequestError:
    fix = "load another file, or begin anew without it."
    return InvalidRequestError(message(f"{os.fsdecode(path)} {what}.", operation="load", fix=fix))


# -- The checkpoint of a job ----------------------------------------------------------------------------------------


def resume(state: Any, *, is_newcomer: bool) -> str:
    """Load the job's checkpoint, if there is one; a newcomer gets rank 0's state. Returns a text for the log."""
    global _state
    path = config().checkpoint
    if not path:
        return ""
    if not callable(getattr(state, "_content", None)):
        fact = f"KVHVD_CHECKPOINT is set, but a {type(state).__name__} cannot be written to a file."
        raise InvalidTypeError(message(fact, operation="elastic.run", fix="use a GluonState or an ObjectState."))
    _parts(state._content())  # a state that cannot be written is an error now
    _state = state
    if is_newcomer:
        return ""
    try:
        state.load(path)
    except FileNotFoundError:
        return f"there is no checkpoint {path} yet: training begins anew"
    return f"training goes on from the checkpoint {path}"


def commit(state: Any, get_rank: Callable[[], int], *, now: bool = False) -> None:
    """After a save: write the job's checkpoint if that is due, or `now`."""
    global _is_written
    if state is _state:
        _is_written = get_rank() != 0
        if now or time.monotonic() - _tried >= config().checkpoint_every_s:
            finish()


def finish() -> None:
    """Write the last commit, unless that has been done. Training goes on if it fails."""
    global _tried, _is_written
    if _is_written:
        return
    path = config().checkpoint
    try:
        write(path, _state._content())
        _is_written = True
    except (OSError, KVHvdError) as error:
        log.logger.error("the checkpoint %s was not written, the last one stays: %s", path, error)
    _tried = time.monotonic()
