"""Fixtures of the parallel tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("support.zero_copy")  # it asserts for the tests, and should say as much as they do


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


@pytest.fixture
def no_static_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start as a program of its own would: what earlier tests have compiled is gone."""
    from kvstore_hvd.mxnet_compat import gradients

    monkeypatch.setattr(gradients, "_static_graphs", False)


@pytest.fixture
def dynamic(world: Any) -> Iterator[None]:
    """Let this test add process sets; they are gone afterwards."""
    from kvstore_hvd.mxnet import process_sets

    process_sets.allow_dynamic()
    yield
    registry = process_sets._registry()
    for each in list(registry.sets.values()):
        process_sets.remove_process_set(each.first)
    registry.is_dynamic = False
