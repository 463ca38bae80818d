"""Makes an error that our operators report through MXNet's engine come out as the class it is.

An operator of the native adapter fails with a text; MXNet raises it where the result is read (``wait_to_read``,
``asnumpy``, ``waitall``), once. MXNet picks the class of the exception by the text's first line, up to its first colon.
So the adapter's text has to be::

    MismatchError: [rank 0/2] allreduce 'x' (key 3): ranks disagree on shape.
      (256, 784): ranks 0-1
      Fix: build the same network on every rank.

that is the name of a class in errors.py, a colon and a space, then the text as errors.message builds it, without blank
lines. (MXNet takes lines that begin with two spaces for a stack trace, reverses them and puts them before the first
line. The classes here undo that.) The exception is of the class in errors.py *and* an ``MXNetError``, and its text is
the one that the same error has when it is raised directly.
"""

from __future__ import annotations

from typing import Any

from kvstore_hvd import errors

_TRACE = "Traceback (most recent call last):"

#: Whether MXNet or a call has raised an error of an operation, and no call has followed; lost worlds do not count.
raised = False


def engine_text(error: errors.KVHvdError) -> str:
    """The text that an operator must fail with, so that reading its result raises an error like `error`."""
    name = next(cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return f"{name}: {error}"


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


def _plain(cls: type, args: tuple[Any, ...]) -> BaseException:
    made = cls(*args)
    assert isinstance(made, BaseException)
    return made


def _both(cls: type[errors.KVHvdError], mxnet_error: type) -> type:
    """A subclass of one of our errors and of MXNetError; pickled as the former, since no other process has this one."""

    def init(self: Any, text: object = "", *rest: object) -> None:
        self.args = (restore_text(str(text), cls.__name__), *rest)
        global raised
        raised = raised or not issubclass(cls, errors.HorovodInternalError)

    def to_text(self: Any) -> str:
        return str(self.args[0]) if self.args else ""

    def reduce(self: Any) -> tuple[Any, ...]:
        return _plain, (cls, self.args)

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
        cls = getattr(errors, name)
        if not isinstance(cls, type) or not issubclass(cls, errors.KVHvdError):
            continue
        present = known.get(name)
        if not (isinstance(present, type) and issubclass(present, cls)):
            mxnet.base.register_error(name, _both(cls, mxnet.base.MXNetError))
