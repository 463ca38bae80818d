"""Checkpoints: the state of a training in a file, from which another job continues.

The file is a ZIP archive that is not compressed. ``state.json`` has the format; ``NAME.params`` and ``NAME.states``
have networks and Trainers as MXNet's own functions write and read them; ``state.pickle`` has all else.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.base.files import replacing
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, KVHvdError, message

_FORMAT = "kvstore_hvd state, version 2"
_OLD = b"kvstore_hvd-state-1"  # how files of version 1 begin

_state: Any = None  # the state that the job's checkpoint is of
_is_written = True  # whether its last commit is in the file
_tried = time.monotonic()  # when this process last wrote the file, or failed to


class Stored:
    """Bytes of a value that lie in a file of the archive by themselves; `parts` makes them when they are written."""

    def __init__(self, suffix: str, parts: Callable[[], list[Any]]) -> None:
        # `name`, which the state gives it, and `suffix`: of the file.
        self.name, self.suffix, self.parts = "", suffix, parts


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.stored: dict[str, Stored] = {}

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, Stored):
            return None
        file = f"{value.name}{value.suffix}"
        self.stored[file] = value
        return file


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile) -> None:
        super().__init__(file)
        self._archive = archive

    def persistent_load(self, file: str) -> Stored:
        data = self._archive.read(file)
        return Stored("", lambda: [data])


def _files_of(content: Any) -> dict[str, list[Any]]:
    """The parts of the files that a content consists of."""
    pickler = _Pickler(body := io.BytesIO())
    try:
        pickler.dump(content)
        return {"state.pickle": [body.getbuffer()], **{file: each.parts() for file, each in pickler.stored.items()}}
    except Exception as error:
        fact, fix = f"the state cannot be written: {error}.", "keep what cannot be pickled outside of the state."
        raise InvalidRequestError(message(fact, operation="save", fix=fix)) from error


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Write a file as a whole or not at all: it replaces the last one once it is on the disk."""
    path, files = os.path.realpath(os.fsdecode(path)), _files_of(content)
    if os.path.isdir(path):
        raise InvalidRequestError(message(f"{path} is a folder.", operation="save", fix="name a file."))
    unfinished = f"{path}.part"
    try:
        with replacing(path, unfinished) as file:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("state.json", json.dumps({"format": _FORMAT}))
                for name, parts in files.items():
                    with archive.open(name, "w", force_zip64=True) as member:
                        for part in parts:
                            member.write(part)
            file.flush()
            os.fsync(file.fileno())
    except (BlockingIOError, IsADirectoryError) as error:
        fact, fix = f"another process is writing {path}.", "end the other job, or give each a file of its own."
        if isinstance(error, IsADirectoryError):
            fact, fix = f"{unfinished}, where {path} is written first, is a folder.", "move it, or name another file."
        raise InvalidRequestError(message(fact, operation="save", fix=fix)) from None
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str]) -> Any:
    """The content of a file; its parts are checked by their checksums."""
    with open(path, "rb") as file:
        if file.read(len(_OLD)) == _OLD:
            raise _refused(path, "is of an older version", "go on with the kvstore_hvd that wrote it.")
        try:
            with zipfile.ZipFile(file) as archive:
                if json.loads(archive.read("state.json"))["format"] != _FORMAT:
                    raise _refused(path, "is no checkpoint of this version of kvstore_hvd")
                return _Unpickler(io.BytesIO(archive.read("state.pickle")), archive).load()
        except InvalidRequestError:
            raise
        except Exception as error:
            raise _refused(path, f"is no checkpoint, or damaged: {error}") from error


def _refused(
    path: str | os.PathLike[str], what: str, fix: str = "load another file, or begin anew without it."
) -> InvalidRequestError:
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
    _files_of(state._content())  # a state that cannot be written is an error now
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
