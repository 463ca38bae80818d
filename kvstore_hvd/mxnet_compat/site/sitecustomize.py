"""Start of a worker's interpreter: ``import mxnet`` and ``import horovod`` import kvstore_hvd first.

So plain ``import mxnet`` works with today's NumPy, the store is registered in a script that imports MXNet only, and
kvstore_hvd answers for Horovod if it is to. kvhvdrun puts this folder on PYTHONPATH.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _Before:
    """A finder and loader. A finder must import nothing, see base/import_hook.py: the loader imports kvstore_hvd."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def] # without typing: faster
        """The spec of the module that is there, or that kvstore_hvd will answer with."""
        if name not in ("mxnet", "horovod") or cls not in sys.meta_path or _is_complete(sys.modules.get("kvstore_hvd")):
            return None
        later = (each for each in sys.meta_path[sys.meta_path.index(cls) + 1 :] if hasattr(each, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None)
        # As kvstore_hvd.config reads it, which may not be imported here.
        is_ours = os.environ.get("KVHVD_AS_HOROVOD", "").lower() in ("1", "true", "yes", "on")  # noqa: TID251
        if spec is None and name == "horovod" and is_ours and importlib.util.find_spec("kvstore_hvd"):
            spec = importlib.machinery.ModuleSpec(name, None)
        if spec is not None:
            spec.loader = cls  # type: ignore[assignment]
        return spec

    @classmethod
    def create_module(cls, spec):  # type: ignore[no-untyped-def]
        """Import kvstore_hvd, find the module anew by its finders, and begin to load it."""
        try:
            import kvstore_hvd  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "kvstore_hvd":  # else it is another environment's interpreter
                raise
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
        vars(spec).update(vars(importlib.util.find_spec(spec.name)))
        return spec.loader.create_module(spec)

    @classmethod
    def exec_module(cls, module):  # type: ignore[no-untyped-def]
        """Not called: the spec has the other loader by then."""


def _is_complete(module: object) -> bool:
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


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
