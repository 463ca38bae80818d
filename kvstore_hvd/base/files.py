"""Files that replace others when they are complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterable, Iterator
from io import BufferedWriter, FileIO

#: The memory file of a worker for its Python stacks, and the signal on which it writes them there.
STACKS, STACKS_SIGNAL = "kvstore_hvd-stacks", signal.SIGRTMAX - 2
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


def failure_path(wanted: str, job: str, folder: str) -> str:
    """The path of the file of a job's failure: the setting ``KVHVD_FAILURE_FILE``, by default in a folder."""
    path = os.path.join(folder, f"kvhvd-failure-{job[:16]}.json") if wanted == "default" else wanted
    try:
        return os.path.abspath(path)
    except FileNotFoundError:  # the working folder has been deleted
        import tempfile  # here, for a quick start of the launcher

        return os.path.join(tempfile.gettempdir(), os.path.basename(path))


def failure_file(parts: Iterable[str]) -> bytes:
    """The content of that file: the parts of some hosts, each as JSON."""
    return ('{"format": 1, "parts": [\n' + ",\n".join(parts) + "\n]}\n").encode()


def replace(path: str, content: bytes) -> None:
    """Write a small file as a whole or not at all; of several processes at the same time the last one remains."""
    if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/null
        with FileIO(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "w") as file:
            file.write(content)
        return
    with replacing(path, f"{path}.{os.getpid()}.new") as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: str, temporary: str) -> Iterator[BufferedWriter[FileIO]]:
    """A new file under another name, locked, which replaces `path` and keeps its mode; an error deletes it."""
    with BufferedWriter(open_alone(temporary)) as file:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            yield file
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


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
        import logging  # here, for a quick start of the launcher

        from kvstore_hvd import log

        text = "%s cannot be locked (%s): nothing keeps another job from writing it, too"
        log.once("file-lock", logging.WARNING, text, path, error.strerror)


def _busy(path: str) -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, "another process is writing it", path)
