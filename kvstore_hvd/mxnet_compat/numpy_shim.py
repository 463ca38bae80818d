"""Lets MXNet 1.9.1 and 2.0.0b1 be imported on NumPy and Python versions that are newer than they are.

Only names that are missing get added; nothing that exists is replaced. docs/numpy-shim.md lists them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Optional

# -- What MXNet misses in NumPy -----------------------------------------------------------------------------------


def _gone(name: str, np: object) -> Callable[..., Any]:
    def gone(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"numpy.{name} was removed from NumPy; numpy_financial has it.")

    gone.__name__ = name
    gone.__doc__ = "Removed from NumPy."
    return gone


# Name -> how to make it. MXNet evaluates nearly all of them while it is imported.
_NAMES: dict[str, Callable[[Any], Any]] = {
    # Gone in NumPy 1.24.
    "bool": lambda np: np.bool_,
    "int": lambda np: int,
    # Gone in NumPy 2.0 or later.
    "Inf": lambda np: np.inf,
    "NAN": lambda np: np.nan,
    "NINF": lambda np: -np.inf,
    "NZERO": lambda np: -0.0,
    "NaN": lambda np: np.nan,
    "PINF": lambda np: np.inf,
    "PZERO": lambda np: 0.0,
    "alltrue": lambda np: np.all,
    "compat": lambda np: types.SimpleNamespace(basestring=str),
    "in1d": lambda np: lambda ar1, ar2, *args, **kwargs: np.isin(ar1, ar2, *args, **kwargs).ravel(),
    "msort": lambda np: lambda a: np.sort(a, axis=0),
    "product": lambda np: np.prod,
    "round_": lambda np: np.round,
    "sometrue": lambda np: np.any,
    "trapz": lambda np: np.trapezoid,
}
# Gone since NumPy 1.20 and from the namespace altogether since 2.0: MXNet only wants to see the names.
_FINANCIAL = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")


def _add_numpy_names() -> None:
    try:
        import numpy as np
    except ImportError:
        return  # MXNet says that better itself
    gone: dict[str, Callable[[Any], Any]] = {name: functools.partial(_gone, name) for name in _FINANCIAL}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns when some of these names are looked up
        for name, make in {**_NAMES, **gone}.items():
            if not hasattr(np, name):
                setattr(np, name, make(np))


# -- What MXNet misses in Python ----------------------------------------------------------------------------------


@functools.total_ordering
class _Version:
    """Just enough of distutils' versions: MXNet compares NumPy's version with ``1.6.0``, ``1.15`` and ``1.17``."""

    def __init__(self, text: str) -> None:
        parts = text.split("+", maxsplit=1)[0].split(".")[:3]
        self.version = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self.version == other.version

    def __lt__(self, other: _Version) -> bool:
        return self.version < other.version

    __hash__ = None  # type: ignore[assignment]


_our_distutils: dict[str, types.ModuleType] = {}


def _add_distutils() -> None:
    """Python 3.12 has no distutils; setuptools brings one of its own where it is installed."""
    python = tuple(sys.version_info)  # a plain tuple: type checkers take comparisons of the original for their own
    if python < (3, 12) or _our_distutils:
        return
    try:
        if importlib.util.find_spec("distutils.version") is not None:
            return
    except (ImportError, ValueError):
        pass
    package, version = types.ModuleType("distutils"), types.ModuleType("distutils.version")
    package.__path__ = []
    package.version = version  # type: ignore[attr-defined]
    version.LooseVersion = version.StrictVersion = _Version  # type: ignore[attr-defined]
    _our_distutils.update({"distutils": package, "distutils.version": version})
    sys.modules.update(_our_distutils)


# -- What NumPy 2 changed for MXNet's own code --------------------------------------------------------------------

# They hand the parameters of operators and iterators to the library as text, made with str().
_TEXT_MODULES = (
    "mxnet._ctypes.ndarray",
    "mxnet._ctypes.symbol",
    "mxnet._ctypes.cached_op",
    "mxnet.io.io",
    "mxnet.gluon.data._internal",
)


def _plain(value: object = "") -> str:
    """``str(value)`` as before NumPy 2: its scalars print as ``1.0`` in a list or tuple, not as ``np.float64(1.0)``."""
    if not isinstance(value, (tuple, list)):
        return str(value)
    import numpy as np

    def shown(item: object) -> str:
        if isinstance(item, (tuple, list)):
            return _plain(item)
        return str(item.item()) if isinstance(item, np.generic) else repr(item)

    text = ", ".join(map(shown, value))
    if isinstance(value, list):
        return f"[{text}]"
    return f"({text},)" if len(value) == 1 else f"({text})"


def _array(self: Any, dtype: Any = None, copy: Optional[bool] = None) -> Any:
    """The values as a new NumPy array (waits for them); what ``numpy.array(nd)`` and ``numpy.asarray(nd)`` call."""
    if copy is False:
        raise ValueError("the memory of an MXNet array cannot be shared with NumPy this way: a copy is needed.")
    values = self.asnumpy()
    return values if dtype is None else values.astype(dtype, copy=False)


def _forking(multiprocessing: Any) -> types.SimpleNamespace:
    """The module as MXNet's loader knows it: its workers are forked and inherit the dataset, unless a program chose."""

    def context(method: Optional[str] = None) -> Any:
        return multiprocessing.get_context(method or multiprocessing.get_start_method(allow_none=True) or "fork")

    made: dict[str, Any] = {
        "get_context": context,
        "Pool": lambda *args, **kwargs: context().Pool(*args, **kwargs),
        "Process": lambda *args, **kwargs: context().Process(*args, **kwargs),
    }
    return types.SimpleNamespace(**{**vars(multiprocessing), **made})


def prepare() -> None:
    """Add what MXNet misses while it is imported. Called before the import."""
    _add_numpy_names()
    _add_distutils()


def finish() -> None:
    """Repair what MXNet's own modules miss, and clean up. Called after the import."""
    for name, ours in _our_distutils.items():  # setuptools complains about a distutils that is there before it
        if sys.modules.get(name) is ours:
            del sys.modules[name]
    _our_distutils.clear()
    numpy = sys.modules.get("numpy")
    if numpy is not None and int(numpy.__version__.split(".")[0]) >= 2:
        for name in _TEXT_MODULES:
            module = sys.modules.get(name)
            if module is not None and not hasattr(module, "str"):
                module.str = _plain  # type: ignore[attr-defined]
    loader = sys.modules.get("mxnet.gluon.data.dataloader")
    if loader is not None and sys.version_info >= (3, 14):  # which forks no more on its own
        loader.multiprocessing = _forking(loader.multiprocessing)  # type: ignore[attr-defined]
    ndarray = sys.modules.get("mxnet.ndarray.ndarray")
    if ndarray is not None and not hasattr(ndarray.NDArray, "__array__"):
        # Without it NumPy >= 1.24 makes arrays of objects, or fails, and NumPy < 1.24 reads element by element.
        ndarray.NDArray.__array__ = _array
