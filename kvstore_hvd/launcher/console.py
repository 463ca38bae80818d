"""The launcher's own standard streams: that they are open, and what it says itself."""

from __future__ import annotations

import errno
import os

from kvstore_hvd.errors import LaunchError, message

__all__ = ["check_streams", "say", "write_all"]


def check_streams() -> None:
    """Make sure that descriptors 0, 1 and 2 are open, lest a pipe to a worker take the place of one of them."""
    # A closed standard input becomes an empty one.
    for fd, name in ((0, "input"), (1, "output"), (2, "error")):
        try:
            os.fstat(fd)
        except OSError:
            if fd > 0:
                raise LaunchError(
                    message(
                        f"standard {name} is closed.",
                        fix=f"to drop what is written there, use {fd if fd > 1 else ''}> /dev/null.",
                    )
                ) from None
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # the lowest free number, which is this one


def say(text: str) -> None:
    """Write a line of the launcher's own to stderr, or to stdout if stderr is closed; what fails is left unsaid."""
    line = f"kvhvdrun: {text}\n".encode()
    for fd in (2, 1):
        try:
            write_all(fd, line)
        except OSError as error:
            if error.errno == errno.EBADF:
                continue
        return


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(fd, data) :]
