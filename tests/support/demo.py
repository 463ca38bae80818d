"""Programs that import scikit-learn, as the examples with digits do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from support.digits import FOLDER, is_installed

#: For tests that run such programs.
needs_demo = pytest.mark.skipif(not is_installed(), reason="no scikit-learn is installed")


def with_demo(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a program, made from that of another one."""
    return {**variables, "PYTHONPATH": ":".join(filter(None, [variables.get("PYTHONPATH"), str(FOLDER)]))}
