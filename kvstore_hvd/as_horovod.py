"""The module ``horovod`` of programs (see horovod/alias.py); ``horovod.mxnet`` is `kvstore_hvd.mxnet`."""

from __future__ import annotations

from kvstore_hvd.launch.call import run

__all__ = ["run"]

# The version of Horovod that has this interface; programs compare it.
__version__ = "0.28.1"
