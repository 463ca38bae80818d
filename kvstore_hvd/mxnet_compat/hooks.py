"""The MXNet of this process: its version, library, engine and errors; how its functions are replaced, for which store.

Nothing here imports MXNet before it is asked for something that needs it.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Optional

from kvstore_hvd import errors, native
from kvstore_hvd.config import environment
from kvstore_hvd.errors import KVHvdError, message

NAME = "horovod"
# With 'dist' in the name even an MXNet without our wrappers creates the store; the store's .type stays NAME.
ALIAS = "dist_horovod"
_SIMILAR = 0.75  # as difflib counts: one or two letters of NAME are wrong

# Of a wrapper: the function that it replaces.
_WRAPPED = "_kvstore_hvd_wraps"

# MXNet is one per process, and so are the changes to it.
_store: Optional[type] = None
_world_size: Callable[[], Optional[int]] = lambda: None  # noqa: E731
#: Where gradients live that all workers sum in place; None where there is no such memory.
arena: Callable[[], Any] = lambda: None  # noqa: E731


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


def children_of(block: Any) -> list[Any]:
    """The children of a Block of Gluon; MXNet 2 holds them by weak references."""
    return [each() if isinstance(each, weakref.ref) else each for each in vars(block)["_children"].values()]


def libmxnet_path() -> str:
    """Absolute path of the ``libmxnet.so`` that is loaded in this process; open it with ``RTLD_NOLOAD``."""
    return str(require_mxnet().base._LIB._name)


def engine_is_naive() -> bool:
    """Whether MXNet runs every operator at once (``MXNET_ENGINE_TYPE=NaiveEngine``), where errors of ours get lost."""
    return environment().get("MXNET_ENGINE_TYPE", "") == "NaiveEngine"


@functools.cache
def local_operations() -> native.LocalOperations:
    """Operations of the native adapter on arrays of this worker alone."""
    return native.LocalOperations(libmxnet_path(), engine_is_naive())


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


# -- What is changed in it --------------------------------------------------------------------------------------------


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function `name` of a module or class by ``make(original)``, unless that has been done before."""
    original = owner.__dict__.get(name)
    if original is None or is_wrapped(original):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _WRAPPED, original)
    setattr(owner, name, wrapper)


def surround(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """As `wrap`: a call becomes ``function(original, ...)``. It is one call more: not for what a step does."""
    wrap(owner, name, lambda original: lambda *args, **kwargs: function(original, *args, **kwargs))


def with_subclasses(kind: Any) -> Iterator[Any]:
    """A class and all that are derived from it."""
    yield kind
    for each in kind.__subclasses__():
        yield from with_subclasses(each)


@contextlib.contextmanager
def holding(owner: Any, **values: Any) -> Iterator[None]:
    """Within, these attributes of an object have these values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def is_wrapped(function: Any) -> bool:
    """Whether a function is a wrapper of ours, or somebody else's around one."""
    return hasattr(function, _WRAPPED)


def register_store(mxnet: Any, store: type, world_size: Callable[[], Optional[int]], memory: Callable[[], Any]) -> None:
    """Register `store` under both names, in the place of MXNet's own, without a warning; `memory` becomes `arena`."""
    global _store, _world_size, arena
    _store, _world_size, arena = store, world_size, memory
    base = mxnet.kvstore.KVStoreBase
    present = base.kv_registry.get(NAME)
    # 2.0 has a store of this name, which needs Horovod; to replace that one is the point, and not worth a warning.
    # Replacing anybody else's is.
    if present is not None and present.__module__ in ("mxnet.kvstore.horovod", store.__module__):
        del base.kv_registry[NAME]
    base.register(store)
    base.kv_registry[NAME] = base.kv_registry[ALIAS] = store


def is_ours(kv: object) -> bool:
    """Whether it is a store of this package."""
    return _store is not None and isinstance(kv, _store)


def asks_for_ours(kv: object) -> bool:
    """Whether it is a store of this package, or the name of one."""
    return is_ours(kv) or (isinstance(kv, str) and kv.lower() in (NAME, ALIAS))


def refuse_misspelt(name: object) -> None:
    """Raise InvalidRequestError for a name that is nearly NAME, with which MXNet would train alone."""
    known = sys.modules["mxnet"].kvstore.KVStoreBase.kv_registry
    if isinstance(name, str) and name.lower() not in known:
        for close in difflib.get_close_matches(name.lower(), (NAME, ALIAS), 1, _SIMILAR):
            fact = f"there is no store '{name}'; did you mean '{close}'?"
            raise errors.InvalidRequestError(message(fact, fix=f"mx.kv.create('{close}'), or kvstore='{close}'."))


def workers() -> int:
    """How many workers there are, or are going to be."""
    return _world_size() or 1


# -- Errors of operators of ours ---------------------------------------------------------------------------------------
#
# An operator of the native adapter fails with a text: the name of a class in errors.py, a colon and a space, and the
# text of `errors.message`. MXNet raises it where the result is read, once, as the class that is named. It takes lines
# that begin with two spaces for a stack trace, reverses them and puts them before the first line; the classes here undo
# that. Their errors are of the class in errors.py *and* an ``MXNetError``, and have the text of the same error that is
# raised directly.

_TRACE = "Traceback (most recent call last):"

#: Whether MXNet or a call has raised an error of an operation, and no call has followed; lost worlds do not count.
raised = False


def restore_text(text: str, name: str) -> str:
    """Undo what MXNet does to a text of several lines, and take the name of the class off its front."""
    lines = text.split("\n")
    if lines[0] == _TRACE:
        # What was not indented kept its place, behind all that was.
        indented = [line for line in lines[1:] if line.startswith("  ")]
        others = [line for line in lines[1:] if not line.startswith("  ")]
        lines = [*others[:1], *reversed(indented), *others[1:]]
    if lines[0].startswith(f"{name}: "):
        lines[0] = lines[0][len(name) + 2 :]
    return "\n".join(lines)


def in_one_line(error: BaseException, name: str = "") -> str:
    """The class of any error, or `name` in its place, and the first line of its text."""
    name = name or type(error).__name__
    text = restore_text(str(error).strip(), name).partition("\n")[0]
    return f"{name}{': ' if text else ''}{text}"


def _both(cls: type[errors.KVHvdError], mxnet_error: type) -> type:
    """A subclass of one of our errors and of MXNetError; pickled as the former, since no other process has this one."""

    def init(self: Any, text: object = "", *rest: object) -> None:
        self.args = (restore_text(str(text), cls.__name__), *rest)
        global raised
        raised = raised or not issubclass(cls, errors.HorovodInternalError)

    def to_text(self: Any) -> str:
        return str(self.args[0]) if self.args else ""

    def reduce(self: Any) -> tuple[Any, ...]:
        return cls, self.args

    namespace = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__init__": init,
        "__str__": to_text,
        "__reduce__": reduce,
    }
    return type(cls.__name__, (cls, mxnet_error), namespace)


def register_errors(mxnet: Any) -> None:
    """Tell MXNet about every class in errors.py. Doing it again changes nothing."""
    known = mxnet.base.error_types
    for name in errors.__all__:
        cls, present = getattr(errors, name), known.get(name)
        is_known = isinstance(present, type) and issubclass(present, cls)
        if issubclass(cls, errors.KVHvdError) and not is_known:
            mxnet.base.register_error(name, _both(cls, mxnet.base.MXNetError))
