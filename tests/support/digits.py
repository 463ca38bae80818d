"""Images of digits for trainings of tests: made here, and as easy to learn as real ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

__all__ = ["digits", "needs_sklearn"]

#: For tests of programs that import scikit-learn.
needs_sklearn = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="no scikit-learn is installed")


def digits() -> tuple[Any, Any]:
    """Return 1797 images of 8 x 8 numbers from 0 to 16, and the digits that they show."""
    random = np.random.default_rng(8)
    labels = random.integers(0, 10, 1797)
    images = random.uniform(0, 16, (10, 8, 8))[labels] + random.normal(0, 4, (1797, 8, 8))
    return images.round().clip(0, 16), labels
