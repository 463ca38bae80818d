"""The command lines of the two programs that `run` starts: the launcher, and in each worker what calls the function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["launcher_command", "worker_command"]

# `-m` would look for modules in the working folder first, where a user's json.py or queue.py may lie. The folder of
# this package comes last: it may hold anything too. Until the program has handlers of its own, Ctrl-C ends it without a
# traceback.
_PROGRAM = """import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.path[0] == "":
    del sys.path[0]
sys.path.append(sys.argv.pop(1))
from kvstore_hvd.calling.{} import main
sys.exit(main())"""


def launcher_command(python: str, parent: int, call: int, reports: int, arguments: Sequence[str]) -> list[str]:
    """That of the launcher."""
    return [*_program(python, "launcher"), str(parent), str(call), str(reports), *arguments]


def worker_command(python: str, call: int, reports: int) -> list[str]:
    """That of the workers; parameters as for the launcher."""
    return [*_program(python, "worker"), str(call), str(reports)]


def _program(python: str, module: str) -> list[str]:
    return [python, "-c", _PROGRAM.format(module), str(Path(__file__).parents[2])]
