"""What a program finds under the name ``horovod`` (see horovod/alias.py); ``horovod.mxnet`` is `kvstore_hvd.mxnet`."""

from __future__ import annotations

from kvstore_hvd.launch.call import run

__all__ = ["run"]

# The Horovod whose interface this is; programs compare it.
__version__ = "0.28.1"
