"""docs/api.md is what the docstrings say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_it_is_current() -> None:
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    assert make_api.page() == make_api.PAGE.read_text(), "the docstrings have changed: run `make api`"
