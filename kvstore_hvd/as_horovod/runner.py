"""``horovod.runner``: workers are started from the command line here."""

from __future__ import annotations

from typing import Any, NoReturn

from kvstore_hvd.errors import LaunchError, message

__all__ = ["run", "run_commandline"]


def run(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse to start workers from within a program, whatever the arguments.

    Raises
    ------
    LaunchError
        Always; it names the command that starts workers.
    """
    raise LaunchError(
        message(
            "horovod.run() starts workers from within a program, which kvstore_hvd does not do.",
            fix="put the function into a script: kvhvdrun -np N --as-horovod python script.py",
        )
    )


def run_commandline(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse to be horovodrun, whatever the arguments.

    Raises
    ------
    LaunchError
        Always; it names the command that takes its place.
    """
    raise LaunchError(message("kvstore_hvd has no horovodrun.", fix="kvhvdrun -np N --as-horovod python script.py"))
