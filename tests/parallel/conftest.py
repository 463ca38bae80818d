"""Fixtures of the parallel tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def kv(world: Any) -> Any:
    """Return a store of its own for this test."""
    import mxnet as mx

    return mx.kv.create("horovod")


@pytest.fixture(params=["nd", "np"])
def kind(request: Any) -> Any:
    """Return the module of one of MXNet's two classes of arrays."""
    import mxnet as mx

    return getattr(mx, request.param)
