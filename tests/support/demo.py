"""What the examples and scripts with digits need, which lies beside the other packages: see the Makefile."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

_FOLDER = Path(sys.prefix) / "demo"

#: For tests that run such programs.
needs_demo = pytest.mark.skipif(
    not _FOLDER.is_dir() and importlib.util.find_spec("sklearn") is None, reason="no scikit-learn is installed"
)


def with_demo(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a program, made from that of another one."""
    return {**variables, "PYTHONPATH": ":".join(filter(None, [variables.get("PYTHONPATH"), str(_FOLDER)]))}
