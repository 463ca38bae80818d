"""The module ``horovod`` of programs (see alias.py); ``horovod.mxnet`` is `kvstore_hvd.mxnet`."""

from __future__ import annotations

from typing import Any

__all__ = ["run"]

# The version of Horovod that has this interface; programs compare it.
__version__ = "0.28.1"


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_hvd.launch.call import run

    return run
