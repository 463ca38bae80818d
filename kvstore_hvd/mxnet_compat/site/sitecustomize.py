"""Start of a worker's interpreter: ``import mxnet`` and ``import horovod`` import kvstore_hvd first.

So plain ``import mxnet`` works with today's NumPy, the store is registered in a script that imports MXNet only, and
kvstore_hvd answers for Horovod if it is to. kvhvdrun puts this folder on PYTHONPATH.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _Before:
    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def] # without typing: faster
        """Import kvstore_hvd, whose own finders then answer."""
        if name not in ("mxnet", "horovod") or cls not in sys.meta_path or "kvstore_hvd" in sys.modules:
            return None
        sys.meta_path.remove(cls)
        try:
            import kvstore_hvd  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "kvstore_hvd":  # else it is another environment's interpreter
                raise
        return importlib.util.find_spec(name)


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.meta_path.insert(0, _Before)
    # The sitecustomize that this one hides.
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_start()
