"""Files that replace others when they are complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from io import FileIO

from kvstore_hvd import log

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# Attempts of `open_alone`; each meets another process.
_ATTEMPTS = 10


def open_alone(path: str) -> FileIO:
    """A new file that is locked; raises BlockingIOError if another process writes to it."""
    # An existing file is removed, not written to: it may be a link to another file, or a pipe.
    for _ in range(_ATTEMPTS):
        try:
            # Without a buffer, which a forked child would write, too.
            file = FileIO(os.open(path, _NEW, 0o666), "w")
        except FileExistsError:
            _remove(path)
            continue
        try:
            _lock(file.fileno(), path)
            if os.fstat(file.fileno()).st_nlink > 0:
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # another process has removed it, as that of a killed process
    raise _busy(path)


def keep_mode(file: int, path: str) -> None:
    """Give a file the mode of `path`, which it will replace."""
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(file, stat.S_IMODE(os.stat(path).st_mode))


def _remove(path: str) -> None:
    """Remove the file of a killed process; raises BlockingIOError if the process runs."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)
            return
        file = os.open(path, _OLD)
        try:
            _lock(file, path)
            if os.path.samestat(os.fstat(file), os.lstat(path)):
                os.unlink(path)
        finally:
            os.close(file)


def _lock(file: int, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path) from None
    except OSError as error:
        text = "%s cannot be locked (%s): nothing keeps another job from writing it, too"
        log.once("file-lock", logging.WARNING, text, path, error.strerror)


def _busy(path: str) -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, "another process is writing it", path)
