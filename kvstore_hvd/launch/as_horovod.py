"""``--as-horovod``: the command of a Python program, changed so that this package runs the program."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from kvstore_hvd.errors import LaunchError, message

__all__ = ["through_this_package"]

_INTERPRETER = re.compile(r"python\d*(\.\d+)?[dt]*")
_US = ("-m", "kvstore_hvd")


def through_this_package(command: Sequence[str]) -> list[str]:
    """Put ``-m kvstore_hvd`` between an interpreter with its options and the script or ``-m module`` that it runs."""
    if not _INTERPRETER.fullmatch(os.path.basename(command[0])):
        raise LaunchError(
            message(
                f"--as-horovod knows how to change 'python script.py', and the command begins with '{command[0]}'.",
                fix=f"kvhvdrun -np N --as-horovod python {' '.join(command)}"
                if command[0].endswith(".py")
                else "omit --as-horovod, and write python -m kvstore_hvd where the command runs python.",
            )
        )
    before, program = _split(command)
    return [*before, *([] if program[:2] == [*_US] else _US), *program]


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter with its own options, and from the script or ``-m`` on the rest."""
    before, rest = [command[0]], list(command[1:])
    while rest:
        option = rest[0]
        if option == "--check-hash-based-pycs":
            before += rest[:2]
            del rest[:2]
            continue
        if not option.startswith("-"):
            return before, rest
        # Letters may stand together; the one of an option with a value is the last of them.
        match = re.fullmatch(r"-([^-cmWX]*)([cmWX]?)(.*)", option, re.DOTALL)
        if option == "-" or match is None or match[2] == "c" or re.search(r"[hV?]", match[1]):
            break
        value = [match[3]] if match[3] else rest[1:2]
        after = rest[1:] if match[3] or not match[2] else rest[2:]
        if match[2] == "m" and value:
            return [*before, *([f"-{match[1]}"] if match[1] else [])], ["-m", *value, *after]
        before += rest[: len(rest) - len(after)]
        rest = after
    raise LaunchError(
        message(
            f"--as-horovod needs a script or a module that Python runs, and '{' '.join(command)}' names none.",
            fix="kvhvdrun -np N --as-horovod python script.py, or python -m module; put code given to -c into a file.",
        )
    )
