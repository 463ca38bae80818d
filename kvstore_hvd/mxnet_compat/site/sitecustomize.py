"""Start of a worker's interpreter: ``import mxnet`` and ``import horovod`` import kvstore_hvd first.

So plain ``import mxnet`` works with today's NumPy, the store is registered in a script that imports MXNet only, and
kvstore_hvd answers for Horovod if it is to. kvhvdrun puts this folder on PYTHONPATH. kvstore-hvd-horovod runs this file
under another name, in every interpreter of its environment.
"""

import importlib.machinery
import importlib.util
import os
import sys


class _Before:
    """A finder. It must import nothing, see kvstore_hvd/__init__.py: its loader imports kvstore_hvd."""

    _shown: object = None  # the excepthook before `_end`

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def] # without typing: faster
        """The spec of the module that is there, or that kvstore_hvd will answer with."""
        if name not in ("mxnet", "horovod") or cls not in sys.meta_path or _is_complete(sys.modules.get("kvstore_hvd")):
            return None
        later = (each for each in sys.meta_path[sys.meta_path.index(cls) + 1 :] if hasattr(each, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in later)), None)
        # As kvstore_hvd.config reads it, which may not be imported here.
        is_ours = os.environ.get("KVHVD_AS_HOROVOD", "").lower() in ("1", "true", "yes", "on")  # noqa: TID251
        if name == "horovod" and is_ours and importlib.util.find_spec("kvstore_hvd") and not _has_loader(spec):
            spec = importlib.machinery.ModuleSpec(name, _Loader(None))  # type: ignore[arg-type]
        elif _has_loader(spec):
            spec.loader = _Loader(spec.loader)  # type: ignore[union-attr, assignment]
        elif spec is None and cls._shown is None:
            cls._shown, sys.excepthook = sys.excepthook, cls._end
        return spec

    @classmethod
    def _end(cls, kind, error, trace):  # type: ignore[no-untyped-def]
        """Have a program that ends because the module is absent say what to do."""
        try:
            import kvstore_hvd

            kvstore_hvd._explain(error)
        except Exception:  # noqa: BLE001 - another environment's interpreter; the program's own error counts
            pass
        cls._shown(kind, error, trace)  # type: ignore[operator]


def _has_loader(spec: object) -> bool:
    return getattr(spec, "loader", None) is not None  # a folder without __init__.py has none


class _Loader:
    """Imports kvstore_hvd, whose finders then find the module anew; anything else is the real loader's."""

    def __init__(self, loader: object) -> None:
        self._loader = loader

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        try:
            import kvstore_hvd  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name != "kvstore_hvd":  # else it is another environment's interpreter
                raise
        if _Before in sys.meta_path:
            sys.meta_path.remove(_Before)
        vars(spec).update(vars(importlib.util.find_spec(spec.name)))
        self._loader = spec.loader
        return spec.loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        """Called by a lazy loader around this one; others take that of the spec."""
        self._loader.exec_module(module)  # type: ignore[attr-defined]

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        return getattr(self._loader, name)


def _is_complete(module: object) -> bool:
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _start() -> None:
    sys.meta_path.insert(0, _Before)
    if __name__ != "sitecustomize":
        return
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    # The sitecustomize that this one hides.
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_start()
