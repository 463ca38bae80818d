"""The module of programs written for Horovod: `kvstore_hvd.horovod`, whose alias.py finds ``horovod.mxnet``."""

import importlib
import sys
from importlib.metadata import distributions

if any(distributions(name="horovod")):  # pip keeps wheels, whose installation asks nobody
    raise ImportError(
        "Horovod and kvstore-hvd-horovod are both installed, and both have a module 'horovod'.\n"
        "  Fix: pip uninstall horovod kvstore-hvd-horovod, then install one of them again."
    )
# An import returns what stands here at its end.
sys.modules[__name__] = importlib.import_module("kvstore_hvd.horovod")
importlib.import_module("kvstore_hvd.horovod.alias").install()
