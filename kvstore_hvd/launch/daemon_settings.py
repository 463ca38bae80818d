"""How a daemon is started, and what the launcher tells it then: one line of JSON on its standard input.

Not in its command line or its environment, which others may be able to read: there is a secret in it.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.wire import WireError
from kvstore_hvd.wire.messages import check

__all__ = ["DaemonSettings", "daemon_command"]

# `-m` would look for modules in the working folder first, where a user's json.py or queue.py may lie. The folder of
# this package comes last: it may hold anything too.
_PROGRAM = """import sys
if sys.path[0] == "":
    del sys.path[0]
sys.path.append(sys.argv[1])
from kvstore_hvd.launch.daemon import main
sys.exit(main())"""
_LONGEST = 1 << 16
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "settings": {
        "address": (str, int),
        "secret": str,
        "job": str,
        "host": str,
        "last_words_fd": {None, int},
        "kill_grace_s": float,
        "lease_s": float,
        "prefix": bool,
        "keep": [int],
    }
}


@dataclass(frozen=True)
class DaemonSettings:
    """How a daemon finds its launcher, and how it treats its workers."""

    address: tuple[str, int]  # of the launcher
    secret: bytes
    job: str
    host: str  # its name, as the user wrote it
    last_words_fd: int | None  # the launcher's standard error, for the case that the launcher is gone
    kill_grace_s: float  # seconds between SIGTERM and SIGKILL
    lease_s: float  # seconds for which the launcher may be silent
    prefix: bool  # put '[id] ' before lines of output
    keep: tuple[int, ...] = ()  # descriptors that its workers inherit

    def line(self) -> bytes:
        """The line for the daemon's standard input."""
        return json.dumps({**asdict(self), "secret": self.secret.hex()}).encode() + b"\n"

    @classmethod
    def read(cls, timeout_s: float) -> DaemonSettings:
        """Read them from standard input, which is empty from then on."""
        try:
            values = json.loads(_first_line(timeout_s))
            check({"t": "settings", **values}, _FIELDS)
            return cls(
                **{
                    **values,
                    "address": tuple(values["address"]),
                    "secret": bytes.fromhex(values["secret"]),
                    "keep": tuple(values["keep"]),
                }
            )
        except (ValueError, TypeError) as error:
            raise WireError(f"its settings cannot be understood: {error}.") from None


def daemon_command() -> list[str]:
    """The command line that starts a daemon with this interpreter."""
    return [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[2])]


def _first_line(timeout_s: float) -> bytes:
    deadline = Deadline(timeout_s)
    line = b""
    while not line.endswith(b"\n"):
        if deadline.left() <= 0 or len(line) > _LONGEST:
            raise WireError("its settings did not come.")
        if not select.select([0], [], [], deadline.wait_s())[0]:
            continue
        data = os.read(0, _LONGEST)
        if not data:
            raise WireError("standard input ended before its settings had come.")
        line += data
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return line
