"""Train Apache MXNet with the API of Horovod: a KVStore that reduces gradients without parameter servers.

Importing this package registers the store, now if MXNet is imported already, else as soon as it is::

    import kvstore_hvd
    import mxnet as mx

    kv = mx.kv.create('horovod')
    trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 0.1}, kvstore=kv)
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore_hvd import errors as _errors
from kvstore_hvd.config import config as _config
from kvstore_hvd.config import prepare_mxnet as _prepare_mxnet
from kvstore_hvd.errors import *

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType

    from kvstore_hvd.join import *
    from kvstore_hvd.launch.call import *
    from kvstore_hvd.numpy_ops import *
    from kvstore_hvd.store.divergence import *
    from kvstore_hvd.store.kvstore import *
    from kvstore_hvd.timeline import *
    from kvstore_hvd.world.process import *
    from kvstore_hvd.world.topology import *

__version__ = "1.0.0"

# The public names of modules that are imported at the first use of a name: the launcher needs none, and starts without
# NumPy.
_LATER = {
    "join": ("Join", "JoinHook", "Joinable"),
    "launch.call": ("run",),
    "numpy_ops": ("allreduce", "barrier", "broadcast"),
    "store.divergence": ("verify",),
    "store.kvstore": ("Horovod",),
    "timeline": ("start_timeline", "stop_timeline"),
    "world.process": ("init", "is_initialized", "reset", "shutdown", "topology"),
    "world.topology": ("Topology",),
}

__all__ = [name for names in _LATER.values() for name in names]
__all__ += _errors.__all__
__all__.sort()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module = next((module for module, names in _LATER.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Horovod":  # derives from a class of MXNet's, which may be absent
            importlib.import_module("kvstore_hvd.mxnet_compat").require_mxnet()
        value = globals()[name] = getattr(importlib.import_module(f"kvstore_hvd.{module}"), name)
        return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]


# -- MXNet -------------------------------------------------------------------------------------------------------------


class _ImportHook:
    """A finder for ``sys.meta_path`` that runs `before` and `after` around the first import of one module.

    It is removed after a successful import, and stays after a failed one or a look-up (``importlib.util.find_spec``).
    It imports nothing itself: the interpreter holds the lock of all imports meanwhile.
    """

    def __init__(self, module: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.module, self.before, self.after = module, before, after

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a later finder, with a loader around its loader."""
        if name != self.module or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # type: ignore[arg-type]
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        _explain_absence()
        return None


class _Loader:
    """Runs a hook's actions around a loader's `exec_module`, and is that loader in everything else."""

    def __init__(self, loader: Any, hook: _ImportHook) -> None:
        self._loader, self._hook = loader, hook

    def exec_module(self, module: ModuleType) -> None:
        # pickle, pkgutil and reload must find the module's own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._hook.before()
        try:
            self._loader.exec_module(module)
        except OSError as error:
            if not any(name in str(error) for name in ("libgomp.", "libquadmath.")):
                raise
            # Images of containers lack them.
            fix = "apt-get install libgomp1 libquadmath0, or dnf install libgomp libquadmath"
            kind = importlib.import_module("kvstore_hvd.mxnet_compat").MXNetUnavailableError
            raise kind(_errors.message(f"MXNet needs a library of GCC: {error}.", fix=fix)) from None
        self._hook.after()
        if self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@functools.cache
def _explain_absence() -> None:
    """Have a program that ends because there is no MXNet say how to install it."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _explain(error)
        shown(kind, error, trace)

    sys.excepthook = hook


def _explain(error: BaseException) -> None:
    """Have the error of an absent module say what to do; called by the workers' sitecustomize, too."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("mxnet", "horovod") and "Fix: " not in error.msg:
        from kvstore_hvd.mxnet_compat.hooks import pip_command

        fix = pip_command() if error.name == "mxnet" else "kvhvdrun --as-horovod lets kvstore_hvd answer for it."
        error.msg = f"{error.msg}\n  Fix: {fix}"


def _before_mxnet() -> None:
    if _config().numpy_shim:
        from kvstore_hvd.mxnet_compat import numpy_shim

        numpy_shim.prepare()


def _after_mxnet() -> None:
    """Register the store and make all other changes."""
    from kvstore_hvd import mxnet_compat

    if _config().numpy_shim:
        mxnet_compat.numpy_shim.finish()
    if "kvstore_hvd.store.kvstore" not in sys.modules:  # else it is importing MXNet itself, and goes on afterwards
        importlib.import_module("kvstore_hvd.store.kvstore")


_prepare_mxnet()
if _config().as_horovod:
    importlib.import_module("kvstore_hvd.horovod.alias").install()
if sys.modules.get("mxnet") is not None:
    importlib.import_module("mxnet")  # waits for a thread that is still importing it
    _after_mxnet()
else:
    sys.meta_path.insert(0, _ImportHook("mxnet", _before_mxnet, _after_mxnet))  # type: ignore[arg-type]
