"""Run an unchanged script: ``python -m kvstore_hvd train.py ...`` or ``... -m package ...``.

`-m` imports this package first, which registers the store. ``import horovod.mxnet`` then finds this package, unless
Horovod is installed. The script runs as under Python itself: with the same ``sys.argv``, ``sys.path``, ``__main__``,
traceback and exit code.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader

from kvstore_hvd.config import pass_alias_on
from kvstore_hvd.horovod import alias as horovod_alias

_USAGE = """usage: python -m kvstore_hvd script.py [arguments]
       python -m kvstore_hvd -m module [arguments]

Runs an MXNet program with the store 'horovod' registered, and with `import horovod.mxnet` answered by kvstore_hvd where
Horovod is not installed. Start several workers with kvhvdrun -np N python -m kvstore_hvd script.py, or with mpirun in
place of kvhvdrun."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that `argv` (default: ``sys.argv[1:]``) names."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if arguments == ["-m"]:
        print(_USAGE, file=sys.stderr)
        return _refuse("-m needs the name of a module")
    if arguments[:1] == ["-m"]:
        return _run_module(arguments[1], arguments[2:])
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 2
    return _run_script(arguments[0], arguments[1:])


def _refuse(fact: str) -> int:
    print(f"python -m kvstore_hvd: {fact}", file=sys.stderr)
    return 2


def _run_script(path: str, arguments: list[str]) -> int:
    if not os.path.exists(path):
        return _refuse(f"no such file: '{path}'")
    if os.path.isdir(path) and not any(os.path.isfile(os.path.join(path, f"__main__.{end}")) for end in ("py", "pyc")):
        return _refuse(f"the folder '{path}' has no __main__.py")
    if not os.path.isfile(path) or path.endswith((".zip", ".pyz", ".pyc")):
        _prepare([path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return 0
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        return _refuse(f"cannot read '{path}': {error.strerror}")
    _prepare([path, *arguments])
    # `-m` has put the current folder there; an isolated Python puts nothing there.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    # Not runpy, which removes its module at the end of the script: threads and exit handlers still use it.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=os.path.abspath(path), __builtins__=builtins, __cached__=None, __loader__=loader)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return 0


def _run_module(name: str, arguments: list[str]) -> int:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        return _refuse(f"cannot find module '{name}': {error}")
    if found is None:
        return _refuse(f"no module named '{name}'")
    _prepare([name, *arguments])
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _prepare(argv: list[str]) -> None:
    sys.argv = argv
    pass_alias_on()
    horovod_alias.install()
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Begin the traceback of an unhandled exception in the program, as if Python had started it."""
        first = trace
        while first is not None and _is_ours(first.tb_frame.f_code.co_filename):
            first = first.tb_next
        # Without a frame of the program, the error is our own, or the program cannot be compiled.
        if first is not None or isinstance(error, SyntaxError):
            trace = first
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _is_ours(filename: str) -> bool:
    return filename in (__file__, "<frozen runpy>") or os.path.basename(filename) == "runpy.py"


if __name__ == "__main__":
    sys.exit(main())
