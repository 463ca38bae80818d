"""``horovod.runner``: starting workers."""

from __future__ import annotations

from typing import Any, NoReturn

from kvstore_hvd.calling import run
from kvstore_hvd.errors import LaunchError, message

__all__ = ["run", "run_commandline"]


def run_commandline(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse to be horovodrun, whatever the arguments."""
    raise LaunchError(message("kvstore_hvd has no horovodrun.", fix="kvhvdrun -np N --as-horovod python script.py"))
