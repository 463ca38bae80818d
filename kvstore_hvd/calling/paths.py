"""Where modules are found: in the workers as in the program that has started them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["prefixes", "take_path"]


def prefixes() -> list[str]:
    """Where this interpreter's own libraries lie."""
    return sorted({sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix})


def take_path(path: Sequence[str], theirs: Sequence[str]) -> None:
    """Find modules where another process does; an interpreter of another kind keeps its own libraries."""
    if list(theirs) == prefixes():
        sys.path[:] = path
    else:
        within = tuple(os.path.join(prefix, "") for prefix in theirs)
        sys.path[:0] = [each for each in path if each not in sys.path and not each.startswith(within)]
