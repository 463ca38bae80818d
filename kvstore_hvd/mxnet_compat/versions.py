"""Which MXNet is here: its version, its library, its engine; and what to say when there is none.

Nothing here imports MXNet before it is asked for something that needs it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from concurrent.futures import Future
from typing import Any, Optional

from kvstore_hvd.config import environment
from kvstore_hvd.errors import KVHvdError, message


class MXNetUnavailableError(KVHvdError, ImportError):
    """MXNet is not installed, or cannot be imported."""


def pip_command() -> str:
    """The command that installs an MXNet that works with this Python; versions are always pinned."""
    # An unpinned ``mxnet`` next to NumPy 2 resolves to MXNet 1.0.0 without a word, and NumPy 1.x has no wheels for
    # Python 3.13.
    if sys.version_info >= (3, 13):
        return "pip install --no-deps mxnet==1.9.1 && pip install numpy 'graphviz<0.9' requests"
    if sys.version_info >= (3, 12):
        return "pip install mxnet==1.9.1 'numpy<2'"
    return "pip install mxnet==1.9.1 'numpy<1.24'"


def is_imported() -> bool:
    """Whether MXNet has been imported (not: whether it could be)."""
    return sys.modules.get("mxnet") is not None


def require_mxnet() -> Any:
    """Import MXNet and return its module."""
    try:
        import mxnet
    except Exception as error:  # an import on a NumPy that is too new fails with AttributeError, not ImportError
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mxnet"
        fact = "MXNet is not installed." if missing else f"MXNet cannot be imported: {type(error).__name__}: {error}."
        hint = "" if missing else " (and leave KVHVD_NUMPY_SHIM unset)"
        raise MXNetUnavailableError(message(fact, fix=f"{pip_command()}{hint}")) from error
    return mxnet


@functools.cache
def version_number() -> int:
    """MXNet's version as its library tells it: 10901 for 1.9.1, 20000 for 2.0.0b1."""
    base = require_mxnet().base
    number = ctypes.c_int()
    base.check_call(base._LIB.MXGetVersion(ctypes.byref(number)))
    return number.value


def libmxnet_path() -> str:
    """Absolute path of the ``libmxnet.so`` that is loaded in this process; open it with ``RTLD_NOLOAD``."""
    return str(require_mxnet().base._LIB._name)


def engine_is_naive() -> bool:
    """Whether MXNet runs every operator at once (``MXNET_ENGINE_TYPE=NaiveEngine``), where errors of ours get lost."""
    return environment().get("MXNET_ENGINE_TYPE", "") == "NaiveEngine"


def waitall() -> None:
    """Wait until MXNet has nothing left to compute; raises the first error that nobody has read yet."""
    # MXNet's own wait hears no Ctrl-C: another thread is in it where the main thread waits.
    mx = require_mxnet()
    if threading.current_thread() is not threading.main_thread():
        mx.nd.waitall()
        return
    mx.engine.set_bulk_size(mx.engine.set_bulk_size(0))  # what this thread holds back goes to MXNet's engine
    waited: Future[None] = Future()
    try:
        threading.Thread(target=_wait, args=(mx, waited), name="kvstore_hvd-waitall", daemon=True).start()
    except RuntimeError:  # Python ends, or has as many threads as it may have
        _wait(mx, waited)
    try:
        waited.result()
    finally:
        del waited  # an error's traceback refers to this frame


def _wait(mx: Any, waited: Optional[Future[None]]) -> None:
    assert waited is not None
    try:
        waited.set_result(mx.nd.waitall())
    except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
        waited.set_exception(error)
        waited = None  # the same
