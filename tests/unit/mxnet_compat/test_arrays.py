"""What others ask about MXNet: of arrays, and of the library."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvstore_hvd import mxnet_compat
from kvstore_hvd.mxnet_compat import gradients, graphs
from support.gluon import is_mxnet_2

mx = mxnet_compat.require_mxnet()


@pytest.mark.filterwarnings("error::DeprecationWarning:mxnet")
def test_questions_about_arrays() -> None:
    plain, sparse, new = mx.nd.ones((2, 3)), mx.nd.sparse.zeros("row_sparse", (2, 3)), mx.np.ones((2,), dtype="int8")
    assert [mxnet_compat.is_ndarray(x) for x in (plain, sparse, new, plain.asnumpy(), 1, None)] == [True] * 3 + [
        False
    ] * 3
    assert [mxnet_compat.is_np_ndarray(x) for x in (plain, sparse, new, plain.asnumpy())] == [False, False, True, False]
    assert [mxnet_compat.stype_of(x) for x in (plain, sparse)] == ["default", "row_sparse"]
    assert mxnet_compat.context_of(mx.nd.ones((1,), mx.cpu(1))) == mx.cpu(1)
    assert mxnet_compat.context_of(new) == mx.cpu(0)
    assert mxnet_compat.handle_of(plain) == plain.handle.value != 0
    names = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
    assert [mxnet_compat.dtype_name(mx.nd.zeros((1,), dtype=name)) for name in names] == names
    bfloat16 = np.dtype([("bfloat16", np.uint16)])  # how MXNet tells NumPy
    assert mxnet_compat.dtype_name(mx.nd.empty((1,), dtype=bfloat16)) == "bfloat16"


@pytest.mark.parametrize("value", [True, False, 1, 0, "1", "0", "true", "True", "TRUE", "false"])
def test_flags_of_graphs_are_read_as_mxnet_does(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    monkeypatch.setattr(gradients, "_static_graphs", False)  # what follows does not count for later tests
    flags = [("static_alloc", True), ("static_shape", value)]
    data = mx.sym.var("data")
    mx.nd.CachedOp(data + 1, flags)  # which refuses what it does not know
    assert graphs.has_static_shape(flags) == (str(value).lower() in ("1", "true"))
    assert len(graphs.checked_flags(data, flags)) == 2


def test_questions_about_the_library() -> None:
    assert mxnet_compat.version_number() == (20000 if is_mxnet_2() else 10901)
    assert os.path.isfile(mxnet_compat.libmxnet_path())
    assert mxnet_compat.is_imported()
    mxnet_compat.waitall()
