"""The digits of scikit-learn, which need not be imported for them: that takes longer than many a test."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FOLDER", "digits", "is_installed"]

#: Where scikit-learn lies, beside the other packages: see the Makefile.
FOLDER = Path(sys.prefix) / "demo"

_FOUND = importlib.machinery.PathFinder.find_spec("sklearn", [str(FOLDER), *sys.path])


def is_installed() -> bool:
    """Whether scikit-learn is there."""
    return _FOUND is not None


def digits() -> tuple[Any, Any]:
    """Return the images of 8 x 8 numbers from 0 to 16, and the digits that they show: what ``load_digits()`` has."""
    assert _FOUND is not None and _FOUND.origin is not None, "no scikit-learn is installed"
    table = np.loadtxt(Path(_FOUND.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)
