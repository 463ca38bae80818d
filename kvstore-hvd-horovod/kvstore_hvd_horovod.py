"""Imported by the .pth file at the start of every interpreter: ``import mxnet`` imports kvstore_hvd first."""

import importlib.util
import os

package = importlib.util.find_spec("kvstore_hvd")  # imports nothing
if package is not None and package.origin is not None:
    path = os.path.join(os.path.dirname(package.origin), "mxnet_compat", "site", "sitecustomize.py")
    spec = importlib.util.spec_from_file_location("kvstore_hvd_start", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
